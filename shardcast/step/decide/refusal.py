"""Raise an error of one rank, in a call that all ranks make, on all of them.

A rank that raised by itself would leave the others waiting in their next collective. So it holds
its error back until the next message in the form of a decision: that of a step, of a clip, or, on
gloo, the one that starts each rare collective call.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.comm.objects import failure_of, raised_elsewhere
from shardcast.memory.hashing import hasher_of
from shardcast.messages import by_rank
from shardcast.step.decide.options import listed, mask_of
from shardcast.step.decide.signal import Signal, known, to_device

KEPT = 16  # parts that are cached on the device
FACTS = 2  # the compared facts: the call, and the loaded weights


# How many sharded models there have been with these ranks.
_MODELS: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


class Refusal(Signal):
    """Each rank's call, an error of this rank alone, and the weights that it loaded.

    A call is that of one model: another one's message may have the same length.

    For each fact with digest ``d`` a rank sends ``d`` and ``-ranks * d * d``. If all digests are
    equal, the sum of the second is the negative square of the sum of the first; otherwise it is
    less (Cauchy-Schwarz). An error lowers it by 1. Calls are compared over all ranks, weights over
    data-parallel ones.

    Attributes:
        call: this rank's current call.
        loads: weights that a script loaded into the model since the last step.
    """

    skips = (True, True)  # for an error or a different call; for different weights
    call = ""

    def __init__(self, process_groups: ProcessGroups, device: torch.device) -> None:
        self._everyone, self._device = process_groups.everyone, device
        self._ranks, self._in_mesh = process_groups.dp.size, process_groups.model.size > 1
        self._mask = mask_of(self._ranks)
        self._model = 1  # its number, since one of the same shapes has messages of the same length
        if (group := process_groups.dp.group) is not None:
            self._model = _MODELS[group] = _MODELS.get(group, 0) + 1
        self.loads = Loads(device)
        self._loaded = ""  # loaded weights that were sent
        self._error: Exception | None = None
        self._parts: dict[tuple[str, str, bool], Tensor] = {}
        self._nothing = torch.zeros(FACTS, dtype=torch.float64, device=device)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold an error back until all ranks know of it."""
        try:
            yield
        except Exception as error:
            if self._everyone.size == 1:
                raise
            self._error = self._error or error  # the first error explains later ones

    def local(self) -> Tensor:
        """Return this rank's part; empty with one rank."""
        if self._everyone.size == 1:
            return self._nothing[:0]
        self._loaded = self.loads.changed()
        facts = self.call, self._loaded
        key = *facts, self._error is not None
        if key not in self._parts:
            if len(self._parts) >= KEPT:
                self._parts.clear()
            texts = f"{self.call} of model {self._model}", self._loaded
            digests = [zlib.crc32(text.encode()) & self._mask for text in texts]
            squares = [-self._ranks * digest * digest for digest in digests]
            squares[0] -= self._error is not None
            self._parts[key] = to_device([*digests, *squares], torch.float64, self._device)
        return self._parts[key]

    def read(self, total: Tensor) -> Tensor:
        """Return the mistakes, and with model parallelism the sum of the calls' digests."""
        if not total.numel():
            return self._nothing
        sums, squares = total.split(FACTS)
        mistakes = torch.addcmul(squares, sums, sums)
        return torch.cat([mistakes, sums[:1]]) if self._in_mesh else mistakes

    def merge(self, readings: Tensor) -> Tensor:
        """Add a mistake if model-parallel ranks are in different calls."""
        mistakes, calls = readings[:, :FACTS].abs().amax(0), readings[:, FACTS]
        mistakes[0] = torch.maximum(mistakes[0], (calls != calls[0]).any().double())
        return mistakes

    def error(self, mistakes: Sequence[float]) -> Exception:
        """Return this rank's own error, otherwise that of other ranks, or the difference."""
        error, self._error = self._error, None
        own = self.call, failure_of(error), self._loaded, self._model
        told = known(own, self._everyone, self._device)
        if error is not None:
            return error
        outcomes = [(call, failure) for call, failure, *_ in told.values()]
        if len({*outcomes}) > 1:
            return raised_elsewhere(outcomes)
        models = [(rank, f"number {model}") for rank, (*_, model) in told.items()]
        if len({number for _, number in models}) > 1:
            return RuntimeError(
                f"{self.call}: the ranks made this call on different sharded models, numbered in "
                f"the order of shard() ({by_rank(models)}); make the same calls in the same "
                "order on every rank"
            )
        if mistakes[0]:  # on an accelerator a rank knows only its own facts
            return RuntimeError(
                f"{self.call}: another rank raised an error (see its log), or made a different "
                "call; make the same calls in the same order on every rank"
            )
        loaded = [(rank, loaded or "nothing") for rank, (_, _, loaded, _) in told.items()]
        return RuntimeError(
            f"{self.call}: the ranks loaded different weights by model.load_state_dict since the "
            f"last step ({by_rank(loaded)}), which would mix them in one model; load the same "
            "state on every rank, without `if rank == 0:`"
        )

    def conclude(self, decision: object) -> None:
        """End the step; weights loaded after its decision count for the next one."""
        self.loads.clear()


class Loads:
    """Parameters that were loaded since the last step, each with a hash of its earlier value.

    Loads must be equal on all ranks, because each owner takes only its own span: a load on one rank
    alone would put another model into its spans. Weights that are loaded and put back, for an
    evaluation in between, do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # name, hash, and whether other ranks hold it
        self._before: dict[nn.Parameter, tuple[str, int, bool]] = {}
        self._told: list[nn.Parameter] = []

    def note(self, param: nn.Parameter, name: str, is_shared: bool) -> None:
        """Note a parameter that is about to be loaded. Local; waits for the device.

        Args:
            is_shared: all data-parallel ranks hold it, unlike experts.
        """
        if param not in self._before:
            self._before[param] = name, self._hash(param), is_shared

    def changed(self) -> str:
        """Return the parameters whose bits have changed, with a hash of their values."""
        self._told = [*self._before]
        changed = {}
        for param, (name, before, is_shared) in self._before.items():
            if (after := self._hash(param)) != before:
                changed[name] = after if is_shared else None
        if not changed:
            return ""
        return f"{listed([*changed])} (values {zlib.crc32(repr([*changed.items()]).encode()):08x})"

    def clear(self) -> None:
        """Forget those that :meth:`changed` last returned, because a step has compared them."""
        for param in self._told:
            self._before.pop(param, None)
        self._told.clear()

    def _hash(self, param: Tensor) -> int:
        return int(hasher_of(self._device)(_compat.local_tensor(param)))
