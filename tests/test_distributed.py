"""Worlds of 2, 3 and 4 ranks against a world of one, with equal gradients installed by hand."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, parts, run_world, sharded, values, whole
from torch import Tensor, nn

from shardcast.step.sync.sync import Sync
from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(60)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    params = model.parameters()
    if kind == "sgd":
        return torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True)
    if kind == "rmsprop":  # no kernel of ours: goes through the inner optimizer
        return torch.optim.RMSprop(params, lr=1e-2, momentum=0.5)
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, amsgrad=kind == "amsgrad")


def train(group: Any, case: str, kind: str, fields: dict[str, Any], steps: int = 5) -> dict:
    """Steps on installed gradients; what this rank has after each one, and at the end."""
    rank = 0 if group is None else group.rank()
    model = CASES[case].build(seed=rank)  # rank 0's weights must win
    optimizer = sharded(model, group, lambda m: optimizer_of(kind, m), **fields)
    after = [values(model)]
    for step in range(steps):
        if step == 3:
            optimizer.param_groups[0]["lr"] = 3e-3
        install(model, step)
        optimizer.step()
        optimizer.zero_grad()
        after.append(values(model))
    return {"after": after, "parts": parts(optimizer), "norm": optimizer.grad_norm}


def check(ranks: list[dict], alone: dict) -> None:
    for rank in ranks:
        for mine, expected in zip(rank["after"], alone["after"], strict=True):
            assert_same_bits(mine, expected)
    assert_same_bits(whole(rank["parts"] for rank in ranks), whole([alone["parts"]]))


# Every two of model, number of ranks, partition and dtype meet.
WORLDS = [
    (case, 2 + (n + m) % 3, partition, dtype)
    for n, case in enumerate(("mlp", "gpt", "scalars", "tiny"))
    for m, (partition, dtype) in enumerate(itertools.product(("even", "whole"), (BF16, FP16, FP32)))
]


@pytest.mark.parametrize(("case", "size", "partition", "dtype"), WORLDS)
def test_a_world_equals_one_rank_bit_for_bit_however_it_is_cut(
    case: str, size: int, partition: str, dtype: torch.dtype
):
    fields = {"param_dtype": dtype, "partition": partition}
    ranks, _ = run_world(size, train, case, "adamw", fields)
    check(ranks, alone_of(case, dtype))


@functools.cache
def alone_of(case: str, dtype: torch.dtype) -> dict:
    alone = train(None, case, "adamw", {"param_dtype": dtype, "partition": "even"})
    assert not all(
        torch.equal(alone["after"][0][name], tensor) for name, tensor in alone["after"][-1].items()
    ), "nothing was trained"
    return alone


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "amsgrad": ("amsgrad", {}),
    "other torch optimizer": ("rmsprop", {}),
    "other torch optimizer, whole": ("rmsprop", {"partition": "whole"}),
    "clipped": ("adamw", {"max_grad_norm": 0.5}),
    "clipped, maximum norm": ("sgd", {"max_grad_norm": 0.1, "norm_type": float("inf")}),
    "all_gather": ("adamw", {"sync": "all_gather"}),
    "reduce_scatter": ("adamw", {"reduce": "reduce_scatter", "param_dtype": FP32}),
    "small packs": ("adamw", {"pack_params": 2, "alignment": 8}),
    "fp32 accumulation": ("adamw", {"grad_dtype": FP32}),
    "fp32 wire": ("adamw", {"reduce_dtype": FP32}),
    "norms in fp32": ("adamw", {"keep_fp32": "norms"}),
    "norms in fp32, whole": ("adamw", {"keep_fp32": "norms", "partition": "whole"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_do_not_change_that_a_world_equals_one_rank(variant: str):
    kind, changes = VARIANTS[variant]
    fields = {"param_dtype": BF16, **changes}
    alone = train(None, "gpt", kind, fields)
    # A sum of three equal fp32 values is rounded by a reduce-scatter, of two or four it is not.
    for size in (2, 4) if "reduce_scatter" in variant else (2, 3):
        ranks, _ = run_world(size, train, "gpt", kind, fields)
        check(ranks, alone)
        for rank in ranks:
            assert torch.equal(rank["norm"], alone["norm"])


@pytest.mark.parametrize("fault", ["one ulp in a master", "no sync"])
def test_a_fault_of_one_rank_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Negative controls of the comparison of worlds."""
    if fault == "no sync":
        monkeypatch.setattr(Sync, "__call__", lambda self: None)

    def spoiled(group: Any) -> dict:
        result = train(group, "mlp", "adamw", {"param_dtype": BF16})
        if fault != "no sync" and group.rank() == 1:
            key = next(k for k in result["parts"] if k[-1] == "master")
            flat = result["parts"][key].view(-1)
            flat[0] = torch.nextafter(flat[0], torch.tensor(9.0))
        return result

    ranks, _ = run_world(2, spoiled)
    with pytest.raises(AssertionError):
        check(ranks, alone_of("mlp", BF16))


def mean_of_different(group: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One SGD step of lr 1 from 0 on gradients that differ: minus the reduced mean."""
    model = nn.Linear(5, 7, bias=False)
    nn.init.zeros_(model.weight)
    make = lambda m: torch.optim.SGD(m.parameters(), lr=1.0)  # noqa: E731
    optimizer = sharded(model, group, make, param_dtype=dtype, keep_fp32=())
    torch.manual_seed(group.rank())
    grad = torch.randn(7, 5).to(dtype) * (100.0 if group.rank() else 1e-2)
    model.weight.grad = grad.clone()
    optimizer.step()
    return grad, model.weight.detach().clone()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_reduction_is_the_mean_summed_in_fp32_and_rounded_once(dtype: torch.dtype):
    ranks, _ = run_world(3, mean_of_different, dtype)
    total = torch.stack([grad.float() for grad, _ in ranks])
    exact = ((total[0] + total[1]) + total[2]) / 3
    for _, weight in ranks:
        # The mean is rounded to the gradient dtype, and the weight is that number negated.
        assert torch.equal(weight, -exact.to(dtype))
    low = (ranks[0][0] + ranks[1][0] + ranks[2][0]) / 3
    assert not torch.equal(low, exact.to(dtype)), "the control: low-precision sums differ"


def test_small_fp16_gradients_survive_the_mean_of_many_ranks():
    def step(group: Any) -> Tensor:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        make = lambda m: torch.optim.SGD(m.parameters(), lr=2.0**10)  # noqa: E731
        optimizer = sharded(model, group, make, param_dtype=FP16)
        model.weight.grad = torch.full((1, 4), 2.0**-24, dtype=FP16)  # the smallest there is
        optimizer.step()
        return model.weight.detach().clone()

    ranks, _ = run_world(4, step)
    assert (torch.tensor(2.0**-24).half() / 4) == 0, "the control: divided first, it is gone"
    for weight in ranks:
        assert torch.equal(weight, torch.full((1, 4), -(2.0**-14), dtype=FP16))


@pytest.mark.parametrize(
    ("case", "kind", "fields"),
    [
        ("gpt", "adamw", {"param_dtype": BF16, "max_grad_norm": 1.0}),
        ("gpt", "adamw", {"param_dtype": BF16, "sync": "all_gather"}),
        ("scalars", "sgd", {"param_dtype": FP32, "partition": "whole"}),
        ("tiny", "adamw", {"param_dtype": FP16, "loss_scale": 1.0, "partition": "even"}),
        ("mlp", "adamw", {"param_dtype": FP32, "reduce": "reduce_scatter", "pack_params": 1}),
    ],
)
def test_two_gloo_processes_equal_one_rank_bit_for_bit(
    gloo: SpawnedWorld, case: str, kind: str, fields: dict[str, Any]
):
    check(gloo.run(train, case, kind, fields), train(None, case, kind, fields))
