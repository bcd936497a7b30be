"""The process groups of one job: those of a mesh, or the one of plain data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat
from shardcast.comm.group import Comm
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.plan.sharing import PLAIN, Axes, Sharing, Tie

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh

Patterns = Mapping[str, Sequence[str]]  # by mesh dimension


class Grid:
    """Who this rank talks to.

    Attributes:
        everyone: all ranks of the job: they set up, save and load together.
        dp: the data-parallel ranks, which hold the same parameters (of experts: the same number).
        cut: those of them that cut packs; not all where the rest are replicas.
        model: the model-parallel ranks of one data-parallel coordinate, in the order of the mesh.
        axes: the dimensions, for planning.
    """

    def __init__(
        self, everyone: Comm, dp: Comm, cut: Comm, model: Comm, groups: Mapping[str, Comm],
        axes: Axes,
    ) -> None:  # fmt: skip
        self.everyone, self.dp, self.cut, self.model, self.axes = everyone, dp, cut, model, axes
        self._groups = groups

    @classmethod
    def flat(cls, comm: Comm) -> Grid:
        """Data parallelism alone."""
        return cls(comm, comm, comm, Comm(None), {}, Axes(comm.size))

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        dp: str | Sequence[str] | DeviceMesh,
        *,
        pipeline: str = "pp",
        sum_over: Patterns | None = None,
        experts: Patterns | None = None,
        tied: Sequence[Sequence[Any]] = (),
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Grid:
        """The groups of a mesh. Every rank of it must call it: further groups are made.

        Args:
            dp: the data-parallel dimension, by name, or flattened ones as a mesh of one dimension;
                or two names, of which the first has replicas of what the second one cuts.
            shapes: of the parameters here by name, for ``tied``.

        Raises:
            TypeError, ValueError: no such mesh, dimension or weight.
        """
        outer, inner = _data_parallel(mesh, dp)
        dims = mesh.mesh_dim_names or ()
        data = _covered(mesh, outer, inner)
        model = tuple(dim for dim in dims if dim not in data)
        _check_dims("grad_sum_over", sum_over or {}, model)
        _check_dims("experts", experts or {}, data)
        groups = {dim: _comm(mesh, [dim]) for dim in dims}
        cut, replicas = Comm(inner.get_group()), outer if outer and groups[outer].size > 1 else ""
        ties: dict[Tie, Comm] = {}
        if pipeline in model:
            ties = _ties(groups, pipeline, tied, shapes or {}, torch.device(mesh.device_type))
        groups.update({tie.group: comm for tie, comm in ties.items()})
        axes = Axes(
            cut.size,
            {name: comm.size for name, comm in groups.items()},
            {name: comm.rank for name, comm in groups.items()},
            {dim: _compat.mesh_line(mesh, dim) for dim in dims},
            data,
            model,
            pipeline,
            replicas,
            sum_over or {},
            experts or {},
            tuple(ties),
        )
        return cls(
            _comm(mesh, dims),
            _comm(mesh, data) if outer else cut,
            cut,
            _comm(mesh, model) if model else Comm(None),
            groups,
            axes,
        )

    @property
    def is_flat(self) -> bool:
        """Whether it is data parallelism alone, every rank cutting every pack."""
        return self.everyone is self.cut

    def group(self, name: str) -> Comm:
        """The ranks of a group that a :class:`Sharing` names."""
        return self.cut if name == PLAIN else self._groups[name]

    def holders(self, sharing: Sharing) -> Comm:
        """The data-parallel ranks that hold the same parameters."""
        return self.dp if sharing.cut == PLAIN else self.group(sharing.cut)

    def groups(self, names: Sequence[str]) -> list[Comm]:
        """Those of several names."""
        return [self.group(name) for name in names]


def _data_parallel(mesh: Any, dp: Any) -> tuple[str, DeviceMesh]:
    """The dimension of replicas, or nothing, and the one that cuts.

    Raises:
        TypeError, ValueError: they are not the mesh's.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(
            f"mesh: expected a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__};"
            " make one with init_device_mesh(device, sizes, mesh_dim_names=(...))"
        )
    names = mesh.mesh_dim_names or ()
    if hasattr(dp, "mesh_dim_names"):
        if dp.ndim != 1:
            raise ValueError(f"dp: expected a mesh of one dimension, got {dp!r}; flatten it")
        return "", dp
    given = (dp,) if isinstance(dp, str) else tuple(dp)
    if len(given) not in (1, 2) or not set(given) <= set(names):
        raise ValueError(
            f"dp: expected a dimension of the mesh, or two, (replicas, shards), of "
            f"{', '.join(names) or '(none has a name)'}, got {dp!r}; several as one: "
            "dp=mesh['dp', 'cp']._flatten('dp_cp')"
        )
    return (given[0] if len(given) == 2 else ""), mesh if mesh.ndim == 1 else mesh[given[-1]]


def _covered(mesh: DeviceMesh, outer: str, inner: DeviceMesh) -> tuple[str, ...]:
    """The mesh's own dimensions that are data-parallel, also inside a flattened one."""
    inside = set(inner.mesh.flatten().tolist())
    given = (outer, *(inner.mesh_dim_names or ()))
    lines = {name: _compat.mesh_line(mesh, name) for name in mesh.mesh_dim_names or ()}
    return tuple(
        name
        for name, line in lines.items()
        if name in given or (len(line) > 1 and inside.issuperset(line))
    )


def redistributed(grad: Any, placements: Sequence[Any]) -> Tensor:
    """The local tensor of a DTensor that is to lie in another way, in its own dtype.

    Sums are made in the dtype of masters: torch's own reduction would be in that of the gradient.
    All ranks of its mesh must call it.
    """
    sums = any(placement.is_partial() for placement in grad.placements)
    exact = grad.to(MASTER_DTYPE) if sums else grad
    moved = exact.redistribute(placements=placements).to(grad.dtype)
    return _compat.arrived(moved.to_local()).contiguous()


def _comm(mesh: DeviceMesh, dims: Sequence[str]) -> Comm:
    return Comm(_compat.mesh_group(mesh, dims))


def _check_dims(option: str, given: Patterns, allowed: Sequence[str]) -> None:
    for dim in given:
        if dim not in allowed:
            raise ValueError(
                f"{option}: expected a mesh dimension among {', '.join(allowed) or '(none)'}, got "
                f"{dim!r}"
            )


def _ties(
    groups: Mapping[str, Comm],
    pipeline: str,
    tied: Sequence[Sequence[Any]],
    shapes: Mapping[str, Sequence[int]],
    device: torch.device,
) -> dict[Tie, Comm]:
    """The ties that this rank's stage takes part in, with the ranks that hold the weight.

    Args:
        device: where the stages tell each other what they hold.
    """
    line, found = groups[pipeline], {}
    if line.size == 1:
        return {}
    for pair in tied:
        if len(pair) not in (2, 3):
            raise ValueError(
                "tied: expected (name on its first holder, name on the other[, process group]), "
                f"got {pair!r}"
            )
        tie = Tie(str(pair[0]), str(pair[1]))
        mine = {n: tuple(shapes[name]) for n, name in enumerate(pair[:2]) if name in shapes}
        held = line.exchange(mine, device)
        holders = [rank for rank, some in enumerate(held) if some]
        if {number for some in held for number in some} != {0, 1} or len(holders) != 2:
            raise ValueError(
                f"tied: expected {tie.first!r} on one pipeline stage and {tie.other!r} on another, "
                f"found them on stages {holders}; within a stage tie the Parameter itself"
            )
        found_shapes = {shape for some in held for shape in some.values()}
        if len(found_shapes) > 1:
            raise ValueError(
                f"tied: expected {tie.first!r} and {tie.other!r} of one shape, got "
                f"{' and '.join(map(str, sorted(found_shapes)))}"
            )
        if len(pair) == 2 < line.size:
            # Each rank makes one group for each tie, those between the holders an idle one: torch
            # names a group by how many the rank has, and ranks that differ in it would hang.
            ranks = dist.get_process_group_ranks(line.group)
            side = line.rank in holders
            members = [rank for n, rank in enumerate(ranks) if (n in holders) == side]
            comm = Comm(dist.new_group(members, use_local_synchronization=True))
        elif line.rank in holders:
            comm = Comm(pair[2]) if len(pair) == 3 else line
        if line.rank in holders:
            found[tie] = comm
    return found
