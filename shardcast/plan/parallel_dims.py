"""Which ranks hold a parameter, in jobs that are more than data-parallel.

Each dimension of a mesh is data-parallel or model-parallel (tensor, pipeline or any other name).
Along a model-parallel dimension, ranks hold different parts of a parameter, or copies of it; along
the pipeline, stages hold different parameters. For each parameter this decides which ranks own
spans of its packs, whose gradients are summed, and whose copy counts. Parameters of one pack agree
in all of this.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from shardcast import _compat
from shardcast._compat import dtensor


@dataclass(frozen=True)
class ParallelDims:
    """The dimensions of a mesh, as one rank sees them; none for plain data parallelism.

    Attributes:
        world_size: number of ranks that own spans of a pack.
        sizes: number of ranks along each dimension, and in the group of each tie, by name.
        coordinate: this rank's position there.
        lines: ranks of this rank's group along each dimension of the mesh.
        data, model: the data-parallel and the model-parallel dimensions.
        pipeline: the model-parallel dimension along which ranks have different parameters.
        replicas: a data-parallel dimension whose ranks hold the same spans.
        sum_over: by dimension, name patterns of plain parameters with a partial gradient.
        experts: by dimension, name patterns of parameters that are sharded over it alone.
        ties: weights that several stages hold.
    """

    world_size: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    coordinate: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    pipeline: str = ""
    replicas: str = ""
    sum_over: Mapping[str, Sequence[str]] = field(default_factory=dict)
    experts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ties: tuple[Tie, ...] = ()

    @property
    def in_pipeline(self) -> bool:
        """Whether other ranks hold other stages."""
        return self.sizes.get(self.pipeline, 1) > 1

    @property
    def replicating(self) -> tuple[str, ...]:
        """Dimensions along which ranks may hold equal copies."""
        return tuple(d for d in self.model if d != self.pipeline and self.sizes[d] > 1)

    def set_up_order(self, pack_groups: PackGroups) -> int:
        """Return a parameter's position among collectives at set-up, and its pack's in a step.

        Tied parameters come first, in the order of ``tied=``, because two stages may hold them in
        different orders.
        """
        ties = [tie.group for tie in self.ties]
        return next((ties.index(name) for name in pack_groups.replicate if name in ties), len(ties))

    def ranks(self, pack_groups: PackGroups) -> int:
        """Return the number of ranks that own spans of a pack."""
        return self.world_size if pack_groups.shard == PLAIN else self.sizes[pack_groups.shard]

    def expert_blocks(self, pack_groups: PackGroups) -> tuple[int, int]:
        """Return how many experts of one name the data-parallel ranks hold, and this index."""
        number, own = 1, 0
        for dim in self.data if pack_groups.shard != PLAIN else ():
            if dim != pack_groups.shard:
                number *= self.sizes[dim]
                own = own * self.sizes[dim] + self.coordinate[dim]
        return number, own

    def pack_groups_by_name(self, named: Mapping[str, nn.Parameter]) -> dict[str, PackGroups]:
        """Return the groups of each parameter.

        Raises:
            TypeError, ValueError: a DTensor does not fit the mesh.
        """
        return {name: pack_groups_of(self, name, param) for name, param in named.items()}

    @property
    def _patterns(self) -> dict[str, Mapping[str, Sequence[str]]]:
        return {"grad_sum_over": self.sum_over, "experts": self.experts}

    def options(self) -> list[str]:
        """Return the options that must be equal on all ranks, one per line."""
        return [
            f"{option} = { {dim: [*names] for dim, names in by_dim.items()} }"
            for option, by_dim in self._patterns.items()
            if by_dim
        ]

    def unmatched(self, names: Collection[str]) -> list[str]:
        """Return the patterns that match none of these parameters, as messages."""
        return [
            f"{option}: the pattern {pattern!r} of dimension {dim!r} matches no parameter of the "
            "optimizer; give a list of patterns for names as in model.named_parameters()"
            for option, by_dim in self._patterns.items()
            for dim, patterns in by_dim.items()
            for pattern in patterns
            if isinstance(patterns, str) or not any(matches(name, [pattern]) for name in names)
        ]


def pack_groups_of(dims: ParallelDims, name: str, param: nn.Parameter) -> PackGroups:
    """Return the groups of a parameter's pack, from the parameter and the patterns of a mesh.

    Raises:
        TypeError, ValueError: a DTensor does not fit the mesh.
    """
    shard = next((dim for dim, names in dims.experts.items() if matches(name, names)), PLAIN)
    # An expert may be a DTensor over the data-parallel dimensions along which experts differ.
    allowed = (*dims.model, *(dim for dim in dims.data if shard != PLAIN and dim != shard))
    placed = _placements(name, param, allowed, dims.lines)
    replicate, reduce = [], []
    for dim in dims.replicating:
        if dim not in placed or placed[dim].is_replicate():
            replicate.append(dim)
            # A DTensor's gradient may be partial (Partial) or whole.
            if dim in placed or matches(name, dims.sum_over.get(dim, ())):
                reduce.append(dim)
    for tie in dims.ties:
        if name in (tie.first, tie.second):
            replicate.append(tie.group)
            reduce.append(tie.group)
    is_primary = all(dims.coordinate[dim] == 0 for dim in replicate)
    if dims.replicas and shard == PLAIN:
        reduce.append(dims.replicas)
        is_primary = is_primary and dims.coordinate[dims.replicas] == 0
    return PackGroups(shard, tuple(replicate), tuple(reduce), is_primary)


def _placements(
    name: str, param: Any, allowed: Sequence[str], lines: Mapping[str, tuple[int, ...]]
) -> dict[str, dtensor.Placement]:
    """Return a DTensor's placement along each dimension; empty for a plain parameter."""
    if _compat.is_dtensor(param) and not allowed:
        raise TypeError(
            f"optimizer: parameter {name!r} is a DTensor; expected a plain tensor: parameters of "
            "fully_shard cannot be sharded again, so keep the plain optimizer for them; for "
            "tensor parallelism pass mesh= with the model-parallel dimensions"
        )
    placements = dtensor.placements(param)
    for dim, placement in placements.items():
        if placement.is_partial():
            raise TypeError(
                f"optimizer: parameter {name!r} is Partial along {dim!r}; expected Shard or "
                "Replicate: redistribute it before the optimizer is built"
            )
        if dim not in allowed:
            raise TypeError(
                f"optimizer: parameter {name!r} is a DTensor over mesh dimension {dim!r}; "
                f"expected only model-parallel ones, {', '.join(allowed)}: parallelize over "
                "mesh['tp'] alone, and let shard() shard over the data-parallel dimensions"
            )
        line = dtensor.mesh_line(param.device_mesh, dim)
        if line != lines[dim]:
            raise ValueError(
                f"optimizer: parameter {name!r} is a DTensor over another mesh, whose {dim!r} has "
                f"the ranks {line} here; expected {lines[dim]}, as in mesh=: parallelize with the "
                "mesh that shard() is given"
            )
    return placements


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the glob patterns matches the name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


PLAIN = "dp"  # the group whose ranks own spans, unless a parameter has another one


class PackGroups(NamedTuple):
    """The process groups of a pack, by name; see :class:`shardcast.comm.ProcessGroups`.

    Attributes:
        shard: the group whose ranks own the spans.
        replicate: groups whose ranks hold equal copies, which start equal and stay equal.
        reduce: groups over which reduced gradients are summed again, in fp32.
        is_primary: norms and checkpoints use this rank's copy. Only this field differs between
            ranks that share a pack.
    """

    shard: str = PLAIN
    replicate: tuple[str, ...] = ()
    reduce: tuple[str, ...] = ()
    is_primary: bool = True

    @property
    def sums_replicas(self) -> bool:
        """Whether gradients of copies are summed."""
        return bool(self.reduce) and not set(self.replicate).isdisjoint(self.reduce)

    def __str__(self) -> str:
        facts = [] if self.shard == PLAIN else [f"cut over {self.shard}"]
        facts += [f"copies over {' and '.join(self.replicate)}"] if self.replicate else []
        facts += [f"summed over {' and '.join(self.reduce)}"] if self.reduce else []
        return ", ".join(facts)


class Tie(NamedTuple):
    """One weight that two pipeline stages hold, with its name on the first and second holder."""

    first: str
    second: str

    @property
    def group(self) -> str:
        """Name of the group of its holders."""
        return f"tie of {self.first} and {self.second}"
