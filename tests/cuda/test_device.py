"""Steps on a GPU: no waits, no new memory, and capture in a graph."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.step.decide.norm import PNorm
from shardcast.testing import spawn

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("GPU_KIT_DEVICE") == "cpu",
        reason="needs a CUDA device",
    ),
]
BACKEND = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() > 1 else "gloo"
FORMS: list[dict[str, Any]] = [
    {},
    {"fuse": "eager"},
    {"moments": "bf16"},
    {"moments": "int8"},
    {"offload": True},
    {"guard": {"norm": 6.0, "window": 4}},
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 9)).cuda()


def sharded(model: nn.Module, group: Any = None, **fields: Any) -> shardcast.ShardedOptimizer:
    fields = {"max_grad_norm": 1.0, **fields}
    return shardcast.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), process_group=group, **fields
    )


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 256, generator=generator).cuda()
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_a_step_waits_for_nothing(fields: dict[str, Any]) -> None:
    model = network()
    optimizer = sharded(model, **fields)
    for step in range(3):  # compiles, and allocates persistent memory
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    backward(model, 3)
    with no_waiting():
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tokens", [32, torch.tensor(32)], ids=["a number", "a tensor"])
def test_a_step_of_counted_tokens_waits_for_nothing(tokens: int | Tensor) -> None:
    model, tokens = network(), tokens.cuda() if isinstance(tokens, Tensor) else tokens
    optimizer = sharded(model)
    for step in range(4):
        with no_waiting() if step == 3 else nullcontext():
            optimizer.count(tokens)
        backward(model, step)
        with no_waiting() if step == 3 else nullcontext():
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_steps_take_no_memory_from_the_device_once_it_is_warm(fields: dict[str, Any]) -> None:
    """Temporary memory comes from the allocator's cache and returns to it."""
    model = network()
    optimizer = sharded(model, **fields)
    for step in range(4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for step in range(5):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for key in ("num_device_alloc", "num_alloc_retries", "allocated_bytes.all.current"):
        assert after.get(key) == before.get(key), key


@pytest.mark.parametrize(
    "fields",
    [{}, {"fuse": "eager"}, {"moments": "bf16"}, {"pack_params": 1}, {"averages": {"ema": 0.9}}],
    ids=str,  # one pack per parameter: batched ranges
)
def test_a_captured_step_replays_as_so_many_steps(fields: dict[str, Any]) -> None:
    """The step count is on the device, so bias corrections advance with each replay."""
    plain, captured = network(), network()
    eager, replayed = sharded(plain, **fields), sharded(captured, **fields)
    for model, optimizer in ((plain, eager), (captured, replayed)):
        backward(model, 0)
        optimizer.step()
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.step()
    for _ in range(3):
        graph.replay()
        eager.step()
    torch.cuda.synchronize()
    for mine, other in zip(values(captured), values(plain), strict=True):
        assert torch.equal(mine, other)


def test_a_captured_step_skips_what_is_not_finite() -> None:
    model = network()
    optimizer = sharded(model)
    backward(model, 0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    next(model.parameters()).grad.view(-1)[3] = math.nan
    before = values(model)
    graph.replay()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


def test_a_storage_made_by_dlpack_keeps_its_memory_from_the_caching_allocator() -> None:
    """Parameters have such storages, and their pack may be freed before them."""
    base = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
    own = _compat.own_storage(base[256:512])
    expected = own.clone()
    assert own.data_ptr() == base.data_ptr() + 1024 and own.untyped_storage().nbytes() == 1024
    del base
    taken = [torch.full((1 << 16,), math.nan, device="cuda") for _ in range(8)]
    assert torch.equal(own, expected)
    del taken


def test_the_norm_of_low_precision_makes_no_copy_in_fp64() -> None:
    own = torch.ones(1 << 24, dtype=torch.bfloat16, device="cuda")
    norm = PNorm(2.0, own.device)
    norm.powers([own])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert norm.powers([own]).item() == own.numel()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_gradients_are_copied_into_their_pack_by_one_kernel() -> None:
    """``_foreach_copy_`` copies many tensors; a loop would launch one kernel per parameter."""
    model = nn.ParameterList(torch.randn(2, 50, device="cuda") for _ in range(64))
    optimizer = sharded(model)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            optimizer.step()
            torch.cuda.synchronize()
        optimizer.zero_grad()
    kernels = [e for e in seen.key_averages() if "multi_tensor" in e.key]
    assert 1 <= sum(event.count for event in kernels) <= 2


def test_a_model_and_its_optimizer_leave_no_memory_behind() -> None:
    model = network()
    backward(model, 0)  # allocates the libraries' workspaces
    del model
    gc.collect()  # an optimizer is in reference cycles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = network()
    optimizer = sharded(model)
    backward(model, 0)
    optimizer.step()
    del model, optimizer
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 4096  # small tensors kept per device


def test_two_ranks_hold_the_same_parameters_however_they_are_synced() -> None:
    """The mean is compiled in a hook, on autograd's thread. With gloo, one GPU is enough."""
    for equal in spawn(_train, 2, timeout=100.0, backend=BACKEND)[0]:
        assert equal


def _train(group: dist.ProcessGroup) -> list[bool]:
    torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    found = []
    for fields in ({}, {"overlap_sync": True}, {"accumulate": "sharded"}, {"sync": "all_gather"}):
        model = network()
        optimizer = sharded(model, group, **fields)
        for step in range(4):
            backward(model, 10 * step + group.rank())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait_sync()
        bits = torch.cat([v.view(torch.int16).view(-1) for v in values(model)]).cpu()
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, bits)
        found.append(torch.equal(ranks[0], ranks[1]))
        optimizer.close()
    return found
