"""``metrics=``: norms per parameter, equal on all ranks, beside the same by hand."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from models import CASES, exact_muon, install, run_world, sharded
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardcast
from shardcast.step.update import any_optimizer, fused
from shardcast.step.update.fusion import Executor
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(60)
BF16, FP32 = torch.bfloat16, torch.float32
Norms = dict[str, dict[str, Tensor]]
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def muon_and_sgd(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.SGD(vectors, lr=1e-2)]


def by_hand(model: nn.Module, optimizer: Any, act: Any) -> Norms:
    """The norms of one step, from full parameters; on rank 0."""
    names = dict(model.named_parameters())
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in names.items()}
    before = {n: t.clone() for n, t in optimizer.full_parameters().items()}
    low = {name: param.detach().clone() for name, param in names.items()}
    act()
    after, norms = optimizer.full_parameters(), {}
    for name in names if after else ():
        new, old, grad = (t[name].double() for t in (after, before, grads))
        same = names[name].detach().to(BF16).view(torch.int16) == low[name].view(torch.int16) \
            if names[name].dtype == BF16 else names[name].detach() == low[name]  # fmt: skip
        norms[name] = {
            "grad_norm": grad.norm(), "weight_norm": new.norm(), "update_norm": (new - old).norm(),
            "update_to_weight": (new - old).norm() / new.norm(),
            "swallowed": ((new != old) & same).double().mean(),
        }  # fmt: skip
    return norms


def compare(found: Norms, expected: Norms) -> None:
    assert found.keys() == expected.keys()
    for name, norms in expected.items():
        for metric, value in norms.items():
            # The change of an fp32 master is rounded as the master is.
            wide = 1e-4 if "update" in metric else 1e-6
            torch.testing.assert_close(
                found[name][metric].double(), value, rtol=wide, atol=1e-9, msg=f"{name} {metric}"
            )


@pytest.mark.parametrize("device", ["on host", "on device"])
@pytest.mark.parametrize(
    ("kind", "world", "fields"),
    [
        (adamw, 1, {}),
        (adamw, 2, {"param_dtype": BF16, "averages": {"ema": 0.9}}),
        (adamw, 3, {"param_dtype": BF16, "master": "split16", "moments": "bf16"}),
        (adamw, 4, {"partition": "whole", "moments": "int8", "offload": True}),
        (rmsprop, 3, {"param_dtype": BF16}),
        (rmsprop, 2, {"averages": {"ema": 0.9}}),
        (muon_and_sgd, 2, {"param_dtype": BF16}),
        pytest.param(
            adamw, 1, {"param_dtype": BF16, "fuse": "compile"},
            marks=[pytest.mark.slow, needs_compiler, pytest.mark.timeout(240)],
        ),
    ],
)  # fmt: skip
def test_metrics_are_those_of_one_process_by_hand(
    kind: Any, world: int, fields: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
):
    """With an absent gradient, and a skipped step, which keeps those of the step before."""
    if device == "on device":
        for module in (fused, any_optimizer):
            monkeypatch.setattr(
                module, "choose_executor", lambda *_: Executor(False, on_host=False)
            )
    exact_muon(monkeypatch)

    def run(group: Any) -> Norms:
        model = CASES["gpt"].build()
        optimizer = shardcast.shard(
            model, kind(model), process_group=group, metrics=True,
            **{"param_dtype": FP32, "fuse": "eager", **fields},
        )  # fmt: skip
        for step in range(4):
            install(model, step)
            first = next(iter(model.parameters()))
            if step == 2:
                first.grad = None
            if step < 3:
                expected = by_hand(model, optimizer, optimizer.step)
            else:
                first.grad.fill_(torch.nan)
                optimizer.step()
            if expected:
                compare(optimizer.metrics(), expected)
        return {n: {k: v.clone() for k, v in m.items()} for n, m in optimizer.metrics().items()}

    ranks, _ = run_world(world, run)
    assert float(ranks[0]["wte.weight"]["update_norm"]) == 0.0, "absent in the last step"
    for found in ranks[1:]:
        for name, norms in ranks[0].items():
            assert all(torch.equal(norms[k], found[name][k]) for k in norms), name


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


def test_swallowed_tells_that_bf16_eats_the_learning_rate_and_fp32_does_not():
    shares = {}
    for dtype, rate in ((BF16, 1e-6), (BF16, 1e-1), (FP32, 1e-6)):
        model = CASES["gpt"].build()
        optimizer = sharded(model, None, param_dtype=dtype, metrics=1)
        optimizer.param_groups[0]["lr"] = rate
        assert optimizer.metrics() == {}
        install(model, 0)
        optimizer.step()
        found = optimizer.metrics("blocks.0.*")
        assert found and all(name.startswith("blocks.0.") for name in found)
        shares[dtype, rate] = float(found["blocks.0.fc.weight"]["swallowed"])
    assert shares[BF16, 1e-6] > 0.9 > 0.1 > shares[BF16, 1e-1]
    assert shares[FP32, 1e-6] < 0.1


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


def test_metrics_and_averages_are_of_the_whole_parameter_on_a_mesh():
    """A matrix that is cut over tp, a vector that is copied along it, replicas of shards."""

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
            model, torch.optim.AdamW(model.parameters()), param_dtype=BF16, fuse="eager",
            metrics=True, averages={"ema": 0.5}, **places,
        )  # fmt: skip
        for grad in grads:
            model[0].grad, model[1].grad = part(grad.to(BF16)), grad[0].to(BF16)
            optimizer.step()
        with optimizer.averaged("ema"):
            inside = [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in model]
        return optimizer.metrics(), [t.detach() for t in inside]

    norms, average = run(None)
    for found, inside in threaded_world({"replicas": 2, "shards": 2, "tp": 2}, run):
        compare(found, {n: {k: v.double() for k, v in m.items()} for n, m in norms.items()})
        for left, right in zip(inside, average, strict=True):
            assert torch.equal(left, right)
