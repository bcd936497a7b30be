"""Ranks that hold a parameter, in jobs that are more than data-parallel.

The dimensions of a mesh are data-parallel, or model-parallel: tensor, pipeline, whatever a script
calls them. Along a model-parallel one a parameter is cut (each rank has another part), or held as
copies of one another; along the pipeline each stage has other parameters. From that follow, per
parameter, the ranks that cut its packs, those whose gradients are added up, and whose copy counts.
Packs do not mix parameters that differ in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardcast import _compat
from shardcast.plan.pack_groups import PLAIN, PackGroups, Tie
from shardcast.plan.placements import matches, pack_groups_of


@dataclass(frozen=True)
class ParallelDims:
    """The dimensions of a mesh, as one rank sees them; without any: plain data parallelism.

    Attributes:
        world_size: ranks that cut packs.
        sizes: ranks along each dimension, and in the group of each tie, by name.
        coordinate: the place of this rank there.
        lines: the ranks of this rank's group along each dimension of the mesh.
        data, model: the data-parallel and the model-parallel dimensions.
        pipeline: the model-parallel dimension along which each rank has other parameters.
        replicas: a data-parallel dimension whose ranks hold the same spans.
        sum_over: per dimension, patterns of names of plain parameters whose gradient is a part.
        experts: per dimension, patterns of names of parameters that are sharded over it alone.
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
        """Return whether other ranks hold other stages."""
        return self.sizes.get(self.pipeline, 1) > 1

    @property
    def replicating(self) -> tuple[str, ...]:
        """The dimensions along which ranks may hold equal copies."""
        return tuple(d for d in self.model if d != self.pipeline and self.sizes[d] > 1)

    def set_up_order(self, pack_groups: PackGroups) -> int:
        """Return the place of a parameter among collectives at set-up, and its pack's in a step.

        Tied ones come first, in the order of ``tied=``: two stages may hold them in two orders.
        """
        ties = [tie.group for tie in self.ties]
        return next((ties.index(name) for name in pack_groups.replicate if name in ties), len(ties))

    def ranks(self, pack_groups: PackGroups) -> int:
        """Return how many ranks cut a pack."""
        return self.world_size if pack_groups.shard == PLAIN else self.sizes[pack_groups.shard]

    def expert_blocks(self, pack_groups: PackGroups) -> tuple[int, int]:
        """Return how many experts of one name the data-parallel ranks hold, and which is here."""
        number, own = 1, 0
        for dim in self.data if pack_groups.shard != PLAIN else ():
            if dim != pack_groups.shard:
                number *= self.sizes[dim]
                own = own * self.sizes[dim] + self.coordinate[dim]
        return number, own

    def pack_groups_by_name(self, named: Mapping[str, nn.Parameter]) -> dict[str, PackGroups]:
        """The groups of each parameter.

        Raises:
            TypeError, ValueError: a DTensor does not fit the mesh.
        """
        if self == ParallelDims(self.world_size) and not any(
            map(_compat.is_dtensor, named.values())
        ):
            return dict.fromkeys(named, PackGroups())
        return {name: pack_groups_of(self, name, param) for name, param in named.items()}

    @property
    def _patterns(self) -> dict[str, Mapping[str, Sequence[str]]]:
        return {"grad_sum_over": self.sum_over, "experts": self.experts}

    def options(self) -> list[str]:
        """Return the options that all ranks must have alike, a line each."""
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
