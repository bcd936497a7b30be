"""Weights that two pipeline stages hold, and gradients that are parts of a sum: known answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bag import Bag
from models import assert_same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(60)

TIE = [("words.weight", "head.weight")]
GRID = {"dp": 2, "pp": 2}


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(5, 3), nn.Embedding(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.positions.weight[: tokens.shape[1]]


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def stage_of(mesh: DeviceMesh) -> nn.Module:
    """Integers everywhere, so that what follows is exact; stages begin with other values."""
    rank = mesh.get_local_rank("pp")
    stage = Last() if rank else First()
    for param in stage.parameters():
        nn.init.constant_(param, 64.0 + rank)
    return stage


def install(stage: nn.Module, value: float) -> None:
    for param in stage.parameters():
        if param.requires_grad:
            param.grad = torch.full_like(param, value)


def one_step(
    mesh: DeviceMesh, tied: Sequence[Sequence[str]], frozen: Sequence[str], **options: Any
) -> dict[str, Any]:
    """SGD with rate 1 on the gradient 2**rank; the change of every parameter, and the norm."""
    stage = stage_of(mesh)
    for name in frozen:
        if name in dict(stage.named_parameters()):
            stage.get_parameter(name).requires_grad_(False)
    sgd = torch.optim.SGD(stage.parameters(), lr=1.0)
    optimizer = shardcast.shard(
        [stage], sgd, mesh=mesh, tied=tied, param_dtype=torch.float32, **options
    )
    before = {name: p.detach().clone() for name, p in stage.named_parameters()}
    install(stage, 2.0 ** mesh.get_rank())
    optimizer.step()
    after = {name: p.detach() for name, p in stage.named_parameters()}
    changes = {name: before[name] - after[name] for name in after}
    for name, change in changes.items():
        assert (change == change.flatten()[0]).all(), name
    return {
        "changes": {name: change.flatten()[0].item() for name, change in changes.items()},
        "values": after,
        "norm": optimizer.grad_norm,
    }


def changes(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Of all stages together; they are the same in all replicas."""
    found: dict[str, float] = {}
    for rank in ranks:
        for name, change in rank["changes"].items():
            assert found.setdefault(name, change) == change, name
    return found


# The means over the data-parallel ranks: of 2**0 and 2**2 on the first stage, 2**1 and 2**3 on
# the last one.
ON_FIRST, ON_LAST = 2.5, 5.0


def test_gradients_of_a_tied_weight_are_added_up_over_its_stages() -> None:
    ranks = threaded_world(GRID, one_step, TIE, ())
    both = ON_FIRST + ON_LAST
    assert changes(ranks) == {
        "words.weight": both,
        "positions.weight": ON_FIRST,
        "norm.weight": ON_LAST,
        "norm.bias": ON_LAST,
        "head.weight": both,
    }
    squares = 15 * both**2 + 12 * ON_FIRST**2 + 6 * ON_LAST**2  # the tied weight counts once
    for rank in ranks:
        torch.testing.assert_close(rank["norm"].item(), math.sqrt(squares), rtol=1e-6, atol=0)
    for first, last in (ranks[:2], ranks[2:]):
        same = {"weight": first["values"]["words.weight"]}
        assert_same_bits(same, {"weight": last["values"]["head.weight"]})
        assert (same["weight"] == 64.0 - both).all()  # the first holder's value, less the change


def test_weights_that_are_not_tied_keep_gradients_of_their_own() -> None:
    ranks = threaded_world(GRID, one_step, (), ())
    assert changes(ranks) == {
        "words.weight": ON_FIRST,
        "positions.weight": ON_FIRST,
        "norm.weight": ON_LAST,
        "norm.bias": ON_LAST,
        "head.weight": ON_LAST,
    }
    squares = 27 * ON_FIRST**2 + 21 * ON_LAST**2
    for rank in ranks:
        torch.testing.assert_close(rank["norm"].item(), math.sqrt(squares), rtol=1e-6, atol=0)


def test_a_frozen_tied_weight_stays_as_it_is() -> None:
    ranks = threaded_world(GRID, one_step, TIE, ("words.weight", "head.weight"))
    found = changes(ranks)
    assert (found["words.weight"], found["head.weight"]) == (0.0, 0.0)
    assert (found["positions.weight"], found["norm.bias"]) == (ON_FIRST, ON_LAST)


def test_a_frozen_stage_lets_the_others_train() -> None:
    names = ("words.weight", "positions.weight")
    found = changes(threaded_world(GRID, one_step, (), names))
    assert (found["words.weight"], found["positions.weight"]) == (0.0, 0.0)
    assert (found["norm.bias"], found["head.weight"]) == (ON_LAST, ON_LAST)


@pytest.mark.parametrize("frozen", [(), ("norm.weight",)], ids=["trained", "frozen"])
def test_partial_gradients_of_norms_are_added_up_over_tensor_parallel_ranks(
    frozen: Sequence[str],
) -> None:
    def run(mesh: DeviceMesh) -> dict[str, Any]:
        # The first stage has no norm, which the pattern of all stages may well match elsewhere.
        return one_step(mesh, (), frozen, grad_sum_over={"tp": ["norm.*"]})

    ranks = threaded_world({"dp": 1, "pp": 2, "tp": 2}, run)
    first, last = changes(ranks[2:3]), changes(ranks[3:])
    expected = {"norm.weight": 0.0 if frozen else 4.0 + 8.0, "norm.bias": 4.0 + 8.0}
    assert first == {**expected, "head.weight": 4.0}  # a whole gradient: each rank takes its own
    assert last == {**expected, "head.weight": 8.0}


def trained(mesh: DeviceMesh, tied: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """100 steps on random gradients, two of which are skipped."""
    stage = stage_of(mesh)
    adamw = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    optimizer = shardcast.shard([stage], adamw, mesh=mesh, tied=tied, max_grad_norm=1.0)
    for step in range(100):
        for param in stage.parameters():
            param.grad = torch.randn_like(param)
        if step % 50 == 20 and mesh.get_rank() == 3:
            stage.head.weight.grad[0, 0] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 2
    return {name: p.detach() for name, p in stage.named_parameters()}


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("tied", [True, False])
def test_tied_copies_have_the_same_bits_after_100_steps_with_skips(tied: bool) -> None:
    ranks = threaded_world(GRID, trained, TIE if tied else ())
    assert torch.equal(ranks[0]["words.weight"], ranks[1]["head.weight"]) is tied
    for one, other in zip(ranks[:2], ranks[2:], strict=True):
        assert_same_bits(one, other)


def test_a_pattern_needs_to_match_on_one_stage_only() -> None:
    def run(mesh: DeviceMesh, pattern: str) -> dict[str, torch.dtype]:
        stage = stage_of(mesh)
        sgd = torch.optim.SGD(stage.parameters(), lr=1.0)
        shardcast.shard([stage], sgd, mesh=mesh, keep_fp32=[pattern])
        return {name: p.dtype for name, p in stage.named_parameters()}

    first, last = threaded_world(GRID, run, "norm.*")[:2]
    assert set(first.values()) == {torch.bfloat16}
    assert (last["norm.bias"], last["head.weight"]) == (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"keep_fp32: the pattern 'nrm.*' matches no parameter"):
        threaded_world(GRID, run, "nrm.*")


class Tables(nn.Module):
    """A stage with a table that every stage has a copy of, and a parameter of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0) + number)
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3)})


def test_two_stages_of_a_rank_may_each_have_a_buffer_of_one_name() -> None:
    def run(mesh: DeviceMesh) -> list[Tensor]:
        stages = [Tables(number) for number in (mesh.get_local_rank("pp"), 2)]
        params = [p for stage in stages for p in stage.parameters()]
        shardcast.shard(stages, torch.optim.SGD(params, lr=1.0), mesh=mesh, cast_buffers=True)
        return [stage.angles for stage in stages]

    for first, second in threaded_world({"dp": 2, "pp": 1}, run):
        assert first.dtype == second.dtype == torch.bfloat16
        assert (first.tolist(), second.tolist()) == ([0.0, 1.0, 2.0], [2.0, 3.0, 4.0])


def test_sharded_gradients_are_refused_in_a_pipeline() -> None:
    def run(mesh: DeviceMesh) -> None:
        stage = stage_of(mesh)
        sgd = torch.optim.SGD(stage.parameters(), lr=1.0)
        shardcast.shard([stage], sgd, mesh=mesh, grads="sharded")

    with pytest.raises(ValueError, match="grads: expected 'full' in a pipeline"):
        threaded_world(GRID, run)


def test_a_stage_has_ties_with_several_others():
    """Its groups differ in number from theirs, by which torch would name them differently."""
    names = [("a", "b"), ("c",), ("d",), ("e",)]
    ties = [("a.weight", "e.weight"), ("b.weight", "d.weight")]

    def train(mesh: DeviceMesh) -> list[float]:
        stage = nn.ModuleDict({n: nn.Linear(2, 2) for n in names[mesh.get_local_rank("pp")]})
        for param in stage.parameters():
            nn.init.ones_(param)
        optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
        optimizer = shardcast.shard([stage], optimizer, mesh=mesh, tied=ties, param_dtype="fp32")
        for param in stage.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return [layer.weight[0, 0].item() for layer in stage.values()]

    assert threaded_world({"dp": 1, "pp": 4}, train) == [[-1.0, -1.0], [0.0], [-1.0], [-1.0]]


PAIRS = [("a", "y"), ("b", "x")]
STAGES = [("a", "b"), ("z",), ("x", "y")]  # the last one holds its ties in another order
GRADIENTS = {"a": 1.0, "b": 10.0, "x": 100.0, "y": 1000.0, "z": 1.0}


def in_other_order(mesh: DeviceMesh, frozen: bool) -> dict[str, float]:
    """What each parameter is after a step from a value of its own, or where it is left out."""
    names = STAGES[:: 2 // (mesh["pp"].size() - 1)][mesh.get_local_rank("pp")]
    model = Bag(**dict.fromkeys(names, (4, 3)))
    for name, param in model.named_parameters():
        nn.init.constant_(param, 2.0 + ord(name))
    params = [nn.Parameter(torch.zeros(1))] if frozen else list(model.parameters())
    if frozen:
        model.register_parameter(f"own{names[0]}", params[0])
    optimizer = torch.optim.SGD(params, lr=1.0)
    optimizer = shardcast.shard([model], optimizer, mesh=mesh, tied=PAIRS, param_dtype="fp32")
    for name in () if frozen else names:
        param = model.get_parameter(name)
        param.grad = torch.full_like(param, GRADIENTS[name])
    optimizer.step()
    return {name: model.get_parameter(name)[0, 0].item() for name in names}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "left out"])
def test_two_stages_may_hold_their_ties_in_two_orders(stages: int, frozen: bool):
    first, *_, last = threaded_world({"dp": 1, "pp": stages}, in_other_order, frozen)
    a, b = (2.0 + ord("a"), 2.0 + ord("b")) if frozen else (99.0 - 1001.0, 100.0 - 110.0)
    assert (first, last) == ({"a": a, "b": b}, {"x": b, "y": a})


def test_a_tied_weight_has_one_owner_on_both_stages_where_owners_have_whole_parameters():
    """Each stage has other parameters beside it, by which the ranks' loads are evened out."""

    def train(mesh: DeviceMesh) -> Tensor:
        last = mesh.get_local_rank("pp")
        model = Bag(c=(16, 4), d=(9, 9), head=(6, 4)) if last else Bag(embed=(6, 4), a=(3, 3))
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        optimizer = shardcast.shard([model], optimizer, mesh=mesh, tied=[("embed", "head")])
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        return (model.head if last else model.embed).detach()

    first, *rest = threaded_world({"pp": 2, "dp": 3}, train)
    assert first.any() and all(torch.equal(first, other) for other in rest)


def trained_in_one_place(mesh: DeviceMesh, clears: bool) -> list[float]:
    """Three steps of two parameters; in the first one one rank alone has a gradient of a copy."""
    stage, part = mesh.get_local_rank("pp"), mesh.get_local_rank("tp")
    model = Bag(**{("embed", "head")[stage]: (6, 4), "parts": (5,)})
    copy, parts = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    optimizer = shardcast.shard(
        [model], optimizer, mesh=mesh, tied=[("embed", "head")], divisor=1, param_dtype="fp32",
        grad_sum_over={"tp": ["parts"]},
    )  # fmt: skip
    found = []
    for step in range(3):
        if step == 0 and mesh.get_local_rank("dp") == 0:
            if stage == 0:
                copy.grad = torch.ones_like(copy)
            if part == 0:
                parts.grad = torch.ones_like(parts)
        if clears and step == 1:
            optimizer.clip_grad_norm_(1.0)  # reduces
        if clears:
            copy.grad = parts.grad = None
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        found += [copy[0, 0].item(), parts[0].item()]
    return found


def test_a_gradient_of_one_copy_trains_all_copies_and_none_leaves_them_alone():
    grid = {"pp": 2, "dp": 2, "tp": 2}
    assert threaded_world(grid, trained_in_one_place, False) == [[-1.0, -1.0] * 3] * 8
    assert threaded_world(grid, trained_in_one_place, True) == [[0.0, 0.0] * 3] * 8


def test_copies_that_were_frozen_train_from_the_first_gradient_of_one_of_them_on():
    def train(mesh: DeviceMesh) -> list[float]:
        last = mesh.get_local_rank("pp")
        model = Bag(**{"head" if last else "embed": (6, 4)}, own=(2,))
        copy, own = model.parameters()
        copy.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = shardcast.shard(
            [model], optimizer, mesh=mesh, tied=[("embed", "head")], param_dtype="fp32"
        )
        copy.requires_grad_(True)
        (copy if last else own).grad = torch.ones_like(copy if last else own)
        optimizer.step()
        return [copy[0, 0].item(), own[0].item()]

    assert threaded_world({"pp": 2, "dp": 1}, train) == [[-1.0, -1.0], [-1.0, 0.0]]
