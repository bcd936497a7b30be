"""A sharded optimizer's state, in and out, and ``optimizer.state``.

A state dictionary has two forms: this rank's own (:meth:`StateDict.dump`, local and without
collectives), and the plain one of ``torch.optim``. Each rank loads its part of a plain one.
:class:`FullState` gathers one on rank 0 or, inside ``as_plain()``, on every rank.
:class:`StateView` is ``optimizer.state``: values that all ranks know can be read, and all else
raises.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import Comm, warn_first
from shardcast.memory.gradients import Gradients
from shardcast.memory.shard import Shard
from shardcast.optimizer.groups import activate_packs
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.plan.layout import Fragment, Slot
from shardcast.plan.originals import Group, ParamGroup, is_known

FORMAT = 1  # format of the local state
STEP = "step"  # name of a parameter's step count in the state of torch's classes
MASTER = "shardcast_master"  # name of a master in a parameter's state, for DCP
DCP = "torch.distributed.checkpoint"
Groups = Sequence[ParamGroup]
ValuesOf = Callable[[Shard, int], Mapping[str, object]]  # values of a fragment, by its number


class FragmentState(NamedTuple):
    """The future state of a fragment: torch's and, if not ``None``, its master."""

    shard: Shard
    number: int
    values: dict[str, object]
    master: Tensor | None


class LoadPlan(NamedTuple):
    """A checked plan of a load; nothing has changed yet.

    Attributes:
        active: indices of packs that are, or once were, trained.
        fragments: states of this rank's fragments.
        decider: loss scale, number of skipped steps and so on, from a local state.
        groups: options of the parameter groups.
        masters: whether it includes masters, on every rank.
    """

    active: frozenset[int]
    fragments: list[FragmentState]
    decider: Mapping[str, Any] | None = None
    groups: Groups = ()
    masters: bool = False


class StateDict:
    """State in and out of one optimizer."""

    def __init__(self, packed: PackedOptimizer) -> None:
        self._packed = packed

    @property
    def _groups(self) -> list[Group]:
        self._packed.originals.check()
        return self._packed.originals.groups

    def dump(self) -> dict[str, Any]:
        """Return this rank's shards; see :meth:`shardcast.ShardedOptimizer.state_dict`. Local."""
        packed = self._packed
        groups = self._groups
        packed.ready_to_read()
        state = {
            param: {
                "master": shard.exact(fragment).clone(),
                **copied(packed.update_of(shard).fragment_state(shard, number)),
            }
            for shard in packed.shards
            for number, fragment, param in shard.owned()
        }
        return {
            **plain_dict(state, groups),
            "shardcast": {
                **self._head(),
                "active": [s.pack.layout.index for s in packed.shards if s.grads is not None],
                "scaler": step_state(packed),
            },
        }

    def plan(self, loaded: Mapping[str, Any] | list[Mapping[str, Any]]) -> LoadPlan:
        """Plan a load. Collective: every rank; if one cannot load, all raise.

        A rank that raised alone would leave the others waiting when they publish.

        Args:
            loaded: a state, or a list with a plain one for each optimizer.

        Raises:
            ValueError: on every rank, with the reason.
        """
        comm, device = self._packed.process_groups.everyone, self._packed.device
        plan = self._packed.together(lambda: self._plan_alone(loaded), "load_state_dict")
        if len(set(comm.exchange(("shardcast" in loaded, plan.masters), device))) > 1:
            raise ValueError(
                "state_dict: some ranks got their own part, or a state with masters, and others a "
                "plain one; load on every rank what that rank saved, or the same plain state on "
                "all ranks"
            )
        return plan

    def _plan_alone(self, state_or_list: Mapping[str, Any] | list[Mapping[str, Any]]) -> LoadPlan:
        loaded = plain_state(state_or_list, self._packed.originals.places)
        groups, head = loaded["param_groups"], loaded.get("shardcast")
        state = state_by_param(loaded, self._groups)
        if head is None:
            return self.plan_plain(state)._replace(groups=groups)
        self._check_head(head)
        fragments = self._fragments(state, is_local=True)
        return LoadPlan(frozenset(head["active"]), fragments, head["scaler"], groups, True)

    def _head(self) -> dict[str, object]:
        packed, parallel_dims = self._packed, self._packed.process_groups.parallel_dims
        layout = packed.layout.digest().hex()
        place = {
            dim: [parallel_dims.coordinate[dim], parallel_dims.sizes[dim]]
            for dim in (*parallel_dims.data, *parallel_dims.model)
        }
        return {"format": FORMAT, "rank": packed.comm.rank, "layout": layout, "mesh": place}

    def _check_head(self, head: Mapping[str, Any]) -> None:
        expected, comm = self._head(), self._packed.comm
        if any(head.get(key) != value for key, value in expected.items()):
            raise ValueError(
                "state_dict: expected the part of this rank and layout (rank "
                f"{comm.rank} of {comm.size}), got the part of rank {head.get('rank')}"
                + (", another layout" if head.get("layout") != expected["layout"] else "")
                + (", another place in the mesh" if head.get("mesh") != expected["mesh"] else "")
                + "; a rank's part fits no other rank or layout: save with "
                "shardcast.checkpoint.save, or call full_state_dict() on every rank, which gives "
                "rank 0 the state of all"
            )

    def plan_plain(self, state: Mapping[Any, Mapping[str, Any]]) -> LoadPlan:
        """Plan this rank's part of a plain optimizer's state, keyed by model parameter. Local."""
        active = frozenset(
            shard.pack.layout.index
            for shard in self._packed.shards
            if any({*state.get(param, ())} - {MASTER} for param in shard.pack.params)
        )
        masters = any(MASTER in values for values in state.values())
        return LoadPlan(active, self._fragments(state, is_local=False), masters=masters)

    def _fragments(
        self, state: Mapping[Any, Mapping[str, Any]], is_local: bool
    ) -> list[FragmentState]:
        """Return a state by fragments: fragments of :meth:`dump`, or parts of full tensors."""
        fragments = []
        for shard in self._packed.shards:
            elementwise = self._packed.update_of(shard).elementwise
            for number, fragment, param in shard.owned():
                values: dict[str, Any] = {
                    name: value if is_local else _cut(value, fragment, name, elementwise)
                    for name, value in state.get(param, {}).items()
                    if not isinstance(value, dict) or value  # DCP leaves out empty states
                }
                master = values.pop("master" if is_local else MASTER, None)
                if is_local:
                    master = torch.empty(0) if master is None else master  # refused below
                    check_numel(master, fragment.numel, (fragment.numel,), fragment, "master")
                    for name, value in values.items() if elementwise else ():
                        if isinstance(value, Tensor) and value.dim():
                            check_numel(value, fragment.numel, (fragment.numel,), fragment, name)
                fragments.append(FragmentState(shard, number, values, master))
        return fragments

    def apply(self, plan: LoadPlan) -> None:
        """Write a planned load. Collective: every rank, with a plan of the same kind."""
        packed = self._packed
        packed.ready_to_read()
        if packed.comm.steps and plan.decider is not None:  # a run that resumes has no steps
            self._warn_of_weights(plan)
        activate_packs(packed, plan.active)
        forget_averages(packed)
        for shard, number, values, master in plan.fragments:
            fragment = shard.fragments[number]
            if master is None and plan.masters:  # so that it is published below, too
                master = shard.exact(fragment)
            if master is not None:
                shard.set_exact(fragment, master)
            packed.update_of(shard).load_fragment(shard, number, values)
        agree_on_counts(packed)
        if plan.decider is not None:
            load_step_state(packed, plan.decider)
        if plan.masters:
            packed.publish()
        load_groups(self._groups, plan.groups)

    @staticmethod
    def _warn_of_weights(plan: LoadPlan) -> None:
        """Warn if the masters of a local state are of other weights than the model's. Local."""
        for shard, number, _, master in plan.fragments:
            fragment = shard.fragments[number]
            now = shard.exact(fragment)
            assert master is not None  # in each local state
            given = master.to(now.device, now.dtype)
            if not torch.equal(*(shard.rounded(fragment.slot, it) for it in (now, given))):
                warn_first(
                    "load_state_dict: what state_dict() returns on a rank includes masters, so "
                    f"this load changes weights of the model, too ({fragment.slot.name!r}), which "
                    "torch's does not. If you load the model as well, load it first. To keep the "
                    "weights, replace the masters before: now = optimizer.state_dict()['state']; "
                    "for k, values in state['state'].items(): values['master'] = now[k]['master']",
                    "load_state_dict changes weights",
                )
                return


def plain_dict(state: Mapping[Any, Mapping[str, Any]], groups: Groups) -> dict[str, Any]:
    """Return a state keyed by parameters in ``groups``, numbered as torch does."""
    params = chain.from_iterable(group["params"] for group in groups)
    number = {param: place for place, param in enumerate(params)}
    return {
        "state": {place: state[param] for param, place in number.items() if param in state},
        "param_groups": [
            {**group, "params": [number[param] for param in group["params"]]} for group in groups
        ],
    }


def plain_state(
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]], places: Sequence[int]
) -> Mapping[str, Any]:
    """Return a state; for a list with a plain one per optimizer, the joint state.

    Args:
        places: for each group, the index of its optimizer.

    Raises:
        ValueError: an item is not a state, a list contains a local state, or the number of states
            or groups differs.
    """
    listed = [states] if isinstance(states, Mapping) else states
    for key in ("state", "param_groups"):
        if not listed or any(key not in state for state in listed):
            raise ValueError(
                f"state_dict: expected 'state' and 'param_groups', got no {key!r}; every rank "
                "needs the state, but full_state_dict() returns it on rank 0 only: broadcast it"
            )
    if isinstance(states, Mapping):
        return states
    if any("shardcast" in state for state in states):
        raise ValueError(
            "state_dict: expected a list of plain states, as full_state_dicts() gives, got "
            "one rank's part in it; pass what state_dict() returned without a list"
        )
    sizes = [len(state["param_groups"]) for state in states]
    expected = [list(places).count(place) for place in range(max(places) + 1)]
    if sizes != expected:
        raise ValueError(
            f"state: expected the states of {len(expected)} optimizers with {expected} groups, got "
            f"{len(sizes)} with {sizes}; give one for each optimizer, in the order of shard()"
        )
    groups: list[Group] = []
    joined: dict[int, Any] = {}
    start = 0
    for state in states:
        for group in state["param_groups"]:
            numbers = range(start, start + len(group["params"]))
            for number, number_in_state in zip(numbers, group["params"], strict=True):
                if number_in_state in state["state"]:
                    joined[number] = state["state"][number_in_state]
            groups.append({**group, "params": list(numbers)})
            start = numbers.stop
    return {"state": joined, "param_groups": groups}


def state_by_param(loaded: Mapping[str, Any], groups: Groups) -> dict[Any, Any]:
    """Return a state keyed by the parameters of ``groups``, matched by order, as in torch.

    Raises:
        ValueError: the number of groups, or of parameters in one of them, differs.
    """
    # DCP's keys are names instead of numbers.
    keys, params = (
        [list(group["params"]) for group in groups_of_one]
        for groups_of_one in (loaded["param_groups"], groups)
    )
    if list(map(len, keys)) != list(map(len, params)):
        raise ValueError(
            f"state_dict: expected groups with {list(map(len, params))} parameters, got "
            f"{list(map(len, keys))}; build the optimizer with the same groups as when the state "
            "was saved"
        )
    param_by_key = dict(zip(chain(*keys), chain(*params), strict=True))
    return {param_by_key[key]: values for key, values in loaded["state"].items()}


def load_groups(groups: Sequence[Group], loaded: Groups) -> None:
    """Overwrite the options, not the parameters, of ``groups``, after checking them."""
    for group, loaded_group in zip(groups, loaded, strict=False):
        options = {key: value for key, value in loaded_group.items() if key != "params"}
        # a copy, because a scheduler writes to a tensor ``lr``
        group.update(copy.deepcopy(options))


def _cut(value: object, fragment: Fragment, name: str, elementwise: bool) -> object:
    """Return the fragment's part of a full state tensor; numbers and 0-dim tensors unchanged."""
    slot = fragment.slot
    if not isinstance(value, Tensor) or (value.dim() == 0 and name != MASTER):
        return value
    value = _compat.local_tensor(value)
    if not elementwise and fragment.numel == slot.numel and name != MASTER:
        return value  # it has its own shape, like factored moments
    check_numel(value, slot.numel, slot.shape, fragment, name)
    start, stop = fragment.param_range
    return value.reshape(-1)[start:stop]


def copied(state: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Return the state with copies of its tensors, on ``device`` if given."""
    return {
        name: value.detach().to(device or value.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def step_state(packed: PackedOptimizer) -> dict[str, object]:
    """Return loss scale, skipped steps, state of signals and hooks, as plain numbers. Local."""
    hooks = {hook.name: state for hook in packed.step_hooks if (state := hook.state_dict())}
    state = packed.decider.state_dict()
    return {**state, "hooks": hooks} if hooks else state


@torch.no_grad()
def load_step_state(packed: PackedOptimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`step_state` returned. Local."""
    reduce, scale = packed.reduce, packed.decider.loss_scale
    before = 1.0 if scale is None else float(scale.value)
    packed.decider.load_state_dict(state)
    change = (1.0 if scale is None else float(scale.value)) / before
    if change != 1 and reduce.pending is None:  # a clip has read the scale already
        with reduce.own_edits():
            for grads in reduce.grads:
                grads.rescale(change)
            frozen = (shard.pack for shard in packed.shards if shard.grads is None)
            for param in (param for pack in frozen for param in pack.in_model):
                if param.grad is not None:
                    param.grad.mul_(change)
    hooks = state.get("hooks", {})
    for hook in packed.step_hooks:
        if hook.name in hooks:
            hook.load_state_dict(hooks[hook.name])


def forget_averages(packed: PackedOptimizer) -> None:
    """Reset the step counts of averages, before a state is loaded. Local."""
    for update in packed.updates:
        update.epilogue_steps = [0.0] * len(update.epilogue_steps)


def agree_on_counts(packed: PackedOptimizer) -> None:
    """Make step counts equal on all ranks, after a state was loaded. Collective.

    These are the counts of averages, and of each parameter, which its owners know.
    """
    if any(update.epilogues for update in packed.updates):
        own = [update.epilogue_steps for update in packed.updates]
        by_rank = packed.process_groups.everyone.exchange(own, packed.device)
        for update, counts in zip(packed.updates, zip(*by_rank, strict=True), strict=True):
            update.epilogue_steps = [max(steps) for steps in zip(*counts, strict=True)]
    by_comm: dict[Comm, list[tuple[Shard, Gradients]]] = defaultdict(list)
    for shard in packed.shards:
        if shard.grads is not None and counts_steps(packed, shard):
            by_comm[shard.pack.comm].append((shard, shard.grads))
    for comm, shards in by_comm.items():
        of_rank = [_own_steps(packed, shard) for shard, _ in shards]
        of_ranks = comm.exchange(of_rank, packed.device)
        for (_, grads), of_shard in zip(shards, zip(*of_ranks, strict=True), strict=True):
            steps = [max(of_slot) for of_slot in zip(*of_shard, strict=True)]
            packed.decider.presence.take_steps(grads, steps)


def counts_steps(packed: PackedOptimizer, shard: Shard) -> bool:
    """Return whether ``step`` in its state is the number of steps that updated a parameter.

    This holds for torch's classes, except SGD, which has no ``step``.
    """
    optimizer = packed.originals.optimizers[shard.pack.layout.optimizer]
    return is_known(optimizer) and type(optimizer) is not torch.optim.SGD


def _own_steps(packed: PackedOptimizer, shard: Shard) -> list[float]:
    """Return ``step`` of each slot, 0 for slots without a part on this rank. Local."""
    steps = dict.fromkeys(shard.pack.layout.slots, 0.0)
    for number, fragment in enumerate(shard.fragments):
        state = packed.update_of(shard).fragment_state(shard, number, decode=False)
        steps[fragment.slot] = float(state.get(STEP, 0.0))
    return [*steps.values()]


def caller_of(function: str) -> str:
    """Return the module of the code that called ``function``, skipping wrappers of that name.

    It must be called inside that function, or below it.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == function:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def called_by_dcp(function: str) -> bool:
    """Return whether ``torch.distributed.checkpoint`` called ``function``; see :func:`caller_of`.

    DCP treats the optimizer as a plain one, and would save one rank's part as the whole.
    """
    return caller_of(function).startswith(DCP)


def outside_as_plain(call: str) -> RuntimeError:
    """Return the error for DCP calls on the sharded optimizer itself."""
    return RuntimeError(
        f"{call}: torch.distributed.checkpoint got a sharded optimizer, and each rank has only a "
        "part of its state; call it inside `with optimizer.as_plain():` on every rank (of the "
        "optimizer that shardcast.shard returned), or use shardcast.checkpoint.save"
    )


def refuse_write(*_args: object, **_named: object) -> NoReturn:
    """Raise TypeError for a write to ``optimizer.state``."""
    raise TypeError(
        "state: optimizer.state is read-only, because each rank has only its own part; edit "
        "tensors in `with optimizer.whole(...) as params:` or `with optimizer.owned() as "
        "parts:`; to replace or drop state, on every rank: state = optimizer.state_dict(), edit "
        "or delete all but 'master' in state['state'], optimizer.load_state_dict(state); to move "
        "it to a device: nothing, it is where the model is"
    )


class StateView(Mapping[object, "StateOfParameter"]):
    """torch's state by model parameter: values that all ranks know can be read, all else raises.

    All ranks know how many steps have updated a parameter, and how many each average has seen.

    Args:
        place: index of the optimizer whose parameters it has; ``None``: it has all parameters.
    """

    __setitem__ = __delitem__ = __ior__ = refuse_write
    clear = pop = popitem = setdefault = update = refuse_write

    def __init__(self, packed: PackedOptimizer, place: int | None = None) -> None:
        self._packed = packed
        self._places = {
            param: (shard, position)
            for shard in packed.shards
            if shard.grads is not None and place in (None, shard.pack.layout.optimizer)
            for position, param in enumerate(shard.pack.in_model)
        }
        self._numbers = {
            param: number for shard in packed.shards for number, _, param in shard.owned()
        }

    def __getitem__(self, param: Any) -> StateOfParameter:
        if param not in self._places:
            return StateOfParameter("", (), {})
        shard, position = self._places[param]
        assert shard.grads is not None
        known = self._packed.update_of(shard).steps_of_averages()
        if counts_steps(self._packed, shard):
            known[STEP] = self._packed.decider.presence.steps(shard.grads)[position]
        if param in self._numbers:
            names = self._own(shard, self._numbers[param])
        elif STEP in known and not known[STEP]:
            names = ()
        else:
            names = self._others(shard)
        return StateOfParameter(shard.pack.layout.slots[position].name, names, known)

    def _own(self, shard: Shard, number: int) -> Collection[str]:
        return self._packed.update_of(shard).fragment_state(shard, number, decode=False).keys()

    def _others(self, shard: Shard) -> Collection[str]:
        """Return the names of state for a parameter that this rank owns nothing of."""
        update = self._packed.update_of(shard)
        for other in self._packed.shards:
            if other.grads is not None and self._packed.update_of(other) is update:
                for number in range(len(other.fragments)):
                    if names := self._own(other, number):
                        return names
        return update.state_names if self._packed.comm.steps else ()

    def __iter__(self) -> Iterator[Any]:
        return iter([param for param in self._places if param in self])

    def __contains__(self, param: Any) -> bool:
        return param in self._places and bool(self[param])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "state: optimizer.state of a sharded optimizer cannot be copied or pickled, as each "
            "rank has a part of it; use optimizer.state_dict() for this rank's part, and "
            "optimizer.full_state_dict() on every rank for all of it"
        )


class StateOfParameter(Mapping[str, object]):
    """torch's state of one parameter; see :class:`StateView`.

    Args:
        names: names of all state that the class keeps.
        known: values that every rank knows, 0-dim.
    """

    __setitem__ = __delitem__ = __ior__ = refuse_write
    clear = pop = popitem = setdefault = update = refuse_write

    def __init__(self, param: str, names: Collection[str], known: Mapping[str, Tensor]) -> None:
        self._param, self._names, self._known = param, tuple(names), known

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        if name not in self._known:
            raise RuntimeError(
                f"state: {name!r} of {self._param!r} is sharded over the ranks: read and edit "
                f"tensors inside `with optimizer.whole({self._param!r}) as params:` on every "
                f"rank, params[{self._param!r}].state[{name!r}], or each rank's own part inside "
                "`with optimizer.owned() as parts:`; numbers are in "
                "optimizer.full_state_dict(), which every rank must call"
            )
        # torch then refuses in-place edits, which would have no effect
        with torch.inference_mode():
            return self._known[name].clone()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"state of {self._param!r}: {', '.join(self._names)}"


def is_elementwise(value: object, fragment: Fragment, flat: bool) -> bool:
    """Return whether a fragment's state is a tensor with one value per element of the fragment.

    Args:
        flat: the optimizer keeps such state flat, whatever the parameter's shape.
    """
    shapes = (fragment.shape, (fragment.numel,)) if flat else (fragment.shape,)
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) in shapes


def check_numel(
    value: Tensor, numel: int, shape: tuple[int, ...], fragment: Fragment, name: str
) -> None:
    if value.numel() != numel:
        raise ValueError(
            f"state_dict: {name!r} of parameter {fragment.slot.name!r} has shape "
            f"{tuple(value.shape)}, expected {shape}; load the state of this very model (state "
            "that is not elementwise needs partition 'whole')"
        )


class RankPart(dict[str, object]):
    """One rank's state dictionary, which warns when its state is read, as by a save.

    Reading a learning rate, or loading it back in memory, does not warn. Copies behave alike;
    pickles are plain dictionaries.

    Args:
        size: number of ranks.
    """

    def __init__(self, values: Mapping[str, object], size: int) -> None:
        super().__init__(values)
        self._size = size

    def plain(self) -> dict[str, Any]:
        """Return an ordinary dictionary with the same contents, without a warning."""
        return {key: super(RankPart, self).__getitem__(key) for key in super().__iter__()}

    def _warn(self) -> None:
        warn_first(
            f"state_dict: this is a copy of one of {self._size} ranks' parts, and a run "
            "cannot resume from it alone: save with shardcast.checkpoint.save, or call "
            "full_state_dict() on every rank, which returns the whole state on rank 0. To edit "
            "moments, use `with optimizer.whole(...)`: edits of a copy change nothing"
        )

    def __getitem__(self, key: str) -> Any:
        if key == "state":
            self._warn()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> object:
        """Return a value."""
        if key not in self:
            return default
        return self[key]

    def __iter__(self) -> Iterator[str]:  # dict(part) and {**part} call this and __getitem__
        return super().__iter__()

    def items(self) -> Any:
        """Return keys and values."""
        self._warn()
        return super().items()

    def values(self) -> Any:
        """Return the values."""
        self._warn()
        return super().values()

    def __copy__(self) -> RankPart:
        return RankPart(self.plain(), self._size)

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> RankPart:
        return RankPart(copy.deepcopy(self.plain(), memo), self._size)

    def __reduce__(self) -> tuple[object, ...]:
        self._warn()  # torch.load(weights_only=True) knows the class
        return OrderedDict, (), None, None, iter(self.plain().items())


class FullState:
    """The gathered state of one optimizer."""

    def __init__(self, packed: PackedOptimizer) -> None:
        self._packed = packed
        self._begun = False  # a state to be shown only inside ``as_plain()``

    def gather(self, place: int | None = None) -> dict[str, object]:
        """Return the full state on rank 0, as the unsharded ``state_dict``; else an empty one.

        Collective: every rank. It goes pack by pack through pickled copies on the host, so it suits
        a hand-over, not a loop.

        Args:
            place: index of one optimizer, to get its state alone.
        """
        state = self._full_state(self._state_of, on_all=False, place=place)
        return state if self._packed.process_groups.everyone.rank == 0 else {}

    def gather_on_all(self) -> dict[str, object]:
        """Return the full state on every rank, with masters of low-precision parameters, for DCP.

        Collective: every rank.
        """
        packed = self._packed
        packed.together(packed.ready_to_read, "state_dict")
        return self._full_state(self._state_and_master, on_all=True)

    def _state_of(self, shard: Shard, number: int) -> Mapping[str, object]:
        return self._packed.update_of(shard).fragment_state(shard, number)

    def _state_and_master(self, shard: Shard, number: int) -> dict[str, object]:
        values = dict(self._state_of(shard, number))
        # even without a state, otherwise a resume would start from rounded ones
        if not shard.in_place:
            values[MASTER] = shard.exact(shard.fragments[number])
        return values

    @contextmanager
    def as_plain(self) -> Iterator[None]:
        """See :meth:`shardcast.ShardedOptimizer.as_plain`. Collective at its start."""
        packed = self._packed
        if packed.plain_names is not None:  # inside another as_plain()
            yield
            return
        packed.together(partial(self._check_gathers, "as_plain"), "as_plain")
        names = self._gathered_names()
        self._begun = {*chain.from_iterable(names.values())} <= {MASTER}
        if self._begun:
            packed.together(self._begin, "as_plain")
            names = self._gathered_names()
        packed.plain_names = names
        try:
            yield
        finally:
            packed.plain_names = None
            if self._begun:
                self._forget()

    def note_loaded(self) -> None:
        """Note that a state was loaded on all ranks, so it stays."""
        if self._packed.plain_names is not None:
            self._begun = False
            self._packed.plain_names = self._gathered_names()

    def _gathered_names(self) -> dict[nn.Parameter, dict[str, None]]:
        packed = self._packed
        owned = {
            fragment.slot.name: dict.fromkeys(self._state_and_master(shard, number))
            for shard in packed.shards
            for number, fragment, _ in shard.owned()
        }
        names: dict[str, dict[str, None]] = {}
        for names_on_rank in packed.process_groups.everyone.exchange(owned, packed.device):
            names |= {name: values for name, values in names_on_rank.items() if values}
        return {param: names.get(name, {}) for name, param in packed.model.named_parameters()}

    def _begin(self) -> None:
        for update in self._packed.updates:
            update.begin_state()

    def _forget(self) -> None:
        for shard in self._packed.shards:
            for number in range(len(shard.fragments)):
                self._packed.update_of(shard).load_fragment(shard, number, {})

    def masters(self, average: str | None = None) -> dict[str, Tensor]:
        """Return all parameters in fp32 by name, including tied names, on rank 0's host.

        Other ranks get an empty dictionary. Collective: every rank.

        Args:
            average: name of an average to return instead of the parameters.
        """
        packed = self._packed
        averages = None if average is None else packed.hook_for("averaged")

        def ready() -> None:
            packed.ready_to_read()
            if averages is not None:
                averages.check("full_parameters", average)

        packed.together(ready, "full_parameters")

        def master_of(shard: Shard, number: int) -> dict[str, Tensor]:
            if averages is not None:
                return {MASTER: averages.values(shard, number, average)}
            return {MASTER: shard.exact(shard.fragments[number])}

        gathered = self._gathered("full_parameters", packed.shards, master_of, on_all=False)
        # By names, because model.to("meta") makes other parameters; without what wrappers add,
        # because a script may have compiled a module in place since.
        masters = {_compat.bare_name(slot.name): values[MASTER] for slot, _, values in gathered}
        names = {param: _compat.bare_name(name) for name, param in packed.model.named_parameters()}
        every = packed.model.named_parameters(remove_duplicate=False)
        return {name: masters[names[p]] for name, p in every if names[p] in masters}

    def _full_state(
        self, values: ValuesOf, on_all: bool, place: int | None = None
    ) -> dict[str, object]:
        """Return the ``state_dict()`` of a plain optimizer; no state on ranks that get none."""
        packed, originals = self._packed, self._packed.originals
        packed.together(originals.check, "full_state_dict")
        groups = originals.groups if place is None else originals.optimizers[place].param_groups
        shards = [s for s in packed.shards if place in (None, s.pack.layout.optimizer)]
        gathered = self._gathered("full_state_dict", shards, values, on_all=on_all)
        return plain_dict({param: state for _, param, state in gathered if state}, groups)

    def _gathered(
        self, call: str, shards: Sequence[Shard], values: ValuesOf, on_all: bool
    ) -> Iterator[tuple[Slot, nn.Parameter, dict[str, Any]]]:
        """Return, for each parameter, ``values`` of its fragments on all ranks.

        An error on one rank, in ``values`` or while states are pickled or joined, is raised on all.

        Args:
            on_all: return it on every rank; otherwise on rank 0, and nothing on the others.
        """
        self._check_gathers(call)
        everyone, device = self._packed.process_groups.everyone, self._packed.device
        failure: Exception | None = None  # error of joining the last pack on this rank
        for shard in shards:
            pickled = everyone.together(partial(_pickled, shard, values, failure), device, call)
            pack = shard.pack
            gather = pack.comm.exchange if on_all else pack.comm.gather
            by_rank = gather(pickled, device)
            # the first rank of another group of replicas also has it
            if everyone.rank != 0 and not on_all:
                continue
            elementwise = self._packed.update_of(shard).elementwise
            try:
                states = _joined_states(by_rank, pack.layout.slots, elementwise)
            except Exception as error:  # the host is out of memory, or a rank lacks a state
                failure = error
                continue
            yield from zip(pack.layout.slots, pack.in_model, states, strict=True)
        everyone.together(partial(_raise, failure), device, call)

    def _check_gathers(self, call: str) -> None:
        """Raise RuntimeError with model parallelism or experts, where no rank has everything."""
        self._packed.need_masters(call)
        process_groups = self._packed.process_groups
        parallel_dims = process_groups.parallel_dims
        if process_groups.model.size > 1 or parallel_dims.experts:
            dims = ", ".join(map(repr, parallel_dims.model or parallel_dims.experts))
            raise RuntimeError(
                f"{call}: expected a data-parallel job, got parameters that are also sharded "
                f"over mesh dimension {dims}, so no rank can gather the full state; use "
                "shardcast.checkpoint.save, and shardcast.checkpoint.export for plain files"
            )


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _pickled(shard: Shard, values: ValuesOf, failure: Exception | None) -> bytes:
    """Return the pickled ``values`` of this rank's fragments, on the host."""
    _raise(failure)
    return pickle.dumps(
        [(fragment, copied(values(shard, number), "cpu")) for number, fragment, _ in shard.owned()]
    )


def _joined_states(
    by_rank: Sequence[bytes], slots: Sequence[Slot], elementwise: bool
) -> list[dict[str, Any]]:
    """Return the full state of each parameter of a pack, from all ranks' pickles."""
    parts: dict[Slot, list[tuple[Fragment, dict[str, Any]]]] = defaultdict(list)
    for fragment, state in chain.from_iterable(map(pickle.loads, by_rank)):
        if state:
            parts[fragment.slot].append((fragment, state))
    return [_joined(parts[slot], elementwise) for slot in slots]


def _joined(parts: list[tuple[Fragment, dict[str, Any]]], elementwise: bool) -> dict[str, Any]:
    """Return one parameter's full state from its fragments' states."""
    parts.sort(key=lambda part: part[0])
    joined: dict[str, Any] = {}
    for name, value in parts[0][1].items() if parts else ():
        fragment = parts[0][0]
        if is_elementwise(value, fragment, elementwise or name == MASTER):
            value = torch.cat([state[name].reshape(-1) for _, state in parts])
            value = value.view(fragment.slot.shape)
        joined[name] = value
    return joined
