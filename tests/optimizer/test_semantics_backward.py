"""Unusual backwards: autograd.grad, re-entrant checkpoints, exceptions."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from models import CASES, on_each_rank, sharded
from oracle import BATCH, check, mlp, on_ranks, sgd, steps, values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(60)


def test_a_rank_may_ask_for_gradients_alone():
    """``torch.autograd.grad`` on one rank runs hooks of weights and inputs, like a backward."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor, sharded: bool) -> None:
        for _ in range(3):
            inputs = batch.clone().requires_grad_()
            if sharded and packed_of(optimizer).comm.rank == 1:
                of = [inputs, *model.parameters()]
                assert all(grad.any() for grad in torch.autograd.grad(model(inputs).sum(), of))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, tol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_through_a_graph_made_before_the_step_is_refused_as_in_plain_torch(size: int):
    """It would combine new weights with old activations."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        first, late = model(batch).square().mean(), model(batch).square().mean()
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()

    plain = mlp()
    script(plain, sgd(plain), BATCH)
    on_ranks(script, size)


def test_a_graph_of_parameters_that_the_step_left_alone_may_still_be_used():
    def script(model: Any, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for _ in range(3):
            hidden = model[:2](batch)
            model[2:](hidden.detach()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model[2:](hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, tol=1e-6)


class Tied(nn.Module):
    """One weight used outside and, if asked, inside a re-entrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = nn.Linear(7, 7), nn.Linear(7, 7)
        self.inside = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = checkpoint(self.tied, x, use_reentrant=True) if self.inside else self.tied(x)
        return self.tied(x.tanh())  # its backward runs before the checkpoint's


def late(group: Any, start: int) -> tuple[list[int], list[Tensor]]:
    """Train with checkpoints on rank 0 from step ``start`` on; return which steps were refused."""
    model, refused = Tied(), []
    optimizer = shardcast.shard(
        model, sgd(model), process_group=group, pack_params=1, param_dtype="fp32"
    )
    for step in range(3):
        model.inside = group.rank() == 0 and step >= start
        while True:
            optimizer.zero_grad()
            model(BATCH.chunk(2)[group.rank()]).square().mean().backward()
            try:
                optimizer.step()
                break
            except RuntimeError as error:
                assert "use_reentrant=False" in str(error)
                refused.append(step)
    return refused, values(model)


@pytest.mark.parametrize("start", [0, 1])
def test_a_weight_outside_and_inside_a_reentrant_checkpoint_trains_or_is_refused_once(start: int):
    """It trains if used from the first step on. Later, all ranks raise and the next try trains."""
    world = ThreadedWorld(2)
    runs = world.run(late, start)
    assert_same_sequence(world.logs)
    plain = ThreadedWorld(2).run(late, 9)
    late_ones = [start] if start else []
    assert [refused for refused, _ in (*runs, *plain)] == [late_ones, late_ones, [], []]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
    for mine, expected in zip(runs[0][1], plain[0][1], strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("call", ["step", "gather_gradients", "clip_grad_norm_"])
def test_a_hook_may_step_gather_or_clip_before_its_backward_ends(call: str):
    def script(model: Any, optimizer: Any, batch: Tensor, sharded: bool) -> None:
        def hook(_: Tensor) -> None:
            if call == "step":
                optimizer.step()
            elif sharded:
                getattr(optimizer, call)(*[1e3] * (call == "clip_grad_norm_"))

        model[0].weight.register_post_accumulate_grad_hook(hook)  # only a bias comes later
        for _ in range(2):
            model(batch).float().square().mean().backward()
            if call != "step":
                optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, tol=1e-6)


@on_each_rank(2)
def test_an_empty_no_sync_of_one_rank_before_all_clear_is_no_difference(group: Any):
    """Otherwise every later step would raise that ranks cleared gradients differently."""
    model = CASES["mlp"].build()
    optimizer = sharded(model, group)
    CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
    if group.rank() == 1:
        with optimizer.no_sync():
            pass
    optimizer.zero_grad()
    CASES["mlp"].loss(model, CASES["mlp"].batch(1)).backward()
    optimizer.step()


@on_each_rank(2)
def test_a_backward_in_no_sync_of_one_rank_upon_means_is_an_error_on_all(group: Any):
    """Ranks without a backward inside make the same collectives, so that no rank hangs."""
    model, batch = CASES["mlp"].build(), CASES["mlp"].batch(0)
    optimizer = sharded(model, group)
    CASES["mlp"].loss(model, batch).backward()
    with optimizer.no_sync():
        if group.rank() == 1:
            CASES["mlp"].loss(model, batch).backward()
    with pytest.raises(RuntimeError, match=r"got a gradient inside no_sync\(\)"):
        optimizer.step()


@on_each_rank(2)
def test_gradients_of_a_last_backward_in_no_sync_are_sent_once_where_sums_are_sharded(group: Any):
    model, batch = CASES["mlp"].build(), CASES["mlp"].batch(0)
    optimizer, begun = sharded(model, group, accumulate="sharded"), len(group.log)
    for _ in range(3):
        with optimizer.no_sync():
            CASES["mlp"].loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = [call.op for call in group.log[begun:]].count("all_to_all_single")
    assert sent == 3 * len(optimizer.layout.packs)


def test_sgd_takes_a_plain_state_of_a_buffer_not_begun():
    def script(model: nn.Module, optimizer: Any, _batch: Tensor, _sharded: bool) -> None:
        state = {n: {"momentum_buffer": None} for n in range(6)}
        groups = [{**optimizer.param_groups[0], "params": list(range(6))}]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        steps(3)(model, optimizer, _batch, _sharded)

    check(lambda model: sgd(model, momentum=0.9, dampening=0.5), script)


@pytest.mark.parametrize("clears", [False, True], ids=["", "zero_grad inside"])
@pytest.mark.parametrize("last", ["outside", "inside", "in an attempt"])
def test_a_step_of_which_no_backward_was_synchronized_warns_of_local_sgd(last: str, clears: bool):
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        fields = {"on_error": "skip"} if last == "in an attempt" else {}
        optimizer = sharded(model, group, **fields)
        contexts = {"outside": contextlib.nullcontext, "inside": optimizer.no_sync}
        for _ in range(2):
            with optimizer.no_sync():
                CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
            with contexts[last]() if last in contexts else optimizer.attempt():
                if clears:
                    optimizer.zero_grad()
                CASES["mlp"].loss(model, CASES["mlp"].batch(1)).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ThreadedWorld(2).run(run)
    local = [it for it in told if "all backwards of a step ran inside it" in str(it.message)]
    assert len(local) == (last == "inside")


def test_a_step_inside_no_sync_raises_and_does_not_warn_that_it_averages():
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group)
        with optimizer.no_sync():
            CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
            with pytest.raises(RuntimeError, match=r"step: called inside no_sync\(\)"):
                optimizer.step()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ThreadedWorld(2).run(run)
    assert not [it for it in told if "ran inside it" in str(it.message)]
