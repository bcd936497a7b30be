"""Process groups of a mesh, for jobs that are more than data-parallel.

Ranks agree on the plans of parameters that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardcast._compat import dtensor
from shardcast._compat.groups import group_of
from shardcast.comm import ProcessGroups
from shardcast.comm.objects import Comm
from shardcast.messages import by_rank
from shardcast.optimizer.setup import Plan
from shardcast.plan.parallel_dims import ParallelDims, Tie
from shardcast.plan.validate import check_matched

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Patterns = Mapping[str, Sequence[str]]  # by mesh dimension


class MeshGroups(ProcessGroups):
    """Process groups of a mesh, which also compare plans of parameters that ranks share."""

    def check_alike(self, plan: Plan, device: torch.device) -> None:
        """Raise RuntimeError on every rank if plans differ; names the first difference.

        In a pipeline, also raise ValueError for weights that two stages would treat differently,
        and for patterns that match nothing in any stage.
        """
        dims = self.parallel_dims
        self.everyone.check_equal(plan.options, device)
        # All ranks must learn of it, not only the data-parallel ranks of a stage that differ.
        alike = [(self.dp, plan.facts())]
        for dim in dims.replicating:  # dimensions along which ranks hold copies
            packs = [pack for pack in plan.new if dim in pack.pack_groups.replicate]
            facts = [
                f"    {slot.name} {slot.shape} {pack.dtype}, group {slot.group}, trained: "
                f"{pack.requires_grad}, held as copies over {dim}"
                for pack in packs
                for slot in pack.slots
            ]
            alike.append((self.comm(dim), facts))
        alike += [(self.comm(dim), plan.experts(dim)) for dim in dims.experts]
        for comm, facts in alike:
            self.everyone.together(partial(comm.check_equal, facts, device), device)
        if dims.in_pipeline:
            line = self.comm(dims.pipeline)
            everywhere = line.exchange((plan.unmatched, _tied(plan, dims.ties)), device)
            unmatched, stages = zip(*everywhere, strict=True)
            check_matched(sorted(set(plan.unmatched).intersection(*unmatched)))
            self.everyone.together(partial(_check_tied, stages), device)


def _tied(plan: Plan, ties: Sequence[Tie]) -> dict[Tie, str]:
    """Return the facts about a shared weight that must be equal on both stages."""
    plans = {name: f"{param.dtype}, in no group" for name, param in plan.outside.items()}
    for pack in plan.new:
        trained = "trained" if pack.requires_grad else "frozen"
        plans |= {
            slot.name: f"{pack.dtype}, {trained}, in group {slot.group}"
            for slot in pack.slots
            if pack.pack_groups.replicate
        }
    facts = {tie: plans.get(tie.first, plans.get(tie.second)) for tie in ties}
    return {tie: fact or "not among the new parameters" for tie, fact in facts.items()}


def _check_tied(stages: Sequence[Mapping[Tie, str]]) -> None:
    """Raise ValueError for a weight that its two stages would treat differently.

    Args:
        stages: for each stage its ties, and the plan of the weight there.
    """
    for tie, fact in ((tie, fact) for facts in stages for tie, fact in facts.items()):
        unlike = next((facts[tie] for facts in stages if facts.get(tie, fact) != fact), None)
        if unlike is not None:
            raise ValueError(
                f"tied: expected {tie.first!r} and {tie.second!r} to be alike on their two stages, "
                f"got {fact} and {unlike}; put both into the same group of the optimizer or leave "
                "both out, freeze both or neither, and list both or neither in keep_fp32"
            )


def groups_of(
    mesh: DeviceMesh,
    dp: str | Sequence[str] | DeviceMesh,
    *,
    pipeline: str = "pp",
    sum_over: Patterns | None = None,
    experts: Patterns | None = None,
    tied: Sequence[Sequence[Any]] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
    check: Callable[[], object] = lambda: None,
) -> MeshGroups:
    """Create the process groups of a mesh. Collective: every rank of the mesh.

    Args:
        dp: name of the data-parallel dimension; or flattened ones as a one-dimensional mesh; or two
            names, replicas first, then shards.
        shapes: shapes of this rank's parameters by name, for ``tied``.
        check: raises any other error of this rank.

    Raises:
        TypeError, ValueError: there is no such mesh, dimension or weight.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(
            "mesh: expected a torch.distributed.device_mesh.DeviceMesh, got "
            f"{type(mesh).__name__}; make one with init_device_mesh(...)"
        )
    dims = mesh.mesh_dim_names or ()

    def dimensions() -> tuple[str, DeviceMesh, tuple[str, ...], tuple[str, ...]]:
        check()
        outer, inner = _data_parallel(mesh, dp)
        data = _covered(mesh, outer, inner, experts or {})
        model = tuple(dim for dim in dims if dim not in data)
        _check_dims("grad_sum_over", sum_over or {}, model)
        _check_dims("experts", experts or {}, data)
        return outer, inner, data, model

    # Groups are made from the dimensions. If a rank names others, or none, the other ranks of its
    # groups would wait for it.
    outer, inner, data, model = _together_over(
        mesh, dimensions, f"shard(dp={getattr(dp, 'mesh_dim_names', dp)!r})"
    )
    groups, everyone = {dim: _comm(mesh, [dim]) for dim in dims}, _comm(mesh, dims)
    shard = Comm(inner.get_group())
    replicas = outer if outer and groups[outer].size > 1 else ""
    ties: dict[Tie, Comm] = {}
    if pipeline in model:
        device = torch.device(mesh.device_type)
        search = partial(_ties, groups[pipeline], tied, shapes or {}, device)
        ties = everyone.together(search, device, "shard")  # it may differ between pipelines
    groups.update({tie.group: comm for tie, comm in ties.items()})
    parallel_dims = ParallelDims(
        shard.size,
        {name: comm.size for name, comm in groups.items()},
        {name: comm.rank for name, comm in groups.items()},
        {dim: dtensor.mesh_line(mesh, dim) for dim in dims},
        data,
        model,
        pipeline,
        replicas,
        sum_over or {},
        experts or {},
        tuple(ties),
    )
    return MeshGroups(
        everyone,
        _comm(mesh, data) if outer else shard,
        shard,
        _comm(mesh, model) if model else Comm(None),
        groups,
        parallel_dims,
    )


def _together_over(mesh: DeviceMesh, fn: Callable[[], T], call: str) -> T:
    """Run ``fn`` on all ranks of a mesh; if it fails on any rank, all ranks raise.

    Flags are passed along one dimension after another, because there is no group of all ranks yet.
    """
    device = torch.device(mesh.device_type)
    for position in range(mesh.ndim):
        fn = partial(Comm(mesh.get_group(position)).together, fn, device, call)
    return fn()


def _data_parallel(mesh: DeviceMesh, dp: Any) -> tuple[str, DeviceMesh]:
    """Return the dimension of replicas, if any, and the sharded one.

    Raises:
        ValueError: they are not dimensions of the mesh.
    """
    names = mesh.mesh_dim_names or ()
    if hasattr(dp, "mesh_dim_names"):
        if dp.ndim != 1:
            raise ValueError(f"dp: expected a mesh of one dimension, got {dp!r}; flatten it")
        return "", dp
    names_given = (dp,) if isinstance(dp, str) else tuple(dp)
    if (
        len(names_given) not in (1, 2)
        or len({*names_given}) < len(names_given)
        or not {*names_given} <= {*names}
    ):
        raise ValueError(
            f"dp: expected a dimension of the mesh, or two different ones, (replicas, shards), of "
            f"{', '.join(names) or '(none has a name)'}, got {dp!r}; several as one: "
            "dp=mesh['dp', 'cp']._flatten('dp_cp')"
        )
    replicas = names_given[0] if len(names_given) == 2 else ""
    return replicas, mesh if mesh.ndim == 1 else mesh[names_given[-1]]


def _covered(mesh: DeviceMesh, outer: str, inner: DeviceMesh, experts: Patterns) -> tuple[str, ...]:
    """Return the mesh's own data-parallel dimensions, including those inside a flattened one.

    One rank lies inside any dimension, so a dimension of size 1 counts only if ``experts`` names
    it.
    """
    inside = set(inner.mesh.flatten().tolist())
    data_dims = (outer, *(inner.mesh_dim_names or ()))
    lines = {name: dtensor.mesh_line(mesh, name) for name in mesh.mesh_dim_names or ()}
    return tuple(
        name
        for name, line in lines.items()
        if name in data_dims or (inside.issuperset(line) and (len(line) > 1 or name in experts))
    )


def _comm(mesh: DeviceMesh, dims: Sequence[str]) -> Comm:
    return Comm(dtensor.mesh_group(mesh, dims))


def _check_dims(option: str, given: Patterns, allowed: Sequence[str]) -> None:
    for dim in given:
        if dim not in allowed:
            raise ValueError(
                f"{option}: expected a mesh dimension among {', '.join(allowed) or '(none)'}, got "
                f"{dim!r}"
            )


def _ties(
    line: Comm,
    tied: Sequence[Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    device: torch.device,
) -> dict[Tie, Comm]:
    """Return the ties of this rank's stage, with the ranks that hold the weight.

    Args:
        line: ranks of the pipeline, over which all stages exchange what they hold.
    """
    if line.size == 1:
        return {}
    pairs = [tuple(map(str, pair)) for pair in tied]
    own = {name: tuple(shapes[name]) for pair in pairs for name in pair if name in shapes}
    stages = line.exchange((pairs, own), device)  # nothing may raise before this exchange
    _check_pairs([pairs_of_stage for pairs_of_stage, _ in stages])
    ranks = dist.get_process_group_ranks(line.group)
    comms: dict[Tie, Comm] = {}
    for tie in (Tie(*pair) for pair in pairs):
        places = [
            (n, name)
            for n, (_, shapes_held) in enumerate(stages)
            for name in tie
            if name in shapes_held
        ]
        holders = sorted({stage for stage, _ in places})
        if sorted(name for _, name in places) != sorted(tie) or len(holders) != 2:
            raise ValueError(
                f"tied: expected {tie.first!r} on one pipeline stage, {tie.second!r} on another, "
                f"found them on stages {holders}; two stages of one rank, such as the first and "
                "the last one of a V schedule, share the Parameter itself (b.weight = a.weight) "
                "without tied="
            )
        shapes_held = {stages[stage][1][name] for stage, name in places}
        if len(shapes_held) > 1:
            raise ValueError(
                f"tied: expected {tie.first!r} and {tie.second!r} of one shape, got "
                f"{' and '.join(map(str, sorted(shapes_held)))}"
            )
        side, group = line.rank in holders, line
        if line.size > 2:
            # Every rank makes one group per tie; ranks between the two holders make an idle one.
            # torch names a group by the rank's number of groups, and ranks with different numbers
            # would hang.
            members = [rank for stage, rank in enumerate(ranks) if (stage in holders) == side]
            group = Comm(group_of(members, "tied"))
        if side:
            comms[tie] = group
    return comms


def _check_pairs(by_stage: Sequence[Sequence[tuple[str, ...]]]) -> None:
    """Raise ValueError on all stages if pairs differ between them, or names repeat."""
    pairs = by_stage[0]
    names = [name for pair in pairs for name in pair]
    twice = next((name for name in names if names.count(name) > 1), None)
    refused = {
        f"(name on its first holder, name on the other), got {pairs}": (
            any(len(pair) != 2 for listed in by_stage for pair in listed)
        ),
        "the same names on all pipeline stages, got "
        f"{by_rank(enumerate(map(str, by_stage)))}; pass all ties to every rank": (
            any(listed != pairs for listed in by_stage)
        ),
        f"each weight in one pair, got {twice!r} in two; a weight can be held by two pipeline "
        "stages, not by three": twice is not None,
    }
    for expected, holds in refused.items():
        if holds:
            raise ValueError(f"tied: expected {expected}")
