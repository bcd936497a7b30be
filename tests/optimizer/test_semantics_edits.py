"""What scripts do to gradients by hand, against plain torch on the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(60)

X = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
Script = Callable[[nn.Module, Any, Tensor], None]
WORLDS = pytest.mark.parametrize("size", [1, 2, 3])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def on_ranks(script: Script, size: int, **fields: Any) -> list[list[Tensor]]:
    def run(group: Any) -> list[Tensor]:
        model = mlp()
        config = {"param_dtype": torch.float32, "pack_params": 2, **fields}
        optimizer = shardcast.shard(model, sgd(model), process_group=group, **config)
        script(model, optimizer, X.chunk(size)[group.rank()])
        return [param.detach().clone() for param in model.parameters()]

    return ThreadedWorld(size).run(run)


def assert_as_plain(script: Script, size: int, **fields: Any) -> None:
    model = mlp()
    script(model, sgd(model), X)
    for params in on_ranks(script, size, **fields):
        for mine, plain in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(mine, plain.detach(), rtol=1e-5, atol=1e-7)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


@WORLDS
def test_a_gradient_that_was_given_other_memory_counts_and_so_do_later_ones(size: int):
    def script(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        for number in range(5):
            loss_of(model, x).backward()
            if number == 1:
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.data = param.grad.data * 0.5
            optimizer.step()
            optimizer.zero_grad()

    assert_as_plain(script, size)


@WORLDS
def test_gradients_that_a_script_kept_outlive_the_next_backward(size: int):
    def script(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        for _ in range(3):
            kept = []
            for task in range(2):
                model(x)[:, task].pow(2).mean().backward()
                kept.append([param.grad for param in model.parameters()])
                optimizer.zero_grad()
            for param, first, second in zip(model.parameters(), *kept, strict=True):
                param.grad = first - 0.5 * second
            optimizer.step()
            optimizer.zero_grad()

    assert_as_plain(script, size)


@WORLDS
def test_a_gradient_replaced_between_two_backwards_is_not_averaged_again(size: int):
    def script(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        for _ in range(3):
            for scale in (1.0, 3.0):
                (scale * loss_of(model, x)).backward()
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad = param.grad * 0.9
            optimizer.step()
            optimizer.zero_grad()

    assert_as_plain(script, size)


def cleared(model: nn.Module) -> None:
    model.zero_grad()


def one_cleared(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def replaced(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 0.1


def in_place(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.add_(0.1)


@pytest.mark.parametrize("edit", [cleared, one_cleared, replaced, in_place])
def test_a_step_refuses_gradients_that_were_edited_after_the_clip(edit: Callable[..., None]):
    def script(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        loss_of(model, x).backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.clip_grad_value_(0.01)  # our own edit
        edit(model)
        with pytest.raises(RuntimeError, match="edited, replaced or cleared after clip_grad_norm_"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()

    on_ranks(script, 2)


def test_a_clip_before_the_last_backward_is_said_to_be_lost():
    def script(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        loss_of(model, x).backward()
        optimizer.clip_grad_norm_(0.1)
        loss_of(model, x).backward()
        with pytest.warns(UserWarning, match="this clip is lost"):
            optimizer.step()

    on_ranks(script, 1)


@pytest.mark.parametrize("dropped", [False, True])
def test_gradients_set_by_hand_are_averaged_or_said_not_to_be(
    dropped: bool, recwarn: pytest.WarningsRecorder
):
    def script(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        params = list(model.parameters())
        for _ in range(2):
            if dropped:
                loss_of(model, x).backward()
                optimizer.zero_grad()
            grads = torch.autograd.grad(loss_of(model, x), params)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
            optimizer.zero_grad()

    if dropped:
        on_ranks(script, 2)
    else:
        assert_as_plain(script, 2)
    told = [w for w in recwarn.list if "not averaged over ranks" in str(w.message)]
    assert bool(told) == dropped


class Net(nn.Module):
    """Four layers, of which some may be left out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor, skipped: int = -1) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = x + torch.tanh(layer(x))
        return x


def two_models(group: Any, size: int, fields: dict[str, Any]) -> list[Tensor]:
    """One backward through both; from the second step on a rank leaves out a layer."""
    torch.set_num_threads(1)
    nets = Net(0), Net(1)
    optimizers: list[Any] = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    if group is not None:
        config = {"param_dtype": torch.float32, "pack_params": 1, **fields}
        optimizers = [
            shardcast.shard(net, optimizer, process_group=group, **config)
            for net, optimizer in zip(nets, optimizers, strict=True)
        ]
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(5))
    for number in range(5):
        for rank in range(size) if group is None else [group.rank()]:
            skipped = 3 if rank == 1 and number else -1
            loss = nets[1](nets[0](x.chunk(size)[rank]), skipped).pow(2).mean()
            (loss / size if group is None else loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for net in nets for param in net.parameters()]


@pytest.mark.parametrize(
    "fields", [{}, {"reduce": "reduce_scatter"}, {"grads": "sharded"}], ids=str
)
@pytest.mark.parametrize("size", [2, 3])
def test_two_models_in_one_backward_may_lack_gradients_on_one_rank(
    size: int, fields: dict[str, Any]
):
    expected = two_models(None, size, {})
    for params in ThreadedWorld(size).run(two_models, size, fields):
        for mine, plain in zip(params, expected, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


def edited_through_data(group: Any, edit: Callable[[Tensor], Any]) -> None:
    model = mlp()
    optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype="fp32")
    for _ in range(2):
        loss_of(model, torch.ones(2, 7) + group.rank()).backward()
        for param in model.parameters():
            edit(param.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("edit", "warned"), [(lambda grad: grad.data.mul_(0.5), 2), (lambda grad: grad.data.norm(), 0)]
)
def test_an_edit_that_no_version_counter_sees_is_warned_of_once(edit: Any, warned: int):
    """DINO's clip and hand-made all-reduces write ``p.grad.data``; reading it is fine."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ThreadedWorld(2).run(edited_through_data, edit)
    edits = [warning for warning in caught if "edited in place" in str(warning.message)]
    assert len(edits) == warned, "once on each rank"
