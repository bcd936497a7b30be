"""torch's pipelines with data parallelism: two pipeline ranks times two.

The cases and tolerances are those of torch's test_composability.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

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

LAYERS, WIDTH, MICRO_BATCHES, STEPS = 4, 10, 4, 3
LAST = str(LAYERS - 1)
FP32, BF16 = torch.float32, torch.bfloat16
GRID = {"dp": 2, "pp": 2}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(torch.relu(self.net1(x)))


class Layers(nn.ModuleDict):
    """A range of layers, under their names in the whole model."""

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


def tie(first: nn.Module, last: nn.Module) -> None:
    last.net2.weight = first.net1.weight


def adam(stages: Sequence[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.ModuleList(stages).parameters(), lr=1e-2)  # a shared weight once


def values(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for stage in stages for name, p in stage.named_parameters()}


class How(NamedTuple):
    """Options of :func:`pipelined`."""

    as_list: bool = True
    scale_grads: bool = False
    late: bool = False  # add a group after shard()
    autocast: bool = False
    counted: bool = False  # the loss is a sum, and its rows are counted
    shared: bool = False  # the first and the last stage share a weight


def pipelined(mesh: DeviceMesh, schedule: str, dtype: torch.dtype, how: How) -> dict[str, Any]:
    """Train this rank's stages; return their values, and the norms of all steps."""
    pp, dp_rank = mesh["pp"], mesh.get_local_rank("dp")
    here, dp_log = pp.get_local_rank(), mesh.get_group("dp").log
    kind = get_schedule_class(schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    count = 4 if several else 2
    numbers = range(here, 4 - here, 3 - 2 * here) if "ZBV" in schedule else range(here, count, 2)
    size = LAYERS // count
    stages = [layers(number * size, (number + 1) * size) for number in numbers]
    if how.shared and here == 0:
        tie(stages[0]["0"], stages[1][LAST])
    inner = adam(stages)
    params = inner.param_groups[0]["params"]
    added = params[::3] if how.late else []
    inner.param_groups[0]["params"] = [p for p in params if not any(p is late for late in added)]
    optimizer = shardcast.shard(
        stages if how.as_list else stages[0],
        inner,
        mesh=mesh,
        param_dtype=dtype,
        autocast=how.autocast,
    )
    parts = [
        PipelineStage(stage, number, count, torch.device("cpu"), group=pp.get_group())
        for number, stage in zip(numbers, stages, strict=True)
    ]
    is_sum = how.scale_grads or how.counted
    pipeline = kind(
        parts if several else parts[0],
        MICRO_BATCHES,
        loss_fn=lambda output, x: mean_loss(output, x) / (1 if is_sum else MICRO_BATCHES),
        scale_grads=how.scale_grads,
    )
    if added:
        optimizer.add_param_group({"params": added})
    norms, sent = [], 0
    for step in range(STEPS):
        x = inputs(step, dp_rank)
        before = len(dp_log)
        target = x if parts[-1].is_last else None
        if how.counted:
            optimizer.count(len(x))
        pipeline.step(*[x] * parts[0].is_first, target=target)
        sent += len(dp_log) - before
        optimizer.step()
        optimizer.zero_grad()
        if not how.shared:  # torch has no eval() for V schedules
            pipeline.eval(*[x] * parts[0].is_first, target=target)
        norms.append(optimizer.grad_norm)
    return {"values": values(stages), "norms": torch.stack(norms), "sent": sent}


def data_parallel(group: Any, dtype: torch.dtype, backwards: bool, shared: bool) -> dict[str, Any]:
    """Train without a pipeline on two ranks, optionally with micro-batches in reverse order."""
    model = layers()
    if shared:
        tie(model["0"], model[LAST])
    optimizer = shardcast.shard(model, adam([model]), process_group=group, param_dtype=dtype)
    norms = []
    for step in range(STEPS):
        micro_batches = inputs(step, group.rank()).split(1)
        for number, x in enumerate(micro_batches[::-1] if backwards else micro_batches, 1):
            with nullcontext() if number == MICRO_BATCHES else optimizer.no_sync():
                (mean_loss(model(x), x) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return {"values": values([model]), "norms": torch.stack(norms)}


PLAIN = How()


@functools.cache
def without_pipeline(
    dtype: torch.dtype = FP32, backwards: bool = False, shared: bool = False
) -> dict[str, Any]:
    return run_world(2, data_parallel, dtype, backwards, shared)[0][0]


@functools.cache
def on_four(schedule: str, dtype: torch.dtype = FP32, how: How = PLAIN) -> list[dict[str, Any]]:
    ranks = threaded_world(GRID, pipelined, schedule, dtype, how, timeout=60)
    for one, other in zip(ranks[:2], ranks[2:], strict=True):  # the replicas
        assert_same_bits(one["values"], other["values"])
    assert all(torch.equal(rank["norms"], ranks[0]["norms"]) for rank in ranks)
    return ranks


def joined(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the parameters of all stages."""
    return ranks[0]["values"] | ranks[1]["values"]


def test_data_parallelism_alone_trains_as_one_process_does():
    """The tests below compare pipelines with data parallelism."""
    model, norms = layers(), []
    optimizer = adam([model])
    for step in range(STEPS):
        for rank in range(2):
            x = inputs(step, rank)
            (mean_loss(model(x), x) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), torch.inf))
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(without_pipeline()["values"], values([model]))
    torch.testing.assert_close(without_pipeline()["norms"], torch.stack(norms))


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        ("GPipe", FP32),
        ("1F1B", FP32),
        ("1F1B", BF16),
        ("Interleaved1F1B", FP32),
        ("LoopedBFS", FP32),
        ("InterleavedZeroBubble", FP32),
        ("InterleavedZeroBubble", BF16),
    ],
    ids=str,
)
def test_a_pipeline_gives_what_data_parallelism_alone_gives(schedule: str, dtype: torch.dtype):
    ranks = on_four(schedule, dtype)
    expected = without_pipeline(dtype, backwards=schedule == "LoopedBFS")
    assert_same_bits(joined(ranks), expected["values"])
    torch.testing.assert_close(ranks[0]["norms"], expected["norms"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("schedule", "dtype", "how"),
    [
        ("InterleavedZeroBubble", BF16, How(autocast=True)),  # only affects these layers
        ("1F1B", FP32, How(scale_grads=True)),
        ("InterleavedZeroBubble", FP32, How(scale_grads=True)),
        ("1F1B", FP32, How(as_list=False)),
        ("Interleaved1F1B", FP32, How(scale_grads=True, late=True)),
    ],
    ids=str,
)
def test_what_is_said_otherwise_moves_no_bit(schedule: str, dtype: torch.dtype, how: How):
    """Covers the loss scaled by script or schedule, one stage or a list, and a late group."""
    plain, ranks = on_four(schedule, dtype), on_four(schedule, dtype, how)
    assert_same_bits(joined(ranks), joined(plain))
    assert torch.equal(ranks[0]["norms"], plain[0]["norms"])
    assert all(rank["sent"] == 0 for rank in ranks)


@pytest.mark.parametrize(
    ("schedule", "how"),
    [("1F1B", How(counted=True)), ("ZBVZeroBubble", How(shared=True))],
    ids=str,
)
def test_counted_rows_and_weights_of_two_stages_of_a_rank_train_as_without_a_pipeline(
    schedule: str, how: How
):
    """It also warns to pass scale_grads=False, since torch divides silently."""
    if how.shared and torch.__version__ < (2, 13):
        pytest.skip("torch sends to itself, which fails")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        on_four.cache_clear()
        ranks = on_four(schedule, FP32, how)
    told = " ".join(str(warning.message) for warning in warned)
    assert "scale_grads=False" in told
    expected = without_pipeline(shared=how.shared)
    torch.testing.assert_close(ranks[0]["norms"], expected["norms"], rtol=1e-5, atol=0)
    for name, value in joined(ranks).items():
        name = "0.net1.weight" if how.shared and name == f"{LAST}.net2.weight" else name
        torch.testing.assert_close(value, expected["values"][name], rtol=1e-5, atol=1e-6)
