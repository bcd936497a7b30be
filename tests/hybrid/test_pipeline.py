"""Pipelines of torch beside data parallelism: two stages' ranks times two.

Cases of torch's test_composability, with its sizes and tolerances.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import assert_same_bits, run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import shardcast
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)

LAYERS, WIDTH, MICRO_BATCHES, STEPS = 8, 10, 8, 3
FP32, BF16 = torch.float32, torch.bfloat16
GRID = {"dp": 2, "pp": 2}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(torch.relu(self.net1(x)))


class Layers(nn.ModuleDict):
    """Layers of a range, under the names that they have in the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def layers(start: int = 0, stop: int = LAYERS) -> Layers:
    torch.manual_seed(0)
    whole = [Layer() for _ in range(LAYERS)]
    return Layers({str(number): whole[number] for number in range(start, stop)})


def inputs(step: int, dp_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dp_rank)
    return torch.rand((MICRO_BATCHES, WIDTH), generator=generator)


def mean_loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def adam(model: nn.Module | list[Layers]) -> torch.optim.Optimizer:
    modules = model if isinstance(model, list) else [model]
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr=1e-2)


def values(*modules: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for m in modules for name, p in m.named_parameters()}


def pipelined(
    mesh: DeviceMesh,
    schedule: str,
    dtype: torch.dtype,
    as_list: bool = True,
    scale_grads: bool = False,
    overlap: bool = False,
    late: bool = False,
    autocast: bool = False,
    counted: bool = False,
) -> dict[str, Any]:
    """Train this rank's stages; what they hold at the end, and the norms of all steps."""
    pp, dp_rank = mesh["pp"], mesh.get_local_rank("dp")
    kind = get_schedule_class(schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    count = 4 if several else 2
    numbers = range(pp.get_local_rank(), count, 2)
    size = LAYERS // count
    stages = [layers(number * size, (number + 1) * size) for number in numbers]
    model = stages if as_list else stages[0]
    inner = adam(stages)
    added = inner.param_groups[0]["params"][::3] if late else []
    inner.param_groups[0]["params"] = [
        p for p in inner.param_groups[0]["params"] if not any(p is other for other in added)
    ]
    optimizer = shardcast.shard(model, inner, mesh=mesh, param_dtype=dtype, autocast=autocast)
    parts = [
        PipelineStage(stage, number, count, torch.device("cpu"), group=pp.get_group())
        for number, stage in zip(numbers, stages, strict=True)
    ]

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return mean_loss(output, target) / (1 if scale_grads or counted else MICRO_BATCHES)

    pipeline = kind(
        parts if several else parts[0], MICRO_BATCHES, loss_fn=loss_of, scale_grads=scale_grads
    )
    if overlap:
        optimizer.overlap_reduce(parts)
    if added:
        optimizer.add_param_group({"params": added})
    norms, sent = [], []
    for step in range(STEPS):
        x = inputs(step, dp_rank)
        before = len(mesh.get_group("dp").log)
        target = x if parts[-1].is_last else None
        if counted:
            optimizer.count(len(x))
        pipeline.step(*[x] * parts[0].is_first, target=target)
        sent.append(len(mesh.get_group("dp").log) - before)
        optimizer.step()
        optimizer.zero_grad()
        if overlap:
            before = len(mesh.get_group("dp").log)
            pipeline.eval(*[x] * parts[0].is_first, target=target)
            assert len(mesh.get_group("dp").log) == before
        norms.append(optimizer.grad_norm)
    return {"values": values(*stages), "norms": torch.stack(norms), "sent": sent}


def data_parallel(group: Any, dtype: torch.dtype, backwards: bool) -> dict[str, Any]:
    """The same without a pipeline, on two ranks; also from the last micro-batch to the first."""
    model = layers()
    optimizer = shardcast.shard(model, adam(model), process_group=group, param_dtype=dtype)
    norms = []
    for step in range(STEPS):
        micro_batches = inputs(step, group.rank()).split(1)
        for number, x in enumerate(micro_batches[::-1] if backwards else micro_batches, 1):
            with nullcontext() if number == MICRO_BATCHES else optimizer.no_sync():
                (mean_loss(model(x), x) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return {"values": values(model), "norms": torch.stack(norms)}


@functools.cache
def without_pipeline(dtype: torch.dtype, backwards: bool = False) -> dict[str, Any]:
    ranks, _ = run_world(2, data_parallel, dtype, backwards)
    return ranks[0]


@functools.cache
def by_torch() -> dict[str, Any]:
    """One process, torch's own optimizer and norm."""
    model, norms = layers(), []
    optimizer = adam(model)
    for step in range(STEPS):
        for rank in range(2):
            x = inputs(step, rank)
            (mean_loss(model(x), x) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), torch.inf))
        optimizer.step()
        optimizer.zero_grad()
    return {"values": values(model), "norms": torch.stack(norms)}


@functools.cache
def on_four(schedule: str, dtype: torch.dtype, **how: bool) -> list[dict[str, Any]]:
    return threaded_world(GRID, functools.partial(pipelined, **how), schedule, dtype)


def joined(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The parameters of all stages; those of the two replicas have the same bits."""
    for one, other in zip(ranks[:2], ranks[2:], strict=True):
        assert_same_bits(one["values"], other["values"])
    found = ranks[0]["values"] | ranks[1]["values"]
    assert len(found) == 4 * LAYERS
    return found


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_a_pipeline_with_data_parallelism_trains_as_one_process_does(schedule: str):
    ranks = on_four(schedule, FP32)
    torch.testing.assert_close(joined(ranks), by_torch()["values"])
    for rank in ranks:
        torch.testing.assert_close(rank["norms"], by_torch()["norms"])


@pytest.mark.parametrize(("overlap", "scale_grads"), [(False, False), (True, False), (True, True)])
def test_counted_rows_of_a_pipeline_train_as_their_mean_in_one_process(
    overlap: bool, scale_grads: bool
):
    """Where it reduces stages early, the optimizer knows of the schedule's own division."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ranks = on_four("1F1B", FP32, overlap=overlap, scale_grads=scale_grads, counted=True)
    # Else torch divides silently where the schedule is not told otherwise.
    assert any("overlap_reduce" in str(warning.message) for warning in warned) == (not overlap)
    torch.testing.assert_close(joined(ranks), by_torch()["values"])
    for rank in ranks:
        torch.testing.assert_close(rank["norms"], by_torch()["norms"])


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [("1F1B", FP32), ("1F1B", BF16), ("Interleaved1F1B", FP32), ("LoopedBFS", FP32),
     ("InterleavedZeroBubble", FP32), ("InterleavedZeroBubble", BF16)],
    ids=str,
)  # fmt: skip
def test_a_pipeline_gives_what_data_parallelism_alone_gives(schedule: str, dtype: torch.dtype):
    ranks = on_four(schedule, dtype)
    expected = without_pipeline(dtype, backwards=schedule == "LoopedBFS")
    assert_same_bits(joined(ranks), expected["values"])
    for rank in ranks:
        torch.testing.assert_close(rank["norms"], expected["norms"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("schedule", "dtype", "how"),
    [
        ("1F1B", BF16, {"autocast": True}),  # which casts these layers alone
        ("Interleaved1F1B", BF16, {"autocast": True}),
        ("1F1B", FP32, {"scale_grads": True}),
        ("InterleavedZeroBubble", FP32, {"scale_grads": True}),
        ("1F1B", FP32, {"as_list": False}),
        ("Interleaved1F1B", FP32, {"scale_grads": True, "overlap": True, "late": True}),
    ],
    ids=str,
)
def test_what_is_said_otherwise_moves_no_bit(schedule: str, dtype: torch.dtype, how: Any):
    """A scaled loss or the schedule's scale, one stage or a list, a group that is added late."""
    assert_same_bits(joined(on_four(schedule, dtype, **how)), joined(on_four(schedule, dtype)))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_stages_are_reduced_beside_a_step_of_the_schedule_not_in_its_eval_with_the_same_bits(
    schedule: str,
):
    ranks = on_four(schedule, FP32, scale_grads=True, overlap=True)
    several = issubclass(get_schedule_class(schedule), PipelineScheduleMulti)
    for rank, plain in zip(ranks, on_four(schedule, FP32), strict=True):
        assert_same_bits(rank["values"], plain["values"])
        assert torch.equal(rank["norms"], plain["norms"])
        assert sum(plain["sent"]) == 0 < (2 if several else 1) * STEPS <= sum(rank["sent"])


def test_a_second_schedule_before_the_step_is_refused_where_stages_are_reduced_at_once():
    def twice(mesh: DeviceMesh) -> str:
        pp = mesh["pp"]
        stage = layers()
        optimizer = shardcast.shard([stage], adam(stage), mesh=mesh, param_dtype=FP32)
        part = PipelineStage(stage, 0, 1, torch.device("cpu"), group=pp.get_group())
        part.has_backward = True  # as in a schedule's step
        optimizer.overlap_reduce([part])
        with pytest.raises(ValueError, match="expected the 1 PipelineStage"):
            optimizer.overlap_reduce([])
        x = inputs(0, 0)
        second = "ran a second time before step"
        mean_loss(stage(x), x).backward()
        part.scale_grads(8)
        with pytest.raises(RuntimeError, match=second):
            part.scale_grads(8)  # as of a zero-bubble schedule, whose gradients no hook sees
        with pytest.raises(RuntimeError, match=second):
            mean_loss(stage(x), x).backward()
        optimizer.zero_grad()  # forgets it
        mean_loss(stage(x), x).backward()
        part.scale_grads(8)
        optimizer.step()
        return str(optimizer.grad_norm)

    first, second = threaded_world({"dp": 2, "pp": 1}, twice)
    assert first == second


def shared_in_a_v(
    mesh: DeviceMesh, overlap: bool, scale_grads: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """First and last stage are on one rank and share a weight; their gradients are one sum."""
    pp = mesh["pp"]
    numbers = (0, 3) if pp.get_local_rank() == 0 else (1, 2)
    size = LAYERS // 4
    stages = [layers(number * size, (number + 1) * size) for number in numbers]
    if numbers[0] == 0:
        tie(stages[0]["0"], stages[1]["7"])
    adam_of_all = adam(nn.ModuleList(stages))  # which lists a shared weight once
    optimizer = shardcast.shard(stages, adam_of_all, mesh=mesh, param_dtype=FP32)
    parts = [
        PipelineStage(stage, number, 4, torch.device("cpu"), group=pp.get_group())
        for number, stage in zip(numbers, stages, strict=True)
    ]

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return mean_loss(output, target) / (1 if scale_grads else MICRO_BATCHES)

    schedule = get_schedule_class("ZBVZeroBubble")(
        parts, MICRO_BATCHES, loss_fn=loss_of, scale_grads=scale_grads
    )
    if overlap:
        optimizer.overlap_reduce(parts)
    for step in range(STEPS):
        x = inputs(step, mesh.get_local_rank("dp"))
        schedule.step(*[x] * parts[0].is_first, target=x if parts[-1].is_last else None)
        optimizer.step()
        optimizer.zero_grad()
    return values(*stages), optimizer.grad_norm


def tie(first: nn.Module, last: nn.Module) -> None:
    last.net2.weight = first.net1.weight


def without_a_v(group: Any) -> tuple[dict[str, Tensor], Tensor]:
    model = layers()
    tie(model["0"], model["7"])
    optimizer = shardcast.shard(model, adam(model), process_group=group, param_dtype=FP32)
    for step in range(STEPS):
        for number, x in enumerate(inputs(step, group.rank()).split(1), 1):
            with nullcontext() if number == MICRO_BATCHES else optimizer.no_sync():
                (mean_loss(model(x), x) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model), optimizer.grad_norm


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch sends to itself, which fails")
@pytest.mark.parametrize(("overlap", "scale_grads"), [(False, False), (True, False), (True, True)])
def test_a_v_schedule_shares_a_weight_between_the_stages_of_one_rank(
    overlap: bool, scale_grads: bool
):
    (expected, norm), *_ = run_world(2, without_a_v)[0]
    with pytest.warns(UserWarning, match="scale_grads"):
        world = threaded_world(GRID, shared_in_a_v, overlap, scale_grads, timeout=60)
    for found, its_norm in world:
        torch.testing.assert_close(its_norm, norm, rtol=1e-5, atol=0)
        for name, value in found.items():
            name = "0.net1.weight" if name == "7.net2.weight" else name  # shared
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
