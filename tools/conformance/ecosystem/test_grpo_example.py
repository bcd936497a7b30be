"""examples/with_trl_grpo.py on two ranks: rewards grow, and the optimizer sleeps in rollouts."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
from pathlib import Path
from unittest import mock

import harness  # noqa: F401  (torchvision's operators)
import pytest

from shardcast.testing import spawn_world

pytestmark = pytest.mark.timeout(240)
EXAMPLE = Path(__file__).parents[3] / "examples" / "with_trl_grpo.py"


def run(_group: object, folder: str) -> tuple[list[float], str]:
    """Return the rewards by step and the script's output."""
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch("torch.distributed.destroy_process_group"):
        trainer = runpy.run_path(str(EXAMPLE), run_name="__main__")["trainer"]
    history = trainer.state.log_history
    return [row["reward"] for row in history if "reward" in row], printed.getvalue()


def test_the_reward_grows_in_fp16(tmp_path: Path):
    with spawn_world(2, timeout=200.0, start_method="forkserver") as world:
        (rewards, text), _ = world.run(run, str(tmp_path))
    print(rewards, text)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert "loss scale" in text and "MB slept" in text and " 0.0 MB slept" not in text
