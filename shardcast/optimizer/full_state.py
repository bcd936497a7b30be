"""A sharded optimizer's state and masters, gathered to be a plain optimizer's.

On rank 0, or inside ``as_plain()`` on every rank, where ``torch.distributed.checkpoint`` takes the
optimizer for a plain one. An error on one rank is an error of all.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.memory.pack import Pack
from shardcast.memory.shard import Shard
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.state_dict import MASTER, copied, plain_dict
from shardcast.optimizer.state_view import is_elementwise
from shardcast.plan.layout import Fragment, Slot
from shardcast.plan.precision import MASTER_DTYPE

ValuesOf = Callable[[Shard, int], Mapping[str, Any]]  # of a fragment, by its number


class FullState:
    """The state of one optimizer, gathered."""

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer = optimizer
        self._begun = False  # only to be shown inside ``as_plain()``

    def gather(self, place: int | None = None) -> dict[str, Any]:
        """The full state on rank 0, as the unsharded optimizer's ``state_dict``; else empty.

        Every rank must call it. Pack by pack, through pickled copies on the host: for hand-over,
        not for a loop.

        Args:
            place: of one of several optimizers, whose state alone is wanted.
        """
        state = self._full_state(self._state_of, on_all=False, place=place)
        return state if self._optimizer.process_groups.everyone.rank == 0 else {}

    def gather_on_all(self) -> dict[str, Any]:
        """The full state on every rank, with masters where parameters are less exact, for DCP.

        Every rank must call it.
        """
        optimizer = self._optimizer
        optimizer.together(optimizer.ready_to_read, "state_dict")
        return self._full_state(self._state_and_master, on_all=True)

    def _state_of(self, shard: Shard, number: int) -> Mapping[str, Any]:
        return self._optimizer.update_of(shard).fragment_state(shard, number)

    def _state_and_master(self, shard: Shard, number: int) -> dict[str, Any]:
        values = dict(self._state_of(shard, number))
        if not shard.in_place:  # without a state too, or a resume would begin from rounded ones
            values[MASTER] = shard.exact(shard.fragments[number])
        return values

    @contextmanager
    def as_plain(self) -> Iterator[None]:
        """See :meth:`shardcast.ShardedOptimizer.as_plain`. Collective at its beginning."""
        optimizer = self._optimizer
        if optimizer.plain_names is not None:  # inside another one
            yield
            return
        optimizer.together(partial(self._check_gathers, "as_plain"), "as_plain")
        names = self._gathered_names()
        self._begun = {*chain.from_iterable(names.values())} <= {MASTER}
        if self._begun:
            optimizer.together(self._begin, "as_plain")
            names = self._gathered_names()
        optimizer.plain_names = names
        try:
            yield
        finally:
            optimizer.plain_names = None
            if self._begun:
                self._forget()

    def note_loaded(self) -> None:
        """A state was loaded on all ranks, which stays."""
        if self._optimizer.plain_names is not None:
            self._begun = False
            self._optimizer.plain_names = self._gathered_names()

    def _gathered_names(self) -> dict[nn.Parameter, dict[str, None]]:
        optimizer = self._optimizer
        owned = {
            fragment.slot.name: dict.fromkeys(self._state_and_master(shard, number))
            for shard in optimizer.shards
            for number, fragment, _ in shard.owned()
        }
        names: dict[str, dict[str, None]] = {}
        for names_on_rank in optimizer.process_groups.everyone.exchange(owned, optimizer.device):
            names |= {name: values for name, values in names_on_rank.items() if values}
        return {param: names.get(name, {}) for name, param in optimizer.model.named_parameters()}

    def _begin(self) -> None:
        for update in self._optimizer.updates:
            update.begin_state()

    def _forget(self) -> None:
        for shard in self._optimizer.shards:
            for number in range(len(shard.fragments)):
                self._optimizer.update_of(shard).load_fragment(shard, number, {})

    def check_copies(self) -> None:
        """Compare, by hashes, what several ranks hold; see ``ShardedOptimizer.check_copies``."""
        optimizer, process_groups = self._optimizer, self._optimizer.process_groups
        optimizer.together(partial(optimizer.need_masters, "check_copies"), "check_copies")
        optimizer.sync.wait()
        differing: list[str] = []
        for shard in optimizer.shards:
            pack, pack_groups = shard.pack, shard.pack.layout.pack_groups
            hashes = _hashes(pack)
            comms = {"data-parallel": process_groups.data_parallel(pack_groups)}
            comms |= {name: process_groups.comm(name) for name in pack_groups.replicate}
            for name, comm in comms.items():
                hashes_by_rank = comm.exchange(hashes, optimizer.device)
                for slot, *by_rank in zip(pack.layout.slots, *hashes_by_rank, strict=True):
                    rank = next((r for r, value in enumerate(by_rank) if value != by_rank[0]), None)
                    if rank is not None:
                        differing.append(f"{slot.name!r} between ranks 0 and {rank} ({name})")

        def refuse() -> None:
            if differing:
                raise RuntimeError(f"parameters that must be equal differ: {'; '.join(differing)}")

        optimizer.together(refuse, "check_copies")

    def masters(self, average: str | None = None) -> dict[str, Tensor]:
        """All parameters in fp32 by name, tied ones under each, on rank 0's host; else empty.

        Every rank must call it.

        Args:
            average: the name of an average, in place of the parameters.
        """
        optimizer = self._optimizer
        averages = None if average is None else optimizer.hook_for("averaged")

        def ready() -> None:
            optimizer.ready_to_read()
            if averages is not None:
                averages.check("full_parameters", average)

        optimizer.together(ready, "full_parameters")

        def master_of(shard: Shard, number: int) -> dict[str, Tensor]:
            if averages is not None:
                return {MASTER: averages.values(shard, number, average)}
            return {MASTER: shard.exact(shard.fragments[number])}

        gathered = self._gathered("full_parameters", optimizer.shards, master_of, on_all=False)
        masters = {
            slot.name: values[MASTER] if values else torch.zeros(slot.shape, dtype=MASTER_DTYPE)
            for slot, _, values in gathered
        }
        names = {param: name for name, param in optimizer.model.named_parameters()}
        every = optimizer.model.named_parameters(remove_duplicate=False)
        return {name: masters[names[p]] for name, p in every if names[p] in masters}

    def _full_state(
        self, values: ValuesOf, on_all: bool, place: int | None = None
    ) -> dict[str, Any]:
        """Return the ``state_dict()`` of a plain optimizer; no state on ranks that receive none."""
        optimizer, originals = self._optimizer, self._optimizer.originals
        optimizer.together(originals.check, "full_state_dict")
        groups = originals.groups if place is None else originals.optimizers[place].param_groups
        shards = [s for s in optimizer.shards if place in (None, s.pack.layout.optimizer)]
        gathered = self._gathered("full_state_dict", shards, values, on_all=on_all)
        return plain_dict({param: state for _, param, state in gathered if state}, groups)

    def _gathered(
        self, call: str, shards: Sequence[Shard], values: ValuesOf, on_all: bool
    ) -> Iterator[tuple[Slot, nn.Parameter, dict[str, Any]]]:
        """Return for each parameter what ``values`` gives of its fragments on all ranks.

        An error on one rank, in ``values`` or while states are pickled or joined, is raised on all.

        Args:
            on_all: every rank gets it; else rank 0 alone, nothing on the others.
        """
        self._check_gathers(call)
        everyone, device = self._optimizer.process_groups.everyone, self._optimizer.device
        failure: Exception | None = None  # of joining the last pack on this rank
        for shard in shards:
            pickled = everyone.together(partial(_pickled, shard, values, failure), device, call)
            pack = shard.pack
            gather = pack.comm.exchange if on_all else pack.comm.gather
            by_rank = gather(pickled, device)
            if everyone.rank != 0 and not on_all:  # of a group of replicas the first one has it too
                continue
            elementwise = self._optimizer.update_of(shard).elementwise
            try:
                states = _joined_states(by_rank, pack.layout.slots, elementwise)
            except Exception as error:  # no room on this host, a rank without one of the states
                failure = error
                continue
            yield from zip(pack.layout.slots, pack.in_model, states, strict=True)
        everyone.together(partial(_raise, failure), device, call)

    def _check_gathers(self, call: str) -> None:
        """Raise RuntimeError with model parallelism, or with experts: no rank has them all."""
        self._optimizer.need_masters(call)
        process_groups = self._optimizer.process_groups
        parallel_dims = process_groups.parallel_dims
        if process_groups.model.size > 1 or parallel_dims.experts:
            dims = ", ".join(map(repr, parallel_dims.model or parallel_dims.experts))
            raise RuntimeError(
                f"{call}: expected a data-parallel job, got parameters that are spread over mesh "
                f"dimension {dims} too, of which no rank gathers the full state; use "
                "shardcast.checkpoint.save, and shardcast.checkpoint.export for plain files"
            )


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _pickled(shard: Shard, values: ValuesOf, failure: Exception | None) -> bytes:
    """Return what ``values`` gives of this rank's fragments, on the host."""
    _raise(failure)
    return pickle.dumps(
        [(fragment, copied(values(shard, number), "cpu")) for number, fragment, _ in shard.owned()]
    )


def _joined_states(
    by_rank: Sequence[bytes], slots: Sequence[Slot], elementwise: bool
) -> list[dict[str, Any]]:
    """The full state of each parameter of a pack, from what all ranks pickled."""
    parts: dict[Slot, list[tuple[Fragment, dict[str, Any]]]] = defaultdict(list)
    for fragment, state in chain.from_iterable(map(pickle.loads, by_rank)):
        if state:
            parts[fragment.slot].append((fragment, state))
    return [_joined(parts[slot], elementwise) for slot in slots]


def _joined(parts: list[tuple[Fragment, dict[str, Any]]], elementwise: bool) -> dict[str, Any]:
    """One parameter's full state from its fragments' states."""
    parts.sort(key=lambda part: part[0])
    joined: dict[str, Any] = {}
    for name, value in parts[0][1].items() if parts else ():
        fragment = parts[0][0]
        if is_elementwise(value, fragment, elementwise or name == MASTER):
            value = torch.cat([state[name].reshape(-1) for _, state in parts])
            value = value.view(fragment.slot.shape)
        joined[name] = value
    return joined


def _hashes(pack: Pack) -> list[bytes]:
    """Hash each slot to 16 bytes; copies the pack to the host."""
    host, size = pack.data.cpu(), pack.data.element_size()
    ranges = (
        (host.data_ptr() + slot.offset * size, slot.numel * size) for slot in pack.layout.slots
    )
    return [hashlib.blake2b(ctypes.string_at(*r), digest_size=16).digest() for r in ranges]
