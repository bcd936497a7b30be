"""State: a sharded optimizer's state as plain dictionaries.

Three forms: this rank's own (``state_dict``, local and collective-free), the plain ``torch.optim``
one taken in (each rank keeps its part), and the plain one gathered on rank 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardcast.comm import Comm
from shardcast.memory.shard import Shard
from shardcast.plan.layout import Fragment
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.update.fused import Update

FORMAT = 1  # of the local state
Groups = Sequence[Mapping[str, Any]]


class Piece(NamedTuple):
    """What a fragment is to have: torch's state of it and, if not ``None``, its master."""

    master: Shard
    position: int
    values: dict[str, Any]
    exact: Tensor | None = None


def owned(masters: Sequence[Shard]) -> Iterator[tuple[Shard, int, nn.Parameter]]:
    """Each fragment of this rank, with its model parameter."""
    for master in masters:
        params = dict(zip(master.pack.layout.slots, master.pack.params, strict=True))
        for position, fragment in enumerate(master.fragments):
            yield master, position, params[fragment.slot]


class Told(dict[Any, Any]):
    """A dictionary that tells of every item that is set or removed; copies of it are plain ones.

    Args:
        changed: called with the key; by default nobody is told, for tools that rebuild mappings.
    """

    def __init__(self, items: Any = (), changed: Callable[[Any], None] = lambda _key: None) -> None:
        super().__init__(items)
        self._changed = changed

    def __setitem__(self, key: Any, value: Any) -> None:
        before = self.get(key)
        super().__setitem__(key, value)
        if value is not before:
            self._changed(key)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._changed(key)

    # The others by these two: a dictionary's own would change it without a word.
    clear, pop, popitem = MutableMapping.clear, MutableMapping.pop, MutableMapping.popitem
    setdefault, update = MutableMapping.setdefault, MutableMapping.update

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class States(Told):
    """torch's state by model parameter; what is assigned in it is so in the shards too."""

    def __init__(self, masters: Sequence[Shard], update: Update) -> None:
        self._places = {param: (master, position) for master, position, param in owned(masters)}
        self._update = update
        super().__init__(
            {p: values for p in self._places if (values := self._told(p))}, self._write
        )

    def _told(self, param: Any) -> Told:
        return Told(self._update.fragment_state(*self._places[param]), lambda _: self._write(param))

    def _write(self, param: Any) -> None:
        if param in self._places:  # else another rank's
            master, position = self._places[param]
            values = _checked(self._update, master.fragments[position], dict(self.get(param, {})))
            self._update.load_fragment(master, position, values)

    def pop(self, param: Any, *_default: Any) -> Any:
        """As of a dictionary that has an item for every parameter."""
        values = apart(self[param])
        del self[param]
        return values

    def __missing__(self, param: Any) -> dict[str, Any]:
        values = self._told(param) if param in self._places else {}
        dict.__setitem__(self, param, values)  # as a defaultdict does, and nothing to tell
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))


def apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter with tensors of its own: what is removed is zeroed where it lies."""
    return {n: value.clone() if isinstance(value, Tensor) else value for n, value in values.items()}


def part(master: Shard, fragment: Fragment) -> Tensor:
    """The master elements of one fragment, 1-d fp32; :func:`set_part` takes them back."""
    return master.store.read(master.local(fragment.start, fragment.stop))


def set_part(master: Shard, fragment: Fragment, values: Tensor) -> None:
    """Overwrite the master elements of one fragment; 1-d, any floating dtype, any device."""
    exact = values.to(master.published.device, MASTER_DTYPE)
    master.store.write(master.local(fragment.start, fragment.stop), exact)


def numbered(groups: Groups) -> dict[nn.Parameter, int]:
    """torch's index of each parameter in a state dict."""
    params = (param for group in groups for param in group["params"])
    return {param: number for number, param in enumerate(params)}


def plain_groups(groups: Groups) -> list[dict[str, Any]]:
    """Groups with indices in place of parameters, as in torch's state dict."""
    index = numbered(groups)
    return [{**group, "params": [index[param] for param in group["params"]]} for group in groups]


def check_groups(groups: Groups, loaded: Groups) -> None:
    """Raise for groups that are not of the same sizes.

    Raises:
        ValueError: another number of groups, or of parameters in one of them.
    """
    sizes = [len(group["params"]) for group in groups]
    others = [len(group["params"]) for group in loaded]
    if sizes != others:
        raise ValueError(
            f"state_dict: expected groups with {sizes} parameters, got {others}; build the "
            "optimizer with the same groups as when the state was saved"
        )


def load_groups(groups: Sequence[dict[str, Any]], loaded: Groups) -> None:
    """Overwrite the options, not the parameters, of ``groups``; check them first."""
    for group, other in zip(groups, loaded, strict=True):
        group.update((key, value) for key, value in other.items() if key != "params")


def local_state(masters: Sequence[Shard], update: Update, groups: Groups) -> dict[int, Any]:
    """Per parameter index: the fragment's ``master`` (1-d fp32) and torch's state of it."""
    index = numbered(groups)
    return {
        index[param]: {
            "master": part(master, master.fragments[position]).clone(),
            **_copied(update.fragment_state(master, position)),
        }
        for master, position, param in owned(masters)
    }


def plan_local(
    masters: Sequence[Shard], update: Update, groups: Groups, state: Mapping[int, Any]
) -> list[Piece]:
    """The inverse of :func:`local_state`, on the same rank of an equal layout; changes nothing.

    Raises:
        ValueError: a fragment is missing or of another size.
    """
    index = numbered(groups)
    found = []
    for master, position, param in owned(masters):
        fragment, values = master.fragments[position], dict(state.get(index[param], {}))
        exact = values.pop("master", None)
        shape = None if exact is None else tuple(exact.shape)
        if shape != (fragment.numel,):
            raise ValueError(
                f"state_dict: 'master' of parameter {fragment.slot.name!r} has shape {shape}, "
                f"expected ({fragment.numel},); load the state as state_dict() returned it"
            )
        found.append(Piece(master, position, _checked(update, fragment, values), exact))
    return found


def _checked(update: Update, fragment: Fragment, values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dim() and update.elementwise:
            _check_numel(value, fragment.numel, (fragment.numel,), fragment, name)
    return values


def plan_plain(
    masters: Sequence[Shard], update: Update, state: Mapping[nn.Parameter, Mapping[str, Any]]
) -> list[Piece]:
    """This rank's part of a plain optimizer's state, keyed by model parameter; changes nothing.

    Raises:
        ValueError: a tensor that cannot belong to its parameter.
    """
    cut = []
    for master, position, param in owned(masters):
        fragment = master.fragments[position]
        values = {
            name: _cut(value, fragment, name, update.elementwise)
            for name, value in state.get(param, {}).items()
        }
        cut.append(Piece(master, position, values))
    return cut


def take(update: Update, pieces: Sequence[Piece]) -> None:
    """Write what was planned; masters only where there are new ones."""
    for master, position, values, exact in pieces:
        if exact is not None:
            set_part(master, master.fragments[position], exact)
        update.load_fragment(master, position, values)


def _cut(value: Any, fragment: Fragment, name: str, elementwise: bool) -> Any:
    """The fragment's part of a full state tensor; numbers and 0-dim tensors stay whole."""
    slot = fragment.slot
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.numel() == slot.numel:
        start, stop = fragment.param_range
        return value.reshape(-1)[start:stop]
    if elementwise or fragment.numel != slot.numel:
        _check_numel(value, slot.numel, slot.shape, fragment, name)
    return value  # e.g. factored moments of a whole parameter


def _check_numel(
    value: Tensor, numel: int, shape: tuple[int, ...], fragment: Fragment, name: str
) -> None:
    if value.numel() != numel:
        raise ValueError(
            f"state_dict: {name!r} of parameter {fragment.slot.name!r} has shape "
            f"{tuple(value.shape)}, expected {shape}; load the state of this very model (one that "
            "is not elementwise needs partition 'whole')"
        )


def gather_plain(
    masters: Sequence[Shard], update: Update, groups: Groups, comm: Comm
) -> dict[str, Any]:
    """The whole state on rank 0, as the unsharded optimizer's ``state_dict``; empty elsewhere.

    Collective, pack by pack, through pickled copies on the host: for hand-over, not for a loop.
    """
    index = numbered(groups)
    state: dict[int, Any] = {}
    for master in masters:
        mine = {
            index[param]: (
                master.fragments[position].param_range,
                _copied(update.fragment_state(master, position), "cpu"),
            )
            for _, position, param in owned([master])
        }
        everyone = comm.exchange(mine, master.pack.data.device)
        if comm.rank == 0:
            for slot, param in zip(master.pack.layout.slots, master.pack.params, strict=True):
                pieces = [theirs[index[param]] for theirs in everyone if index[param] in theirs]
                merged = _join([piece for piece in pieces if piece[1]], slot.shape)
                if merged:
                    state[index[param]] = merged
    if comm.rank != 0:
        return {}
    return {"state": dict(sorted(state.items())), "param_groups": plain_groups(groups)}


def gather_masters(masters: Sequence[Shard], comm: Comm) -> dict[str, Tensor]:
    """All parameters in fp32 by name, on rank 0's host; empty elsewhere. Collective, as above."""
    found: dict[str, Tensor] = {}
    for master in masters:
        mine = [
            (fragment.slot.name, fragment.param_range, part(master, fragment).detach().cpu())
            for fragment in master.fragments
        ]
        everyone = comm.exchange(mine, master.pack.data.device)
        if comm.rank == 0:
            for slot in master.pack.layout.slots:
                found[slot.name] = torch.zeros(slot.shape, dtype=MASTER_DTYPE)
            for name, (start, stop), values in (piece for theirs in everyone for piece in theirs):
                found[name].view(-1)[start:stop] = values
    return found


def _join(
    pieces: list[tuple[tuple[int, int], dict[str, Any]]], shape: tuple[int, ...]
) -> dict[str, Any]:
    """One parameter's full state from its fragments' states, in order of their ranges."""
    if not pieces:
        return {}
    pieces.sort(key=lambda piece: piece[0])
    joined: dict[str, Any] = {}
    for name, first in pieces[0][1].items():
        (start, stop), _ = pieces[0]
        if isinstance(first, Tensor) and first.dim() and first.numel() == stop - start:
            flat = torch.cat([values[name].reshape(-1) for _, values in pieces])
            joined[name] = flat.view(shape)
        else:
            joined[name] = first
    return joined


def _copied(state: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    return {
        name: value.detach().to(device or value.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }
