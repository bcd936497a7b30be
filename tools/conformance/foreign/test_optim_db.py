"""torch's own list of optimizers and options, each plain and sharded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from evidence import Suite, Verdict
from torch import Tensor, nn

import shardcast
from shardcast.testing import threaded_world

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_optimizers

STEPS = 5
CASES = [
    pytest.param(info, given, id=f"{info.optim_cls.__name__}[{given.desc}]")
    for info in common_optimizers.optim_db
    for given in common_optimizers._get_optim_inputs_including_global_cliquey_kwargs(
        "cpu", torch.float32, info
    )
]
WORLD_SIZES = (1, 2, 3)
SUITE = Suite(
    name="optim_db",
    claim=(
        "each optimizer, option and implementation of torch's tests trains for five steps, plain "
        "and sharded over 1, 2 and 3 ranks, with equal gradients. Weights must be bitwise equal, "
        "or within `assert_close` where noted"
    ),
    source="torch",
    path="torch/testing/_internal/common_optimizers.py",
    license="BSD-3-Clause",
    cases=len(CASES) * len(WORLD_SIZES),
)
TOLERANCE = "not bitwise: torch's fused kernel rounds less often; within `assert_close`"
REFUSED = ("LBFGS", "SparseAdam")


class Parameters(nn.Module):
    """Parameters of several shapes and a loss that depends only on them."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.values = nn.ParameterList(torch.randn(shape, generator=draw) for shape in shapes)

    def forward(self, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(1 + step)
        terms = [(v - torch.randn(v.shape, generator=draw)).square() for v in self.values]
        return torch.stack([(term * (1 + step)).sum() for term in terms]).sum()


def build(info: Any, given: Any) -> tuple[Parameters, torch.optim.Optimizer]:
    shapes: list[tuple[int, ...]] = [(9, 5), (4, 6)]
    if info.optim_cls is not torch.optim.Muon:  # takes only matrices
        shapes += [(7,), (2, 3, 4), ()]
    model = Parameters(shapes)
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.kwargs.items()}
    return model, info.optim_cls(model.parameters(), **options)


def train(model: Parameters, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(step)
            loss.backward()
            return loss

        optimizer.step(closure)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("info", "given"), CASES)
def test_an_optimizer_of_torch_trains_the_same_weights_sharded(
    info: Any, given: Any, world_size: int, verdicts: list[Verdict]
) -> None:
    name = info.optim_cls.__name__
    case = f"{name}, {given.desc or 'default'}, {world_size} ranks"

    def sharded(group: Any) -> list[Tensor]:
        model, optimizer = build(info, given)
        options = {"param_dtype": "fp32", "fuse": "eager"}
        return train(model, shardcast.shard(model, optimizer, options, process_group=group))

    if given.kwargs.get("differentiable") or name in REFUSED:
        error, named = (TypeError, name) if name in REFUSED else (ValueError, "differentiable")
        with pytest.raises(error, match=named) as caught:
            threaded_world(world_size, sharded)
        verdicts.append(Verdict(SUITE, case, "refused", str(caught.value).split(";")[0]))
        return
    torchs = train(*build(info, given))
    start = list(build(info, given)[0].parameters())
    assert not any(torch.equal(a, b) for a, b in zip(torchs, start, strict=True))
    ranks = threaded_world(world_size, sharded)
    exact = all(torch.equal(a, b) for ours in ranks for a, b in zip(ours, torchs, strict=True))
    if not exact:
        assert given.kwargs.get("fused"), (ranks, torchs)
        for ours in ranks:
            torch.testing.assert_close(ours, torchs)
    verdicts.append(Verdict(SUITE, case, "passed", "" if exact else TOLERANCE))
