"""The optimizers of NVIDIA's Emerging-Optimizers, plain and sharded."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from evidence import Suite, Verdict
from torch import Tensor, nn

import shardcast
from shardcast.testing import threaded_world

STEPS = 6  # SOAP-like optimizers change their bases from step 2 on
WORLD_SIZES = (1, 2, 3)
NAMES = (
    "muon",
    "adaptive_muon",
    "mop",
    "muon_hyperball",
    "polargrad",
    "scion",
    "spel",
    "lion",
    "signum",
    "laprop",
    "sim_ademamix",
    "soap",
    "moso",
    "rekls",
    "stacked_soap",
    "tp_rekls",
    "psgd_pro",
    "oblique_sgd",
    "oblique_adam",
    "iso",
    "kl_soap",
    "rekls_v3",
    "kl_m_soap",
)
SUITE = Suite(
    name="Emerging-Optimizers",
    claim=(
        f"every registered optimizer trains for {STEPS} steps, plain and sharded over 1, 2 and 3 "
        "ranks, with equal gradients. Weights must be bitwise equal, or within `assert_close` "
        "where noted"
    ),
    source="NVIDIA-NeMo/Emerging-Optimizers",
    commit="fd7729267109a8848709e9406bf19e53e970c3f4",
    blob="8e8d8c8b12e484ec73fa1692e4850b0af0f90175",
    path="emerging_optimizers/registry.py",
    license="Apache-2.0",
    cases=len(NAMES) * len(WORLD_SIZES),
)
TOLERANCE = "not bitwise: vector tails and the alignment of matrices differ"
# Values of parameters without defaults.
OPTIONS = {"lr": 1e-2, "momentum": 0.95, "weight_decay": 0.01, "hyperball_radius": 1.0}
NOT_APPLICABLE = {"tp_rekls": "gathers tensor-parallel matrices itself"}

DRAWS = {"psgd_pro": "each owner draws its own noise in each step; bitwise equal on one rank"}


class Matrices(nn.Module):
    """Matrices and a loss that depends only on them."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = ((8, 6), (6, 8), (8, 8), (8, 6), (5, 5))
        values = [torch.randn(shape, generator=draw) for shape in shapes]
        self.values = nn.ParameterList(value / value.norm() for value in values)  # on the hyperball

    def forward(self, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(1 + step)
        terms = [(v - torch.randn(v.shape, generator=draw)).square() for v in self.values]
        return torch.stack([(term * (1 + step)).sum() for term in terms]).sum()


@pytest.fixture(scope="module")
def registry(sources: Path | None) -> Any:
    SUITE.text(sources)
    if sys.version_info < (3, 12):
        pytest.skip("Emerging-Optimizers needs Python 3.12")
    sys.path.insert(0, str(sources / "Emerging-Optimizers"))
    package = importlib.import_module("emerging_optimizers")
    for module in pkgutil.walk_packages(package.__path__, "emerging_optimizers."):
        importlib.import_module(module.name)
    found = importlib.import_module("emerging_optimizers.registry")
    assert {*found.get_optimizer_name_list()} == {*NAMES}
    return found


def build(kind: type[torch.optim.Optimizer]) -> tuple[Matrices, torch.optim.Optimizer]:
    model = Matrices()
    given = [*inspect.signature(kind.__init__).parameters.values()]
    if any(p.kind is p.VAR_KEYWORD for p in given):  # passed to the base class
        given += inspect.signature(super(kind, kind).__init__).parameters.values()
    needed = {p.name for p in given if p.default is p.empty} & OPTIONS.keys()
    options = {"lr": OPTIONS["lr"], **{name: OPTIONS[name] for name in needed}}
    return model, kind(model.parameters(), **options)


def train(model: Matrices, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(0)  # PSGD draws random numbers
    for step in range(STEPS):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_trains_the_same_weights_sharded(
    name: str, world_size: int, registry: Any, verdicts: list[Verdict]
) -> None:
    case = f"{name}, {world_size} ranks"
    if name in NOT_APPLICABLE:
        verdicts.append(Verdict(SUITE, case, "not applicable", NOT_APPLICABLE[name]))
        return
    if name in DRAWS and world_size > 1:
        verdicts.append(Verdict(SUITE, case, "not applicable", DRAWS[name]))
        return
    kind = registry.get_optimizer_cls(name)

    def sharded(group: Any) -> list[Tensor]:
        model, optimizer = build(kind)
        options = {"param_dtype": "fp32"}
        return train(model, shardcast.shard(model, optimizer, options, process_group=group))

    plain = train(*build(kind))
    assert not any(
        torch.equal(a, b) for a, b in zip(plain, build(kind)[0].parameters(), strict=True)
    )
    ranks = threaded_world(world_size, sharded)
    exact = all(torch.equal(a, b) for ours in ranks for a, b in zip(ours, plain, strict=True))
    for ours in ranks:
        torch.testing.assert_close(ours, plain)
    assert exact or world_size > 1
    verdicts.append(Verdict(SUITE, case, "passed", "" if exact else TOLERANCE))
