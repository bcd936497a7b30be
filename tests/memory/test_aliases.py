"""Tensors that share a parameter's memory: views follow it, anything else raises an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import assert_same_bits, on_each_rank, values
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(60)


class Views(nn.Module):
    """Module with views of parameters as attributes, in a list and as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.frozen = nn.Linear(5, 7), nn.Linear(3, 3).requires_grad_(False)
        self.data = self.layer.weight.data
        self.turned = self.layer.weight.detach().T
        self.rows = [self.layer.weight.data[2:4], {"bias": self.layer.bias.detach()[1:]}]
        self.graph = self.layer.weight[1:].T
        self.of_frozen = self.frozen.weight.data.view(-1)
        self.register_buffer("seen", self.layer.bias.data)
        self.apart = self.layer.weight.detach().clone()
        self.same = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ torch.cat([self.graph.T, self.graph.T[:1]])[:, :3]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        weight, bias = self.layer.weight, self.layer.bias
        return [
            (self.data, weight),
            (self.turned, weight.T),
            (self.rows[0], weight[2:4]),
            (self.rows[1]["bias"], bias[1:]),
            (self.graph, weight[1:].T),
            (self.seen, bias),
            (self.of_frozen, self.frozen.weight.view(-1)),
        ]


def assert_views(model: Views) -> None:
    for number, (view, part) in enumerate(model.pairs()):
        assert view.data_ptr() == part.data_ptr() and view.dtype == part.dtype, number
        assert torch.equal(view, part), number
    assert model.graph.requires_grad and not model.data.requires_grad
    assert model.seen is model._buffers["seen"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 2])
def test_views_of_a_parameter_show_it_in_its_pack_and_after_it(
    size: int, dtype: torch.dtype, recwarn: pytest.WarningsRecorder
):
    def run(group: Any) -> dict[str, Tensor]:
        model = Views()
        before = model.apart.clone()
        inner = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        optimizer = shardcast.shard(model, inner, process_group=group, param_dtype=dtype)
        assert_views(model)
        for _ in range(3):
            model(torch.ones(2, 5, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert_views(model)
        model.data.mul_(0.5)  # the masters follow
        exact = optimizer.full_parameters()
        if group.rank() == 0:
            assert torch.equal(exact["layer.weight"].to(dtype), model.layer.weight)
        optimizer.close()
        assert_views(model)
        assert torch.equal(model.apart, before) and model.layer.weight.dtype == torch.float32
        return values(model)

    ends = ThreadedWorld(size).run(run)
    assert_same_bits(ends[0], ends[-1])
    assert not [each for each in recwarn.list if "broadcast_buffers" in str(each.message)]


def test_a_view_through_which_gradients_go_trains_as_under_plain_torch():
    def train(sharded: bool) -> Tensor:
        model = Views()
        optimizer: Any = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        if sharded:
            optimizer = shardcast.shard(model, optimizer, param_dtype="fp32")
        for _ in range(3):
            model(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.layer.weight.detach().clone()

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=1e-6)


def flat(model: Views) -> None:
    vector = torch.cat([param.detach().reshape(-1) for param in model.layer.parameters()])
    begin = 0
    for param in model.layer.parameters():
        param.data = vector[begin : begin + param.numel()].view(param.shape)
        begin += param.numel()
    model.vector = vector


def in_a_tuple(model: Views) -> None:
    model.kept = (1, model.layer.weight.data)


def as_integers(model: Views) -> None:
    model.bits = model.layer.weight.data.view(torch.int32)


def strided(model: Views) -> None:
    model.layer.weight.data = model.layer.weight.data.T.contiguous().T
    model.kept = model.layer.weight.data


@pytest.mark.parametrize(
    ("share", "name", "param"),
    [
        (flat, "'vector'", "'layer.weight', 'layer.bias'"),
        (in_a_tuple, r"'kept\[1\]'", "'layer.weight'"),
        (as_integers, "'bits'", "'layer.weight'"),
        (strided, "'kept'", "'layer.weight'"),
    ],
)
@on_each_rank(2)
def test_what_is_no_view_of_one_parameter_is_refused_by_name_on_all_ranks(
    group: Any, share: Any, name: str, param: str
):
    model = Views()
    model.graph = model.data = model.turned = model.rows = model.seen = None  # type: ignore
    share(model)
    inner = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"{name} shares memory with parameter {param}"):
        shardcast.shard(model, inner, process_group=group)
    assert model.layer.weight.dtype == torch.float32


def test_layers_that_hold_their_own_parameters_twice_are_not_refused():
    torch.manual_seed(0)
    model = nn.ModuleList(
        [nn.LSTM(3, 4), torch.nn.utils.spectral_norm(nn.Linear(3, 3)), nn.MultiheadAttention(4, 2)]
    )
    shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), param_dtype="fp32")
    assert model[1].weight.data_ptr() == model[1].weight_orig.data_ptr()
