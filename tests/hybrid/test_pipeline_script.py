"""The training script for grids: one curve whatever the grid, also across a change of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import metrics
import pytest
import torch
from processes import Processes
from train_hybrid import parse_arguments, train

from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
FLAGS = (
    f"--device cpu --config {ROOT}/configs/fp32.yaml --tie-head --width 32 --depth 4 --heads 2 "
    "--context 16 --batch-size 2 --warmup-steps 2 --corpus-mb 1 --steps 4 "
)


def run(group: Any, flags: str, output: Path) -> None:
    """One process of a run, alone without a group."""
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    args = parse_arguments([*FLAGS.split(), *flags.split(), "--output", str(output)])
    train(args, Processes(rank, world, torch.device("cpu")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[metrics.Record]:
    """torch's own optimizer in one process."""
    output = tmp_path_factory.mktemp("alone")
    run(None, "--baseline", output)
    return metrics.read(output)


@pytest.mark.parametrize(
    "grid",
    [
        "--tp 2 --pp 2",
        "--tp 2 --dp 2",
        "--pp 2 --dp 2",
        "--pp 2 --dp 2 --schedule InterleavedZeroBubble",
    ],
)
def test_a_grid_has_the_losses_of_one_process(
    four: SpawnedWorld, alone: list[metrics.Record], tmp_path: Path, grid: str
) -> None:
    four.run(run, grid, tmp_path)
    assert metrics.largest_difference(alone, metrics.read(tmp_path))[1] < 1e-5
