"""``replica_check``: compare, every n steps, data that several ranks hold as copies.

After a sync all data-parallel ranks should have the same parameters and buffers. If a collective is
torn or memory fails, the ranks diverge, and training is worthless long before the loss shows it. So
each rank hashes its data, and a small all-reduce compares the hashes. Masters under
``shard_ranks``, of replicas in a mesh and of tied weights are updated on several ranks
independently; another small all-reduce over those ranks compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm
from shardcast.memory.hashing import hasher_of
from shardcast.memory.shard import Shard
from shardcast.messages import SHOWN
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option
from shardcast.plan.parallel_dims import PLAIN
from shardcast.step.decide.report import HostCopy
from shardcast.step.decide.signal import known, to_device
from shardcast.step.step_hook import StepHook

MASTERS = 1 << 20  # masters that are hashed at a time
KEPT = 52  # bits of a rank's hash that fit a double
BITS, PARTS = 16, 3  # a hash is compared in PARTS parts of BITS bits
KINDS = ("parameters", "buffers")
REMEDY = (
    "A collective did not bring what was sent, or memory of that rank failed: look at its device "
    "and host (ECC errors, the kernel's log, the network), leave it out, and resume from a "
    "checkpoint of before"
)


def _compared(digests: Tensor, ranks: int) -> Tensor:
    """Return the numbers that are summed over ranks for :func:`_differing`."""
    flat = digests.view(-1)
    return torch.cat([flat, -ranks * flat * flat]).double()


def _differing(sums: Tensor) -> Tensor:
    """Return which digests differ between ranks, from sums of :func:`_compared`."""
    totals, squares = sums.chunk(2)
    return torch.addcmul(squares, totals, totals) != 0


class ReplicaCheck(StepHook):
    """Hashes this rank's data every n steps, and compares the hashes.

    The data-parallel ranks sum one message, 1-d fp64::

        rows     (2, ranks)     hashes of parameters and buffers, each rank's in its own place
        digests  (2, PARTS) * 2 parts of them, compared as in :mod:`.options`
        head     3              whether masters differ here; whether this rank has other buffers;
                                from rank 0 the number of the checked step
        packs    packs * 2      one part of the hash of each pack

    The host reads the sums when they have arrived: in the next step, or one later on an
    accelerator.
    """

    name = "replica_check"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer, self._period = optimizer, optimizer.config.replica_check
        self._groups = optimizer.process_groups
        self._hash = hasher_of(optimizer.device)
        ranks = self._ranks = optimizer.comm.size
        bits = min(BITS, (53 - 2 * (ranks - 1).bit_length()) // 2)
        self._mask = (1 << bits) - 1  # (ranks * digest)**2 is an exact double
        own = [rank == optimizer.comm.rank for rank in range(ranks)]
        self._place = to_device([own], torch.float64, optimizer.device)
        self._host = HostCopy(optimizer.device)
        # First parameter of each compared pack, and of the pack of each compared master; None after
        # the result was read.
        self._names: tuple[list[str], list[str]] | None = None

    def after_sync(self) -> None:
        """Start a comparison of the current data, if one is due."""
        made, device = self._optimizer.comm.steps + 1, self._optimizer.device
        is_alone = self._groups.everyone.size == 1
        if made % self._period == 0 and not is_alone and not _compat.is_capturing(device):
            self._read(waits=True)  # the last comparison, if its result has not arrived yet
            self._compare(made)

    def before_reduce(self) -> None:
        """Raise if the last comparison found a difference."""
        self._read()

    def _compare(self, step: int) -> None:
        """Hash, and sum over the ranks. Collective."""
        optimizer = self._optimizer
        optimizer.sync.wait()
        shards = [shard for shard in optimizer.shards if shard.grads is not None]
        plain = [shard for shard in shards if shard.pack.layout.pack_groups.shard == PLAIN]
        hashes, zero = [self._hash(shard.pack.data) for shard in plain], self._hash.joined(())
        buffers = self._hash_of_buffers()
        both = [self._hash.joined(hashes), zero if buffers is None else buffers]
        rows = torch.stack([hash_ >> (64 - KEPT) for hash_ in both]) & ((1 << KEPT) - 1)
        differing, names = self._masters(shards)
        head = zero.new_zeros(3, dtype=torch.float64)
        head[0] = differing.any()
        head[1].fill_(buffers is None)
        head[2].fill_(step if optimizer.comm.rank == 0 else 0)
        message = torch.cat(
            [
                (rows.double().view(2, 1) * self._place).view(-1),
                _compared(self._digests(both, PARTS).T.reshape(-1), self._ranks),
                head,
                _compared(self._digests(hashes, 1), self._ranks),
            ]
        )
        optimizer.comm.all_reduce(message, "replica_check")
        self._names = [shard.pack.layout.slots[0].name for shard in plain], names
        _, digests, head, _ = self._split(message)
        differ = _differing(digests).view(2, PARTS).any(1)
        differ[1] &= head[1] == 0
        mistakes = torch.cat([differ, head[:1] > 0]).double()  # parameters, buffers, masters
        if self._groups.model.size > 1:
            self._groups.everyone.all_reduce(mistakes, "replica_check")
        self._host.send(torch.cat([mistakes, differing.double(), message]))

    def _hash_of_buffers(self) -> Tensor | None:
        """Return one hash of the buffers; ``None`` if this rank has other buffers."""
        hook = self._optimizer.hook_of("broadcast_buffers")
        sent = [] if hook is None else hook.sent()
        return None if sent is None else self._hash.joined([self._hash(buffer) for buffer in sent])

    def _split(self, message: Tensor) -> tuple[Tensor, ...]:
        """Return the rows, digests, head and packs of a message."""
        sizes = 2 * self._ranks, 4 * PARTS, 3
        parts: tuple[Tensor, ...] = message.split([*sizes, message.numel() - sum(sizes)])
        return parts

    def _read(self, waits: bool = False) -> None:
        """Raise for a difference, if the result has arrived.

        On a CPU all ranks call it together and exchange their findings. On an accelerator each rank
        calls it when it has the result, and names its own masters.
        """
        if self._names is None or (numbers := self._host.read(waits)) is None:
            return
        (packs, names), self._names = self._names, None
        mistakes, flags, message = torch.tensor(numbers, dtype=torch.float64).split(
            [3, len(names), len(numbers) - 3 - len(names)]
        )
        if mistakes.any():
            own = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
            raise self._error(mistakes.tolist(), packs, own, message)

    def _error(
        self, mistakes: Sequence[float], packs: Sequence[str], own: list[str], message: Tensor
    ) -> RuntimeError:
        """Return an error that names the ranks and the first pack that differs.

        Args:
            own: masters that this rank found to differ.
        """
        rows, _, head, digests = self._split(message)
        masters = known(own, self._groups.everyone, self._optimizer.device)
        facts = []
        names = [
            name
            for name, differs in zip(packs, _differing(digests).tolist(), strict=True)
            if differs
        ]
        for kind, row, differ in zip(KINDS, rows.view(2, -1).tolist(), mistakes, strict=False):
            usual = Counter(row).most_common(1)[0][0]
            outliers = [rank for rank, value in enumerate(row) if value != usual]
            if differ and outliers:  # else another model-parallel rank's data differ
                text = f"{kind} of rank {', '.join(map(str, outliers[:SHOWN]))} differ from those "
                text += "of the other ranks" if self._ranks > 2 else "of rank 0"
                if names and kind == "parameters":
                    text += (
                        f", first in the pack that begins with {names[0]!r} ({len(names)} of "
                        f"{len(packs)} packs)"
                    )
                facts.append(text)
        facts += [
            f"rank {rank} has other masters than its copies, first in the pack that begins with "
            f"{of_rank[0]!r}"
            for rank, of_rank in masters.items()
            if of_rank
        ]
        text = "; ".join(facts) or "ranks of other model-parallel groups differ, which name it"
        return RuntimeError(f"replica_check: after step {int(head[2])} {text}. {REMEDY}")

    def _masters(self, shards: Sequence[Shard]) -> tuple[Tensor, list[str]]:
        """Find masters, and parameters of experts, that differ between ranks that update them."""
        optimizer, names, flags = self._optimizer, list[str](), list[Tensor]()
        for comm, copies in self._copies(shards):
            hashes = [self._hash(part) for _, part in copies]
            sums = _compared(self._digests(hashes, PARTS), comm.size)
            comm.all_reduce(sums, "replica_check")
            flags.append(_differing(sums).view(PARTS, -1).any(0))
            names += [shard.pack.layout.slots[0].name for shard, _ in copies]
        nothing = torch.zeros(0, dtype=torch.bool, device=optimizer.device)
        return torch.cat([nothing, *flags]), names

    def _copies(self, shards: Sequence[Shard]) -> Iterator[tuple[Comm, list[tuple[Shard, Tensor]]]]:
        """List groups of ranks with equal masters or experts, with this rank's data of each."""
        process_groups = self._optimizer.process_groups
        by_name: dict[str, list[tuple[Shard, Tensor]]] = {}
        for shard in shards:
            groups = shard.pack.layout.pack_groups
            if groups.shard != PLAIN:
                by_name.setdefault(groups.shard, []).append((shard, shard.pack.data))
            # groups over which gradients are summed, in the same order on all ranks
            for name in groups.reduce:
                by_name.setdefault(name, []).append((shard, self._of_masters(shard)))
        for name, copies in sorted(by_name.items()):
            comm = process_groups.comm(name)
            if comm.size > 1:
                yield comm, copies

    def _of_masters(self, shard: Shard) -> Tensor:
        """Return one hash of the masters, 0-dim, independent of their codec."""
        starts = range(0, shard.pack.own.numel, MASTERS)
        shard.look()
        read = (
            shard.home.given(shard.master.read(slice(start, start + MASTERS))) for start in starts
        )
        return self._hash.joined([self._hash(part.contiguous()) for part in read])

    def _digests(self, hashes: Sequence[Tensor], parts: int) -> Tensor:
        """Cut each hash into parts: (parts, hashes), int64."""
        stacked = torch.stack([*hashes]) if hashes else self._place.new_zeros(0, dtype=torch.int64)
        return torch.stack([(stacked >> (64 - BITS * n)) & self._mask for n in range(1, parts + 1)])


OPTION = Option(
    help="every so many steps, compare hashes of data that ranks hold as copies (parameters, "
    "buffers, masters of replicas); if they differ, all ranks raise and name the rank; 0: never",
    within=("a number of steps >= 0", lambda steps: steps >= 0),
    hook=ReplicaCheck,
)
