"""Muon's batches, compared with ``torch.optim.Muon`` on single matrices, in random cases.

Both orthogonalize in float64 here. In bf16, their usual dtype, the bits are equal unless torch's
kernels for one matrix and for a batch round differently, which the iterations amplify.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import exact_muon
from pairwise import WHOLE
from torch import Tensor, nn

import shardcast
from shardcast.extensions.any_optimizer import muon, update
from shardcast.testing import ThreadedWorld

SIZES = (1, 2, 3, 5, 8, 16, 17, 33)


@dataclass
class Case:
    """Parameters with their ``row_splits``, options of the optimizer, and its gradients."""

    params: list[tuple[tuple[int, ...], list[int] | None]]
    options: dict[str, Any]
    world: int
    low_rank: bool
    scale: float

    def values(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape, _ in self.params]

    def grads(self, seed: int) -> list[Tensor]:
        found = self.values(seed)
        if self.low_rank:
            found = [value[..., :1] @ value[..., :1, :] for value in found]
        return [self.scale * value for value in found]

    def matrices(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the matrices in ``values``, as views."""
        found = []
        for value, (shape, splits) in zip(values, self.params, strict=True):
            for matrix in value.view(-1, *shape[-2:]):
                found += matrix.split(splits or [len(matrix)])
        return found


def case_of(seed: int) -> Case:
    draw = random.Random(seed)
    params: list[tuple[tuple[int, ...], list[int] | None]] = []
    for _ in range(draw.randint(1, 4)):
        rows, columns = draw.choice(SIZES), draw.choice(SIZES)
        kind = draw.choice(["matrix", "stack", "rows"])
        if kind == "rows":
            splits = [draw.choice(SIZES) for _ in range(draw.randint(1, 3))]
            params.append(((sum(splits), columns), splits))
        else:
            stack = (draw.randint(1, 4),) if kind == "stack" else ()
            params.append(((*stack, rows, columns), None))
    params += params[: draw.randint(0, 2)]  # of equal shapes, which are batched
    options = {
        "lr": draw.choice([1e-3, 1e-1, torch.tensor(1e-2)]),
        "weight_decay": draw.choice([0.0, 0.5]),
        "momentum": draw.choice([0.0, 0.95]),
        "nesterov": draw.random() < 0.5,
        "adjust_lr_fn": draw.choice([None, "original", "match_rms_adamw"]),
        "ns_steps": draw.choice([1, 3, 5]),
    }
    return Case(params, options, draw.randint(1, 3), draw.random() < 0.3, draw.choice([1e-3, 1e3]))


def plain(case: Case, steps: int) -> list[Tensor]:
    matrices = [nn.Parameter(matrix.clone()) for matrix in case.matrices(case.values(0))]
    optimizer = torch.optim.Muon(matrices, **case.options)
    for step in range(steps):
        for matrix, grad in zip(matrices, case.matrices(case.grads(step + 1)), strict=True):
            matrix.grad = grad.clone()
        optimizer.step()
    return [matrix.detach() for matrix in matrices]


def sharded(case: Case, steps: int, group: Any, **fields: Any) -> list[Tensor]:
    model = nn.ParameterList(map(nn.Parameter, case.values(0)))
    optimizer = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **case.options)
    optimizer.param_groups.clear()
    given = list(zip(model, (splits for _, splits in case.params), strict=True))
    together = [param for param, splits in given if splits is None]
    if together:
        optimizer.add_param_group({"params": together})
    for param, splits in given:
        if splits is not None:
            optimizer.add_param_group({"params": [param], "row_splits": splits})
    both = shardcast.shard(model, optimizer, process_group=group, param_dtype="fp32", **fields)
    for step in range(steps):
        for param, grad in zip(model, case.grads(step + 1), strict=True):
            param.grad = grad
        both.step()
        both.zero_grad()
    return [matrix.clone() for matrix in case.matrices([param.detach() for param in model])]


def difference(seed: int, steps: int = 3, **fields: Any) -> float:
    """Return the largest difference, relative to a matrix's largest element, on any rank."""
    case = case_of(seed)
    expected = plain(case, steps)
    return max(
        float((mine - theirs).abs().max() / theirs.abs().max())
        for found in ThreadedWorld(case.world).run(
            lambda group: sharded(case, steps, group, **fields)
        )
        for mine, theirs in zip(found, expected, strict=True)
    )


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_muon(monkeypatch)


def test_random_matrices_are_updated_as_each_by_itself():
    assert max(map(difference, range(60 if WHOLE else 30))) <= 1e-6


def test_a_model_that_is_updated_in_several_turns_equals_one_turn(monkeypatch: pytest.MonkeyPatch):
    """Models of more than :data:`muon.BATCH` elements per rank are updated in turns."""
    counts: list[int] = []
    turns = update.AnyOptimizerUpdate._turns

    def counted(self: update.AnyOptimizerUpdate) -> list[Any]:
        found = turns(self)
        counts.append(len(found))
        return found

    monkeypatch.setattr(muon, "BATCH", 100)
    monkeypatch.setattr(update.AnyOptimizerUpdate, "_turns", counted)
    for fields in ({}, {"overlap_sync": True}, {"averages": {"ema": 0.5}}):
        assert (
            max(difference(seed, pack_params=1, **fields) for seed in range(8 if WHOLE else 4))
            <= 1e-6
        )
    assert max(counts) > 2


def test_a_rate_is_adjusted_by_the_shape_as_newer_torch_does():
    assert muon.rate_factor("spectral_unclamped", 2, 8) == 0.5


def test_an_adjustment_that_is_not_known_is_refused():
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Muon(model.parameters())
    optimizer.param_groups[0]["adjust_lr_fn"] = "by_the_moon"
    with pytest.raises(ValueError, match="adjust_lr_fn: expected one of"):
        shardcast.shard(model, optimizer)
