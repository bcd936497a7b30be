"""Warnings about loads: of a model if no name matches, of state if it changes weights."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import shardcast


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in nn.Linear(4, 4).state_dict().items()}


def told(loads: Any, wrapped: bool = False) -> list[str]:
    """Return the warnings of ``loads(model)`` and two forwards after it."""
    inside: nn.Module = nn.Linear(4, 4)
    model = nn.Sequential(checkpoint_wrapper(inside) if wrapped else inside)
    shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), param_dtype="bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loads(model)
        for _ in range(2):
            model(torch.ones(1, 4))
    return [str(each.message) for each in caught if "loaded nothing" in str(each.message)]


def again(model: nn.Module) -> None:
    """Load, and on an error load again with another prefix, as some scripts do."""
    state = prefixed("module.0.")
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)


@pytest.mark.parametrize("prefix", ["module.0.", "_orig_mod.0.", "other."])
def test_a_load_without_a_name_of_the_model_is_warned_of_once(prefix: str):
    (message,) = told(lambda model: model.load_state_dict(prefixed(prefix), strict=False))
    assert "none of 2 names" in message and f"'{prefix}weight'" in message
    assert "'0.bias'" in message
    assert ("consume_prefix" in message) == (prefix != "other.")


@pytest.mark.parametrize("wrapped", [False, True])
def test_loads_that_match_or_raise_are_not(wrapped: bool):
    quiet = [
        lambda model: model.load_state_dict(prefixed("0.")),
        lambda model: model.load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False),
        lambda model: model.load_state_dict({}, strict=False),
        again,
    ]
    for loads in quiet:
        assert not told(loads, wrapped)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "how", ["state alone", "current masters", "model first", "nothing trained"]
)
def test_a_load_of_state_that_changes_weights_is_warned_of(dtype: str, how: str):
    """Continual learning, Reptile and restarts load an earlier state but keep the weights."""
    model = nn.Linear(4, 4)
    optimizer = shardcast.shard(model, torch.optim.Adam(model.parameters()), param_dtype=dtype)

    def train() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    first, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    if how != "nothing trained":
        train()
    if how == "model first":
        model.load_state_dict(weights)
    if how == "current masters":
        now = optimizer.state_dict()["state"]
        for number, values in first["state"].items():
            values["master"] = now[number]["master"]
    before = model.weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(first)
    texts = [str(each.message) for each in caught]
    assert [text[:50] for text in texts if "changes weights of the model" in text] == (
        ["load_state_dict: what state_dict() returns on a ra"] if how == "state alone" else []
    )
    assert torch.equal(model.weight, before) == (how != "state alone")
