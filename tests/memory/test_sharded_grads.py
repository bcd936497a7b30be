"""Option ``grads: sharded``: every backward is reduced, a rank keeps its part of the gradients."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from oracle import BATCH, adamw, equal, mlp, on_ranks, values
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.optimizer.stateful import packed_of
from shardcast.step.reduce.reduce_pass import WINDOW
from shardcast.testing import SpawnedWorld, ThreadedWorld

pytestmark = pytest.mark.timeout(60)


def train(model: Any, optimizer: Any, batch: Tensor) -> list[Tensor]:
    for _ in range(4):
        optimizer.scale_loss(model(batch).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(
    ("size", "dtype", "partition"),
    [(1, "bf16", "even"), (2, "fp32", "whole"), (2, "fp16", "even"), (3, "bf16", "whole"),
     (3, "fp32", "even")],
)  # fmt: skip
def test_one_backward_per_step_gives_the_bits_of_full_gradients(
    size: int, dtype: str, partition: str
):
    fields = {"param_dtype": dtype, "partition": partition, "max_grad_norm": 0.5}
    sharded, full = (on_ranks(train, size, adamw, grads=g, **fields) for g in ("sharded", "full"))
    assert all(map(equal, sharded, full))


def on_gloo(group: Any, grads: str) -> list[Tensor]:
    model = mlp()
    optimizer = shardcast.shard(
        model, adamw(model), process_group=group, grads=grads, pack_params=2
    )
    return train(model, optimizer, BATCH.chunk(2)[group.rank()])


def test_two_gloo_processes_give_the_bits_of_full_gradients(gloo: SpawnedWorld):
    assert all(map(equal, gloo.run(on_gloo, "sharded"), gloo.run(on_gloo, "full")))


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
    packs = packed_of(optimizer).reduce.grads
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
    assert 2 * numel <= after < 2.01 * numel, "the control, with the places of NaN"
    assert most == 12


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


def test_nothing_is_shown_after_a_backward_and_a_set_gradient_is_taken_for_the_mean():
    def script(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        model(batch).float().sum().backward()
        for param in model.parameters():
            assert param.grad.shape == param.shape
            with pytest.raises(RuntimeError, match=r"reads \.grad of .*use grads 'full'"):
                param.grad.norm()
            with _compat.without_torch_function():  # as an extension in C++
                assert param.grad.isnan().all()
            assert param.grad.untyped_storage().nbytes() == param.grad.element_size()
        model[0].weight.grad = torch.full_like(model[0].weight, 2.0)
        norm = optimizer.clip_grad_norm_(1e9)
        with pytest.raises(RuntimeError, match=r"reads \.grad of '0.weight'"):
            model[0].weight.grad.isnan()
        return norm.square() - 4.0 * model[0].weight.numel()

    first, second = on_ranks(script, grads="sharded")
    assert first == second > 0


def forgets(model: Any, optimizer: Any, batch: Tensor) -> list[Tensor]:
    for step in range(4):
        model(batch).float().square().mean().backward()
        optimizer.step()
        if step == 2:
            for param in model.parameters():
                param.grad = None
    return values(model)


def test_gradients_that_are_never_or_individually_cleared_train_as_full_ones():
    sharded, full = (on_ranks(forgets, 3, adamw, grads=g) for g in ("sharded", "full"))
    assert all(map(equal, sharded, full))


def clears_handles(group: Any, grads: str, drop: bool) -> list[Tensor]:
    model = mlp()
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[2:].parameters(), lr=1.0),
    ]  # fmt: skip
    optimizer = shardcast.shard(
        model, optimizers, process_group=group, grads=grads, param_dtype="fp32"
    )
    if drop:
        (100.0 * model(BATCH)).square().mean().backward()
        for handle in optimizer.optimizers:
            handle.zero_grad()
    model(BATCH).square().mean().backward()
    optimizer.step()
    return values(model)


@pytest.mark.parametrize("grads", ["full", "sharded"])
def test_zero_grad_of_every_handle_drops_the_means_of_a_backward(grads: str):
    dropped, none = (ThreadedWorld(2).run(clears_handles, grads, drop) for drop in (True, False))
    assert all(map(equal, dropped, none))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_with_sharded_gradients_clear_their_own(copied: Any):
    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        model(batch).sum().backward()
        twin = copied(model)
        twin(batch).sum().backward()
        twin.zero_grad()
        assert all(param.grad is None for param in twin.parameters())
        assert all(param.grad is not None for param in model.parameters())
        assert optimizer.clip_grad_norm_(1.0) > 0, "those of the model stay"
        optimizer.close()
        assert "zero_grad" not in vars(model)

    on_ranks(script, grads="sharded")


@pytest.mark.parametrize(
    ("reduce", "micro", "culprit"),
    [("all_to_all", 1, 0), ("all_to_all", 2, 2), ("reduce_scatter", 1, 1)],
)
def test_a_skip_names_the_rank_whose_gradient_was_not_finite(reduce: str, micro: int, culprit: int):
    def script(model: Any, optimizer: Any, batch: Tensor) -> str:
        for number in range(micro):
            bad = torch.equal(batch, BATCH.chunk(3)[culprit]) and number == 0
            (model(batch).square().mean() * (float("nan") if bad else 1.0)).backward()
        with pytest.raises(RuntimeError, match="non-finite") as told:
            optimizer.step()
        return str(told.value)

    fields = {"grads": "sharded", "max_skipped_steps": 1, "pack_params": None, "reduce": reduce}
    for told in on_ranks(script, 3, **fields):
        if reduce == "all_to_all":
            assert told.count("first: rank") == 1 and told.count("; rank") == 2, "each owner's"
            assert told.count(f"rank {culprit}, parameter '") == 3 and "element 0" in told
        else:
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

    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        for _ in range(2):
            model(batch).float().square().mean().backward()
        (shard,) = packed_of(optimizer).shards
        assert shard.grads is not None and shard.grads.own.dtype == torch.float32
        summed = weakref.ref(shard.grads.own)
        optimizer.step()
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        assert shard.grads.own.dtype == torch.bfloat16 and summed() is None

    on_ranks(script, grads="sharded", param_dtype="bf16", pack_params=None)
