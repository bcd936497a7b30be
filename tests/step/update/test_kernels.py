"""World 1 in fp32 against plain torch.optim: bit for bit eagerly, within 1 ulp compiled."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, parts, run_world, sharded, values, whole
from torch import Tensor, nn

from shardcast import ShardcastConfig
from shardcast.memory.forms import Exact
from shardcast.step.update import fused, rules
from shardcast.step.update.execute import ChunkedKernel, WholeKernel, choose_kernel
from shardcast.step.update.operands import Flat, Forms

pytestmark = pytest.mark.timeout(60)

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
COMBINATIONS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (ADAM, {}),
    "adam_decay": (ADAM, {"weight_decay": 0.1}),
    "adam_amsgrad": (ADAM, {"amsgrad": True, "weight_decay": 0.01}),
    "adam_maximize": (ADAM, {"maximize": True}),
    "adam_other_betas": (ADAM, {"betas": (0.8, 0.95), "eps": 1e-5}),
    "adamw": (ADAMW, {}),
    "adamw_no_decay": (ADAMW, {"weight_decay": 0.0}),
    "adamw_amsgrad_maximize": (ADAMW, {"amsgrad": True, "maximize": True}),
    "adamw_large_betas": (ADAMW, {"betas": (0.4, 0.999), "weight_decay": 0.3}),
    "sgd": (SGD, {}),
    "sgd_decay": (SGD, {"weight_decay": 0.1}),
    "sgd_momentum": (SGD, {"momentum": 0.9}),
    "sgd_dampening": (SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd_nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd_maximize": (SGD, {"momentum": 0.5, "maximize": True}),
}


def state_of(plain: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """torch's own state in the form of ``whole(parts(...))``."""
    found = {}
    for name, param in model.named_parameters():
        if param.numel():
            found[f"{name}/master"] = param.detach().flatten()
            for key, value in plain.state[param].items():
                if value is not None:
                    found[f"{name}/{key}"] = value if key == "step" else value.flatten()
    return found


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("case", ["gpt", "scalars"])
def test_twenty_fp32_steps_of_one_rank_equal_torch_bit_for_bit(case: str, combination: str):
    kind, options = COMBINATIONS[combination]
    model = CASES[case].build()
    twin = copy.deepcopy(model)
    optimizer = sharded(model, optimizer=lambda m: kind(m.parameters(), lr=1e-2, **options))
    plain = kind(twin.parameters(), lr=1e-2, foreach=False, **options)
    for step in range(20):
        if step == 8:
            for group in [*optimizer.param_groups, *plain.param_groups]:
                group["lr"] = 3e-3
        install(model, step)
        install(twin, step)
        optimizer.step()
        plain.step()
        if step % 10 == 0:
            assert_same_bits(values(model), values(twin))
    assert_same_bits(values(model), values(twin))
    assert_same_bits(whole([parts(optimizer)]), state_of(plain, twin))


@pytest.mark.parametrize("kind", [ADAMW, SGD])
def test_groups_have_their_own_options_and_follow_their_changes(kind: type):
    model = CASES["gpt"].build()
    twin = copy.deepcopy(model)

    def make(m: nn.Module) -> torch.optim.Optimizer:
        flat = [p for p in m.parameters() if p.dim() < 2]
        square = [p for p in m.parameters() if p.dim() >= 2]
        groups = [{"params": square, "weight_decay": 0.2}, {"params": flat, "lr": 3e-2}]
        return kind(groups, lr=1e-2, **({"momentum": 0.9} if kind is SGD else {}))

    optimizer, plain = sharded(model, optimizer=make), make(twin)
    for step in range(12):
        for group in [optimizer.param_groups[1], plain.param_groups[1]]:
            group["lr"] = 3e-2 / (step + 1)
            if step == 6:
                group["weight_decay"] = 0.05
        install(model, step)
        install(twin, step)
        optimizer.step()
        plain.step()
    assert_same_bits(values(model), values(twin))


def test_a_tensor_learning_rate_is_read_in_every_step():
    model = CASES["mlp"].build()
    twin = copy.deepcopy(model)
    rate = torch.tensor(1e-2)
    optimizer = sharded(model, optimizer=lambda m: ADAMW(m.parameters(), lr=rate))
    plain = ADAMW(twin.parameters(), lr=1e-2, foreach=False)
    for step in range(6):
        if step == 3:
            rate.fill_(5e-3)
            plain.param_groups[0]["lr"] = rate.item()
        install(model, step)
        install(twin, step)
        optimizer.step()
        plain.step()
    for name, tensor in values(model).items():
        # The rate is rounded to fp32 before it is multiplied: 2^-24 of updates of at most 1e-2.
        torch.testing.assert_close(tensor, values(twin)[name], rtol=2**-22, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_the_cast_of_masters_that_equal_torch(dtype: torch.dtype):
    model = CASES["gpt"].build()
    twin = copy.deepcopy(model)
    optimizer = sharded(model, param_dtype=dtype)
    plain = ADAMW(twin.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for step in range(20):
        install(model, step)
        for param, low in zip(twin.parameters(), model.parameters(), strict=True):
            param.grad = low.grad.float()
        optimizer.step()
        plain.step()
        assert_same_bits(
            values(model), {name: value.to(dtype) for name, value in values(twin).items()}
        )
    assert_same_bits(whole([parts(optimizer)]), state_of(plain, twin))


def test_masters_keep_what_bf16_loses():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    plain = copy.deepcopy(model).bfloat16()
    make = lambda m: SGD(m.parameters(), lr=1.0)  # noqa: E731
    optimizer, direct = sharded(model, optimizer=make, param_dtype=torch.bfloat16), make(plain)
    step = torch.full((1, 4), 1e-3, dtype=torch.bfloat16)
    for _ in range(200):
        model.weight.grad, plain.weight.grad = step.clone(), step.clone()
        optimizer.step()
        direct.step()
    total = 200 * step[0, 0].item()
    assert torch.equal(plain.weight, torch.ones_like(plain.weight)), "the control: all lost"
    # 200 subtractions near 1, each rounded to fp32: at most 200 half ulps of 2^-24.
    masters = whole([parts(optimizer)])["weight/master"]
    torch.testing.assert_close(masters, torch.full((4,), 1 - total), rtol=0, atol=200 * 2**-25)
    assert torch.equal(model.weight.flatten(), masters.bfloat16())


FUSED = [
    "adam_amsgrad",
    "adam_decay",
    "adamw",
    "adamw_large_betas",
    "sgd_dampening",
    "sgd_nesterov",
]


@pytest.mark.parametrize("combination", FUSED)
def test_an_optimizer_with_fused_gets_the_bits_of_torchs_fused_kernel(combination: str):
    """Here all are whole vectors; what is left after them torch rounds in another way."""
    kind, options = COMBINATIONS[combination]
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    twin = copy.deepcopy(model)
    optimizer = sharded(
        model, optimizer=lambda m: kind(m.parameters(), lr=1e-2, fused=True, **options)
    )
    plain = kind(twin.parameters(), lr=1e-2, fused=True, **options)
    for step in range(30):
        install(model, step)
        install(twin, step)
        optimizer.step()
        plain.step()
    assert_same_bits(values(model), values(twin))


@pytest.mark.parametrize("combination", FUSED)
def test_the_fused_kernel_gives_the_same_bits_wherever_ranks_and_packs_cut(combination: str):
    kind, options = COMBINATIONS[combination]

    def run(group: Any, **fields: Any) -> dict[str, Tensor]:
        model = CASES["gpt"].build()
        build = lambda m: kind(m.parameters(), lr=1e-2, fused=True, **options)  # noqa: E731
        optimizer = sharded(model, group, build, **fields)
        for step in range(6):
            install(model, step)
            optimizer.step()
        return values(model)

    expected = run(None)
    assert_same_bits(expected, run(None, pack_params=2))
    for size in (2, 3):
        for found in run_world(size, lambda group: run(group, alignment=8))[0]:
            assert_same_bits(expected, found)


@pytest.mark.parametrize("combination", ["adam_amsgrad", "adamw", "sgd_momentum"])
def test_a_foreach_optimizer_has_the_same_bits(combination: str):
    kind, options = COMBINATIONS[combination]
    model = CASES["gpt"].build()
    twin = copy.deepcopy(model)
    optimizer = sharded(model, optimizer=lambda m: kind(m.parameters(), lr=1e-2, **options))
    plain = kind(twin.parameters(), lr=1e-2, foreach=True, **options)
    for step in range(20):
        install(model, step)
        install(twin, step)
        optimizer.step()
        plain.step()
    assert_same_bits(values(model), values(twin))


@pytest.mark.parametrize(
    ("fuse", "options", "by_torch"),
    [
        ("auto", {}, True),
        ("auto", {"fused": True}, True),
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
    def trained(fuse: str, **options: Any) -> dict[str, Tensor]:
        model = CASES["gpt"].build()
        build = lambda m: ADAMW(m.parameters(), lr=1e-2, weight_decay=0.1, **options)  # noqa: E731
        optimizer = sharded(model, None, build, fuse=fuse)
        for step in range(5):
            install(model, step)
            optimizer.step()
        return values(model)

    wanted, other = (trained("eager", fused=fused) for fused in (by_torch, not by_torch))
    found = trained(fuse, **options)
    assert_same_bits(found, wanted)
    assert any(not torch.equal(found[name], other[name]) for name in found), "they differ"
    for name in found:  # by roundings: within 1 ulp of the weight per step
        torch.testing.assert_close(found[name], other[name], rtol=5 * 2**-23, atol=5e-9)


@pytest.mark.parametrize("fused", [False, True])
def test_chunks_and_their_number_do_not_show_in_the_result(
    fused: bool, monkeypatch: pytest.MonkeyPatch
):
    results = []
    for chunk in (1 << 16, 7):
        monkeypatch.setattr("shardcast.step.update.execute.WINDOW", chunk)
        model = CASES["gpt"].build()
        optimizer = sharded(
            model, optimizer=lambda m: ADAMW(m.parameters(), lr=1e-2, fused=fused),
            param_dtype=torch.bfloat16, max_grad_norm=0.5,
        )  # fmt: skip
        for step in range(4):
            install(model, step)
            optimizer.step()
        results.append(whole([parts(optimizer)]))
    assert_same_bits(*results)


def ulps(left: Tensor, right: Tensor) -> int:
    """Largest distance of two fp32 tensors of equal signs, in units in the last place."""
    return int((left.view(torch.int32).long() - right.view(torch.int32).long()).abs().max())


RULES = {
    "adam": (ADAM, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "adamw": (ADAMW, {"weight_decay": 0.1}),
    "sgd": (SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "sgd_dampening": (SGD, {"momentum": 0.9, "dampening": 0.3}),
}
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")),
    reason="torch.compile needs a C++ compiler on CPU",
)


def ranges(kind: type[torch.optim.Optimizer], options: dict[str, Any], numel: int) -> Any:
    """A group, its rule, and a function that makes equal operands."""
    group = kind([nn.Parameter(torch.zeros(1))], lr=1e-3, **options).param_groups[0]
    rule = rules.rule_of(kind, group)
    torch.manual_seed(0)
    master = (0.5 + torch.rand(numel)) * torch.randn(numel).sign()
    state = tuple(torch.zeros(numel) for _ in rule.state)

    def copies() -> Flat:
        return Flat(
            (master.clone(),), torch.empty(numel), tuple((flat.clone(),) for flat in state),
            torch.empty(numel).half(), Forms(Exact(), (Exact(),) * len(state)),
        )  # fmt: skip

    return group, rule, copies


def whole_run(kernel: Any, rule: Any, flat: Flat, group: Any, step: int) -> None:
    skip = torch.tensor(False)
    if kernel.on_host:
        numbers = rule.numbers(group, float(step))
    else:
        numbers = rules.as_tensors(
            rule.numbers(group, torch.tensor(float(step), dtype=torch.float64)), skip
        )
    kernel(rule, flat, numbers, None, skip)


@pytest.mark.parametrize(
    "compile",
    [False, pytest.param(True, marks=[pytest.mark.slow, needs_compiler, pytest.mark.timeout(240)])],
)
@pytest.mark.parametrize("name", RULES)
def test_the_form_without_host_decisions_is_within_one_ulp_of_the_chunked_one(
    name: str, compile: bool
):
    """From the same state in every step: a difference does not add up over steps.

    Weights stay between 0.3 and 1.7. Nearer to 0, where an update is as large as the weight, its
    own roundings are several ulps of the result on any path.
    """
    numel = 1003
    group, rule, copies = ranges(*RULES[name], numel)
    whole, chunked = WholeKernel(compile), ChunkedKernel()
    eager = copies()
    for step in range(1, 51):
        eager.grad.normal_()
        other = copy.deepcopy(eager)
        moments = [flat.clone() for (flat,) in eager.state]
        whole_run(whole, rule, other, group, step)
        whole_run(chunked, rule, eager, group, step)
        assert ulps(other.master[0], eager.master[0]) <= 1
        for (left,), (right,), moment in zip(other.state, eager.state, moments, strict=True):
            # Two roundings of the larger summand: what remains may be small, as moments cancel.
            largest = torch.stack([moment.abs(), right.abs(), eager.grad.abs()]).amax(0)
            assert bool(((left - right).abs() <= largest * 2**-22).all())
        assert torch.equal(other.published, other.master[0].half())


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs_compiler
@pytest.mark.parametrize(
    ("kind", "fields"),
    [(ADAMW, {}), (SGD, {}), (ADAMW, {"master": "split16", "moments": "bf16"})],
    ids=str,
)
def test_lengths_places_and_numbers_trigger_no_recompilation(
    kind: type[torch.optim.Optimizer], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """One graph per group of flags; a schedule of any number, and any pack, runs the same one."""
    torch._dynamo.reset()
    monkeypatch.setattr(fused, "choose_kernel", lambda *_: WholeKernel(compile=True))
    model = CASES["gpt"].build()
    options = {"momentum": 0.9} if kind is SGD else {}
    optimizer = sharded(
        model, optimizer=lambda m: kind(m.parameters(), lr=1e-2, weight_decay=0.1, **options),
        param_dtype=torch.bfloat16, pack_params=3, max_grad_norm=1.0, **fields,
    )  # fmt: skip
    lengths = {master.published.numel() for master in optimizer.engine.shards}
    assert len(lengths) > 3
    install(model, 0)
    optimizer.step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(1, 5):
            install(model, step)
            for position, param in enumerate(model.parameters()):
                if step > 2 and position % 3 == step % 3:
                    param.grad = None  # so runs begin and end inside of packs
            (group,) = optimizer.param_groups
            group["lr"] *= 0.9
            group["weight_decay"] *= 0.5
            if kind is SGD:
                group["momentum"] -= 0.1
            else:
                group["betas"] = (0.8 + step / 100, 0.99)
            optimizer.step()


COMPILED = """
import sys, torch
from torch._dynamo.utils import counters
import shardcast
from shardcast.step.update import fused
from shardcast.step.update.execute import WholeKernel
fused.choose_kernel = lambda *_: WholeKernel(compile=True)
for sizes in [(5, 7), (40, 3)]:
    model = torch.nn.Linear(*sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer = shardcast.shard(model, optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
found = counters["inductor"]
print(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs_compiler
def test_the_next_process_finds_the_compiled_update_in_the_cache(tmp_path: Path):
    """And each of them compiles once for two models of other sizes."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        found.append(tuple(int(number) for number in run.stdout.split()))
    assert found == [(0, 1), (1, 0)]


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
    made: list[bool] = []
    monkeypatch.setattr(
        "shardcast.step.update.execute.WholeKernel", lambda compile: made.append(compile)
    )
    choose_kernel(ShardcastConfig(fuse=fuse), torch.device("cuda", 0))
    assert made == [compiled]


def test_compiling_on_cpu_needs_a_compiler_and_says_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ValueError, match=r"fuse: .* install g\+\+ or use fuse 'eager'"):
        choose_kernel(ShardcastConfig(fuse="compile"), torch.device("cpu"))
    assert isinstance(choose_kernel(ShardcastConfig(), torch.device("cpu")), ChunkedKernel)


def test_the_eager_fallback_of_accelerators_works_by_pieces(monkeypatch: pytest.MonkeyPatch):
    group, rule, copies = ranges(*RULES["adamw"], 100)
    results = []
    for piece in (7, 1 << 24):
        monkeypatch.setattr("shardcast.step.update.execute.PIECE", piece)
        flat = copies()
        flat.grad.fill_(0.25)
        whole_run(WholeKernel(False), rule, flat, group, 1)
        results.append({"master": flat.master[0], "low": flat.published, "m": flat.state[0][0]})
    assert_same_bits(*results)
