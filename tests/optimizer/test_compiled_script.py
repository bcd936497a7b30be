"""A script that compiles its whole training step, including the optimizer's calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairwise import thinned
from torch import Tensor, nn
from torch._dynamo import convert_frame

import shardcast
from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("several", "dtype"), thinned(2, [False, True], ["bf16", "fp32", "fp16"]))
def test_a_compiled_step_of_training_has_the_bits_of_one_that_is_not_compiled(
    dtype: str, several: bool
):
    def trained(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parts = list(model) if several else [model]
        given = [torch.optim.SGD(part.parameters(), 1e-2) for part in parts]
        optimizer = shardcast.shard(model, given, param_dtype=dtype)
        loops: Any = optimizer.optimizers if several else [optimizer]

        def step(x: Tensor) -> None:
            with optimizer.no_sync():
                optimizer.scale_loss(model(x[:1]).float().square().mean()).backward()
            optimizer.scale_loss(model(x).float().square().mean()).backward()
            optimizer.clip_grad_norm_(0.1)
            for each in loops:
                each.step()
            for each in loops:
                each.zero_grad()

        run = torch.compile(step, backend="eager") if compiled else step
        for number in range(3):
            run(torch.randn(3, 4, generator=torch.Generator().manual_seed(number)))
        return [param.detach().clone() for param in model.parameters()]

    plain = trained(False)
    for one, other in zip(plain, trained(True), strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(0)
    start = nn.Linear(4, 4).weight
    assert not torch.equal(plain[0], start.to(plain[0].dtype)), "it trained"
    codes = [code for of_code in convert_frame.input_codes.seen if (code := of_code())]
    inside = {code.co_name for code in codes if "/shardcast/step/" in code.co_filename}
    assert codes and inside <= {"no_sync"}, "Dynamo must not trace hooks that autograd calls"


def clipped(group: Any, compiled: bool) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = shardcast.shard(
        model, torch.optim.SGD(model.parameters(), 1.0), param_dtype="fp32", process_group=group
    )

    def step(x: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norms = [model[0].weight.grad.norm()]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        return norms

    run, norms = torch.compile(step, backend="eager") if compiled else step, []
    for _ in range(2):
        norms += run(torch.full((3, 4), 1.0 + group.rank()))
    return [*norms, *(param.detach() for param in model.parameters())]


def test_norms_of_gradients_in_a_compiled_step_are_those_of_one_that_is_not(gloo: SpawnedWorld):
    """TD-MPC2 compiles ``loss.backward(); clip_grad_norm_(...); optimizer.step()`` as a whole."""
    for plain, compiled in zip(gloo.run(clipped, False), gloo.run(clipped, True), strict=True):
        assert all(map(torch.equal, plain, compiled))
