"""Every kind of parameter of a hybrid job gets the sum of the right ranks' gradients, once.

Rank ``r`` gives each parameter the gradient ``2**r * (1, 2, 3 ...)``, so that a sum tells which
ranks are in it, how often, and that no element lies in the place of another. All numbers are
integers far below 2**24: every comparison is exact. After one step of SGD with a learning rate of
1, from zero, parameters are the negated sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bag import Bag
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardcast
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(60)

Sums = dict[str, Tensor]


def numbered(*shape: int) -> Tensor:
    return 1.0 + torch.arange(float(torch.Size(shape).numel())).view(shape)


def sgd(model: nn.Module | list[nn.Module], **fields: Any) -> shardcast.ShardedOptimizer:
    parts = model if isinstance(model, list) else [model]
    params = [param for part in parts for param in part.parameters()]
    fields = {"param_dtype": "fp32", "divisor": 1, **fields}
    return shardcast.shard(model, torch.optim.SGD(params, lr=1.0), **fields)


def stepped(model: nn.Module | list[nn.Module], loss: Callable[[], Tensor], **fields: Any) -> float:
    """Make one step; the norm of all gradients."""
    optimizer = sgd(model, **fields)
    loss().backward()
    optimizer.step()
    return float(optimizer.grad_norm)


def negated(model: nn.Module) -> Sums:
    return {name: -whole(param) for name, param in model.named_parameters()}


def norm_of(sums: Iterable[Tensor]) -> float:
    return float(torch.cat([grad.double().flatten() for grad in sums]).norm())


# -- tensor parallelism ---------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (5, 3), "columns": (2, 7), "copy": (3,), "partial": (4,), "plain": (6,), "part": (3, 2),
}  # fmt: skip


def tensor_parallel(mesh: DeviceMesh, dp: Any, **options: Any) -> tuple[Sums, float]:
    """A step of a model with all kinds of parameters; what they are after it, whole, negated."""
    place = mesh.get_local_rank("tp")
    model = Bag(**SHAPES)
    model.place(mesh["tp"], rows=Shard(0), columns=Shard(1), copy=Replicate(), partial=Replicate())
    mine = 2.0 ** dist.get_rank()
    # Tensor-parallel ranks see the same data: what is not a part of a sum is equal on them.
    same = 2.0 ** dist.get_process_group_ranks(mesh.get_group("tp"))[0]
    grads = {name: numbered(*shape) * same for name, shape in SHAPES.items()}
    grads["rows"] = grads["rows"].chunk(2)[place]
    grads["columns"] = grads["columns"].chunk(2, 1)[place]
    for name in ("partial", "part"):
        grads[name] = numbered(*SHAPES[name]) * mine
    options = {"grad_sum_over": {"tp": ["part"]}, **options}
    norm = stepped(model, lambda: model(grads, ["partial"]), mesh=mesh, dp=dp, **options)
    return negated(model), norm


def whole(param: nn.Parameter) -> Tensor:
    data = param.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data.clone()


@pytest.mark.parametrize(
    ("grid", "dp"),
    [
        ({"dp": 2, "tp": 2}, "dp"),
        ({"tp": 2, "dp": 3}, "dp"),
        ({"copies": 2, "dp": 2, "tp": 2}, ("copies", "dp")),
    ],
    ids=str,
)
def test_tensor_parallel_parameters_get_the_sums_of_their_ranks(grid: dict[str, int], dp: Any):
    ranks = range(torch.Size(grid.values()).numel())
    stride = 1 if list(grid)[-1] == "tp" else grid["dp"]  # between tensor-parallel neighbours
    first = [rank for rank in ranks if rank // stride % 2 == 0]
    expected = {
        name: numbered(*shape) * sum(2.0**r for r in (ranks if "part" in name else first))
        for name, shape in SHAPES.items()
    }
    for found, norm in threaded_world(grid, tensor_parallel, dp):
        for name, total in expected.items():
            assert torch.equal(found[name], total), name
        assert norm == pytest.approx(norm_of(expected.values()), rel=1e-7)


def test_without_the_option_a_plain_parameter_counts_as_whole():
    """Negative control of ``grad_sum_over``: each tensor-parallel rank keeps its own part."""
    results = threaded_world({"dp": 2, "tp": 2}, tensor_parallel_without)
    assert [float(found["part"][0, 0]) for found, _ in results] == [1 + 4, 2 + 8, 1 + 4, 2 + 8]


def tensor_parallel_without(mesh: DeviceMesh) -> tuple[Sums, float]:
    return tensor_parallel(mesh, "dp", grad_sum_over=None)


def means(mesh: DeviceMesh) -> list[float]:
    model = Bag(copy=(4,), cut=(4,))
    model.place(mesh["tp"], copy=Replicate(), cut=Shard(0))
    optimizer = sgd(model, mesh=mesh)
    part = torch.full((4,), 2.0 + mesh.get_local_rank("tp") * 4)
    for param in model.parameters():
        param.grad = DTensor.from_local(part, mesh["tp"], [Partial("avg")], run_check=False)
    optimizer.step()
    return [float(total[0]) for total in negated(model).values()]


def test_gradients_that_are_parts_of_a_mean_are_not_added_up():
    assert threaded_world({"dp": 2, "tp": 2}, means) == [[8.0, 8.0]] * 4


def uneven(mesh: DeviceMesh) -> Sums:
    """Tensor-parallel ranks with unequal parts, beside which copies have the same owners."""
    model = Bag(rows=(3, 8), more=(5, 3), first=(4,), second=(3,))
    model.place(mesh["tp"], rows=Shard(0), more=Shard(0), first=Replicate(), second=Replicate())
    grads = {name: torch.ones(param.to_local().shape) for name, param in model.named_parameters()}
    stepped(model, lambda: model(grads, ["first"]), mesh=mesh, partition="whole")
    return negated(model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_owners_of_whole_copies_do_not_depend_on_what_is_cut_beside_them(ranks: int):
    for found in threaded_world({"dp": ranks, "tp": 2}, uneven):
        for name, total in found.items():
            assert (total == ranks * (2 if name == "first" else 1)).all(), name


def assigned(mesh: DeviceMesh) -> tuple[Sums, float]:
    """Gradients that lie in another way than their parameters, as some operators give them."""
    tp, place = mesh["tp"], mesh.get_local_rank("tp")
    model = Bag(pending=(4, 6), turned=(4, 6), cut=(4, 6))
    model.place(tp, pending=Shard(0), turned=Shard(0), cut=Replicate())
    optimizer = sgd(model, mesh=mesh)
    same = 2.0 ** dist.get_process_group_ranks(mesh.get_group("tp"))[0]
    half = (numbered(4, 6) * same).chunk(2, 1)[place].contiguous()
    part = numbered(4, 6) * 2.0 ** dist.get_rank()
    model.pending.grad = DTensor.from_local(part, tp, [Partial()], run_check=False)
    model.turned.grad = DTensor.from_local(half, tp, [Shard(1)], run_check=False)
    model.cut.grad = DTensor.from_local(half, tp, [Shard(1)], run_check=False)
    optimizer.step()
    return negated(model), float(optimizer.grad_norm)


def test_gradients_that_lie_in_another_way_are_moved():
    parts = {"pending": 15, "turned": 5, "cut": 5}
    for found, norm in threaded_world({"dp": 2, "tp": 2}, assigned):
        for name, total in parts.items():
            assert torch.equal(found[name], numbered(4, 6) * total), name
        totals = [numbered(4, 6) * total for total in parts.values()]
        assert norm == pytest.approx(norm_of(totals), rel=1e-7)


def low(mesh: DeviceMesh) -> float:
    model = Bag(partial=(4,))
    model.place(mesh["tp"], partial=Replicate())
    value = (256.0, 1.0, -256.0)[mesh.get_local_rank("tp")]
    optimizer = sgd(model, mesh=mesh, param_dtype="bf16")
    model({"partial": torch.full((4,), value)}, ["partial"]).backward()
    optimizer.step()
    return float(optimizer.grad_norm)


def test_sums_over_tensor_parallel_ranks_are_in_fp32():
    """256 + 1 - 256, of which 256 + 1 has no place in bf16, the dtype of gradients."""
    assert torch.tensor(257.0).bfloat16() == 256
    assert threaded_world({"dp": 2, "tp": 3}, low) == [2.0 * 2] * 6


def apart(mesh: DeviceMesh) -> tuple[Sums, float]:
    """A parameter over two model-parallel dimensions, and one that each data rank alone uses."""
    model = Bag(block=(4, 6), first=(3,), other=(2, 2))
    block = distribute_tensor(model.block.data, mesh["ep", "tp"], [Shard(0), Shard(1)])
    model.register_parameter("block", nn.Parameter(block))
    model.place(mesh["tp"], first=Replicate())
    here = mesh.get_local_rank("dp")
    rows, columns = mesh.get_local_rank("ep"), mesh.get_local_rank("tp")
    grads = {"block": numbered(4, 6).chunk(2)[rows].chunk(2, 1)[columns] * 2.0**here}
    used = "other" if here else "first"
    grads[used] = numbered(*getattr(model, used).shape) * 2.0**here
    return negated_after(model, grads, mesh)


def negated_after(model: Bag, grads: Sums, mesh: DeviceMesh) -> tuple[Sums, float]:
    norm = stepped(model, lambda: model(grads), mesh=mesh)
    return negated(model), norm


def test_two_model_parallel_dimensions_and_gradients_of_one_rank_alone():
    totals = {"block": numbered(4, 6) * 3, "first": numbered(3), "other": numbered(2, 2) * 2}
    for found, norm in threaded_world({"dp": 2, "ep": 2, "tp": 2}, apart):
        for name, total in totals.items():
            assert torch.equal(found[name], total), name
        assert norm == pytest.approx(norm_of(totals.values()), rel=1e-7)


def grown(mesh: DeviceMesh) -> Sums:
    """A group that is added later, and another divisor for each step."""
    model, more = Bag(rows=(4, 6)), Bag(columns=(4, 6), partial=(5,))
    model.place(mesh["tp"], rows=Shard(0))
    more.place(mesh["tp"], columns=Shard(1), partial=Replicate())
    optimizer = sgd(model, mesh=mesh)
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
    return negated(model)


def test_parameters_that_are_added_later_are_summed_as_the_first_ones():
    for found in threaded_world({"dp": 2, "tp": 2}, grown):
        assert torch.equal(found["rows"], torch.full((4, 6), 2 / 1 + 2 / 4))
        assert torch.equal(found["more.columns"], torch.full((4, 6), 2 / 4))
        assert torch.equal(found["more.partial"], torch.full((5,), 4 / 4))


# -- experts --------------------------------------------------------------------------------------


def experts(mesh: DeviceMesh, options: dict[str, Any]) -> tuple[Sums, float]:
    """Ranks of ``ep`` hold other experts under one name, all ranks the same router."""
    data = mesh["ep", "edp"]._flatten("data")
    model = Bag(router=(3,), expert=(5, 2))
    mine = 2.0 ** dist.get_rank()
    grads = {name: numbered(*param.shape) * mine for name, param in model.named_parameters()}
    norm = stepped(model, lambda: model(grads), mesh=mesh, dp=data, **options)
    return negated(model), norm


def test_experts_are_summed_over_the_ranks_that_share_them_alone():
    sums = {"router": [15, 15, 15, 15], "expert": [3, 3, 12, 12]}
    results = threaded_world({"ep": 2, "edp": 2}, experts, {"experts": {"edp": ["expert"]}})
    for rank, (found, norm) in enumerate(results):
        for name, totals in sums.items():
            assert torch.equal(found[name], numbered(*found[name].shape) * totals[rank]), name
        parts = [numbered(3) * 15, numbered(10) * 3, numbered(10) * 12]
        assert norm == pytest.approx(norm_of(parts), rel=1e-7)


def test_experts_may_have_no_copies():
    results = threaded_world({"ep": 2, "edp": 1}, experts, {"experts": {"edp": ["expert"]}})
    assert [int(found["expert"][0, 0]) for found, _ in results] == [1, 2]
    assert [int(found["router"][0]) for found, _ in results] == [3, 3]


def test_without_the_option_experts_are_taken_for_one():
    """Negative control."""
    results = threaded_world({"ep": 2, "edp": 2}, experts, {})
    assert [int(found["expert"][0, 0]) for found, _ in results] == [15] * 4


# -- pipelines ------------------------------------------------------------------------------------


def pipeline(mesh: DeviceMesh, tied: list[Any]) -> tuple[Sums, float]:
    """Two stages, several backwards in a step, and a weight that both hold under other names."""
    first = mesh.get_local_rank("pp") == 0
    model = Bag(embed=(4, 3), early=(5,)) if first else Bag(late=(2, 2), head=(4, 3))
    mine = 2.0 ** dist.get_rank()
    grads = {name: numbered(*param.shape) * mine for name, param in model.named_parameters()}

    def loss() -> Tensor:
        for _ in range(2):  # micro-batches
            model(grads).backward()
        return model(grads)

    norm = stepped([model], loss, mesh=mesh, tied=tied)
    return negated(model), norm


def test_stages_are_summed_apart_and_tied_weights_together():
    tied = [("embed", "head")]
    stages = [{"embed": 3 * 15, "early": 3 * 3}, {"late": 3 * 12, "head": 3 * 15}]
    parts = [numbered(4, 3) * 45, numbered(5) * 9, numbered(2, 2) * 36]
    for rank, (found, norm) in enumerate(threaded_world({"pp": 2, "dp": 2}, pipeline, tied)):
        for name, total in stages[rank // 2].items():
            assert torch.equal(found[name], numbered(*found[name].shape) * total), name
        assert norm == pytest.approx(norm_of(parts), rel=1e-7), "the tied weight counts once"


def test_weights_that_are_not_said_to_be_tied_go_apart():
    """Negative control."""
    (first, _), _, (last, _), _ = threaded_world({"pp": 2, "dp": 2}, pipeline, [])
    assert int(first["embed"][0, 0]) == 9 and int(last["head"][0, 0]) == 36


# -- tokens ---------------------------------------------------------------------------------------

TOKENS = {0: 3, 1: 5}  # by data-parallel rank; a power of two in all


def counted(mesh: DeviceMesh, dp: str, tokens: Callable[[DeviceMesh, int], int]) -> tuple[Any, ...]:
    """A step of two counted micro-batches whose loss is a sum; the same with a divisor of 1."""
    dims = mesh.mesh_dim_names or ()
    options: dict[str, Any] = {"mesh": mesh, "dp": dp}
    if "ep" in dims:
        options |= {"dp": mesh["ep", "edp"]._flatten("data"), "experts": {"edp": ["expert"]}}
    dp_rank = mesh[dp].get_local_rank()
    results = []
    for is_counted in (True, False):
        model = Bag(rows=(4, 3), expert=(5, 2), copy=(3,))
        if "tp" in dims:
            model.place(mesh["tp"], rows=Shard(0))
        grads = {
            name: numbered(*(p.to_local() if isinstance(p, DTensor) else p).shape) * 2.0**dp_rank
            for name, p in model.named_parameters()
        }
        optimizer = sgd([model] if "pp" in dims else model, **options)
        for number in range(2):
            if is_counted:
                optimizer.count(tokens(mesh, dp_rank) if number else 0)
            model(grads).backward()
        optimizer.step()
        results.append((negated(model), float(optimizer.grad_norm)))
    return tuple(results)


def own_tokens(_mesh: DeviceMesh, dp_rank: int) -> int:
    return TOKENS[dp_rank % 2]


@pytest.mark.parametrize(
    ("grid", "dp", "total"),
    [({"pp": 2, "dp": 2, "tp": 2}, "dp", 8), ({"dp": 2, "tp": 2}, "dp", 8),
     ({"ep": 2, "edp": 2}, "edp", 16)],
    ids=str,
)  # fmt: skip
def test_sums_of_every_kind_are_divided_by_the_tokens_of_data_parallel_ranks(
    grid: dict[str, int], dp: str, total: int
):
    for (found, norm), (sums, sums_norm) in threaded_world(grid, counted, dp, own_tokens):
        for name, gradient_sum in sums.items():
            assert torch.equal(found[name] * total, gradient_sum), name
        assert norm * total == sums_norm


@pytest.mark.parametrize("dim", ["pp", "tp"])
def test_model_parallel_ranks_that_count_other_tokens_are_refused_on_all_ranks(dim: str):
    def tokens(mesh: DeviceMesh, dp_rank: int) -> int:
        return own_tokens(mesh, dp_rank) * (mesh.get_local_rank(dim) == 0)

    def run(mesh: DeviceMesh) -> None:
        with pytest.raises(RuntimeError, match=r"optimizer\.count") as error:
            counted(mesh, "dp", tokens)
        assert "0" in str(error.value) and "3" in str(error.value) and "5" in str(error.value)

    threaded_world({"pp": 2, "dp": 2, "tp": 2}, run)
