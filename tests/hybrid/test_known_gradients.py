"""Each kind of parameter of a hybrid job gets the sum of the right ranks' gradients, once.

Rank ``r`` gives each parameter the gradient ``2**r * (1, 2, 3 ...)``, so a sum shows which ranks
are in it, how often, and that all elements are in their places. All numbers are integers far below
2**24, so every comparison is exact. After one SGD step with learning rate 1 from zero, parameters
are the negative sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from bag import Bag
from models import full
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardcast
from shardcast.testing import threaded_world

Sums = dict[str, Tensor]


def numbered(*shape: int) -> Tensor:
    return 1.0 + torch.arange(float(torch.Size(shape).numel())).view(shape)


def mine() -> float:
    return 2.0 ** dist.get_rank()


def first_of(mesh: DeviceMesh) -> float:
    """Return the factor of the first tensor-parallel rank here, since these see the same data."""
    return 2.0 ** dist.get_process_group_ranks(mesh.get_group("tp"))[0]


class Step(NamedTuple):
    """A step of one rank.

    Attributes:
        grads: gradients of local parts by parameter.
        partial: parameters whose gradients are parts of a sum over tensor-parallel ranks.
        backwards: number of backwards before the step, each with these gradients.
        tokens: if given, counted before the last backward.
        options: options of ``shard()``.
    """

    model: Bag
    grads: Sums
    options: dict[str, Any]
    partial: tuple[str, ...] = ()
    backwards: int = 1
    tokens: int | None = None


def sgd(mesh: DeviceMesh, model: Bag, **options: Any) -> shardcast.ShardedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    part = [model] if "pp" in mesh.mesh_dim_names else model
    options = {"mesh": mesh, "param_dtype": "fp32", "divisor": 1, **options}
    return shardcast.shard(part, optimizer, **options)


def stepped(mesh: DeviceMesh, build: Callable[[DeviceMesh], Step]) -> tuple[Sums, float]:
    """Make a step; return the negative change of each parameter, and the gradient norm."""
    step = build(mesh)
    optimizer = sgd(mesh, step.model, **step.options)
    for number in range(1, step.backwards + 1):
        if step.tokens is not None:
            optimizer.count(step.tokens if number == step.backwards else 0)
        loss = step.model(step.grads, step.partial)
        if loss.requires_grad:  # else the whole stage is frozen
            loss.backward()
    optimizer.step()
    moved = {name: -full(param) for name, param in step.model.named_parameters()}
    return moved, float(optimizer.grad_norm)


# -- tensor parallelism ---------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (5, 3),
    "columns": (2, 7),
    "copy": (3,),
    "partial": (4,),
    "plain": (6,),
    "part": (3, 2),
}


def tensor_parallel(mesh: DeviceMesh, **options: Any) -> Step:
    """Build parameters of all kinds."""
    place = mesh.get_local_rank("tp")
    model = Bag(**SHAPES)
    model.place(mesh["tp"], rows=Shard(0), columns=Shard(1), copy=Replicate(), partial=Replicate())
    grads = {name: numbered(*shape) * first_of(mesh) for name, shape in SHAPES.items()}
    grads["rows"] = grads["rows"].chunk(2)[place]
    grads["columns"] = grads["columns"].chunk(2, 1)[place]
    for name in ("partial", "part"):
        grads[name] = numbered(*SHAPES[name]) * mine()
    return Step(model, grads, {"grad_sum_over": {"tp": ["part"]}, **options}, ("partial",))


def unequal_parts(mesh: DeviceMesh) -> Step:
    """Build parameters with unequal parts, some empty; owners of whole copies must still agree."""
    place, tp = mesh.get_local_rank("tp"), mesh["tp"].size()
    model = Bag(rows=(3, 8), few=(tp - 1, 3), first=(4,), second=(3,))
    model.place(mesh["tp"], rows=Shard(0), few=Shard(0), first=Replicate(), second=Replicate())
    grads = {
        name: numbered(*param.shape) * first_of(mesh) for name, param in model.named_parameters()
    }
    for name in ("rows", "few"):
        pieces = grads[name].chunk(tp)
        grads[name] = pieces[place] if place < len(pieces) else grads[name][:0]
    grads["first"] = numbered(4) * mine()
    return Step(model, grads, {"partition": "whole"}, ("first",))


def two_dimensions(mesh: DeviceMesh) -> Step:
    """Build a parameter over two model-parallel dimensions, and two used on one data rank each."""
    model = Bag(block=(4, 6), first=(3,), other=(2, 2))
    block = distribute_tensor(model.block.data, mesh["ep", "tp"], [Shard(0), Shard(1)])
    model.register_parameter("block", nn.Parameter(block))
    model.place(mesh["tp"], first=Replicate())
    here = mesh.get_local_rank("dp")
    rows, columns = mesh.get_local_rank("ep"), mesh.get_local_rank("tp")
    grads = {"block": numbered(4, 6).chunk(2)[rows].chunk(2, 1)[columns] * 2.0**here}
    used = "other" if here else "first"
    grads[used] = numbered(*getattr(model, used).shape) * 2.0**here
    return Step(model, grads, {})


# -- experts and pipelines ------------------------------------------------------------------------


def experts(mesh: DeviceMesh, named: bool = True, **step: Any) -> Step:
    """Build different experts of one name along ``ep``, and the same router on all ranks."""
    options: dict[str, Any] = {"dp": mesh["ep", "edp"]._flatten("data")}
    options |= {"experts": {"edp": ["expert"]}} if named else {}
    options |= {"divisor": None} if step else {}
    model = Bag(router=(3,), expert=(5, 2))
    grads = {name: numbered(*param.shape) * mine() for name, param in model.named_parameters()}
    return Step(model, grads, options, **step)


def counted_experts(mesh: DeviceMesh) -> Step:
    """Count different tokens on the ranks of a pair, 16 in total."""
    return experts(mesh, backwards=2, tokens=5 if mesh.get_local_rank("edp") else 3)


STAGES = ({"embed": (4, 3), "early": (5,)}, {"late": (2, 2), "norm": (3,), "head": (4, 3)})


def pipeline(
    mesh: DeviceMesh, tied: Any = (("embed", "head"),), frozen: Iterable[str] = (), **options: Any
) -> Step:
    """Build two stages that share a weight under two names, with several backwards."""
    model = Bag(**STAGES[mesh.get_local_rank("pp")])
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    grads = {
        name: numbered(*param.shape) * mine()
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    return Step(model, grads, {"tied": list(tied), **options}, backwards=3)


def several_ties(mesh: DeviceMesh) -> Step:
    """Build stages with different numbers of groups, after which torch would name groups."""
    names = (("a", "b"), ("c",), ("d",), ("e",))[mesh.get_local_rank("pp")]
    model = Bag(**dict.fromkeys(names, (2, 2)))
    grads = {name: numbered(2, 2) * mine() for name in names}
    return Step(model, grads, {"tied": [("a", "e"), ("b", "d")]})


class Known(NamedTuple):
    """Expected results of :func:`stepped` on a grid.

    Attributes:
        sums: factor of ``(1, 2, 3 ...)`` in each parameter's sum; a list has one per rank.
        counted: ranks and parameters that make up the norm; None: all parameters of rank 0.
    """

    grid: dict[str, int]
    build: Callable[[DeviceMesh], Step]
    sums: Mapping[str, float | list[float]]
    counted: list[tuple[int, str]] | None = None


def sums_of(first: float, every: float) -> dict[str, float]:
    """Return ``every`` for parts of a sum over tensor-parallel ranks, ``first`` for the others."""
    return {name: every if "part" in name else first for name in SHAPES}


GRID = {"dp": 2, "pp": 2}  # ranks 0 and 2 have the first stage, 1 and 3 the last
STAGE_SUMS = {"embed": 3 * 15, "early": 3 * 5, "late": 3 * 10, "norm": 3 * 10, "head": 3 * 15}
ONCE = [(0, "embed"), (0, "early"), (1, "late"), (1, "norm")]  # the tied weight counts once
KNOWN: dict[str, Known] = {
    "tensor-parallel": Known({"dp": 2, "tp": 2}, tensor_parallel, sums_of(1 + 4, 15)),
    "data-parallel neighbours": Known(
        {"tp": 2, "dp": 3}, lambda mesh: tensor_parallel(mesh, dp="dp"), sums_of(7, 63)
    ),
    "replicas": Known(
        {"copies": 2, "dp": 2, "tp": 2},
        lambda mesh: tensor_parallel(mesh, dp=("copies", "dp")),
        sums_of(1 + 4 + 16 + 64, 255),
    ),
    "a part that is not said to be one": Known(
        {"dp": 2, "tp": 2},
        lambda mesh: tensor_parallel(mesh, grad_sum_over=None),
        {**sums_of(5, 15), "part": [5, 10, 5, 10]},
    ),
    "unequal parts": Known(
        {"dp": 2, "tp": 2}, unequal_parts, {"rows": 5, "few": 5, "first": 15, "second": 5}
    ),
    "unequal parts of three ranks": Known(
        {"dp": 3, "tp": 2}, unequal_parts, {"rows": 21, "few": 21, "first": 63, "second": 21}
    ),
    "unequal thirds": Known(
        {"dp": 1, "tp": 3}, unequal_parts, {"rows": 1, "few": 1, "first": 7, "second": 1}
    ),
    "two model-parallel dimensions": Known(
        {"dp": 2, "ep": 2, "tp": 2}, two_dimensions, {"block": 3, "first": 1, "other": 2}
    ),
    "experts": Known(
        {"ep": 2, "edp": 2},
        experts,
        {"router": 15, "expert": [3, 3, 12, 12]},
        [(0, "router"), (0, "expert"), (2, "expert")],
    ),
    "experts without copies": Known(
        {"ep": 2, "edp": 1},
        experts,
        {"router": 3, "expert": [1, 2]},
        [(0, "router"), (0, "expert"), (1, "expert")],
    ),
    "experts that are not said to be some": Known(
        {"ep": 2, "edp": 2}, lambda mesh: experts(mesh, named=False), {"router": 15, "expert": 15}
    ),
    "experts, by tokens": Known(
        {"ep": 2, "edp": 2},
        counted_experts,
        {"router": 2 * 15 / 16, "expert": [2 * 3 / 16] * 2 + [2 * 12 / 16] * 2},
        [(0, "router"), (0, "expert"), (2, "expert")],
    ),
    "a pipeline": Known(GRID, pipeline, STAGE_SUMS, ONCE),
    "a tie that is not said to be one": Known(
        GRID,
        lambda mesh: pipeline(mesh, tied=()),
        {**STAGE_SUMS, "embed": 15, "head": 30},
        [*ONCE, (1, "head")],
    ),
    "a frozen tie": Known(
        GRID,
        lambda mesh: pipeline(mesh, frozen=("embed", "head")),
        {**STAGE_SUMS, "embed": 0, "head": 0},
        ONCE,
    ),
    "a frozen stage": Known(
        GRID,
        lambda mesh: pipeline(mesh, tied=(), frozen=("embed", "early")),
        {**STAGE_SUMS, "embed": 0, "early": 0, "head": 30},
        [*ONCE, (1, "head")],
    ),
    "a frozen parameter beside a tie": Known(
        GRID, lambda mesh: pipeline(mesh, frozen=("norm",)), {**STAGE_SUMS, "norm": 0}, ONCE
    ),
    "patterns that match on one stage": Known(
        {"dp": 1, "pp": 2, "tp": 2},
        lambda mesh: pipeline(mesh, tied=(), grad_sum_over={"tp": ["norm", "la*"]}),
        {"embed": [3, 6], "early": [3, 6], "late": 36, "norm": 36, "head": [0, 0, 12, 24]},
        [(0, "embed"), (0, "early"), (2, "late"), (2, "norm"), (2, "head")],
    ),
    "ties with several stages": Known(
        {"dp": 1, "pp": 4},
        several_ties,
        {"a": 9, "b": 5, "c": 2, "d": 5, "e": 9},
        [(0, "a"), (0, "b"), (1, "c")],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_every_parameter_gets_the_sum_of_its_ranks_and_counts_once_in_the_norm(name: str):
    grid, build, sums, counted = KNOWN[name]

    def expected(rank: int, name: str, shape: torch.Size) -> Tensor:
        total = sums[name]
        return numbered(*shape) * (total[rank] if isinstance(total, list) else total)

    ranks = threaded_world(grid, stepped, build)
    for rank, (moved, norm) in enumerate(ranks):
        for key, value in moved.items():
            assert torch.equal(value, expected(rank, key, value.shape)), (rank, key)
        assert norm == ranks[0][1]
    held = [(0, key) for key in ranks[0][0]] if counted is None else counted
    parts = [expected(rank, key, ranks[rank][0][key].shape).flatten() for rank, key in held]
    assert ranks[0][1] == pytest.approx(float(torch.cat(parts).double().norm()), rel=1e-7)


# -- gradients of other kinds ---------------------------------------------------------------------


def assigned(mesh: DeviceMesh) -> Sums:
    """Assign gradients with other placements than their parameters, as some operators do."""
    tp, place = mesh["tp"], mesh.get_local_rank("tp")
    model = Bag(pending=(4, 6), turned=(4, 6), cut=(4, 6), copy=(4, 6), part=(4, 6))
    model.place(
        tp, pending=Shard(0), turned=Shard(0), cut=Replicate(), copy=Replicate(), part=Shard(0)
    )
    optimizer = sgd(mesh, model)
    half = (numbered(4, 6) * first_of(mesh)).chunk(2, 1)[place].contiguous()
    sums, means = numbered(4, 6) * mine(), numbered(4, 6) * (2 + 4 * place)
    for param, local, placement in (
        (model.pending, sums, Partial()),
        (model.turned, half, Shard(1)),
        (model.cut, half, Shard(1)),
        (model.copy, means, Partial("avg")),
        (model.part, means, Partial("avg")),
    ):
        param.grad = DTensor.from_local(local, tp, [placement], run_check=False)
    optimizer.step()
    return {name: -full(param) for name, param in model.named_parameters()}


def test_gradients_that_lie_in_another_way_are_moved_and_parts_of_a_mean_not_added_up():
    sums = {"pending": 15, "turned": 5, "cut": 5, "copy": 2 * 4, "part": 2 * 4}
    for moved in threaded_world({"dp": 2, "tp": 2}, assigned):
        for name, total in sums.items():
            assert torch.equal(moved[name], numbered(4, 6) * total), name


def low(mesh: DeviceMesh) -> float:
    model = Bag(partial=(4,))
    model.place(mesh["tp"], partial=Replicate())
    optimizer = sgd(mesh, model, param_dtype="bf16")
    value = (256.0, 1.0, -256.0)[mesh.get_local_rank("tp")]
    model({"partial": torch.full((4,), value)}, ["partial"]).backward()
    optimizer.step()
    return float(optimizer.grad_norm)


def test_sums_over_tensor_parallel_ranks_are_in_fp32():
    """The sum is 256 + 1 - 256; bf16, the dtype of gradients, cannot represent 256 + 1."""
    assert torch.tensor(257.0).bfloat16() == 256
    assert threaded_world({"dp": 2, "tp": 3}, low) == [2.0 * 2] * 6


def grown(mesh: DeviceMesh) -> Sums:
    """Add a group later, and change the divisor between steps."""
    model, more = Bag(rows=(4, 6)), Bag(columns=(4, 6), partial=(5,))
    model.place(mesh["tp"], rows=Shard(0))
    more.place(mesh["tp"], columns=Shard(1), partial=Replicate())
    optimizer = sgd(mesh, model)
    rows = {"rows": torch.ones(2, 6)}
    others = {"columns": torch.ones(4, 3), "partial": torch.ones(5)}
    model(rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.more = more
    optimizer.add_param_group({"params": list(more.parameters())})
    optimizer.divisor = torch.tensor(4.0)
    (model(rows) + more(others, ["partial"])).backward()
    optimizer.step()
    return {name: -full(param) for name, param in model.named_parameters()}


def test_parameters_that_are_added_later_are_summed_as_the_first_ones():
    for moved in threaded_world({"dp": 2, "tp": 2}, grown):
        assert torch.equal(moved["rows"], torch.full((4, 6), 2 / 1 + 2 / 4))
        assert torch.equal(moved["more.columns"], torch.full((4, 6), 2 / 4))
        assert torch.equal(moved["more.partial"], torch.full((5,), 4 / 4))
