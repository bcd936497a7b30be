"""A load of the model that matches no name is said."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import shardcast

pytestmark = pytest.mark.timeout(60)


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in nn.Linear(4, 4).state_dict().items()}


def told(loads: Any, wrapped: bool = False) -> list[str]:
    """What is warned of two forwards after ``loads(model)``."""
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
    """As scripts do that do not know how a checkpoint was made."""
    state = prefixed("module.0.")
    try:
        model.load_state_dict(state)
    except RuntimeError:
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
        with contextlib.suppress(RuntimeError):
            assert not told(loads, wrapped)
