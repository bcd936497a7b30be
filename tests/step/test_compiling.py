"""If compiling fails, perhaps only on one rank, updates and means run eagerly."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import assert_same_bits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from shardcast import shard
from shardcast.step.compiling import or_eager
from shardcast.step.reduce import mean
from shardcast.step.update import fusion
from shardcast.testing import SpawnedWorld

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.needs_compiler,
]


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Clear compiled functions before and after the block."""
    try:
        torch._dynamo.reset()
        mean._kernel.cache_clear()
        fusion._kernel.cache_clear()
        yield
    finally:
        torch._dynamo.reset()
        mean._kernel.cache_clear()
        fusion._kernel.cache_clear()


@contextlib.contextmanager
def broken_compiler() -> Iterator[list[warnings.WarningMessage]]:
    """Clear compiled functions and make the compiler fail; yields the warnings."""
    from torch._inductor import config

    with (
        forgotten(),
        tempfile.TemporaryDirectory() as cache,
        pytest.MonkeyPatch.context() as patched,
        config.patch({"cpp.cxx": (None, "/bin/false")}),
        warnings.catch_warnings(record=True) as told,
    ):
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        warnings.simplefilter("always", UserWarning)
        yield told


def compiling_failed(told: list[warnings.WarningMessage]) -> list[str]:
    """Return the kernels named in warnings."""
    start = "fuse: compiling failed for "
    texts = [str(one.message) for one in told]
    return [text.removeprefix(start).split(" (", 1)[0] for text in texts if text.startswith(start)]


def trained(
    fuse: str, dtype: str, group: Any = None, kind: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> dict[str, Tensor]:
    torch.manual_seed(0 if group is None else group.rank())
    model = nn.Linear(16, 16)
    inner = kind(model.parameters(), lr=0.1)
    optimizer = shard(
        model, inner, process_group=group, fuse=fuse, param_dtype=dtype, loss_scale=8.0
    )
    found = {}
    for step in range(3):
        loss = model(torch.randn(2, 16).to(model.weight.dtype)).square().sum()
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        found[f"norm {step}"] = optimizer.grad_norm.clone()
        optimizer.zero_grad()
    return found | {name: param.detach().clone() for name, param in model.named_parameters()}


def one_rank_without_compiler(
    group: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    eager = trained("eager", "bf16", group)
    with broken_compiler() if group.rank() == 1 else contextlib.nullcontext([]) as told:
        return eager, trained("compile", "bf16", group), compiling_failed(told)


def test_one_rank_that_cannot_compile_trains_with_the_others(gloo: SpawnedWorld):
    (eager, one, warned), (_, other, warned_too) = gloo.run(one_rank_without_compiler)
    assert not warned
    assert [kernel.split(" ", 3)[1] for kernel in warned_too] == ["mean", "update"]
    assert_same_bits(one, other)
    assert torch.equal(one["norm 0"], eager["norm 0"]), "the means must be equal"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Compile to eager code, and count the graphs."""
    counter, compile_ = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, options=None, **kinds: compile_(
            function, backend=lambda *graph: counter(*graph), **kinds
        ),
    )
    return counter


def test_a_failed_kernel_stays_eager_and_others_are_compiled(
    graphs: CompileCounter, monkeypatch: pytest.MonkeyPatch
):
    """The last bit of a master may differ, since the numbers are on the device."""

    def fail(*_graph: Any) -> Any:
        raise OSError("no compiler")

    with forgotten(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        with monkeypatch.context() as patched:
            patched.setattr(CompileCounter, "__call__", fail)
            found = trained("compile", "fp16")
        (kernel,) = compiling_failed(told)
        assert kernel.startswith("the update by AdamRule(") and "torch.float16" in kernel
        trained("compile", "fp16")
        assert graphs.frame_count == 0
        trained("compile", "bf16", kind=torch.optim.SGD)
        assert graphs.frame_count == 1
    assert len(compiling_failed(told)) == 1
    for name, tensor in trained("eager", "fp16").items():
        torch.testing.assert_close(found[name], tensor)


def test_what_fails_once_is_tried_again_and_what_fails_twice_is_not():
    calls: list[str] = []
    failing = iter([OSError, None, OSError, None, OSError, OSError])

    def compiled() -> None:
        calls.append("compiled")
        error = next(failing)
        if error is not None:
            raise error("the cache")

    run = or_eager(compiled, lambda: calls.append("eager"), "a kernel")
    run()
    run()
    assert calls == ["compiled"] * 4
    with pytest.warns(UserWarning, match=r"for a kernel \(OSError: the cache\)"):
        run()
    run()
    assert calls[4:] == ["compiled", "compiled", "eager", "eager"]


def test_a_kernel_of_too_many_graphs_goes_on_eagerly():
    def grow(x: Tensor) -> Tensor:
        return x + 1

    run = or_eager(torch.compile(grow, fullgraph=True, backend="eager"), grow, "a kernel")
    warned = pytest.warns(UserWarning, match="compiling failed for a kernel")
    with forgotten(), torch._dynamo.config.patch(recompile_limit=1), warned:
        for dtype in (torch.float32, torch.float64, torch.int32):
            assert run(torch.zeros(4, dtype=dtype)).sum() == 4


def test_what_no_compiler_raises_is_raised():
    def compiled() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        or_eager(compiled, lambda: None, "a kernel")()


def test_no_kernel_counts_against_the_limit_of_graphs_of_another(graphs: CompileCounter):
    """With torch 2.11, a code object may have eight graphs in a process."""
    with forgotten(), torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower")  # Python 3.13.0
        for dtype, kind in (("bf16", "AdamW"), ("fp32", "AdamW"), ("bf16", "SGD")):
            trained("compile", dtype, kind=getattr(torch.optim, kind))
        for dtype in (torch.bfloat16, torch.float32):
            for carry in (None, torch.zeros(64)):
                first, second = torch.zeros(2, 64, dtype=dtype)
                for out in (first, second, first.clone()):
                    mean.compiled_mean_([first, second], 2, carry, out)
    assert graphs.frame_count == 3 + 2 * 2 * 3
