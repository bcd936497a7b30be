"""Warnings about launch settings that would fail silently; see also test_cli.py."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import MLP, adamw

import shardcast
from shardcast.launched import STORE

RESTARTED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({STORE: "1"}, False),  # no effect on a static rendezvous, but shows intent
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
    ],
)
def test_an_agent_whose_restarts_fail_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], warned: bool
) -> None:
    for name, value in {**RESTARTED, **changes}.items():
        monkeypatch.setenv(name, value)
    model = MLP()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardcast.shard(model, adamw(model), param_dtype=torch.float32)
    assert [f"Set {STORE}=1" in str(w.message) for w in caught] == [True] * warned
    assert all(w.filename == __file__ for w in caught), "it names the line that calls shard()"
