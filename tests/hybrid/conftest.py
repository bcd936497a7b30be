"""One world of four processes for all tests of pipelines, whose stages send to one another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardcast.testing import SpawnedWorld, spawn_world


@pytest.fixture(scope="session")
def four() -> Iterator[SpawnedWorld]:
    with spawn_world(4, timeout=110.0) as world:
        yield world
