"""``metrics=``: norms per parameter, equal on all ranks, compared with norms by hand."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any

import pytest
import torch
from bag import Bag
from models import CASES, adamw, assert_same_bits, exact_muon, full, install, of, run_world, sharded
from oracle import pair
from pairwise import thinned
from quantizers import gpt
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import shardcast
from shardcast.extensions.any_optimizer import update as any_update
from shardcast.step.update import fused
from shardcast.step.update.fusion import Executor
from shardcast.testing import threaded_world

BF16, FP32 = torch.bfloat16, torch.float32
Norms = dict[str, dict[str, Tensor]]
needs_compiler = pytest.mark.needs_compiler
rmsprop = of("RMSprop", lr=1e-3)


def by_hand(model: nn.Module, optimizer: Any, scale: float) -> Norms:
    """Make a step; return its norms, from full parameters, on rank 0."""
    params = dict(model.named_parameters())
    grads = {
        n: torch.zeros(1) if p.grad is None else p.grad.double() / scale for n, p in params.items()
    }
    before = {name: tensor.clone() for name, tensor in optimizer.full_parameters().items()}
    low = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step()
    after, norms = optimizer.full_parameters(), {}
    for name in params if after else ():
        new, old, grad = (t[name].double() for t in (after, before, grads))
        swallowed = (new != old) & (params[name].detach() == low[name])
        norms[name] = norms_of(grad, new, new - old, swallowed)
    return norms


def norms_of(grad: Tensor, weight: Tensor, update: Tensor, swallowed: Any = None) -> Any:
    return {
        "grad_norm": grad.norm(),
        "weight_norm": weight.norm(),
        "update_norm": update.norm(),
        "update_to_weight": update.norm() / weight.norm(),
        "swallowed": torch.zeros(()).double() if swallowed is None else swallowed.double().mean(),
    }


def compare(found: Norms, expected: Norms) -> None:
    assert found.keys() == expected.keys()
    for name, norms in expected.items():
        for metric, value in norms.items():
            # The change of an fp32 master includes the master's rounding.
            wide = 1e-4 if "update" in metric else 1e-6
            torch.testing.assert_close(
                found[name][metric].double(), value, rtol=wide, atol=1e-9, msg=f"{name} {metric}"
            )


def decide(monkeypatch: pytest.MonkeyPatch, on_host: bool) -> None:
    """Make updates decide on the host or, as on an accelerator, on the device."""
    for module in (fused, any_update):
        monkeypatch.setattr(module, "choose_executor", lambda *_: Executor(on_host=on_host))


def four_steps(
    group: Any, build: Any, kind: Any, absent: str, act: Any = None, **fields: Any
) -> Norms:
    """Compare norms after three steps, the third without one gradient, and a skipped one."""
    model = build()
    options = {"process_group": group, "metrics": True, "fuse": "eager", **fields}
    optimizer = shardcast.shard(model, kind(model), **options)
    expected: Norms = {}
    for step in range(4):
        install(model, step)
        optimizer.scale_loss(torch.zeros(()))  # as if the gradients came from a scaled loss
        with torch.no_grad():
            if act is not None:
                act(model, optimizer, step)
        if step == 2:
            model.get_parameter(absent).grad = None
        if step < 3:
            expected = by_hand(model, optimizer, fields.get("loss_scale", 1.0))
        else:
            next(model.parameters()).grad.fill_(torch.nan)
            optimizer.step()
            assert optimizer.last_step_skipped
        if expected:
            compare(optimizer.metrics(), expected)
    return {n: {k: v.clone() for k, v in m.items()} for n, m in optimizer.metrics().items()}


def assert_same_everywhere(ranks: list[Norms], absent: str) -> None:
    assert float(ranks[0][absent]["update_norm"]) == 0.0, "no gradient in the last step"
    for found in ranks[1:]:
        for name, norms in ranks[0].items():
            assert_same_bits(found[name], norms)


def test_sums_of_long_rows_are_exact():
    """All values are equal, so that all roundings have the same direction."""
    model = nn.Linear(8192, 16, bias=False)
    model.weight.data.fill_(0.1)
    optimizer = shardcast.shard(model, adamw(model), param_dtype=BF16, metrics=True)
    model.weight.grad = torch.full_like(model.weight, 0.3)
    expected = by_hand(model, optimizer, 1.0)
    compare(optimizer.metrics(), expected)


@pytest.mark.parametrize(
    ("kind", "world", "fields"),
    [
        (adamw, 1, {}),
        (adamw, 2, {"param_dtype": BF16, "averages": {"ema": 0.9}}),
        (adamw, 3, {"param_dtype": BF16, "master": "split16", "moments": "bf16"}),
        (adamw, 4, {"partition": "whole", "moments": "int8", "offload": True}),
        (rmsprop, 3, {"param_dtype": BF16}),
        (rmsprop, 2, {"averages": {"ema": 0.9}}),
        (adamw, 2, {"param_dtype": torch.float16, "loss_scale": 64.0}),
        (pair, 2, {"param_dtype": BF16}),
        pytest.param(
            adamw,
            1,
            {"param_dtype": BF16, "fuse": "compile"},
            marks=[pytest.mark.slow, needs_compiler, pytest.mark.timeout(240)],
        ),
    ],
)
def test_metrics_on_an_accelerators_path_are_those_of_one_process_by_hand(
    kind: Any, world: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    if "fuse" not in fields:  # compiled updates decide on the device anyway
        decide(monkeypatch, on_host=False)
    exact_muon(monkeypatch)
    fields = {"param_dtype": FP32, **fields}
    build = CASES["gpt"].build
    ranks, _ = run_world(world, lambda it: four_steps(it, build, kind, "wte.weight", **fields))
    assert_same_everywhere(ranks, "wte.weight")


class Signs(torch.optim.SGD):
    """Steps by the gradient's sign, which it writes into the gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.sign_()
        return super().step(closure)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_neither_a_class_that_writes_to_gradients_nor_a_script_that_writes_to_weights_is_measured(
    dtype: torch.dtype,
):
    model = nn.Linear(64, 16)
    inner = Signs(model.parameters(), lr=1e-3)
    optimizer = shardcast.shard(model, inner, param_dtype=dtype, metrics=True, elementwise=True)
    for step in range(3):
        install(model, step)
        if step:
            model.weight.data[3:5] += 1.0
        expected = by_hand(model, optimizer, 1.0)
        compare(optimizer.metrics(), expected)
        assert expected["weight"]["grad_norm"] != expected["weight"]["update_norm"] * 1e3


SWALLOWING: list[tuple[Any, str, int, dict[str, Any]]] = [
    (adamw, "mxfp8", 3, {"averages": {"ema": 0.9}}),
    (adamw, "mxfp4", 2, {"replica_check": 1, "offload": True}),
    (adamw, "fp8_block128", 2, {"changes": True, "moments": "int8"}),
    (adamw, "mxfp8", 1, {"replica_check": 2}),
    (rmsprop, "mxfp4_rceil", 2, {"replica_check": 1}),
    (pair, "fp8_block128", 2, {}),
]


@pytest.mark.parametrize(("case", "on_host"), thinned(2, SWALLOWING, (True, False)))
def test_changes_that_a_form_swallows_are_counted_behind_its_cast(
    case: tuple[Any, str, int, dict[str, Any]], on_host: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also if a script has written weights, on host and device."""
    kind, form, world, fields = case
    decide(monkeypatch, on_host)

    def writes(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = 1e-4
        if step == 1:
            model.get_parameter("blocks.0.fc.weight")[7, 5:9] = 0.3

    fields = {"autocast": False, "published": {form: "blocks.*[!12].weight"}, **fields}
    absent = "blocks.1.fc.weight"
    ranks, _ = run_world(world, lambda it: four_steps(it, gpt, kind, absent, writes, **fields))
    assert_same_everywhere(ranks, absent)
    assert 0.05 < float(ranks[0]["blocks.0.qkv.weight"]["swallowed"]) < 1.0


def test_metrics_of_every_nth_step_cost_a_collective_there_and_none_elsewhere():
    def run(group: Any, metrics: Any) -> list[int]:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, metrics=metrics)
        for step in range(4):
            install(model, step)
            optimizer.step()
        return [len(optimizer.metrics()) if metrics else 0]

    counts = {}
    for metrics in (False, 3, True):
        _, world = run_world(2, lambda group, metrics=metrics: run(group, metrics))
        counts[metrics] = sum("all_reduce" in str(entry) for entry in world.logs[0])
    assert counts[3] == counts[False] + 2 and counts[True] == counts[False] + 4


def test_the_worst_parameters_are_shown_first_and_loggers_get_plain_numbers():
    model = CASES["mlp"].build()
    optimizer = sharded(model, metrics=True)
    install(model, 0)
    optimizer.step()
    values = shardcast.metrics.flat(optimizer.metrics())
    assert values["weight_norm/a.weight"] == pytest.approx(float(model.a.weight.norm()), rel=1e-6)
    table = shardcast.metrics.worst(optimizer.metrics(), "weight_norm", 2).splitlines()
    largest = sorted(dict(model.named_parameters()), key=lambda n: -values[f"weight_norm/{n}"])
    assert [row.split()[0] for row in table] == ["parameter", *largest[:2]]
    with pytest.raises(ValueError, match="update_to_weight"):
        shardcast.metrics.worst(optimizer.metrics(), "update")


def test_metrics_without_the_option_are_refused_by_name():
    with pytest.raises(RuntimeError, match="metrics=True"):
        sharded(CASES["mlp"].build()).metrics()
    with pytest.raises(ValueError, match="metrics"):
        sharded(CASES["mlp"].build(), metrics=-1)


class Patterns(UserDict[str, str]):
    """A mapping whose repr does not show its contents."""

    __repr__ = object.__repr__


def test_a_mapping_measures_the_parameters_that_each_pattern_matches_as_one():
    def run(group: Any) -> None:
        model = CASES["gpt"].build()
        optimizer = sharded(model, group, param_dtype=BF16, metrics=True)
        install(model, 0)
        optimizer.step()
        each = optimizer.metrics()
        patterns = Patterns({"all": "*", "blocks": "blocks.*"})
        groups = optimizer.metrics(patterns)
        assert list(groups) == ["all", "blocks"]
        for label, found in groups.items():
            members = [m for n, m in each.items() if label == "all" or n.startswith("blocks.")]
            for name in ("grad_norm", "weight_norm", "update_norm"):
                total = torch.stack([m[name].double() for m in members]).norm()
                torch.testing.assert_close(found[name].double(), total, rtol=1e-6, atol=0)
            ratio = found["update_norm"] / found["weight_norm"]
            torch.testing.assert_close(found["update_to_weight"], ratio)
            assert min(m["swallowed"] for m in members) <= found["swallowed"]
            assert found["swallowed"] <= max(m["swallowed"] for m in members)
        patterns.data = {"weights": "*weight"}
        assert [*optimizer.metrics(patterns)] == ["weights"], "the mapping is read in each call"
        assert optimizer.metrics("nothing.*") == {}
        with pytest.raises(ValueError, match="'attention'"):
            optimizer.metrics({"attention": "*.attention.*", "all": "*"})

    run_world(2, run)


def test_metrics_of_a_first_step_that_was_skipped_are_none_or_nothing():
    model = CASES["mlp"].build()
    optimizer = sharded(model, metrics=True)
    install(model, 0)
    model.a.weight.grad.fill_(torch.inf)
    optimizer.step()
    for found in optimizer.metrics().values():
        assert found["update_norm"] == 0 and found["update_to_weight"].isnan()


def numbered(*shape: int) -> Tensor:
    return torch.linspace(-1, 2, math.prod(shape)).view(shape)


@pytest.mark.parametrize(
    ("grid", "stages", "factors", "options"),
    [
        (  # means of 2**rank over the data-parallel ranks; the tied weight has their sum
            {"dp": 2, "pp": 2},
            [{"words": (5, 3), "positions": (4, 3)}, {"head": (5, 3), "norm": (3,)}],
            {"words": [7.5], "positions": [2.5], "head": [7.5], "norm": [5.0]},
            {"tied": [("words", "head")]},
        ),
        (  # experts of two ranks with one name are measured as one stack
            {"ep": 2, "edp": 2},
            [{"router": (3,), "expert": (5, 2)}],
            {"router": [3.75], "expert": [0.75, 3.0]},
            {"dp": ("ep", "edp"), "experts": {"edp": ["expert"]}},
        ),
    ],
)
def test_metrics_are_of_the_whole_parameter_in_pipelines_ties_and_experts(
    grid: dict[str, int], stages: Any, factors: dict[str, list[float]], options: dict[str, Any]
):
    def run(mesh: Any) -> Norms:
        model = Bag(**stages[mesh.get_local_rank("pp") if "pp" in grid else 0])
        for param in model.parameters():
            param.data = numbered(*param.shape)
        optimizer = shardcast.shard(
            [model] if "pp" in grid else model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            mesh=mesh,
            param_dtype=FP32,
            metrics=True,
            **options,
        )
        for param in model.parameters():
            param.grad = numbered(*param.shape) * 2.0 ** mesh.get_rank()
        optimizer.step()
        return optimizer.metrics()

    ranks = threaded_world(grid, run)
    assert {name for found in ranks for name in found} == factors.keys()
    for found in ranks:
        expected = {}
        for name in found:
            shape = next(stage[name] for stage in stages if name in stage)
            grad = torch.stack([numbered(*shape) * factor for factor in factors[name]]).double()
            weight = numbered(*shape).double() - 0.5 * grad
            expected[name] = norms_of(grad, weight, 0.5 * grad)
        compare(found, expected)


def test_metrics_and_averages_are_of_the_whole_parameter_on_a_mesh():
    """A matrix is cut over tp, a vector is copied along it, and shards have replicas."""

    def run(mesh: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        matrix, vector, *grads = torch.randn(5, 32, 24).unbind()

        def part(tensor: Tensor) -> Any:
            if mesh is None:
                return tensor.clone()
            return distribute_tensor(tensor, mesh["tp"], [Shard(0)], src_data_rank=None)

        model = nn.ParameterList([nn.Parameter(part(matrix)), nn.Parameter(vector[0].clone())])
        places = {} if mesh is None else {"mesh": mesh, "dp": ("replicas", "shards")}
        optimizer = shardcast.shard(
            model,
            torch.optim.AdamW(model.parameters()),
            param_dtype=BF16,
            fuse="eager",
            metrics=True,
            averages={"ema": 0.5},
            **places,
        )
        for grad in grads:
            model[0].grad, model[1].grad = part(grad.to(BF16)), grad[0].to(BF16)
            optimizer.step()
        with optimizer.averaged("ema"):
            inside = [full(param) for param in model]
        return optimizer.metrics(), inside

    norms, average = run(None)
    assert len(norms) == len(average) == 2
    for found, inside in threaded_world({"replicas": 2, "shards": 2, "tp": 2}, run):
        compare(found, {n: {k: v.double() for k, v in m.items()} for n, m in norms.items()})
        for left, right in zip(inside, average, strict=True):
            assert torch.equal(left, right)


def test_a_skipped_step_after_an_added_group_leaves_the_numbers_of_the_last_one():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    inner = torch.optim.SGD(model[0].parameters(), lr=1.0)
    optimizer = shardcast.shard(model, inner, param_dtype="fp32", metrics=True)
    for param in model[0].parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = {name: float(of["grad_norm"]) for name, of in optimizer.metrics().items()}
    assert before == {"0.weight": pytest.approx(24**0.5), "0.bias": pytest.approx(6**0.5)}
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    model[0].weight.grad = torch.full_like(model[0].weight, torch.nan)
    with pytest.warns(UserWarning, match="step skipped"):
        optimizer.step()
        assert optimizer.skipped_steps == 1
    found = {name: float(of["grad_norm"]) for name, of in optimizer.metrics().items()}
    assert found == {**before, "1.weight": 0.0, "1.bias": 0.0}
