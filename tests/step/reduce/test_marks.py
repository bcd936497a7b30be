"""After the reduction ``.grad`` is the mean or NaN, and to read it is an error by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import BATCH, on_ranks
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.memory import marks
from shardcast.optimizer.stateful import packed_of
from shardcast.step.history import HISTORY
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:step skipped")]
SHAPES = ((70, 50), (3,), (), (4100,), (1,), (2, 600), (900, 3))


class Dots(nn.Module):
    """Its gradients are those that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, seed: int, use: range | set[int]) -> Tensor:
        return torch.stack([(self.all[n] * gradient(seed, n)).sum() for n in use]).sum()


def gradient(seed: int, number: int) -> Tensor:
    """Multiples of 1/16, whose mean over 1 to 4 ranks has no rounding but in fp32's last bit."""
    generator = torch.Generator().manual_seed(100 * seed + number)
    return torch.randint(-16, 17, SHAPES[number], generator=generator) / 16


def made(group: Any, draw: random.Random, **fields: Any) -> tuple[Dots, Any]:
    model = Dots()
    options = {
        "partition": draw.choice(["even", "whole"]), "pack_params": draw.choice([1, 2, None]),
        "param_dtype": draw.choice(["fp32", "bf16"]), "fuse": "eager",
    }  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, shardcast.shard(model, inner, process_group=group, **{**options, **fields})


def assert_mean_or_nan(model: Dots, optimizer: Any, mean: list[Tensor], rank: int) -> int:
    """How many elements are no mean."""
    marked = 0
    for shard in packed_of(optimizer).shards:
        own, data = shard.pack.own, shard.grads.data
        in_slots = torch.zeros_like(data, dtype=torch.bool)
        for slot in shard.pack.layout.slots:
            number = int(slot.name.rsplit(".", 1)[1])
            in_slots[slot.offset : slot.end] = True
            grad = model.all[number].grad
            assert grad is not None
            with _compat.without_torch_function():  # as an extension in C++ sees it
                flat = grad.reshape(-1)
            right = mean[number].reshape(-1).to(flat.dtype)
            place = torch.arange(slot.offset, slot.end)
            is_own = (place >= own.start) & (place < own.stop)
            assert torch.equal(flat[is_own], right[is_own]), "the own span has the mean"
            for part in (
                (flat[place < own.start], flat[place >= own.stop]) if own.numel else (flat,)
            ):
                marked += part.numel()
                for start in range(0, part.numel(), marks.MARKED):
                    assert part[start : start + marks.MARKED].isnan().any()
            assert is_own.all() or flat.sum().isnan()
        assert not data[~in_slots].any(), "padding stays zero"
    return marked


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_gradient_is_the_mean_or_has_nan_in_every_stretch_of_elements(size: int):
    for seed in range(6):

        def run(group: Any, seed: int = seed) -> None:
            draw = random.Random(seed)
            model, optimizer = made(group, draw)
            every = range(len(SHAPES))
            for step in range(3):
                micro = draw.choice([1, 2])
                for _ in range(micro):
                    model(10 * step + group.rank(), every).backward()
                ranks = [[gradient(10 * step + r, n) for n in every] for r in range(size)]
                sums = [torch.stack(one).sum(0) for one in zip(*ranks, strict=True)]
                mean = [
                    (total / size).to(param.grad.dtype) * micro
                    for total, param in zip(sums, model.all, strict=True)
                ]
                marked = assert_mean_or_nan(model, optimizer, mean, group.rank())
                assert bool(marked) == (size > 1) or "whole" in str(optimizer.config)
                if draw.random() < 0.5:
                    optimizer.gather_gradients()
                    for param, right in zip(model.all, mean, strict=True):
                        assert torch.equal(param.grad, right)
                optimizer.step()
                optimizer.zero_grad(set_to_none=draw.random() < 0.5)

        world = ThreadedWorld(size)
        world.run(run)
        assert_same_sequence(world.logs)


def test_the_marks_are_missed_where_they_are_not_put(monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    monkeypatch.setattr(marks.Marks, "put", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_gradient_is_the_mean_or_has_nan_in_every_stretch_of_elements(2)


# -- what scripts make of it ----------------------------------------------------------------------


def torchs_clip(params: list[Any], foreach: bool | None = None) -> None:
    torch.nn.utils.clip_grad_norm_(params, 0.1, foreach=foreach)


def clip_through_data(params: list[Any]) -> None:
    norm = torch.stack([param.grad.data.norm() for param in params]).norm()
    for param in params:
        param.grad.data.mul_(0.1 / (norm + 1e-6))


def normalise(params: list[Any]) -> None:
    norm = torch.cat([param.grad.flatten() for param in params]).norm()
    for param in params:
        param.grad = param.grad / norm


EDITS: list[Callable[[list[Any]], None]] = [
    torchs_clip, partial(torchs_clip, foreach=False), clip_through_data, normalise
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    "fields",
    [{}, {"param_dtype": "bf16", "partition": "whole"}, {"param_dtype": "fp16", "loss_scale": 4.0},
     {"max_grad_norm": 1.0, "pack_params": None}],
)  # fmt: skip
def test_a_factor_of_what_is_read_is_an_error_by_name_on_all_ranks_at_that_line(
    edit: Any, size: int, fields: dict[str, Any]
):
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> list[Tensor]:
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.scale_loss(model(batch.to(before[0].dtype)).float().square().mean()).backward()
        with pytest.raises(RuntimeError, match=r"reads \.grad of '0.weight'.*gather_gradients"):
            edit(list(model.parameters()))
        assert all(map(torch.equal, before, model.parameters())), "nothing is changed"
        optimizer.zero_grad()
        optimizer.scale_loss(model(batch.to(before[0].dtype)).float().square().mean()).backward()
        optimizer.gather_gradients()
        edit(list(model.parameters()))
        optimizer.step()
        assert not any(map(torch.equal, before, model.parameters())), "and all is well"
        return [param.detach().clone() for param in model.parameters()]

    ranks = on_ranks(script, size, **fields)
    for mine in ranks:
        assert all(map(torch.equal, mine, ranks[0]))


def test_gradients_that_are_summed_by_hand_are_an_error():
    """As in StyleGAN2-ADA, for which .grad is this rank's own gradient."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).sum().backward()
        with pytest.raises(RuntimeError, match=r"reads \.grad of '0.weight'.*gather_gradients"):
            torch.cat([param.grad.flatten() for param in model.parameters()])
        for param in model.parameters():
            with pytest.raises(RuntimeError, match=r"all_reduce reads \.grad.*gather_gradients"):
                torch.distributed.all_reduce(param.grad)

    on_ranks(script)


@pytest.mark.parametrize("fields", [{}, {"partition": "whole"}, {"param_dtype": "bf16"}])
def test_a_factor_that_an_extension_in_c_computes_skips_the_step_by_name(fields: dict[str, Any]):
    """It does not come through Python, and sees the marks."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> bool:
        model(batch.to(model[0].weight.dtype)).float().sum().backward()
        with _compat.without_torch_function():
            norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
        for param in model.parameters():
            param.grad.mul_(0.1 / (norm + 1e-6))
        optimizer.step()
        return bool(optimizer.last_step_skipped)

    with pytest.warns(UserWarning, match=r"non-finite gradient: .*gather_gradients"):
        assert all(on_ranks(script, 3, **fields))


def test_nan_to_num_of_each_gradient_by_itself_is_no_mistake():
    def script(model: nn.Module, optimizer: Any, batch: Tensor, cleans: bool) -> list[Tensor]:
        for _ in range(3):
            model(batch).square().mean().backward()
            for param in model.parameters() if cleans else ():
                torch.nan_to_num(param.grad, nan=0, posinf=1e5, neginf=-1e5, out=param.grad)
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    cleaned = on_ranks(partial(script, cleans=True))
    for mine, other in zip(cleaned, on_ranks(partial(script, cleans=False)), strict=True):
        assert all(map(torch.equal, mine, other))


def test_a_gradient_that_is_infinite_by_itself_skips_the_step_beside_an_edit_of_each_element():
    """A dynamic loss scale overflows now and then, in scripts that scale gradients by layers."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> bool:
        (model(batch).square().mean() * 1e30).mul(1e30).backward()
        for param in model.parameters():
            param.grad.mul_(0.5)
        optimizer.step()
        return bool(optimizer.last_step_skipped)

    assert all(on_ranks(script, param_dtype="fp32", max_skipped_steps=100))


def test_ranks_do_not_part_where_one_owns_all_of_a_parameter():
    """A layer-wise factor would be right on the owner alone."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        for _ in range(2):
            model(batch).square().mean().backward()
            for name, param in model.named_parameters():
                with pytest.raises(RuntimeError, match=rf"norm reads \.grad of '{name}'"):
                    param.grad.norm()
            optimizer.step()
            with pytest.raises(RuntimeError, match="after the backward"):  # after the step, too
                param.grad.norm()
            optimizer.zero_grad()

    on_ranks(script, 3, partition="whole")


def test_sharded_gradients_are_neither_edited_nor_read():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        for param in model.parameters():
            assert param.grad.untyped_storage().nbytes() <= 8
            with pytest.raises(RuntimeError, match=r"mul_ edits \.grad of .*hook"):
                param.grad.mul_(0.5)
            with pytest.raises(RuntimeError, match=r"reads \.grad .*use grads 'full'"):
                param.grad.data.norm()

    on_ranks(script, grads="sharded")


# -- alike on all ranks ---------------------------------------------------------------------------


def clears(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def clears_to_zeros(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)  # there is a gradient on all ranks still


def clears_by_the_model(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()


def clears_one(model: Any, optimizer: Any) -> None:
    model[2].weight.grad = None


def drops_a_group(model: nn.Module, optimizer: Any) -> None:
    del optimizer.param_groups[-1]["params"][-1]


def removes_all_groups(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups.clear()


def clips_alone(model: nn.Module, optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.5)


def clips_values_alone(model: nn.Module, optimizer: Any) -> None:
    optimizer.clip_grad_value_(0.5)


def gives_a_loss(model: nn.Module, optimizer: Any) -> None:
    optimizer.step(loss=1.0)


@pytest.mark.parametrize("grads", ["full", "sharded"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("act", "told"),
    [
        (clears, r"\.grad of '0.weight' was kept on some ranks"),
        (clears_to_zeros, r"clears of their gradients differs \(.*rank 1: 1"),
        (clears_by_the_model, r"\.grad of '0.weight' was kept on some ranks"),
        (clears_one, r"'2.weight' was kept on some ranks.*rank 1: cleared"),
        (drops_a_group, "expected the 6 parameters"),
        (removes_all_groups, "expected .1. groups"),
        (gives_a_loss, "loss"),
        (clips_alone, "max_norm differs"),
        (clips_values_alone, "clip_value differs"),
    ],
)
def test_all_ranks_raise_for_what_one_did_alone(act: Any, told: str, size: int, grads: str):
    def run(group: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Linear(11, 3))
        optimizer = shardcast.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group, grads=grads
        )
        model(torch.ones(2, 7).bfloat16()).float().sum().backward()
        with pytest.raises((RuntimeError, TypeError), match=told):
            if group.rank() == 1:
                act(model, optimizer)
            optimizer.step()

    ThreadedWorld(size, timeout=20).run(run)


@pytest.mark.parametrize("fact", HISTORY)
def test_each_number_of_what_was_done_between_two_steps_is_compared(fact: str):
    """Of backwards, too, of which no script can make another number without a collective more."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        if batch.data_ptr() != BATCH.data_ptr():  # not rank 0
            packed_of(optimizer).reduce.history[fact] = 7
        with pytest.raises(RuntimeError, match=f"{fact} differs .*: 7"):
            optimizer.step()

    for size in (2, 3, 4):
        on_ranks(script, size)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_raise_for_a_gradient_that_an_added_parameter_has_on_one_alone(size: int):
    def run(group: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 11), nn.Linear(11, 3))
        inner = torch.optim.SGD(model[:2].parameters(), lr=0.1)
        model[2].requires_grad_(False)
        optimizer = shardcast.shard(model, inner, process_group=group, param_dtype="fp32")
        model[2].requires_grad_(True)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()  # not of what it does not hold
        if group.rank() != 1:
            model.zero_grad()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        model(torch.ones(2, 7)).sum().backward()
        with pytest.raises(RuntimeError, match="gradients that parameters of an added group"):
            optimizer.step()

    ThreadedWorld(size, timeout=20).run(run)


def test_clears_that_all_ranks_make_or_that_clear_nothing_are_no_mistake():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        for _ in range(2):
            if batch[0, 0] > -1:  # not on rank 0
                optimizer.zero_grad()  # there is nothing
            model(batch).sum().backward()
            optimizer.zero_grad()
            if batch[0, 0] > -1:
                optimizer.zero_grad()
                with optimizer.no_sync():
                    model(batch).sum().backward()
                optimizer.zero_grad()  # a micro-batch that this rank leaves out
            with optimizer.no_sync():
                model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    on_ranks(script)


# -- no collective where DDP has none -------------------------------------------------------------


@pytest.mark.parametrize("grads", ["full", "sharded"])
def test_backwards_that_reach_no_trained_parameter_may_differ_in_number(grads: str):
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        for step in range(3):
            model.requires_grad_(False)
            for _ in range(int(batch[0, 0] > -1) + step % 2):  # adversarial examples, Langevin
                example = batch.clone().requires_grad_(True)
                model(example).square().sum().backward()
                assert example.grad is not None
            model.requires_grad_(True)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    on_ranks(script, 2, grads=grads)
    on_ranks(script, 3, grads=grads)


@pytest.mark.parametrize("grads", ["full", "sharded"])
def test_gradients_are_detached_and_zeroed_as_old_scripts_do(grads: str):
    def script(model: nn.Module, optimizer: Any, batch: Tensor, old: bool) -> list[Tensor]:
        for _ in range(3):
            for param in model.parameters():
                if old and param.grad is not None:
                    param.grad.detach_()
                    param.grad.zero_()
            if not old:
                optimizer.zero_grad(set_to_none=False)
            model(batch).square().mean().backward()
            optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    old, new = (on_ranks(partial(script, old=old), grads=grads) for old in (True, False))
    for mine, other in zip(old, new, strict=True):
        assert all(map(torch.equal, mine, other))
