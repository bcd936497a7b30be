"""A sharded optimizer's state as plain dictionaries, out and in.

Two forms: this rank's own (:meth:`StateDict.dump`, local and without collectives), and the plain
``torch.optim`` one, of which each rank takes its part. :mod:`.full_state` gathers the plain one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.shard import Shard
from shardcast.optimizer.groups import activate_packs
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.state_view import check_numel, check_sizes
from shardcast.plan.layout import Fragment

FORMAT = 1  # of the local state
MASTER = "shardcast_master"  # a master among the state of a parameter, for DCP
Groups = Sequence[Mapping[str, Any]]


class FragmentState(NamedTuple):
    """The state that a fragment is to have: torch's and, if not ``None``, its master."""

    shard: Shard
    number: int
    values: dict[str, Any]
    master: Tensor | None


class LoadPlan(NamedTuple):
    """A plan of what is going to be loaded: checked, nothing changed yet.

    Attributes:
        active: indices of the packs that are trained, or were at some time.
        fragments: this rank's.
        decider: the loss scale, the count of skipped steps and the like, of a local state.
        groups: options of the parameter groups.
        masters: masters are among it, on every rank.
    """

    active: frozenset[int]
    fragments: list[FragmentState]
    decider: Mapping[str, Any] | None = None
    groups: Groups = ()
    masters: bool = False


class StateDict:
    """State in and out of one optimizer."""

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def _groups(self) -> list[dict[str, Any]]:
        self._optimizer.originals.check()
        return self._optimizer.originals.groups

    def dump(self) -> dict[str, Any]:
        """This rank's shards; see :meth:`shardcast.ShardedOptimizer.state_dict`. Local."""
        optimizer = self._optimizer
        groups = self._groups
        optimizer.ready_to_read()
        state = {
            param: {
                "master": shard.exact(fragment).clone(),
                **copied(optimizer.update_of(shard).fragment_state(shard, number)),
            }
            for shard in optimizer.shards
            for number, fragment, param in shard.owned()
        }
        return {
            **plain_dict(state, groups),
            "shardcast": {
                **self._head(),
                "active": [s.pack.layout.index for s in optimizer.shards if s.grads is not None],
                "scaler": step_state(optimizer),
            },
        }

    def plan(self, loaded: Mapping[str, Any] | list[Mapping[str, Any]]) -> LoadPlan:
        """Return what is to be written. Every rank must call it; if one cannot load, all raise.

        A rank that raised alone would leave the others waiting for it where they publish.

        Args:
            loaded: a state, or a list with a plain one of each optimizer.

        Raises:
            ValueError: on every rank; says why.
        """
        comm, device = self._optimizer.process_groups.everyone, self._optimizer.device
        plan = self._optimizer.together(lambda: self._plan_alone(loaded), "load_state_dict")
        if len(set(comm.exchange(("shardcast" in loaded, plan.masters), device))) > 1:
            raise ValueError(
                "state_dict: some ranks were given a local state, or one with masters, others a "
                "plain one; every rank loads what it saved itself, or all of them one and the same "
                "plain state"
            )
        return plan

    def _plan_alone(self, state_or_list: Mapping[str, Any] | list[Mapping[str, Any]]) -> LoadPlan:
        loaded = plain_state(state_or_list, self._optimizer.originals.places)
        groups, head = loaded["param_groups"], loaded.get("shardcast")
        state = state_by_param(loaded, self._groups)
        if head is None:
            return self.plan_plain(state)._replace(groups=groups)
        self._check_head(head)
        fragments = self._fragments(state, is_local=True)
        return LoadPlan(frozenset(head["active"]), fragments, head["scaler"], groups, True)

    def _head(self) -> dict[str, Any]:
        optimizer, parallel_dims = self._optimizer, self._optimizer.process_groups.parallel_dims
        layout = optimizer.layout.digest().hex()
        place = {
            dim: [parallel_dims.coordinate[dim], parallel_dims.sizes[dim]]
            for dim in (*parallel_dims.data, *parallel_dims.model)
        }
        return {"format": FORMAT, "rank": optimizer.comm.rank, "layout": layout, "mesh": place}

    def _check_head(self, head: Mapping[str, Any]) -> None:
        expected, comm = self._head(), self._optimizer.comm
        head = {"mesh": {}, **head}  # as states are that were saved before there were meshes
        if any(head.get(key) != value for key, value in expected.items()):
            raise ValueError(
                "state_dict: expected the local state of this rank and layout (rank "
                f"{comm.rank} of {comm.size}), got one of rank {head.get('rank')}"
                + (", another layout" if head.get("layout") != expected["layout"] else "")
                + (", another place in the mesh" if head["mesh"] != expected["mesh"] else "")
                + "; load states of other layouts with shardcast.checkpoint.load"
            )

    def plan_plain(self, state: Mapping[Any, Mapping[str, Any]]) -> LoadPlan:
        """This rank's part of a plain optimizer's state, keyed by model parameter. Local."""
        active = frozenset(
            shard.pack.layout.index
            for shard in self._optimizer.shards
            if any({*state.get(param, ())} - {MASTER} for param in shard.pack.params)
        )
        masters = any(MASTER in values for values in state.values())
        return LoadPlan(active, self._fragments(state, is_local=False), masters=masters)

    def _fragments(
        self, state: Mapping[Any, Mapping[str, Any]], is_local: bool
    ) -> list[FragmentState]:
        """A state by fragments: the parts that :meth:`dump` gave, or to be cut of full tensors."""
        fragments = []
        for shard in self._optimizer.shards:
            elementwise = self._optimizer.update_of(shard).elementwise
            for number, fragment, param in shard.owned():
                values: dict[str, Any] = {
                    name: value if is_local else _cut(value, fragment, name, elementwise)
                    for name, value in state.get(param, {}).items()
                    if not isinstance(value, dict) or value  # DCP: its file has no such state
                }
                master = values.pop("master" if is_local else MASTER, None)
                if is_local:
                    master = torch.empty(0) if master is None else master  # refused
                    check_numel(master, fragment.numel, (fragment.numel,), fragment, "master")
                    check_sizes(elementwise, fragment, values)
                fragments.append(FragmentState(shard, number, values, master))
        return fragments

    def apply(self, plan: LoadPlan) -> None:
        """Write what was planned. Every rank must call it, for a plan of the same kind."""
        optimizer = self._optimizer
        optimizer.ready_to_read()
        activate_packs(optimizer, plan.active)
        forget_averages(optimizer)
        for shard, number, values, master in plan.fragments:
            fragment = shard.fragments[number]
            if master is None and plan.masters:  # it is published below, too
                master = shard.exact(fragment)
            if master is not None:
                shard.set_exact(fragment, master)
            optimizer.update_of(shard).load_fragment(shard, number, values)
        agree_on_averages(optimizer)
        if plan.decider is not None:
            load_step_state(optimizer, plan.decider)
        if plan.masters:
            optimizer.publish()
        load_groups(self._groups, plan.groups)


def plain_dict(state: Mapping[Any, Mapping[str, Any]], groups: Groups) -> dict[str, Any]:
    """A state by what ``groups`` have as parameters, numbered as torch does."""
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
    """A state, or of a list with a plain one of each optimizer the joint one.

    Args:
        places: of each group, the place of its optimizer.

    Raises:
        ValueError: one is no state, or a local one in a list; another number of states or groups.
    """
    listed = [states] if isinstance(states, Mapping) else states
    for key in ("state", "param_groups"):
        if not listed or any(key not in state for state in listed):
            raise ValueError(
                f"state_dict: expected 'state' and 'param_groups', got no {key!r}; every rank "
                "needs a state, full_state_dict() gives one to rank 0 alone: broadcast it"
            )
    if isinstance(states, Mapping):
        return states
    if any("shardcast" in state for state in states):
        raise ValueError(
            "state_dict: expected a list of plain states, as full_state_dicts() gives, got "
            "a local one in it; pass what state_dict() returned without a list"
        )
    sizes = [len(state["param_groups"]) for state in states]
    expected = [list(places).count(place) for place in range(max(places) + 1)]
    if sizes != expected:
        raise ValueError(
            f"state: expected the states of {len(expected)} optimizers with {expected} groups, got "
            f"{len(sizes)} with {sizes}; give one for each optimizer, in the order of shard()"
        )
    groups: list[dict[str, Any]] = []
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
    """A state by what ``groups`` have as parameters: their order decides, as in torch.

    Raises:
        ValueError: another number of groups, or of parameters in one of them.
    """
    # DCP's keys are names in place of numbers.
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


def load_groups(groups: Sequence[dict[str, Any]], loaded: Groups) -> None:
    """Overwrite the options, not the parameters, of ``groups``; check them first."""
    for group, loaded_group in zip(groups, loaded, strict=False):
        options = {key: value for key, value in loaded_group.items() if key != "params"}
        group.update(copy.deepcopy(options))  # a scheduler writes into a tensor ``lr``


def _cut(value: Any, fragment: Fragment, name: str, elementwise: bool) -> Any:
    """The fragment's part of a full state tensor; numbers and 0-dim tensors stay as they are."""
    slot = fragment.slot
    if not isinstance(value, Tensor) or (value.dim() == 0 and name != MASTER):
        return value
    value = _compat.local_tensor(value)
    if not elementwise and fragment.numel == slot.numel and name != MASTER:
        return value  # in its own shape, as factored moments have
    check_numel(value, slot.numel, slot.shape, fragment, name)
    start, stop = fragment.param_range
    return value.reshape(-1)[start:stop]


def copied(state: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Return the state with tensors of its own, on ``device`` if one is given."""
    return {
        name: value.detach().to(device or value.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def step_state(packed: PackedOptimizer) -> dict[str, Any]:
    """Return loss scale, skipped steps, state of signals and hooks, as plain numbers. Local."""
    hooks = {hook.name: state for hook in packed.step_hooks if (state := hook.state_dict())}
    state = packed.decider.state_dict()
    return {**state, "hooks": hooks} if hooks else state


def load_step_state(packed: PackedOptimizer, state: Mapping[str, Any]) -> None:
    """The inverse of :func:`step_state`. Local."""
    packed.decider.load_state_dict(state)
    hooks = state.get("hooks", {})
    for hook in packed.step_hooks:
        if hook.name in hooks:
            hook.load_state_dict(hooks[hook.name])


def forget_averages(packed: PackedOptimizer) -> None:
    """Count the steps of averages from zero, before a state is loaded. Local."""
    for update in packed.updates:
        update.epilogue_steps = [0.0] * len(update.epilogue_steps)


def agree_on_averages(packed: PackedOptimizer) -> None:
    """Count the steps of averages alike on all ranks, after a state was loaded. Collective."""
    if any(update.epilogues for update in packed.updates):
        own = [update.epilogue_steps for update in packed.updates]
        by_rank = packed.process_groups.everyone.exchange(own, packed.device)
        for update, counts in zip(packed.updates, zip(*by_rank, strict=True), strict=True):
            update.epilogue_steps = [max(steps) for steps in zip(*counts, strict=True)]
