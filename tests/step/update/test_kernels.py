"""One rank in fp32 compared with torch.optim: bitwise equal if eager, within 1 ulp compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, parts, run_world, sharded, values, whole
from pairwise import thinned
from torch import Tensor, nn

from shardcast import ShardcastConfig
from shardcast.memory.codecs import Codec
from shardcast.step.update import rules
from shardcast.step.update.fusion import (
    CompiledExecutor,
    Executor,
    Fusion,
    UpdateNumbers,
    choose_executor,
)

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
COMBINATIONS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam_decay": (ADAM, {"weight_decay": 0.1}),
    "adam_amsgrad": (ADAM, {"amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-5}),
    "adamw": (ADAMW, {"weight_decay": 0.1}),
    "adamw_amsgrad_maximize": (ADAMW, {"amsgrad": True, "maximize": True, "weight_decay": 0.0}),
    "adamw_large_betas": (ADAMW, {"betas": (0.4, 0.999), "weight_decay": 0.3}),
    "sgd_decay": (SGD, {"weight_decay": 0.1}),
    "sgd_dampening": (SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd_nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd_maximize": (SGD, {"momentum": 0.5, "maximize": True}),
}
FUSED = ["adam_amsgrad", "adam_decay", "adamw", "sgd_dampening", "sgd_nesterov"]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def maker(combination: str, **more: Any) -> Make:
    kind, options = COMBINATIONS[combination]
    return lambda model: kind(model.parameters(), lr=1e-2, **options, **more)


def check(
    make: Make,
    plain: Make,
    case: str = "gpt",
    steps: int = 20,
    edit: Any = None,
) -> None:
    """Assert that parameters, masters and state equal those of torch's optimizer."""
    model = CASES[case].build() if isinstance(case, str) else case
    twin = copy.deepcopy(model)
    optimizer, expected = sharded(model, None, make), plain(twin)
    for step in range(steps):
        if edit is not None:
            edit(step, [optimizer.param_groups, expected.param_groups])
        install(model, step)
        for param, own in zip(twin.parameters(), model.parameters(), strict=True):
            param.grad = own.grad.clone()
        optimizer.step()
        expected.step()
        assert_same_bits(values(model), values(twin))
    found = {}
    for name, param in twin.named_parameters():
        found[f"{name}/master"] = param.detach().flatten()
        for key, value in expected.state[param].items():
            if value is not None:
                found[f"{name}/{key}"] = value if key == "step" else value.flatten()
    assert_same_bits(whole([parts(optimizer)]), found)


def falls(step: int, both: Any) -> None:
    for groups in both:
        for group in groups:
            group["lr"] = 1e-2 if step < 8 else 3e-3


@pytest.mark.parametrize(
    ("case", "combination"), [*(("gpt", c) for c in COMBINATIONS), ("scalars", "adamw")]
)
def test_twenty_fp32_steps_of_one_rank_equal_torch_bit_for_bit(case: str, combination: str):
    check(maker(combination), maker(combination, foreach=False), case, edit=falls)


@pytest.mark.parametrize("combination", FUSED)
def test_an_optimizer_with_fused_gets_the_bits_of_torchs_fused_kernel(combination: str):
    """Sizes are whole SIMD vectors here; torch rounds the rest of other sizes differently."""
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    check(*[maker(combination, fused=True)] * 2, model)


def trained(group: Any, make: Make, steps: int = 5, **fields: Any) -> dict[str, Tensor]:
    model = CASES["gpt"].build()
    optimizer = sharded(model, group, make, **fields)
    for step in range(steps):
        install(model, step)
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("combination", FUSED)
def test_the_fused_kernel_gives_the_same_bits_wherever_ranks_packs_and_chunks_cut(
    combination: str, monkeypatch: pytest.MonkeyPatch
):
    make = maker(combination, fused=True)
    expected = trained(None, make)
    assert_same_bits(expected, trained(None, make, pack_params=2))
    for found in run_world(3, lambda group: trained(group, make, alignment=8))[0]:
        assert_same_bits(expected, found)
    monkeypatch.setattr("shardcast.step.update.fusion.CACHED", 64)
    assert_same_bits(expected, trained(None, make))


@pytest.mark.parametrize(
    ("fuse", "options", "by_torch"),
    [
        ("auto", {}, True),
        ("auto", {"fused": False}, False),
        ("auto", {"foreach": True}, False),
        ("eager", {}, False),
        ("eager", {"fused": True}, True),
    ],
    ids=str,
)
def test_on_a_cpu_auto_runs_torchs_fused_kernel_where_the_group_does_not_say(
    fuse: str, options: dict[str, Any], by_torch: bool
):
    wanted, other = (
        trained(None, maker("adamw", fused=value), fuse="eager")
        for value in (by_torch, not by_torch)
    )
    found = trained(None, maker("adamw", **options), fuse=fuse)
    assert_same_bits(found, wanted)
    assert any(not torch.equal(found[name], other[name]) for name in found), "they differ"
    for name in found:  # by rounding, within 1 ulp of the weight per step
        torch.testing.assert_close(found[name], other[name], rtol=5 * 2**-23, atol=5e-9)


def ulps(left: Tensor, right: Tensor) -> int:
    """Return the largest difference of two fp32 tensors of equal signs, in ulps."""
    return int((left.view(torch.int32).long() - right.view(torch.int32).long()).abs().max())


RULES = {
    "adam": (ADAM, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "adamw": (ADAMW, {"weight_decay": 0.1}),
    "sgd": (SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "sgd_dampening": (SGD, {"momentum": 0.9, "dampening": 0.3}),
}
needs_compiler = pytest.mark.needs_compiler


def ranges(kind: type[torch.optim.Optimizer], options: dict[str, Any], numel: int) -> Any:
    """Return a group, its fusion, and a function that makes equal operands."""
    group = kind([nn.Parameter(torch.zeros(1))], lr=1e-3, **options).param_groups[0]
    rule = rules.rule_of(kind, group)
    fusion = Fusion(rule, Codec(), (Codec(),) * len(rule.state), casts=True, row=64)
    torch.manual_seed(0)
    master = (0.5 + torch.rand(numel)) * torch.randn(numel).sign()

    def operands() -> list[Tensor]:
        state = [torch.zeros(numel) for _ in rule.state]
        return [torch.empty(numel), master.half(), master.clone(), *state]

    return group, fusion, operands


def execute(
    executor: Executor, fusion: Fusion, operands: list[Tensor], group: Any, step: int
) -> None:
    skip, count = torch.tensor(False), torch.tensor(float(step))
    if executor.on_host:
        numbers = fusion.rule.numbers(group, float(step))
    else:
        numbers = rules.as_tensors(fusion.rule.numbers(group, count.double()), skip)
    executor(
        fusion, operands, UpdateNumbers(count, numbers), None, None if executor.on_host else skip
    )


COMPILED = [pytest.mark.slow, needs_compiler, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in RULES),
        *(
            pytest.param(name, True, marks=COMPILED)
            for name in thinned(2, ("adam", "sgd_dampening"))
        ),
    ],
)
def test_numbers_on_the_device_give_the_numbers_of_the_host_within_one_ulp(
    name: str, compiled: bool
):
    """Every step starts from the same state, so that differences do not add up.

    Weights stay between 0.3 and 1.7. Near 0, where an update is as large as the weight, its own
    rounding is several ulps of the result in any implementation.
    """
    group, fusion, make = ranges(*RULES[name], 1003)
    on_device = CompiledExecutor() if compiled else Executor(on_host=False)
    on_host = Executor(on_host=True)
    operands = make()
    for step in range(1, 51):
        grad, _, master, *state = operands
        grad.normal_()
        also = copy.deepcopy(operands)
        before = [moment.clone() for moment in state]
        execute(on_device, fusion, also, group, step)
        execute(on_host, fusion, operands, group, step)
        assert ulps(also[2], master) <= 1
        for left, right, moment in zip(also[3:], state, before, strict=True):
            # Two roundings of the larger summand; the sum may be smaller, since moments may cancel.
            largest = torch.stack([moment.abs(), right.abs(), grad.abs()]).amax(0)
            assert bool(((left - right).abs() <= largest * 2**-22).all())
        assert torch.equal(also[1], also[2].half())


@pytest.mark.parametrize(
    ("fuse", "triton", "compiler", "compiled"),
    [
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
        ("compile", False, False, True),
        ("eager", True, True, False),
    ],
)
def test_auto_compiles_on_a_gpu_where_triton_and_its_compiler_are(
    fuse: str, triton: bool, compiler: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if triton else None)
    monkeypatch.setattr("shutil.which", lambda name: name if compiler else None)
    executor = choose_executor(ShardcastConfig(fuse=fuse), torch.device("cuda", 0))
    assert (isinstance(executor, CompiledExecutor), executor.on_host) == (compiled, False)


def test_compiling_on_cpu_needs_a_compiler_and_says_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ValueError, match=r"fuse: .* install g\+\+ or use fuse 'eager'"):
        choose_executor(ShardcastConfig(fuse="compile"), torch.device("cpu"))
    assert choose_executor(ShardcastConfig(), torch.device("cpu")).on_host
