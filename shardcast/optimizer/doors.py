"""``owned()`` and ``whole()``: blocks in which a script edits masters, gradients and state.

Each element has one owner. So a script edits either the parts that each rank owns, or whole
parameters, in the same way on all ranks. It gets copies. At the end of the block, values whose bits
changed are written, cast, recorded, and sent to all ranks. All other elements keep their bits.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast._compat import dtensor
from shardcast.comm import Comm
from shardcast.memory.hashing import bits_of, hasher_of
from shardcast.memory.pack import Pack
from shardcast.memory.shard import Shard
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.state import is_elementwise
from shardcast.plan.layout import Fragment
from shardcast.plan.parallel_dims import PLAIN, PackGroups
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.sync.sync import Sync
from shardcast.step.update.epilogues import AVERAGE

# kinds of values; the last one is followed by the name of the state
MASTER, GRAD, STATE = "master", "grad", "state."
Read = Callable[[str], "Tensor | None"]  # returns values of a kind
Land = Callable[[str], None]  # finishes the means of own spans, in a call that all ranks make
T = TypeVar("T")


class Edit(NamedTuple):
    """New values of one kind, 1-d fp32, and which of them changed."""

    kind: str
    changed: Tensor
    values: Tensor


class Values:
    """The master, gradient and state of a parameter, or of a part of it, in fp32.

    Each tensor is read at its first use. Until the block ends, edit it in place or assign another
    tensor.

    Attributes:
        name: name of the parameter, as in ``model.named_parameters()``.
        state: tensors with one element per element of the parameter, by torch's names.
    """

    def __init__(
        self,
        name: str,
        states: Sequence[str],
        read: Read,
        shaped: Callable[[Tensor], Tensor] = lambda flat: flat,
    ) -> None:
        """Read nothing yet.

        Args:
            states: names of the state.
            read: returns a copy of the values of a kind; 1-d fp32.
            shaped: gives a 1-d tensor the parameter's shape.
        """
        self.name, self._read, self._shaped = name, read, shaped
        # by kind: as read, and as the script has it
        self._given: dict[str, tuple[Tensor, Tensor]] = {}
        self.state = StateOfValues(self, states)

    @property
    def master(self) -> Tensor:
        """The weights as the model shows them; at full precision unless a script wrote them."""
        values: Tensor = self.get(MASTER)
        return values

    @master.setter
    def master(self, values: Tensor) -> None:
        self.set(MASTER, values)

    @property
    def grad(self) -> Tensor | None:
        """The mean over ranks, after clipping if you clipped; ``None`` if no rank has one."""
        values: Tensor | None = self.get(GRAD)
        return values

    @grad.setter
    def grad(self, values: Tensor) -> None:
        self.set(GRAD, values)

    def get(self, kind: str) -> Any:
        """Return the values of a kind, the same tensor each time."""
        if kind not in self._given:
            if (values := self._read(kind)) is None:
                return None
            self._given[kind] = values, self._shaped(values.clone())
        return self._given[kind][1]

    def set(self, kind: str, values: Tensor) -> None:
        """Replace the values of a kind with a tensor of the same shape."""
        present = self.get(kind)
        if present is None:
            raise ValueError(
                f"{kind} of {self.name!r}: there is none to replace, because no rank has had a "
                "gradient since the last zero_grad(); run a backward first"
            )
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TypeError(
                f"{kind} of {self.name!r}: expected a tensor of floating-point numbers, got "
                f"{values.dtype if isinstance(values, Tensor) else type(values).__name__}"
            )
        ways = [getattr(tensor, "placements", None) for tensor in (present, values)]
        if values.shape != present.shape or ways[0] != ways[1]:
            raise ValueError(
                f"{kind} of {self.name!r}: expected a tensor of shape {tuple(present.shape)}"
                f"{f' placed {ways[0]}' if ways[0] else ''}, got {tuple(values.shape)}"
                f"{f' placed {ways[1]}' if ways[1] else ''}"
            )
        self._given[kind] = self._given[kind][0], values

    def edits(self) -> list[Edit]:
        """Return what changed.

        Raises:
            RuntimeError: a tensor now has another size.
        """
        found = []
        for kind, (kept, given) in self._given.items():
            values = _compat.local_tensor(given).detach().reshape(-1)
            if values.numel() != kept.numel():
                raise RuntimeError(
                    f"{kind} of {self.name!r}: expected {kept.numel()} elements, got "
                    f"{values.numel()}: the tensor was resized in place"
                )
            values = values.to(kept.device, MASTER_DTYPE)
            found.append(Edit(kind, bits_of(values) != bits_of(kept), values))
        some = [edit.changed.any() for edit in found]
        changes = torch.stack(some).tolist() if some else []  # waits for the device once
        return [edit for edit, is_changed in zip(found, changes, strict=True) if is_changed]

    def end(self) -> None:
        """Refuse further use, because the block is over."""
        self._given.clear()
        self._read = _over

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.name!r}"


class Part(Values):
    """Elements ``[start, stop)`` of a flattened parameter, which this rank owns; all 1-d."""

    def __init__(self, fragment: Fragment, states: Sequence[str], read: Read) -> None:
        super().__init__(fragment.slot.name, states, read)
        self.start, self.stop = fragment.param_range

    def __repr__(self) -> str:
        return f"Part [{self.start}, {self.stop}) of {self.name!r}"


class StateOfValues(Mapping[str, Tensor]):
    """State of :class:`Values` by name; tensors can be assigned, names are fixed."""

    def __init__(self, values: Values, names: Sequence[str]) -> None:
        self._values, self._names = values, tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        values: Tensor = self._values.get(STATE + name)
        return values

    def __setitem__(self, name: str, values: Tensor) -> None:
        if name not in self._names:
            raise KeyError(
                f"{name!r}: the state of {self._values.name!r} has "
                f"{', '.join(map(repr, self._names)) or 'nothing before a first step'}"
            )
        self._values.set(STATE + name, values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _over(kind: str) -> Tensor | None:
    raise RuntimeError(
        f"{kind}: the block of owned() or whole() has ended, and an edit would be lost; enter a "
        "new block"
    )


# -- of this rank alone -----------------------------------------------------------------------


class Fragments:
    """Masters, gradients and state of this rank's fragments. Local.

    Args:
        present: per trained pack and slot, whether some rank has a gradient.
    """

    def __init__(self, packed: PackedOptimizer, present: Mapping[Pack, Sequence[bool]]) -> None:
        self._packed, self._present = packed, present

    def states(self, shard: Shard, number: int) -> list[str]:
        """Return the names of per-element state of a parameter."""
        return [*self._state_of(shard, number, decode=False)]

    def _state_of(self, shard: Shard, number: int, decode: bool = True) -> dict[str, Tensor]:
        update, fragment = self._packed.update_of(shard), shard.fragments[number]
        return {
            name: value
            for name, value in update.fragment_state(shard, number, decode).items()
            if not name.startswith(AVERAGE)
            and is_elementwise(value, fragment, update.elementwise)
            and value.is_floating_point()
        }

    def has_grad(self, pack: Pack, position: int) -> bool:
        """Return whether some rank has a gradient of a slot."""
        return pack in self._present and self._present[pack][position]

    @torch.no_grad()
    def read(self, shard: Shard, number: int, kind: str) -> Tensor | None:
        """Return a copy of the values of a kind, 1-d fp32."""
        fragment = shard.fragments[number]
        if kind == MASTER:
            return shard.exact(fragment).clone()
        if kind == GRAD:
            position = shard.pack.layout.slots.index(fragment.slot)
            if not self.has_grad(shard.pack, position):
                return None
            assert shard.grads is not None
            return shard.grads.part(position).to(MASTER_DTYPE, copy=True)
        value = self._state_of(shard, number)[kind.removeprefix(STATE)]
        return value.detach().reshape(-1).to(MASTER_DTYPE, copy=True)

    @torch.no_grad()
    def write(self, shard: Shard, number: int, edit: Edit) -> None:
        """Overwrite values that changed."""
        fragment, (kind, changed, values) = shard.fragments[number], edit
        if kind == MASTER:
            shard.edit(fragment, changed, values)
        elif kind == GRAD:
            assert shard.grads is not None
            mean = shard.grads.edited(shard.pack.layout.slots.index(fragment.slot))
            mean.copy_(torch.where(changed, values.to(mean.dtype), mean))
        else:
            name = kind.removeprefix(STATE)
            self._packed.update_of(shard).edit(shard, number, name, changed, values)


Written = dict[tuple[Shard, int], dict[str, Edit]]  # by fragment, then by kind


# -- the blocks -------------------------------------------------------------------------------


@contextmanager
def owned(packed: PackedOptimizer, land: Land) -> Iterator[list[Part]]:
    """See :meth:`shardcast.ShardedOptimizer.owned`. Collective.

    Args:
        land: see :data:`Land`.
    """
    packed.together(partial(_check, packed, "owned"), "owned")
    fragments = Fragments(packed, _landed(packed, "owned", land))
    by_fragment = {
        (shard, number): Part(
            fragment, fragments.states(shard, number), partial(fragments.read, shard, number)
        )
        for shard in packed.shards
        for number, fragment, _ in shard.owned()
    }
    with _block(packed, "owned", by_fragment.values()) as found:
        yield [*by_fragment.values()]
    edits: Written = {
        place: {edit.kind: edit for edit in of_part}
        for place, of_part in zip(by_fragment, found, strict=True)
    }
    _take_first(packed, fragments, edits)
    _write(packed, fragments, edits, _changed_anywhere(packed, edits))


@contextmanager
def whole(
    packed: PackedOptimizer, wanted: Sequence[str | nn.Parameter], land: Land
) -> Iterator[dict[str, Values]]:
    """See :meth:`shardcast.ShardedOptimizer.whole`. Collective.

    Args:
        land: see :data:`Land`.
    """
    chosen = _chosen(packed, wanted)
    fragments = Fragments(packed, _landed(packed, "whole", land))
    values = _gathered(packed, fragments, chosen)
    with _block(packed, "whole", values.values()) as found:
        yield values
    of_slots = dict(zip(chosen, found, strict=True))
    _refuse_differences(packed, of_slots)
    edits: Written = {}
    changed = {shard.pack: [False] * len(shard.pack.layout.slots) for shard, _ in chosen}
    for (shard, position), of_slot in of_slots.items():
        changed[shard.pack][position] = any(edit.kind == MASTER for edit in of_slot)
        for number, fragment in enumerate(shard.fragments):
            if fragment.slot is shard.pack.layout.slots[position] and of_slot:
                part = slice(*fragment.param_range)
                edits[shard, number] = {
                    edit.kind: Edit(edit.kind, edit.changed[part], edit.values[part])
                    for edit in of_slot
                }
    _write(packed, fragments, edits, changed)


Place = tuple[Shard, int]  # place of a parameter: a shard, and the position of a slot


def _chosen(packed: PackedOptimizer, wanted: Sequence[str | nn.Parameter]) -> list[Place]:
    """Return the places of parameters in the order of packs. Collective.

    Raises:
        TypeError, ValueError: on every rank: an argument is neither pattern nor parameter, a
            pattern matches nothing on any rank, or ranks want different parameters.
        RuntimeError: see :func:`_check`.
    """
    every = {
        slot.name: (shard, position)
        for shard in packed.shards
        for position, slot in enumerate(shard.pack.layout.slots)
    }

    def find() -> tuple[set[str], list[str]]:
        _check(packed, "whole")
        return _matched(packed, wanted)

    names, unmatched = packed.together(find, "whole")
    everyone = packed.process_groups.everyone
    by_rank = everyone.exchange((sorted(names), unmatched), packed.device)
    others = {name for asked, _ in by_rank for name in asked}
    for tie in packed.process_groups.parallel_dims.ties:  # its other holder uses another name
        if not others.isdisjoint(tie):
            names.update(name for name in tie if name in every)
            others.update(tie)

    def compare() -> None:
        if missing := sorted((others & every.keys()) - names):
            raise ValueError(
                f"whole: expected the same parameters on every rank, got {missing[0]!r} on some "
                f"ranks, but not on rank {everyone.rank}"
            )
        if nowhere := [p for p in unmatched if all(p in theirs for _, theirs in by_rank)]:
            raise ValueError(
                f"whole: the pattern {nowhere[0]!r} matches no parameter of the optimizer; give "
                "names as in model.named_parameters(), with * for any characters"
            )

    packed.together(compare, "whole")
    return [place for name, place in every.items() if name in names]


def _matched(
    packed: PackedOptimizer, wanted: Sequence[str | nn.Parameter]
) -> tuple[set[str], list[str]]:
    """Return names of wanted slots, and patterns that match none here. Local."""
    slots = packed.names()
    every = packed.model.named_parameters(remove_duplicate=False)
    known = [(name, slots[param]) for name, param in every if param in slots]
    names: set[str] = set()
    unmatched = []
    if not wanted:
        raise TypeError("whole: expected patterns of names, or parameters, got none")
    for one in wanted:
        if isinstance(one, str):
            found = {slot for name, slot in known if fnmatch.fnmatchcase(name, one)}
            unmatched += [one] if not found else []
            names |= found
        elif isinstance(one, nn.Parameter) and one in slots:
            names.add(slots[one])
        elif isinstance(one, nn.Parameter):
            raise ValueError(
                f"whole: the optimizer does not hold the parameter of shape {tuple(one.shape)} "
                "that was given; pass parameters of the sharded model, or their names"
            )
        else:
            raise TypeError(
                f"whole: expected patterns of names, or parameters, got {type(one).__name__}"
            )
    return names, unmatched


@torch.no_grad()
def _gathered(
    packed: PackedOptimizer, fragments: Fragments, chosen: Sequence[Place]
) -> dict[str, Values]:
    """Gather whole parameters from their owners. Collective."""
    own = {
        (shard, shard.pack.layout.slots.index(fragment.slot)): number
        for shard in packed.shards
        for number, fragment in enumerate(shard.fragments)
    }
    states = {
        shard.pack.layout.slots[position].name: fragments.states(shard, own[shard, position])
        for shard, position in chosen
        if (shard, position) in own
    }
    by_rank = packed.process_groups.dp.exchange(states, packed.device)
    values: dict[str, Values] = {}
    for shard, position in chosen:
        pack, slot = shard.pack, shard.pack.layout.slots[position]
        names = max((theirs.get(slot.name, []) for theirs in by_rank), key=len)
        kinds = [MASTER, *(STATE + name for name in names)]
        kinds += [GRAD] * fragments.has_grad(pack, position)
        full: dict[str, Tensor] = {}
        pieces = []
        for kind in kinds:
            full[kind] = torch.zeros(slot.numel, dtype=MASTER_DTYPE, device=packed.device)
            if (shard, position) in own:
                number = own[shard, position]
                part = fragments.read(shard, number, kind)
                assert part is not None
                full[kind][slice(*shard.fragments[number].param_range)] = part
            for owner, begin, end in pack.layout.spans:
                start, stop = max(begin, slot.offset), min(end, slot.end)
                if start < stop:
                    pieces.append((owner, full[kind][start - slot.offset : stop - slot.offset]))
        if pieces and pack.comm.size > 1:
            pack.comm.broadcast_all(pieces, pack.layout)
        shaped = partial(_shaped, pack.in_model[position], slot.shape)
        values[slot.name] = Values(slot.name, names, full.get, shaped)
    return values


def _shaped(param: Any, shape: tuple[int, ...], flat: Tensor) -> Tensor:
    """Return values in a parameter's shape; a DTensor for a DTensor."""
    values = flat.view(shape)
    if _compat.is_dtensor(param):
        return dtensor.wrap_local(values, param, param.placements)
    return values


@torch.no_grad()
def _refuse_differences(packed: PackedOptimizer, of_slots: Mapping[Place, list[Edit]]) -> None:
    """Raise RuntimeError on every rank if holders of a parameter made different edits."""
    # Two stages hold a tied weight under two names.
    names = {tie.second: tie.first for tie in packed.process_groups.parallel_dims.ties}
    edits = [
        (shard, f"{edit.kind} of {names.get(name, name)!r}", edit.values)
        for (shard, position), of_slot in of_slots.items()
        for edit in of_slot
        if (name := shard.pack.layout.slots[position].name)
    ]
    hasher = hasher_of(packed.device)
    hashes = torch.stack([hasher(values) for *_, values in edits]).tolist() if edits else []
    kinds: dict[PackGroups, dict[str, int]] = {}
    for shard, _ in of_slots:
        kinds.setdefault(shard.pack.layout.pack_groups._replace(is_primary=True), {})
    for (shard, name, _), value in zip(edits, hashes, strict=True):
        kinds[shard.pack.layout.pack_groups._replace(is_primary=True)][name] = value
    differing: list[str] = []
    for groups, own in kinds.items():
        replicas = packed.process_groups.comms(groups.replicate)
        for comm in (packed.process_groups.data_parallel(groups), *replicas):
            if not comm.agree(repr(own), packed.device, "whole()"):
                first, *rest = comm.exchange(own, packed.device)
                every = {name for each in (first, *rest) for name in each}
                differing += [n for n in every if any(each.get(n) != first.get(n) for each in rest)]

    def refuse() -> None:
        if differing:
            raise RuntimeError(
                f"whole: the ranks left the block with different values of {min(differing)}, so "
                "nothing was written: compute the same values on every rank (seed random "
                "generators alike), or edit each rank's own part in owned()"
            )

    packed.together(refuse, "the end of whole()")


@contextmanager
def _block(
    packed: PackedOptimizer, door: str, every: Collection[Values]
) -> Iterator[list[list[Edit]]]:
    """Yield a list that gets the edits of each of the values at the end of the block.

    There all ranks meet, and raise if any of them raised.
    """
    seen, failure = packed.reduce.versions(), None
    edits: list[list[Edit]] = []

    @torch.no_grad()
    def find() -> list[list[Edit]]:
        if failure is not None:
            raise failure
        found = [values.edits() for values in every]
        is_grad = any(edit.kind == GRAD for of_one in found for edit in of_one)
        if is_grad and packed.reduce.versions() != seen:
            raise RuntimeError(
                "grad: gradients changed while a block of owned() or whole() edited them; leave "
                "the block before a backward"
            )
        return found

    packed.block = (
        f"leave `with optimizer.{door}(...):` first; its edits are written when the block ends"
    )
    try:
        try:
            yield edits
        except Exception as error:  # others end the process
            failure = error
        finally:
            packed.block = ""
        packed.sync.wait()
        edits += packed.together(find, f"the end of {door}()")
    finally:
        for values in every:
            values.end()


def _landed(packed: PackedOptimizer, call: str, land: Land) -> Mapping[Pack, Sequence[bool]]:
    """Finish the means of own spans, if there are gradients. Collective.

    Returns:
        Per trained pack and slot, whether some rank has a gradient.
    """
    reduce = packed.reduce
    everyone = packed.process_groups.everyone
    has, brings = _anywhere(everyone, (reduce.has_gradients, reduce.brings), packed.device)
    if brings:
        land(call)
    if not has:
        return {}
    reduce.multiply_in()
    return reduce.anywhere(call)


def _check(packed: PackedOptimizer, call: str) -> None:
    """Raise RuntimeError if asleep, closed, or in another block; wait for parameters. Local."""
    if packed.is_closed:
        raise RuntimeError(f"{call}: the optimizer is closed; call it before optimizer.close()")
    packed.refuse_inside(call)
    if packed.plain_names is not None:
        raise RuntimeError(f"{call}: leave `with optimizer.as_plain():` first")
    packed.ready_to_read()


def _anywhere(comm: Comm, facts: Iterable[bool], device: torch.device) -> list[bool]:
    """Return for each fact whether it holds on some rank. Collective."""
    total = torch.tensor([*map(float, facts)]).to(device)
    comm.all_reduce(total, "owned() or whole()")
    return [count > 0 for count in total.tolist()]


def _holders(packed: PackedOptimizer, groups: PackGroups) -> list[Comm]:
    """Return the groups of ranks that hold the same spans of a pack, including this rank."""
    process_groups = packed.process_groups
    replicas = process_groups.parallel_dims.replicas
    names = [*groups.replicate, *([replicas] if replicas and groups.shard == PLAIN else ())]
    return [comm for comm in process_groups.comms(names) if comm.size > 1]


def _take_first(packed: PackedOptimizer, fragments: Fragments, edits: Written) -> None:
    """Replace this rank's edits by those of each element's first holder. Collective."""
    by_comm: dict[Comm, list[Shard]] = {}
    for shard in packed.shards:
        for comm in _holders(packed, shard.pack.layout.pack_groups):
            by_comm.setdefault(comm, []).append(shard)
    for comm, shards in by_comm.items():
        own = [
            (place, number, kind)
            for place, shard in enumerate(shards)
            for number in range(len(shard.fragments))
            for kind in edits.get((shard, number), ())
        ]
        first = comm.share(own, packed.device)
        for shard in shards:
            for number in range(len(shard.fragments)):
                if comm.rank != 0:
                    edits.pop((shard, number), None)
        for place, number, kind in first:
            shard = shards[place]
            kept = fragments.read(shard, number, kind)
            assert kept is not None
            if comm.rank == 0:
                edit = edits[shard, number][kind]
                values = torch.where(edit.changed, edit.values, kept)
            else:
                values = kept.clone()
            comm.broadcast(values, 0, shard.pack.layout)
            if comm.rank != 0:
                edit = Edit(kind, bits_of(values) != bits_of(kept), values)
                edits.setdefault((shard, number), {})[kind] = edit


def _changed_anywhere(packed: PackedOptimizer, edits: Written) -> dict[Pack, list[bool]]:
    """Return per pack and slot whether some rank edits its master. Collective."""
    own = {
        (shard.pack, shard.fragments[number].slot)
        for (shard, number), of_fragment in edits.items()
        if MASTER in of_fragment
    }
    flags = {
        pack: (pack.layout.pack_groups, [(pack, slot) in own for slot in pack.layout.slots])
        for pack in (shard.pack for shard in packed.shards)
    }
    return packed.process_groups.anywhere(flags, packed.device, "owned() or whole()")


@torch.no_grad()
def _write(
    packed: PackedOptimizer,
    fragments: Fragments,
    edits: Written,
    changed: Mapping[Pack, Sequence[bool]],
) -> None:
    """Write edits, and send published values of changed packs to all ranks. Collective.

    Args:
        changed: per pack and slot, whether its master is edited; equal on the ranks of a pack.
    """
    for (shard, number), of_fragment in edits.items():
        for edit in of_fragment.values():
            fragments.write(shard, number, edit)
    is_grad = any(GRAD in of_fragment for of_fragment in edits.values())
    if any(_anywhere(packed.process_groups.everyone, [is_grad], packed.device)):
        packed.reduce.note_edits()
    sync = Sync()
    for shard in packed.shards:
        if any(changed.get(shard.pack, ())):
            sync.add(shard.pack)
    sync(encodes=False)  # codes cannot represent values that a script wrote
    params = [
        param
        for pack, slots in changed.items()
        for param, is_changed in zip(pack.in_model, slots, strict=True)
        if is_changed
    ]
    # Makes autograd refuse a backward through a forward with the earlier weights.
    torch.autograd.graph.increment_version(params)
