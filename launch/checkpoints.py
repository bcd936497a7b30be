"""Checkpoints of a run: resume from the newest, save at intervals and on SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from processes import Processes
from torch import nn

import shardcast
from shardcast import checkpoint


class Checkpoints:
    """Checkpoints of one run with shardcast. All processes must make the same calls.

    A SIGTERM (from a preempted job, or from `torchrun`) takes effect after the step. The processes
    agree on it, save, and stop together.
    """

    def __init__(
        self,
        directory: Path,
        model: nn.Module | Sequence[nn.Module],
        optimizer: shardcast.ShardedOptimizer,
        processes: Processes,
        *,
        interval: int,
        keep: int,
        facts: dict[str, Any],
    ) -> None:
        self._directory, self._model, self._optimizer = directory, model, optimizer
        self._processes, self._interval, self._keep = processes, interval, keep
        self._facts = facts  # what a resumed run must have in common with this one
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, _number: int, _frame: Any) -> None:
        self._told = True

    def resume(self) -> int:
        """Load the newest committed checkpoint, and return its step; 0 in a new run."""
        resumed = checkpoint.resume(self._directory, self._model, self._optimizer)
        if resumed is None:
            return 0
        if resumed.extra != self._facts:
            raise ValueError(
                f"--checkpoint-dir {self._directory} holds a run of {resumed.extra}, this one is "
                f"of {self._facts}; give another directory"
            )
        return resumed.step

    def after(self, step: int, last: int) -> bool:
        """Save if a save is due, and return whether to stop now."""
        told = torch.tensor(float(self._told), device=self._processes.device)
        stop = bool(self._processes.sum(told) > 0)
        if stop or step % self._interval == 0 or step == last:
            checkpoint.save(
                self._directory,
                self._model,
                self._optimizer,
                step=step,
                extra=self._facts,
                keep=self._keep,
            )
        return stop
