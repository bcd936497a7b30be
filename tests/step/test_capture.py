"""A step as in a CUDA graph, which only repeats the device's operations.

A CPU has no graphs, so these tests record the operations of one step on the path of accelerators,
and run them again on the same memory. Decisions of the host are made once, as in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import assert_same_bits, sharded
from torch import Tensor, is_tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardcast
from shardcast import _compat
from shardcast.optimizer.sharded import packed_of
from shardcast.step.decide.report import HostCopy
from shardcast.testing import fake_world

BY_INDEX = {torch.ops.aten.index.Tensor}  # only a mask makes its shape unknown
READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__")
FORMS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.1, "pack_params": 1},
    {"param_dtype": torch.float32, "norm_type": math.inf, "max_grad_norm": 0.01},
    {"param_dtype": torch.float16, "loss_scale": "dynamic", "loss_scale_init": 8.0},
    {"averages": {"ema": 0.9}, "moments": "bf16"},
    {"guard": {"norm": 6.0, "window": 4}, "pack_params": 1},
    {"master": "split16"},
]


class Recorded(TorchDispatchMode):
    """Records operations and their results; :meth:`replay` runs them on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = any(it.dtype is torch.bool for it in tree_leaves(args[1:]) if is_tensor(it))
        reads = torch.Tag.dynamic_output_shape in func.tags and (by_mask or func not in BY_INDEX)
        if reads or torch.Tag.data_dependent_output in func.tags:
            raise AssertionError(f"{func} asks the device for a value")
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = [*filter(is_tensor, tree_leaves(results))]
            self._calls.append((func, args, kwargs or {}, outputs))
        return results

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            results = [*filter(is_tensor, tree_leaves(func(*args, **kwargs)))]
            for output, result in zip(outputs, results, strict=True):
                if output is not result:
                    output.copy_(result)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat the CPU as an accelerator during capture, whose values the host does not know."""
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    with fake_world(8):
        yield


def prepared(fields: dict[str, Any], rate: Any = 1e-2) -> tuple[nn.Module, Any]:
    """Return a model with fixed gradients after two steps, which allocate all buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 64))
    plain = torch.optim.AdamW(model.parameters(), lr=rate)
    optimizer = shardcast.shard(
        model, plain, process_group=torch.distributed.group.WORLD, fuse="eager", **fields
    )
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(4, 64).to(dtype)).float().square().mean()
    optimizer.scale_loss(loss).backward()
    for _ in range(2):
        optimizer.step()
    return model, optimizer


def recorded(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Run one step, and return a function that repeats it."""

    def read(*_args: Any) -> Any:
        raise AssertionError("the host reads a value")

    with monkeypatch.context() as patch, Recorded() as step:
        patch.setattr(HostCopy, "read", lambda _self: None)  # as during capture
        for name in READS:
            patch.setattr(Tensor, name, read)
        optimizer.step()
    return step.replay


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    scale = optimizer.loss_scale
    return {**values, "scale": torch.ones(()) if scale is None else scale.clone()}


@pytest.mark.parametrize("fields", FORMS, ids=str)
@pytest.mark.usefixtures("accelerator")
def test_a_step_reads_no_value_and_replays_as_so_many_steps(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    rates = [torch.tensor(1e-2), torch.tensor(1e-2)]
    (plain, eager), (captured, optimizer) = (prepared(fields, rate) for rate in rates)
    replay = recorded(optimizer, monkeypatch)
    eager.step()
    assert_same_bits(state_of(captured, optimizer), state_of(plain, eager))
    for number in range(3):
        for rate in rates:
            rate.fill_(1e-3 * number)
        replay()
        eager.step()
        assert_same_bits(state_of(captured, optimizer), state_of(plain, eager))
    assert optimizer.digest() == eager.digest()


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.usefixtures("accelerator")
def test_a_replayed_step_skips_what_is_not_finite(monkeypatch: pytest.MonkeyPatch):
    model, optimizer = prepared({"max_grad_norm": 1.0})
    replay = recorded(optimizer, monkeypatch)
    replay()
    before = state_of(model, optimizer)
    with torch.no_grad():
        next(model.parameters()).grad.mul_(math.nan)
    replay()
    assert_same_bits(state_of(model, optimizer), before)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize(
    "way",
    [
        lambda it: it.tolist(),
        lambda it: it.item(),
        lambda it: it.cpu(),
        lambda it: bool(it),
        lambda it: float(it),
        lambda it: it[it > 0],
        lambda it: it.nonzero(),
        lambda it: torch.equal(it, it),
    ],
    ids=["tolist", "item", "cpu", "bool", "float", "mask", "nonzero", "equal"],
)
@pytest.mark.usefixtures("accelerator")
def test_reads_of_the_host_are_seen(
    way: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
):
    """Negative control: each way to read a value, within a step."""
    _, optimizer = prepared({})
    decider = packed_of(optimizer).decider
    monkeypatch.setattr(decider, "conclude", lambda decision: way(decision.norm.view(1)))
    with pytest.raises(AssertionError, match="value"):
        recorded(optimizer, monkeypatch)


class Reads(TorchDispatchMode):
    """Counts the tensor values that the host reads, which makes it wait."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:step skipped by the guard")
@pytest.mark.parametrize(
    ("guard", "waits"),
    [
        ({"norm": 6.0, "window": 8}, False),
        ({"norm": 6.0, "window": 8, "action": "clip"}, False),
        (lambda norm, _loss: norm > 1.0, False),
        (lambda norm, _loss: torch.tensor(bool(norm > 1.0)), True),
    ],
    ids=["a window", "a clip", "a function", "one that waits"],
)
@pytest.mark.usefixtures("accelerator")
def test_a_guard_asks_for_no_value_of_the_device(guard: Any, waits: bool):
    model = nn.ParameterList(torch.ones(2, 2048) for _ in range(2))
    optimizer = sharded(model, torch.distributed.group.WORLD, guard=guard)
    for _ in range(3):
        sum(param.sum() for param in model).backward()
        with Reads() as reads:
            optimizer.step()
        optimizer.zero_grad()
    assert (reads.count > 0) == waits
