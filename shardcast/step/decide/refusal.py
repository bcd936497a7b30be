"""An error of one rank, in a call that all ranks make, is raised on all of them.

A rank that raised by itself would leave the others waiting in their next collective. So it holds
its error back until the next message of the form of a decision: that of a step, of a clip, and on
gloo the one with which each rare collective call begins.
"""

from __future__ import annotations

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
from shardcast.step.decide.options import BITS, listed
from shardcast.step.decide.signal import Signal, known, to_device

KEPT = 16  # parts that are on the device already
FACTS = 2  # that are compared: the call, and the weights that were loaded


class Refusal(Signal):
    """The call that each rank is in, an error of this rank alone, and the weights that it loaded.

    For each fact with the digest ``d`` a rank sends ``d`` and ``-ranks * d * d``. The sum of the
    second is the negative square of the sum of the first if all digests are equal, else it is less
    (Cauchy-Schwarz). An error makes it less by 1. Calls are compared over all ranks, weights over
    data-parallel ones.

    Attributes:
        call: the call that this rank is in.
        loads: the weights that a script loaded into the model since the last step.
    """

    skips = (True, True)  # for an error or another call; for other weights
    call = ""

    def __init__(self, process_groups: ProcessGroups, device: torch.device) -> None:
        self._everyone, self._device = process_groups.everyone, device
        self._ranks, self._in_mesh = process_groups.dp.size, process_groups.model.size > 1
        bits = min(BITS, (53 - 2 * (self._ranks - 1).bit_length()) // 2)
        self._mask = (1 << bits) - 1
        self.loads = Loads(device)
        self._loaded = ""  # that was sent
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
            self._error = self._error or error  # the first one explains the others

    def local(self) -> Tensor:
        """Return this rank's part; empty in a world of one rank."""
        if self._everyone.size == 1:
            return self._nothing[:0]
        self._loaded = self.loads.changed()
        facts = self.call, self._loaded
        key = *facts, self._error is not None
        if key not in self._parts:
            if len(self._parts) >= KEPT:
                self._parts.clear()
            digests = [zlib.crc32(fact.encode()) & self._mask for fact in facts]
            squares = [-self._ranks * digest * digest for digest in digests]
            squares[0] -= self._error is not None
            self._parts[key] = to_device([*digests, *squares], torch.float64, self._device)
        return self._parts[key]

    def read(self, total: Tensor) -> Tensor:
        """Return mistakes, and with model parallelism the sum of the calls' digests."""
        if not total.numel():
            return self._nothing
        sums, squares = total.split(FACTS)
        mistakes = torch.addcmul(squares, sums, sums)
        return torch.cat([mistakes, sums[:1]]) if self._in_mesh else mistakes

    def merge(self, readings: Tensor) -> Tensor:
        """Add a mistake where model-parallel ranks are in different calls."""
        mistakes, calls = readings[:, :FACTS].abs().amax(0), readings[:, FACTS]
        mistakes[0] = torch.maximum(mistakes[0], (calls != calls[0]).any().double())
        return mistakes

    def error(self, mistakes: Sequence[float]) -> Exception:
        """Return this rank's own error, else that of others, or what ranks did differently."""
        error, self._error = self._error, None
        own = self.call, failure_of(error), self._loaded
        told = known(own, self._everyone, self._device)
        if error is not None:
            return error
        outcomes = [(call, failure) for call, failure, _ in told.values()]
        if len({*outcomes}) > 1:
            return raised_elsewhere(outcomes)
        if mistakes[0]:  # on an accelerator a rank knows of itself alone
            return RuntimeError(
                f"{self.call}: another rank raised an error, which it names, or is in another call "
                "than this one; make the same calls in the same order on every rank"
            )
        loaded = [(rank, loaded or "nothing") for rank, (_, _, loaded) in told.items()]
        return RuntimeError(
            f"{self.call}: the ranks loaded different weights by model.load_state_dict since the "
            f"last step ({by_rank(loaded)}), so that the model would be mixed of them; load the "
            "same state on every rank, without `if rank == 0:`"
        )

    def conclude(self, decision: object) -> None:
        """End the step; weights that were loaded after its decision are the next one's."""
        self.loads.clear()


class Loads:
    """The parameters that were loaded since the last step, each with a hash of what it was before.

    They must be alike on all ranks: each owner takes what is loaded for its own span, so loaded on
    one rank alone they would train another model in its spans. Weights that are loaded and put
    back, to evaluate others in between, are no difference.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: dict[nn.Parameter, tuple[str, int]] = {}
        self._own: set[nn.Parameter] = set()  # whose values are no other rank's
        self._told: list[nn.Parameter] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def note(self, param: nn.Parameter, name: str, is_shared: bool) -> None:
        """Note a parameter that is loaded next. Local; waits for the device.

        Args:
            is_shared: all data-parallel ranks hold it; they hold different experts.
        """
        if param not in self._before:
            self._before[param] = name, self._hash(param)
            if not is_shared:
                self._own.add(param)

    def changed(self) -> str:
        """Name the parameters whose bits are others than before, with a hash of their values."""
        self._told = [*self._before]
        if not self._before:
            return ""
        changed = {}
        for param, (name, before) in self._before.items():
            if (after := self._hash(param)) != before:
                changed[name] = None if param in self._own else after
        if not changed:
            return ""
        return f"{listed([*changed])} (values {zlib.crc32(repr([*changed.items()]).encode()):08x})"

    def clear(self) -> None:
        """Forget those that :meth:`changed` has told last: a step has compared them."""
        for param in self._told:
            self._before.pop(param, None)
        self._told.clear()

    def _hash(self, param: Tensor) -> int:
        return int(hasher_of(self._device)(_compat.local_tensor(param)))
