"""Fixtures of all tests: a clean environment, and one gloo world to share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from shardcast.testing import SpawnedWorld, spawn_world

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option and no launcher's variable from outside reaches a test."""
    for name in list(os.environ):
        if name.startswith("SHARDCAST_") or name in LAUNCHER:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One intra-op thread: small tensors, and several tests side by side on few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def gloo() -> Iterator[SpawnedWorld]:
    """Two real processes; they start with the first test that runs something in them."""
    with spawn_world(2, timeout=60.0) as world:
        yield world
