"""Options, clips, accumulation, edits and skips work on a mesh as with data parallelism alone.

Each case trains a few steps on tensor-parallel ranks, and on replicas of shards. Norms and
parameters must be those of data-parallel ranks alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models import assert_same_bits, full
from oracle import adamw
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardcast
from shardcast import ShardedOptimizer
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)

VOCAB, LENGTH = 11, 6


class FeedForward(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Language(nn.Module):
    """Tokens to logits. ``gain`` stays a plain parameter and acts on a part of the sequence."""

    def __init__(self, width: int = 16, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.gain = nn.Parameter(torch.ones(dim))
        self.norm, self.last = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wide = FeedForward(dim, width)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.gain
        return self.head(self.last(x + self.wide(self.norm(x))))


PARTS = {"tp": ["gain"]}  # grad_sum_over of Language


def parallel(model: Language, mesh: DeviceMesh) -> Language:
    """Parallelize ``model`` over the tensor-parallel ``mesh``, with sequence parallelism."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "wide": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "wide.up": ColwiseParallel(use_local_output=False),
        "wide.down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelized: Language = parallelize_module(model, mesh, plan)
    return parallelized


def batches(steps: int, size: int = 8) -> Iterator[Tensor]:
    """Yield global batches of tokens that follow a learnable rule."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        start = torch.randint(VOCAB, (size, 1), generator=generator)
        yield (start + 3 * torch.arange(LENGTH + 1)) % VOCAB


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


STEPS = 3
Act = Callable[[nn.Module, ShardedOptimizer, int], Any]
Backward = Callable[[nn.Module, ShardedOptimizer, Tensor, int], None]


def at_once(model: nn.Module, optimizer: ShardedOptimizer, batch: Tensor, _step: int) -> None:
    optimizer.scale_loss(loss_of(model, batch)).backward()


def in_halves(model: nn.Module, optimizer: ShardedOptimizer, batch: Tensor, step: int) -> None:
    first, second = batch.chunk(2)
    # Without no_sync, the second backward adds to reduced gradients.
    with optimizer.no_sync() if step else nullcontext():
        (loss_of(model, first) / 2).backward()
    (loss_of(model, second) / 2).backward()


def overflows(model: nn.Module, _optimizer: Any, batch: Tensor, step: int) -> None:
    (loss_of(model, batch) * (float("inf") if step == 1 else 1.0)).backward()


def nothing(_model: nn.Module, _optimizer: ShardedOptimizer, _step: int) -> None:
    pass


def edits(model: nn.Module, optimizer: ShardedOptimizer, step: int) -> None:
    if step == 1:
        optimizer.gather_gradients()
    for param in model.parameters():
        if param.grad is not None:
            if step == 1:
                param.grad = param.grad * 0.5
            else:
                param.grad.mul_(0.5)
    for absent in (model.norm.weight, model.wide.up.weight, model.gain):
        absent.grad = None


def freezes(model: nn.Module, _optimizer: ShardedOptimizer, step: int) -> None:
    """Freeze parameters in the second step."""
    for param in (model.head.weight, model.gain, model.norm.weight):
        param.requires_grad_(step != 0)


def loads(model: nn.Module, optimizer: ShardedOptimizer, _step: int) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict())


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.SGD(
        [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim < 2], "lr": 0.03, "max_grad_norm": 0.05},
        ],
        lr=0.1,
        momentum=0.9,
    )


class Case(NamedTuple):
    """The backward, the actions before and after a step, the optimizer, and options."""

    backward: Backward = at_once
    before: Act = nothing
    after: Act = nothing
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    fields: dict[str, Any] = {}  # noqa: RUF012, never modified


BF16 = {"param_dtype": "bf16", "autocast": False, "fuse": "eager", "max_grad_norm": 0.1}
CASES = {
    "adamw": Case(),
    "groups": Case(optimizer=two_groups),
    "largest, halves": Case(in_halves, fields={"norm_type": float("inf"), "max_grad_norm": 0.01}),
    "sum, whole": Case(fields={"norm_type": 1.0, "partition": "whole"}),
    "clip_grad_norm_, scaled": Case(
        before=lambda _m, o, _: o.clip_grad_norm_(0.1), fields={"loss_scale": 1024.0}
    ),
    "clip_grad_value_, packs": Case(
        before=lambda _m, o, _: o.clip_grad_value_(0.01),
        fields={"pack_params": 1, "reduce": "reduce_scatter", "sync": "broadcast"},
    ),
    "edits": Case(before=edits),
    "skips, loads": Case(overflows, after=loads),
    "freezes": Case(after=freezes),
    "sharded": Case(in_halves, fields={"accumulate": "sharded"}),
    "bf16": Case(fields=BF16),
    "split16": Case(fields={**BF16, "master": "split16"}),
    "overlap": Case(fields={"overlap_sync": True}),
}

Seen = tuple[list[float], dict[str, Tensor]]


def train(mesh: DeviceMesh, dp: Any) -> dict[str, Seen]:
    """Run all cases; return norms and the final whole parameters."""
    return {name: train_one(mesh, dp, case) for name, case in CASES.items()}


def train_one(mesh: DeviceMesh, dp: Any, case: Case) -> Seen:
    torch.manual_seed(0)
    model, options = Language(6), {"param_dtype": "fp32", **case.fields}
    if "tp" in (mesh.mesh_dim_names or ()):
        parallel(model, mesh["tp"])
        options["grad_sum_over"] = PARTS
    optimizer = shardcast.shard(model, case.optimizer(model), mesh=mesh, dp=dp, **options)
    place, parts = 0, 1
    for dim in [dp] if isinstance(dp, str) else dp:
        place = place * mesh[dim].size() + mesh.get_local_rank(dim)
        parts *= mesh[dim].size()
    norms = []
    for step, batch in enumerate(batches(STEPS)):
        case.backward(model, optimizer, batch.chunk(parts)[place], step)
        case.before(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
        case.after(model, optimizer, step)
        norms.append(torch.nan_to_num(optimizer.grad_norm).item())
    assert optimizer.skipped_steps == (case.backward is overflows)
    optimizer.wait_sync()
    return norms, {name: full(param) for name, param in model.named_parameters()}


@functools.cache
def on_two_ranks() -> dict[str, Seen]:
    return threaded_world({"dp": 2}, train, "dp")[0]


@pytest.mark.parametrize(
    ("grid", "dp"),
    [({"dp": 2, "tp": 2}, "dp"), ({"copies": 2, "dp": 2}, ("copies", "dp"))],
    ids=str,
)
def test_a_mesh_trains_as_data_parallel_ranks_alone_do(grid: dict[str, int], dp: Any):
    expected = on_two_ranks()
    results = threaded_world(grid, train, dp)
    for name, (norms, params) in expected.items():
        for found in results:
            mine, here = found[name]
            low = "16" in name
            assert mine == pytest.approx(norms, rel=2e-2 if low else 1e-6), name
            for key, value in params.items():
                low = value.dtype == torch.bfloat16
                rtol, atol = (0.02, 1e-3) if low else (1e-5, 1e-6)
                torch.testing.assert_close(here[key], value, rtol=rtol, atol=atol, msg=name)
                assert torch.equal(here[key], results[0][name][1][key]), "equal on all ranks"
    for exact, same in (("adamw", "overlap"), ("bf16", "split16")):
        for found in results:
            assert_same_bits(found[exact][1], found[same][1])
    apart = {tuple(norms) for norms, _ in expected.values()}
    assert len(apart) > 6, "the cases must differ"
