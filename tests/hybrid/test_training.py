"""Training on a mesh: losses and norms are those of one process with the whole batch."""

from __future__ import annotations

import functools

import pytest
import torch
from language import PARTS, Language, batches, loss_of, parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)

STEPS = 25


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def language(width: int = 16) -> Language:
    torch.manual_seed(0)
    return Language(width)


@functools.cache
def plainly(width: int, steps: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of one process, plain torch."""
    model = language(width)
    optimizer, seen = adamw(model), []
    for batch in batches(steps):
        loss = loss_of(model, batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def on_mesh(mesh: DeviceMesh, width: int, steps: int) -> list[tuple[float, float]]:
    """The same as one rank of a mesh sees it: the loss of its part of the batch."""
    model = language(width)
    parallel(model, mesh["tp"])
    optimizer = shardcast.shard(
        model, adamw(model), mesh=mesh, param_dtype="fp32", grad_sum_over=PARTS
    )
    seen = []
    for batch in batches(steps):
        loss = loss_of(model, batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), optimizer.grad_norm.item()))
    return seen


def test_losses_and_norms_of_25_steps_are_those_of_one_process():
    reference = plainly(16, STEPS)
    assert reference[-1][0] < 0.5 * reference[0][0], "it learns"
    results = threaded_world({"dp": 2, "tp": 2}, on_mesh, 16, STEPS)
    for step, (loss, norm) in enumerate(reference):
        mean = sum(seen[step][0] for seen in results) / len(results)
        assert mean == pytest.approx(loss, rel=1e-5)
        for seen in results:
            assert seen[step][1] == results[0][step][1] == pytest.approx(norm, rel=1e-5)


WIDTHS = (2, 3, 16, 17)


def widths(mesh: DeviceMesh) -> list[list[tuple[float, float]]]:
    return [on_mesh(mesh, width, 10) for width in WIDTHS]


def test_shards_may_be_uneven_and_empty():
    """Widths of torch's own test of tensor with data parallelism, on three ranks rather than two.

    The last of them has nothing of 2, one of 3, 4 of 16, 5 of 17.
    """
    results = threaded_world({"dp": 1, "tp": 3}, widths)
    for number, width in enumerate(WIDTHS):
        for step, (loss, norm) in enumerate(plainly(width, 10)):
            for seen in results:
                assert seen[number][step] == (
                    pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5)
                )  # fmt: skip
