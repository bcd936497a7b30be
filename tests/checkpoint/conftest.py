"""A run that tests of checkpoints copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import save_two_steps


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks after steps 1 and 2."""
    return save_two_steps(tmp_path_factory.mktemp("made"))
