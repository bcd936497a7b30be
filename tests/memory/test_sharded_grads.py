"""Option ``grads: sharded``: every backward is reduced, a rank keeps its part of the gradients."""

from __future__ import annotations

import copy
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import BATCH, check, mlp
from torch import Tensor, nn

import shardcast
from shardcast.memory.gradients import ShardedGradients
from shardcast.step.reduce.reduce_pass import WINDOW
from shardcast.testing import SpawnedWorld, ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(60)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(group: Any, grads: str, micro: int = 1, **fields: Any) -> list[Tensor]:
    model = mlp()
    options = {"pack_params": 2, "max_grad_norm": 0.5, **fields}
    optimizer = shardcast.shard(model, adamw(model), process_group=group, grads=grads, **options)
    mine = BATCH.chunk(group.size())[group.rank()]
    for _ in range(4):
        for part in mine.chunk(micro):
            optimizer.scale_loss(model(part).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("size", "dtype", "partition"),
    [(1, "bf16", "even"), (2, "fp32", "whole"), (2, "fp16", "even"), (3, "bf16", "whole"),
     (3, "fp32", "even")],
)  # fmt: skip
def test_one_backward_per_step_gives_the_bits_of_full_gradients(
    size: int, dtype: str, partition: str
):
    fields = {"param_dtype": dtype, "partition": partition}
    world = ThreadedWorld(size)
    sharded = world.run(lambda group: train(group, "sharded", **fields))
    assert_same_sequence(world.logs)
    full = ThreadedWorld(size).run(lambda group: train(group, "full", **fields))
    for mine, theirs in zip(sharded, full, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_two_gloo_processes_give_the_bits_of_full_gradients(gloo: SpawnedWorld):
    for mine, theirs in zip(gloo.run(train, "sharded"), gloo.run(train, "full"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def accumulates(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
    for part in batch.chunk(2):
        (model(part).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def without_sync(model: nn.Module, optimizer: Any, batch: Tensor, sharded: bool) -> None:
    with optimizer.no_sync() if sharded else nullcontext():
        (model(batch[: len(batch) // 2]).square().mean() / 2).backward()
        (model(batch[len(batch) // 2 :]).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def throws_away(clear: str) -> Any:
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        (model(batch) * 100).square().mean().backward()
        (optimizer if clear == "optimizer" else model).zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return script


def zeroes(clear: str) -> Any:
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for is_more in (False, True):  # first a step of zeros, with momentum
            (model(batch) * 10).square().mean().backward()
            (optimizer if clear == "optimizer" else model).zero_grad(set_to_none=False)
            if is_more:
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return script


def leaves_unused(set_to_none: bool) -> Any:
    """What is unused after zero_grad moves by momentum and decay, or not at all."""

    def script(model: Any, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for is_used in (True, False):
            hidden = model[:2](batch)
            model[2:](hidden if is_used else hidden.detach()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    return script


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def repeated(script: Any) -> Any:
    def three_times(*args: Any) -> None:
        for _ in range(3):
            script(*args)

    return three_times


@pytest.mark.parametrize(
    "script",
    [
        accumulates, without_sync, throws_away("optimizer"), throws_away("model"),
        zeroes("optimizer"), zeroes("model"), leaves_unused(True), leaves_unused(False),
    ],
    ids=["accumulates", "no_sync", "cleared", "cleared by the model", "zeroed",
         "zeroed by the model", "unused", "unused zeros"],
)  # fmt: skip
def test_accumulated_cleared_and_zeroed_gradients_are_those_of_plain_torch(script: Any):
    check(sgd, repeated(script), tol=1e-6, grads="sharded")


def accumulated(group: Any, grads: str) -> Tensor:
    """The norm after 64 backwards of gradients that bf16 cannot add up."""
    model = nn.Linear(33, 9, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = shardcast.shard(model, inner, process_group=group, grads=grads)
    for step in range(64):
        grad = torch.randn(9, 33, generator=torch.Generator().manual_seed(step))
        (model.weight * grad.bfloat16()).sum().backward()
    return optimizer.clip_grad_norm_(1e9)


def test_backwards_are_added_up_in_fp32():
    torch.manual_seed(0)
    grads = [torch.randn(9, 33, generator=torch.Generator().manual_seed(n)) for n in range(64)]
    exact = torch.stack([grad.bfloat16().double() for grad in grads]).sum(0).norm()
    sharded = ThreadedWorld(2).run(lambda group: accumulated(group, "sharded"))[0]
    full = ThreadedWorld(2).run(lambda group: accumulated(group, "full"))[0]
    assert abs(sharded - exact) / exact < 1e-6
    assert abs(full - exact) / exact > 1e-5, "the control: bf16 accumulation is worse"


def held(group: Any, grads: str, micro: int, to_none: bool = True) -> tuple[int, int, int]:
    """Gradient bytes after backward, most full-size storages at once, elements of the model."""
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(12)])
    optimizer = shardcast.shard(
        model, adamw(model), process_group=group, grads=grads, pack_params=1
    )
    packs = optimizer.reduce.grads
    most = 0

    def look(_param: Tensor) -> None:
        nonlocal most
        most = max(most, sum(pack.allocated for pack in packs))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        optimizer.zero_grad(to_none)
        for _ in range(micro):
            model(torch.ones(2, 32)).float().square().mean().backward()
        bytes_after = sum(pack.nbytes for pack in packs)
        assert bytes_after == optimizer.memory_report()["gradients"]
        optimizer.step()
    return bytes_after, most, 12 * 32 * 32


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_its_share_and_a_window_of_packs(size: int):
    after, most, numel = ThreadedWorld(size).run(lambda group: held(group, "sharded", 1))[0]
    assert after == 2 * numel // size, "bf16, as it was reduced"
    zeroed, _, _ = ThreadedWorld(size).run(lambda group: held(group, "sharded", 1, False))[0]
    assert zeroed == after, "zeros need not be added to"
    assert most <= WINDOW + 2
    after, most, _ = ThreadedWorld(size).run(lambda group: held(group, "sharded", 2))[0]
    assert after == 4 * numel // size, "fp32, once means are added up"
    assert most <= WINDOW + 2
    after, most, _ = ThreadedWorld(size).run(lambda group: held(group, "full", 1))[0]
    assert (after, most) == (2 * numel, 12), "the control"


def test_a_pack_is_not_held_twice_while_its_gradients_come():
    def body(group: Any) -> None:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))  # 2 MiB each
        optimizer = shardcast.shard(model, adamw(model), process_group=group, grads="sharded")
        assert len(optimizer.layout.packs) == 1
        came: list[weakref.ref[Tensor]] = []
        alive: list[int] = []

        def note(param: Tensor) -> None:
            came.append(weakref.ref(param.grad))
            alive.append(sum(grad() is not None for grad in came))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(note)
        model(torch.ones(1, 1024)).float().sum().backward()
        assert alive == [1, 2, 1, 2, 1, 2]  # no more than 4 MiB wait to be copied in

    ThreadedWorld(2).run(body)


def test_no_grad_is_shown_after_a_backward_and_a_set_one_is_taken_for_the_mean():
    def run(group: Any) -> Tensor:
        model = mlp()
        optimizer = shardcast.shard(model, adamw(model), process_group=group, grads="sharded")
        model(BATCH).float().sum().backward()
        assert all(param.grad is None for param in model.parameters())
        model[0].weight.grad = torch.full_like(model[0].weight, 2.0)
        norm = optimizer.clip_grad_norm_(1e9)
        assert model[0].weight.grad is None
        return norm.square() - 4.0 * model[0].weight.numel()

    first, second = ThreadedWorld(2).run(run)
    assert first == second > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_with_sharded_gradients_clear_their_own(copied: Any):
    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(
            model, adamw(model), process_group=group, grads="sharded", param_dtype="fp32"
        )
        model(BATCH).sum().backward()
        twin = copied(model)
        twin(BATCH).sum().backward()
        twin.zero_grad()
        assert all(param.grad is None for param in twin.parameters())
        assert optimizer.clip_grad_norm_(1.0) > 0, "those of the model stay"
        optimizer.close()
        assert "zero_grad" not in vars(model)

    ThreadedWorld(2).run(run)


def test_a_mean_that_is_not_carried_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """The control of accumulation: without the carry the last backward alone counts."""
    reopen = ShardedGradients.reopen

    def forget(self: ShardedGradients, kept: Any) -> Tensor | None:
        carry = reopen(self, kept)
        return None if carry is None else carry.zero_()

    monkeypatch.setattr(ShardedGradients, "reopen", forget)
    with pytest.raises(AssertionError):
        check(sgd, repeated(accumulates), tol=1e-6, grads="sharded")


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_skip_names_the_rank_whose_gradient_was_not_finite(culprit: int):
    def run(group: Any, reduce: str, micro: int) -> str:
        model = mlp()
        optimizer = shardcast.shard(
            model, adamw(model), process_group=group, grads="sharded", param_dtype="fp32",
            max_skipped_steps=1, reduce=reduce,
        )  # fmt: skip
        for number in range(micro):
            bad = group.rank() == culprit and number == 0
            (model(BATCH).square().mean() * (float("nan") if bad else 1.0)).backward()
        with pytest.raises(RuntimeError, match="non-finite") as told:
            optimizer.step()
        return str(told.value)

    for micro in (1, 2):
        for told in ThreadedWorld(3).run(run, "all_to_all", micro):
            assert told.count("first: rank") == 1 and told.count("; rank") == 2, "each owner's"
            assert told.count(f"rank {culprit}, parameter '") == 3 and "element 0" in told
    for told in ThreadedWorld(3).run(run, "reduce_scatter", 1):
        assert "first: the sum over ranks, at its owner 0, parameter" in told


def test_clearing_one_of_several_models_between_two_backwards_is_refused_by_name():
    def run(group: Any) -> None:
        nets = nn.ModuleList([mlp(), mlp()])
        optimizer = shardcast.shard(
            nets, adamw(nets), process_group=group, grads="sharded", param_dtype="fp32"
        )
        loss = nets[0](BATCH).sum() + nets[1](BATCH).sum()
        loss.backward(retain_graph=True)
        nets[0].zero_grad()
        with pytest.raises(RuntimeError, match=r"\.grad of '0\.0\.weight' was cleared"):
            loss.backward()
        optimizer.zero_grad()

    ThreadedWorld(2).run(run)


def test_the_fp32_sum_of_a_step_is_not_kept_beside_the_gradients_of_the_next():
    """The operands of an update are kept between steps where gradients are; these are not."""

    def run(group: Any) -> None:
        model = mlp().bfloat16()
        optimizer = shardcast.shard(model, adamw(model), process_group=group, grads="sharded")
        inputs = BATCH.bfloat16()
        for _ in range(2):
            model(inputs).float().square().mean().backward()
        (shard,) = optimizer.shards
        assert shard.grads is not None and shard.grads.own.dtype == torch.float32
        summed = weakref.ref(shard.grads.own)
        optimizer.step()
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        assert shard.grads.own.dtype == torch.bfloat16 and summed() is None

    ThreadedWorld(2).run(run)
