"""``replica_check`` and ``check_copies()``: compare data that several ranks hold as copies.

After a sync all data-parallel ranks should have the same parameters and buffers. If a collective is
torn, memory fails, or a script writes weights on one rank, the ranks diverge, and training is
worthless long before the loss shows it. The next sync hides it, so parameters are also compared
before an update, as the forwards read them.
Masters under ``shard_ranks``, of replicas in a mesh and of tied weights are updated on several
ranks independently, so they are compared too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm
from shardcast.memory.hashing import hasher_of
from shardcast.memory.shard import Shard
from shardcast.memory.slices import slices
from shardcast.messages import SHOWN
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option
from shardcast.plan.parallel_dims import PLAIN
from shardcast.step.decide.decision import Decision
from shardcast.step.step_hook import StepHook

REMEDY = (
    "A transfer or the memory of that rank was corrupted: check its device and host (ECC "
    "errors, kernel log, network), leave it out, and resume from a checkpoint saved before the "
    "last check that passed"
)


PARAMETERS = "parameters"
WRITTEN = (
    "Either the script changed them on that rank and not on the others: change weights on every "
    "rank alike. Or: "
)


class Copies(NamedTuple):
    """Data of this rank that should be equal on all ranks of a group.

    Attributes:
        kind: of the data, for errors.
        names: of its parts.
        whole: returns one hash of all of it, 0-dim.
        parts: returns a hash of each part.
    """

    kind: str
    names: Sequence[str]
    whole: Callable[[], Tensor]
    parts: Callable[[], list[Tensor]]


class ReplicaCheck(StepHook):
    """Comparison of replicas by their hashes; ranks exchange 8 bytes if all are equal."""

    name = "replica_check"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer, self._period = optimizer, optimizer.config.replica_check
        self._groups, self._hash = optimizer.process_groups, hasher_of(optimizer.device)

    def before_update(self, decision: Decision) -> None:
        """Compare the parameters that the forwards read; the sync takes what their owners have."""
        if self._is_due():
            self._compare(f"replica_check: before step {self._step}", is_read=True)

    def after_sync(self) -> None:
        """Compare the new data, buffers and masters, too."""
        if self._is_due():
            self._compare(f"replica_check: after step {self._step}")

    @property
    def _step(self) -> int:
        return self._optimizer.comm.steps + 1

    def _is_due(self) -> bool:
        if not self._period or self._step % self._period:
            return False
        return not _compat.is_capturing(self._optimizer.device)

    def check_copies(self) -> None:
        """Compare all replicas by 64-bit hashes, for debugging.

        It includes buffers, replicas over tensor-parallel ranks, and tied weights.

        Collective: every rank.

        Raises:
            RuntimeError: on every rank, if replicas differ; names the parameter and the rank.
        """
        packed = self._optimizer
        packed.together(partial(packed.need_masters, "check_copies"), "check_copies")
        self._compare("check_copies:")

    @torch.no_grad()
    def _compare(self, where: str, is_read: bool = False) -> None:
        """Raise on every rank if copies differ. Collective; waits for the device.

        Args:
            is_read: compare parameters only, which a script may have written on one rank.
        """
        packed, everyone = self._optimizer, self._groups.everyone
        if everyone.size == 1:
            return
        packed.sync.wait()
        held: dict[str, list[Copies]] = {}
        for name, copies in self._held():
            if copies.kind == PARAMETERS or not is_read:
                held.setdefault(name, []).append(copies)
        facts = []
        for name, of_group in sorted(held.items()):  # in one order on all ranks
            comm = self._groups.comm(name) if name else self._groups.dp
            facts += self._differences(name, comm, of_group)

        def refuse() -> None:
            if facts:
                remedy = f"{WRITTEN}{REMEDY}" if is_read else REMEDY
                raise RuntimeError(f"{where} {'; '.join(facts)}. {remedy}")

        everyone.together(refuse, packed.device, self.name)

    def _held(self) -> Iterator[tuple[str, Copies]]:
        """Yield this rank's copies with the name of their group; "" is data-parallel."""
        for shard in self._optimizer.shards:
            pack_groups = shard.pack.layout.pack_groups
            parameters = self._parameters(shard)
            yield "" if pack_groups.shard == PLAIN else pack_groups.shard, parameters
            for name in pack_groups.replicate:
                yield name, parameters
            for name in pack_groups.reduce if shard.grads is not None else ():
                yield (
                    name,
                    self._masters(shard),
                )  # gradients are summed in one order
        yield "", self._buffers()

    def _parameters(self, shard: Shard) -> Copies:
        pack = shard.pack
        slots = {slot.name: slice(slot.offset, slot.end) for slot in pack.layout.slots}
        return Copies(
            PARAMETERS,
            [*slots],
            lambda: self._hash(pack.data),
            lambda: [self._hash(pack.data[part].clone()) for part in slots.values()],
        )

    def _masters(self, shard: Shard) -> Copies:
        def parts() -> list[Tensor]:
            return [
                self._hash(shard.read(shard.local(fragment.start, fragment.stop)).clone())
                for fragment in shard.fragments
            ]

        def whole() -> Tensor:
            pieces = slices(shard.pack.own.numel)
            return self._hash.joined([self._hash(shard.read(piece)) for piece in pieces])

        return Copies("masters", [it.slot.name for it in shard.fragments], whole, parts)

    def _buffers(self) -> Copies:
        """Return the buffers that equal rank 0's; none if one of them changed its kind here."""
        hook = self._optimizer.hook_of("broadcast_buffers")
        sent: dict[str, Tensor] = {} if hook is None else hook.sent() or {}

        def parts() -> list[Tensor]:
            return [self._hash(buffer) for buffer in sent.values()]

        return Copies("buffers", [*sent], lambda: self._hash.joined(parts()), parts)

    def _differences(self, name: str, comm: Comm, held: Sequence[Copies]) -> list[str]:
        """Return a sentence for each kind that differs over a group. Collective."""
        device = self._optimizer.device
        hashes = torch.stack([copies.whole() for copies in held]).tolist()
        if comm.agree(repr(hashes), device, self.name):
            return []
        by_rank = comm.exchange(hashes, device)
        unlike = [n for n, values in enumerate(zip(*by_rank, strict=True)) if len({*values}) > 1]
        parts = comm.exchange([list(map(int, held[n].parts())) for n in unlike], device)
        found: dict[str, tuple[dict[str, None], set[int]]] = {}
        for number, *of_ranks in zip(unlike, *parts, strict=True):
            # A rank with buffers of another kind sends none: it has warned.
            for part, *values in zip(held[number].names, *of_ranks, strict=False):
                usual = Counter(values).most_common(1)[0][0]
                if outliers := {rank for rank, value in enumerate(values) if value != usual}:
                    names, ranks = found.setdefault(held[number].kind, ({}, set()))
                    names[part] = None
                    ranks |= outliers
        others = "the other ranks" if comm.size > 2 else "rank 0"
        along = f" along {name!r}" if name else ""
        return [
            f"{kind} of rank {', '.join(map(str, sorted(ranks)[:SHOWN]))}{along} differ from those "
            f"of {others}, first {next(iter(names))!r} ({len(names)} in all)"
            for kind, (names, ranks) in found.items()
        ]


OPTION = Option(
    help="every n steps, compare hashes of data that several ranks hold (parameters, buffers, "
    "replicated masters) and wait for the device; if they differ, all ranks raise and name the "
    "rank; 0: never",
    within=("a number of steps >= 0", lambda steps: steps >= 0),
    hook=ReplicaCheck,
)
