"""The training script for grids has the same losses on any grid."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import metrics
import pytest
import torch
import torch.distributed as dist
from processes import Processes
from train_hybrid import parse_arguments, train

from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
FLAGS = (
    *"--device cpu --tie-head --width 32 --depth 4 --heads 2 --context 16 --batch-size 2".split(),
    *"--warmup-steps 2 --steps 3 --config".split(),
    *(f"{ROOT}/configs/fp32.yaml", "--data", f"{ROOT}/launch"),
)


def run(_group: Any, flags: str, output: Path) -> None:
    """Run one rank; without a process group, one process."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    args = parse_arguments([*FLAGS, *flags.split(), "--output", str(output)])
    train(args, Processes(rank, world, torch.device("cpu")))


def on_four(flags: str, output: Path) -> list[metrics.Record]:
    """Run four ranks as threads of this process; return the records."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signal, "signal", lambda *_: None)  # only allowed in the main thread
        threaded_world({"ranks": 4}, run, flags, output)
    return metrics.read(output)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[metrics.Record]:
    """Records of torch's own optimizer in one process."""
    output = tmp_path_factory.mktemp("alone")
    run(None, "--baseline", output)
    return metrics.read(output)


@pytest.mark.parametrize(
    "grid",
    [
        "--tp 2 --dp 2",
        "--pp 2 --dp 2",
        "--pp 2 --dp 2 --schedule InterleavedZeroBubble",
    ],
)
def test_a_grid_has_the_losses_of_one_process(
    alone: list[metrics.Record], tmp_path: Path, grid: str
) -> None:
    assert metrics.largest_difference(alone, on_four(grid, tmp_path))[1] < 1e-5
