"""Groups that a script adds or assigns, and packs that become trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from shardcast.memory.aliases import tie
from shardcast.memory.shard import Shard
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.setup import agreed, allocate, plan_for
from shardcast.plan.layout import GroupId
from shardcast.plan.originals import Group, OptimizerList


def add_group(packed: PackedOptimizer, place: int, group: Group) -> None:
    """Add a group to the original optimizer at ``place``. Collective."""
    packed.refuse_inside("add_param_group")
    packed.decider.meet("add_param_group")
    with torch.no_grad(), _added(packed.originals, place, group) as number:
        _extend(packed, number)


def assign_groups(
    packed: PackedOptimizer, groups: Sequence[Group], place: int | None = None
) -> list[Group]:
    """Replace the groups of all optimizers, or of one; return additional groups. Local.

    Raises:
        ValueError: the groups have other parameters; nothing changes.
    """
    present = [
        (owner, group)
        for number, owner, group in packed.originals.numbered()
        if place in (None, number.optimizer)
    ]
    replaced = groups[: len(present)]
    params = [[*map(id, group["params"])] for group in replaced]
    if params != [[*map(id, group["params"])] for _, group in present]:
        raise ValueError(
            "param_groups: expected the present groups with their parameters in order, got "
            "other parameters, which have no place in the packs; change options or add groups"
        )
    for optimizer in {id(owner): owner for owner, _ in present}.values():
        optimizer.param_groups[:] = [
            group for group, (owner, _) in zip(replaced, present, strict=True) if owner is optimizer
        ]
    return list(groups[len(present) :])


@contextmanager
def _added(originals: OptimizerList, place: int, group: Group) -> Iterator[GroupId]:
    """Add a group to the optimizer at ``place``, and remove it if the block fails.

    Raises:
        TypeError, ValueError: torch refuses the group.
    """
    optimizer = originals.optimizers[place]
    torch.optim.Optimizer.add_param_group(optimizer, group)  # fills in the defaults
    number = GroupId(place, len(optimizer.param_groups) - 1)
    try:
        yield number
    except BaseException:
        optimizer.param_groups.pop()
        raise
    originals.sharded[number] = list(group["params"])


def _extend(packed: PackedOptimizer, added: GroupId) -> None:
    plan = agreed(
        lambda: plan_for(
            packed.model,
            packed.originals,
            packed.config,
            packed.process_groups.parallel_dims,
            packed.stages,
            packed.layout,
            added,
        ),
        packed.process_groups,
        packed.device,
        "add_param_group",
    )
    shards = allocate(plan, packed.process_groups)
    packed.ready_to_read()
    packed.remove_hooks()  # includes modules that were added to the model
    packed.layout, packed.precision = plan.layout, plan.precision
    tie(packed.aliases)
    packed.add(shards)
    packed.install_hooks()


def activate_packs(packed: PackedOptimizer, indices: Collection[int]) -> None:
    """Activate the packs that are still frozen."""
    for shard in packed.shards:
        if shard.grads is None and shard.pack.layout.index in indices:
            packed.activate(shard)


def activate_together(
    packed: PackedOptimizer, frozen: Sequence[Shard], wanted: Sequence[bool]
) -> list[Shard]:
    """Activate and return the ``frozen`` shards that some rank wants. Collective.

    In models with such packs a step takes this small all-reduce more, for which the host waits.
    Parameters that stay frozen are better left out of the optimizer.
    """
    flags = torch.tensor(wanted, dtype=torch.float32).to(packed.device)
    for number, shard in enumerate(frozen):
        pack_groups = shard.pack.layout.pack_groups
        if pack_groups.sums_replicas:  # copies must be active on all ranks
            for comm in packed.process_groups.comms(pack_groups.reduce):
                comm.all_reduce(flags[number])
    packed.comm.all_reduce(flags)
    activated = [shard for shard, n in zip(frozen, flags.tolist(), strict=True) if n]
    for shard in activated:
        packed.activate(shard)
    return activated
