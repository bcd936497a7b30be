"""A guard and counted tokens on meshes, compared with one process with all gradients."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bag import Bag
from models import local
from torch import Tensor
from torch.distributed.tensor import Shard

import shardcast
from shardcast import checkpoint
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import threaded_world

pytestmark = pytest.mark.filterwarnings("ignore:step skipped")

STAGES: list[dict[str, tuple[int, ...]]] = [{"rows": (4, 3), "early": (5,)}, {"late": (2, 2)}]
SHAPES = {**STAGES[0], **STAGES[1]}
RATE = 2.0**-4
GRIDS: dict[str, dict[str, int]] = {
    "a pipeline": {"pp": 2, "dp": 2},
    "a pipeline of tensor-parallel stages": {"pp": 2, "dp": 2, "tp": 2},
    "experts": {"ep": 2, "edp": 2},
    "replicas": {"copies": 2, "dp": 2},
}


def gradient(name: str, mesh: Any = None) -> Tensor:
    """Return a gradient, the same on data-parallel ranks and different for each expert."""
    shape = SHAPES[name]
    whole = 1.0 + torch.arange(float(math.prod(shape))).view(shape)
    dims = () if mesh is None else mesh.mesh_dim_names
    if "tp" in dims and name == "rows":
        return whole.chunk(2)[mesh.get_local_rank("tp")]
    return whole * 2 if "ep" in dims and name == "late" and mesh.get_local_rank("ep") else whole


def build(mesh: Any, **options: Any) -> tuple[Any, Bag, Any]:
    """Return the argument of ``shard()``, its only module, and the optimizer."""
    dims = () if mesh is None else mesh.mesh_dim_names
    model = Bag(**(STAGES[mesh.get_local_rank("pp")] if "pp" in dims else SHAPES))
    if "tp" in dims and hasattr(model, "rows"):
        model.place(mesh["tp"], rows=Shard(0))
    if mesh is not None:
        options |= {"mesh": mesh}
    if "ep" in dims:
        options |= {"dp": mesh["ep", "edp"]._flatten("data"), "experts": {"edp": ["late"]}}
    if "copies" in dims:
        options |= {"dp": ("copies", "dp")}
    if "cp" in dims:
        options |= {"dp": mesh["dp", "cp"]._flatten("data")}
    part = [model] if "pp" in dims else model
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    return part, model, shardcast.shard(part, sgd, **{"param_dtype": "fp32", **options})


def here(model: Bag) -> dict[str, Tensor]:
    return {name: local(param).clone() for name, param in model.named_parameters()}


# -- a guard --------------------------------------------------------------------------------------

GUARD = {"norm": 4.0, "window": 8}
SPIKES, SAVED, STEPS = {8, 12}, 11, 15
Seen = tuple[set[int], int, list[float], list[dict[str, Tensor]]]


def size_of(step: int, last: bool = False) -> float:
    """Return the factor of gradients; only the last data-parallel rank has spikes."""
    return (1 + 0.01 * (step % 3)) * (30.0 if last and step in SPIKES else 1.0)


def guarded(mesh: Any, steps: range, path: Path | None = None, resumes: bool = False) -> Seen:
    """Return skipped steps, the guard's count, norms, and each step's change of parameters."""
    part, model, optimizer = build(mesh, guard=GUARD)
    if resumes:
        checkpoint.load(path, part, optimizer)
    comm = packed_of(optimizer).comm
    last = mesh is None or comm.rank == comm.size - 1
    skipped, norms, moved = set(), [], []
    for step in steps:
        before = here(model)
        spiky = last and (mesh is None or hasattr(model, "late"))  # only in one stage of a pipeline
        grads = {
            name: gradient(name, mesh) * size_of(step, spiky and name == "late") for name in before
        }
        model(grads).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
        skipped |= {step} if optimizer.last_step_skipped else set()
        moved.append({name: value - before[name] for name, value in here(model).items()})
        if path is not None and step == SAVED and not resumes:
            checkpoint.save(path, part, optimizer, step=step)
    return skipped, optimizer.guarded_steps, norms, moved


def by_rule(norms: list[float]) -> set[int]:
    """Return the steps that the rule skips, computed by hand."""
    accepted: list[float] = []
    spikes = set()
    for step, norm in enumerate(norms):
        window = torch.tensor(accepted[-GUARD["window"] :], dtype=torch.float64)
        if len(window) >= 4 and norm > float(window.mean() + GUARD["norm"] * window.std()):
            spikes.add(step)
        else:
            accepted.append(norm)
    return spikes


@pytest.mark.parametrize("grid", GRIDS)
def test_a_spike_of_one_rank_is_skipped_at_the_same_step_on_all_ranks_and_named(grid: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = threaded_world(GRIDS[grid], guarded, range(STEPS))
    assert by_rule(ranks[0][2]) == SPIKES
    for skipped, count, norms, moved in ranks:
        assert norms == ranks[0][2] and skipped == SPIKES and count == len(SPIKES)
        for step, change in enumerate(moved):
            for name, value in change.items():
                assert bool(value.any()) != (step in SPIKES), (step, name)
    told = [w for w in caught if "skipped by the guard: norm" in str(w.message)]
    assert len(told) == len(SPIKES), "only one rank warns"


def test_a_guard_goes_on_with_its_window_on_another_grid(tmp_path: Path):
    grid = GRIDS["a pipeline of tensor-parallel stages"]
    threaded_world(grid, guarded, range(SAVED + 1), tmp_path)
    steps = range(SAVED + 1, STEPS)
    assert guarded(None, steps)[:2] == (set(), 0), "the control: a new window is not half full"
    ranks = [guarded(None, steps, tmp_path, True)]
    for target in ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 1, "tp": 2}):
        ranks += threaded_world(target, guarded, steps, tmp_path, True)
    assert [rank[:2] for rank in ranks] == [({12}, 2)] * 9


# -- counted tokens -------------------------------------------------------------------------------

FIRST_SCALE, OVERFLOWS = 2.0**6, {1}


def counted(mesh: Any, accumulate: str) -> list[tuple[dict[str, Tensor], float, bool]]:
    """Return parameters, norm and skip of each step; only the last stage scales the loss."""
    _, model, optimizer = build(
        mesh,
        param_dtype=torch.float16,
        loss_scale="dynamic",
        loss_scale_init=FIRST_SCALE,
        accumulate=accumulate,
    )
    rank, dims = packed_of(optimizer).comm.rank, mesh.mesh_dim_names
    scales = "pp" not in dims or mesh.get_local_rank("pp") == 1
    seen = []
    for step in range(3):
        for number in range(2):  # micro-batches
            optimizer.count(tokens(rank, step, number))
            size = 2.0**rank * (math.inf if step in OVERFLOWS and rank == 1 else 1)
            loss = model({name: gradient(name, mesh) * size for name in here(model)})
            (optimizer.scale_loss(loss) if scales else loss * optimizer.loss_scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        scale = float(optimizer.loss_scale)
        assert scale == FIRST_SCALE / (2 if step >= min(OVERFLOWS) else 1)
        seen.append((here(model), float(optimizer.grad_norm), bool(optimizer.last_step_skipped)))
    return seen


def tokens(rank: int, step: int, number: int) -> int:
    return (rank + step) % 3 + 2 * number


@pytest.mark.parametrize(
    ("grid", "accumulate"),
    [
        ({"dp": 2, "cp": 2}, "sharded"),
        ({"dp": 2, "cp": 2}, "local"),
        ({"pp": 2, "dp": 2}, "local"),
        ({"pp": 2, "dp": 2, "cp": 2}, "local"),
        ({"pp": 2, "dp": 2, "tp": 2}, "local"),
    ],
    ids=str,
)
def test_counted_fp16_steps_are_those_of_one_process_on_all_tokens(grid: Any, accumulate: str):
    """Context-parallel ranks count their own tokens; stages and tensor-parallel ranks, the same."""
    size = grid["dp"] * grid.get("cp", 1)
    for rank in threaded_world(grid, counted, accumulate):
        params = {name: torch.zeros_like(value) for name, value in rank[0][0].items()}
        for step, (after, norm, skipped) in enumerate(rank):
            assert skipped == (step in OVERFLOWS)
            if skipped:
                assert all(
                    torch.equal(value, rank[step - 1][0][name]) for name, value in after.items()
                )
                continue
            total = sum(tokens(r, step, number) for r in range(size) for number in range(2))
            factor = 2 * sum(2.0**r for r in range(size)) / total
            for name in params:
                whole, part = gradient(name), params[name]
                whole = whole if whole.shape == part.shape else None
                if whole is not None:
                    part -= (RATE * factor * whole).to(part.dtype)
                    torch.testing.assert_close(after[name], part, rtol=2e-3, atol=0)
            squares = sum(float(gradient(name).square().sum()) for name in SHAPES)
            assert norm == pytest.approx(factor * math.sqrt(squares), rel=1e-6)


def test_a_guard_sees_the_mean_loss_of_all_stages():
    seen: list[float] = []

    def rule(_norm: Tensor, loss: Tensor | None) -> Tensor:
        assert loss is not None
        seen.append(float(loss))
        return loss > 100

    def run(mesh: Any) -> None:
        _, model, optimizer = build(mesh, guard=rule)
        model({name: gradient(name, mesh) for name in here(model)}).backward()
        optimizer.step(loss=2.0 ** (2 * mesh.get_local_rank("pp") + mesh.get_local_rank("dp")))

    threaded_world(GRIDS["a pipeline"], run)
    assert seen == [(1 + 2 + 4 + 8) / 4] * 4
