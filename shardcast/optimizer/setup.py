"""Set-up: what is sharded and how, then the memory for it, with a bounded peak.

One pipeline for :func:`shardcast.shard`, ``add_param_group`` and ``shardcast estimate``::

    plan_for    model, optimizer, config, world size -> Plan: local, pure, also on ``meta``
    agreed      compares the ranks' plans and chooses algorithms: two small collectives
    allocate    Plan -> shards: pack by pack broadcast, masters, cast
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardcast import _compat
from shardcast.comm import ProcessGroups, warn_first
from shardcast.config import ShardcastConfig
from shardcast.memory.aliases import Alias
from shardcast.memory.packed_param import note_of
from shardcast.memory.shard import Shard, build_shard
from shardcast.messages import warn
from shardcast.option_values import load_extension
from shardcast.plan import validate
from shardcast.plan.layout import GroupId, Layout, PackLayout
from shardcast.plan.originals import OptimizerList, OptimizerTraits, known_traits
from shardcast.plan.packing import describe, plan_packs, with_algorithms
from shardcast.plan.parallel_dims import PLAIN, PackGroups, ParallelDims
from shardcast.plan.partition import partition_of
from shardcast.plan.precision import Precision
from shardcast.plan.publishing import publishing_of

EXPERT = "of an expert"  # replaces the name of an expert, whatever its number
told: set[torch.dtype] = set()  # dtypes about which this process has warned


@dataclass(frozen=True)
class Plan:
    """A plan of what is sharded, and how.

    Attributes:
        model: the root module without wrappers; for several pipeline stages, their container.
        stages: the called modules: the root, or the stages.
        originals: the optimizers.
        layout: all packs of the optimizer.
        new: packs to be allocated.
        params: parameters of the new packs by name.
        outside: parameters that the optimizer does not hold.
        pack_groups_by_name: groups of both.
        costs: costs of updates that are not proportional to elements.
        begun: parameters for which the optimizer already has a state.
        options: facts that must be equal on all ranks, whatever their stage, one per line.
        unmatched: patterns that match nothing in this stage of a pipeline, as messages.
        aliases: views of parameters that modules hold.
    """

    model: nn.Module
    stages: tuple[nn.Module, ...]
    originals: OptimizerList
    config: ShardcastConfig
    precision: Precision
    layout: Layout
    new: tuple[PackLayout, ...]
    params: Mapping[str, nn.Parameter]
    outside: Mapping[str, nn.Parameter]
    pack_groups_by_name: Mapping[str, PackGroups]
    costs: Mapping[str, float]
    begun: tuple[str, ...]
    options: tuple[str, ...]
    unmatched: tuple[str, ...]
    aliases: tuple[Alias, ...] = ()

    def facts(self) -> list[str]:
        """Return facts that must be equal on all data-parallel ranks, one per line."""
        outside = (*self.outside.items(), *self.model.named_buffers())
        groups = self.pack_groups_by_name
        begun = [EXPERT if groups[name].shard != PLAIN else name for name in self.begun]
        return [
            *self.layout.lines(expert=EXPERT),
            *self.options,
            # Rank 0's values are broadcast, so they must fit everywhere.
            *(
                f"    {n} {tuple(t.shape)} {t.dtype}, not trained by the optimizer"
                for n, t in outside
            ),
            # Each rank uses its own copy. State loaded on rank 0 alone would cover only rank 0's
            # spans.
            *(f"    {name}, which has optimizer state" for name in begun),
        ]

    def experts(self, dim: str) -> list[str]:
        """Return facts about shared experts that must be equal along a dimension."""
        packs = [pack for pack in self.new if pack.pack_groups.shard == dim]
        return [f"    {slot.name} {slot.shape}" for pack in packs for slot in pack.slots]


def plan_for(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | OptimizerList,
    config: ShardcastConfig,
    world: int | ParallelDims,
    stages: Sequence[nn.Module] = (),
    before: Layout | None = None,
    added: GroupId | None = None,
) -> Plan:
    """Plan all parameters of the optimizers. Local; the model may be on ``meta``.

    Args:
        world: number of ranks, or the dimensions of a mesh.
        stages: stages of a pipeline, which ``model`` holds.
        before: layout of all groups except the ``added`` one. Then only that group is planned,
            after these.

    Raises:
        TypeError, ValueError: something cannot be sharded; names it.
    """
    validate.check_bare(model)
    inner = _compat.unwrapped(model)
    parallel_dims = ParallelDims(world) if isinstance(world, int) else world
    originals = OptimizerList.of(optimizers)
    if config.accumulate == "sharded" and (len(stages) > 1 or parallel_dims.in_pipeline):
        raise ValueError(
            "accumulate: expected 'local' in a pipeline, whose backwards accumulate on each rank "
            "until step(), got 'sharded'"
        )
    names = {param: name for name, param in inner.named_parameters()}
    groups = validate.check_groups(names, originals, added)
    params = {name: param for param, name in names.items() if name in groups}
    outside = {n: p for p, n in names.items() if n not in groups} if before is None else {}
    _check_free(params)
    validate.check_kinds(params)
    optimized = (param for group in originals.groups for param in group["params"])
    precision = Precision(inner, config, {param for param in optimized if param.requires_grad})
    traits = _traits(originals, parallel_dims)
    declared = config.elementwise
    elementwise = [each.elementwise if declared is None else declared for each in traits]
    partitions = {
        number: partition_of(owner, elementwise[number.optimizer], config)
        for number, owner, _ in originals.numbered()
    }
    publishing = publishing_of(config)
    unmatched: tuple[str, ...] = ()
    if before is None:
        of_casts = publishing.unmatched(params) if publishing else ()
        unmatched = (*precision.unmatched, *parallel_dims.unmatched(params), *of_casts)
    if not parallel_dims.in_pipeline:
        validate.check_matched(unmatched)
    pack_groups_by_name = parallel_dims.pack_groups_by_name({**params, **outside})
    for name, param in params.items():
        if _compat.is_dtensor(param) and not elementwise[groups[name].optimizer]:
            validate.check_whole(name, param, originals.owner(groups[name]))
    costs = _costs(params, groups, originals, traits, config)
    flags = {number: originals.flags(number) for number in dict.fromkeys(groups.values())}
    infos = describe(
        params, config, groups, precision.storage_dtype, costs, pack_groups_by_name, flags
    )
    begun = (
        name
        for name, param in params.items()
        if before is None and originals.owner(groups[name]).state.get(param)
    )
    old = before.packs if before else ()
    layout = plan_packs(infos, parallel_dims, partitions, config, len(old))
    new = layout.packs
    if before is not None:
        layout = dataclasses.replace(before, packs=old + new)
    options = [f"{key} = {value}" for key, value in config.to_dict().items()]
    options += parallel_dims.options() + validate.describe_groups(originals, added)
    plan = Plan(
        inner,
        tuple(stages) or (inner,),
        originals,
        config,
        precision,
        layout,
        new,
        params,
        outside,
        pack_groups_by_name,
        costs,
        tuple(begun),
        tuple(options),
        unmatched,
    )
    for option in config.extensions().values():
        if option.fits is not None:
            option.fits(plan, parallel_dims)
    return plan


def _check_free(params: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for a parameter that another sharded optimizer holds."""
    held = [name for name, param in params.items() if _is_held(param)]
    if held:
        which = (
            f"{held[0]!r} belongs"
            if len(held) == 1
            else f"{held[0]!r} and {len(held) - 1} more belong"
        )
        raise ValueError(
            f"optimizer: parameter {which} to another sharded optimizer, which "
            "has its masters; expected each parameter in one sharded optimizer. Build one "
            "optimizer over all parameters and shard the models together, "
            "shardcast.shard(nn.ModuleDict({'one': one, 'other': other}), optimizer); leave the "
            "shared parameters out of this one; or call close() of the other one first"
        )


def _is_held(param: nn.Parameter) -> bool:
    note = note_of(param)
    return note is not None and note.is_held and note.restore is None


def _traits(originals: OptimizerList, parallel_dims: ParallelDims) -> list[OptimizerTraits]:
    """Return the traits of each optimizer.

    Raises:
        TypeError: one of them cannot be sharded.
    """
    traits = [
        known_traits(optimizer) or load_extension("any_optimizer").traits_of(optimizer)
        for optimizer in originals.optimizers
    ]
    ranks = max(parallel_dims.world_size, *parallel_dims.sizes.values(), 1)
    for trait in traits:
        if trait.entangled and ranks > 1:
            raise TypeError(trait.entangled)
        if trait.hazard and ranks > 1:
            warn_first(trait.hazard)
    return traits


def _costs(
    params: Mapping[str, nn.Parameter],
    groups: Mapping[str, GroupId],
    originals: OptimizerList,
    traits: Sequence[OptimizerTraits],
    config: ShardcastConfig,
) -> dict[str, float]:
    """Return costs of updates that differ from the number of elements, by name."""
    costs = {}
    for name, param in params.items():
        number = groups[name]
        cost = traits[number.optimizer].cost
        if cost is not None:
            costs[name] = cost(name, _compat.local_tensor(param).shape, originals.group(number))
        if config.cost_fn is not None:
            costs[name] = float(config.cost_fn(name, param))
    return costs


def agreed(
    planned: Callable[[], Plan], process_groups: ProcessGroups, device: torch.device, call: str
) -> Plan:
    """Return the plan that all ranks agree on, with algorithms of packs. Collective.

    It changes nothing.

    Args:
        planned: makes this rank's plan; if it raises, all ranks raise.
        call: name of the caller.

    Raises:
        TypeError, ValueError: on every rank: something cannot be sharded on one of them.
        RuntimeError: on every rank: plans differ; names the first difference.
    """

    def ready() -> Plan:
        plan = planned()
        outside = (*plan.outside.items(), *plan.model.named_buffers())
        validate.check_memory(plan.params, outside)
        return plan

    plan = process_groups.everyone.together(ready, device, call)
    process_groups.check_alike(plan, device)
    experts = {
        dim: process_groups.comm(dim).topology(device)
        for dim in process_groups.parallel_dims.experts
    }
    layout = with_algorithms(
        plan.layout, plan.config, process_groups.shard.topology(device), experts
    )
    new = layout.packs[len(layout.packs) - len(plan.new) :]
    return dataclasses.replace(plan, layout=layout, new=new)


def allocate(plan: Plan, process_groups: ProcessGroups) -> list[Shard]:
    """Make the new packs and this rank's shards of them. Collective: every rank.

    At its peak the model takes its earlier memory, one pack in fp32, and the shards.
    """
    return [
        build_shard(
            pack, [plan.params[slot.name] for slot in pack.slots], process_groups, plan.config
        )
        for pack in plan.new
    ]


def dtypes_of(stages: Sequence[nn.Module]) -> list[dict[str, torch.dtype]]:
    """Return the dtypes of all parameters and buffers of each stage, by name."""
    return [
        {name: t.dtype for name, t in (*stage.named_parameters(), *stage.named_buffers())}
        for stage in stages
    ]


def warn_of_slow_products(dtypes: Iterable[torch.dtype]) -> None:
    """Warn, once per process and dtype, of ``dtypes`` that make training slow on this CPU.

    Without AVX-512, torch multiplies bf16 and fp16 in a plain loop (pytorch 146508, 118499).
    """
    for dtype in set(dtypes) - told:
        if _compat.has_products(dtype):
            continue
        told.add(dtype)
        name = str(dtype).removeprefix("torch.")
        warn(
            f"param_dtype: {name} matmuls are slow on this CPU: torch has no kernel for them "
            "here, and they take 20 to 150 times as long as in float32; to try things out, pass "
            "param_dtype=torch.float32"
        )
