"""Show progress as a bar, or as lines without a terminal, and write metrics."""

from __future__ import annotations

import math
import sys
import time
from datetime import timedelta

import torch
from metrics import Metrics
from processes import Processes
from torch import Tensor
from tqdm import tqdm

WARM_UP = 2


class Progress:
    """Averages losses and counts tokens between two records; validation time is not counted."""

    def __init__(
        self, metrics: Metrics, processes: Processes, steps: int, tokens_per_step: int
    ) -> None:
        self._metrics, self._processes = metrics, processes
        self._tokens_per_step = tokens_per_step
        self._bar = tqdm(total=steps, unit="step", disable=None if processes.main else True)
        self._steps, self._made, self._warm = steps, 0, 0.0
        self._loss = torch.zeros((), device=processes.device)
        self._step = 0
        self._start()

    def _start(self) -> None:
        self._started, self._processor = time.perf_counter(), time.process_time()

    def resumed(self, step: int) -> None:
        """Start after `step`, the last step of an earlier process."""
        self._step = step
        self._bar.update(step)
        self.say(f"resumed after step {step}")

    def add(self, loss: Tensor) -> None:
        """Add a micro-batch's share of the step's loss, without waiting for the device."""
        self._loss += loss.detach()

    def train(self, step: int, lr: float, grad_norm: Tensor | None, skipped_steps: int) -> None:
        """Write a record of the losses added since the last one; waits for the device."""
        steps = step - self._step
        loss = self._processes.sum(self._loss).item() / (steps * self._processes.world)
        norm = math.nan if grad_norm is None else grad_norm.item()
        processor = (time.process_time() - self._processor) / steps
        speed = self._tokens_per_step * steps / (time.perf_counter() - self._started)
        self._metrics.write(
            "train",
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            skipped_steps=skipped_steps,
            tokens_per_second=speed,
            processor_seconds=processor,
        )
        shown = (
            f"loss {loss:.3f}, {speed:,.0f} tokens/s, grad norm {norm:.2f}, skipped {skipped_steps}"
        )
        self._bar.update(steps)
        self._bar.set_postfix_str(shown)
        if self._bar.disable:  # a file, Slurm
            self.say(f"step {step}: {shown}")
        self._loss.zero_()
        self._step = step
        self._start()

    def after(self, step: int) -> None:
        """Print once how long the rest takes, estimated from this process's first ten steps."""
        self._made += 1
        if self._made == WARM_UP:  # the first steps compile
            self._warm = time.perf_counter()
        elif self._made == 10 and step < self._steps:
            seconds = (time.perf_counter() - self._warm) / (10 - WARM_UP)
            left = timedelta(seconds=round(seconds * (self._steps - step)))
            self.say(f"{seconds:.2f} seconds per step: {self._steps - step} more take {left}")

    def validation(self, step: int, loss: float) -> None:
        self._metrics.write("validation", step=step, loss=loss)
        self.say(f"step {step}: validation loss {loss:.4f} nats per byte")
        self._start()

    def say(self, text: str) -> None:
        """Print on the main process, above the bar."""
        if self._processes.main:
            tqdm.write(text)
            sys.stdout.flush()  # else a file gets it much later

    def close(self) -> None:
        self._bar.close()
