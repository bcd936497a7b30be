"""Accelerate's own test scripts, under ``shardcast launch``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from evidence import Suite, Verdict

SCRIPTS = ("test_script", "test_sync", "test_ops", "test_distributed_data_loop")
DOWNLOADS = ("test_checkpointing", "test_performance")
WORLD_SIZES = (1, 2)
SUITE = Suite(
    name="Accelerate",
    claim=(
        "its unedited test scripts run under `shardcast launch`, on 1 and 2 CPU processes. Each "
        "check is a case. After a failed check, `main` continues with the next one"
    ),
    source="accelerate",
    path="accelerate/test_utils/scripts",
    license="Apache-2.0",
    cases=79,
)
OURS = ("-m", "shardcast", "launch")
STOCK = (
    *"-m torch.distributed.run --standalone --local-addr=127.0.0.1".split(),
    "--nproc-per-node",
)
WITHOUT_OPTIMIZER = (
    "the model was prepared without its optimizer",
    (
        "trains a model that was prepared without an optimizer, so nothing would average its "
        "gradients"
    ),
)
REFUSED = {  # words of the error, and the reason
    "test_distributed_sync": WITHOUT_OPTIMIZER,
    "test_distributed_sync_multiple_fwd": WITHOUT_OPTIMIZER,
    "test_can_join_uneven_inputs": WITHOUT_OPTIMIZER,
    "test_gradient_accumulation_with_opt_and_scheduler": (
        "gather_gradients",
        "reads `.grad` after the backward without `gather_gradients()`",
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_accelerate_under_shardcast_launch(
    name: str, world_size: int, tmp_path: Path, verdicts: list[Verdict]
) -> None:
    if name == "test_distributed_data_loop" and world_size == 1:
        reason = "needs two processes"
        verdicts.append(Verdict(SUITE, f"{name}.py, 1 process", "not applicable", reason))
        return
    wrong: list[str] = []
    stock: list[tuple[str, str]] = []
    ours = checks_of(name, tmp_path, *OURS, "--config_file", written(world_size, tmp_path))
    for index, (check, error) in enumerate(ours):
        case = f"{name}.{check}, {world_size} processes"
        words, reason = REFUSED.get(check.partition("(")[0], ("", ""))
        if not error:
            verdicts.append(Verdict(SUITE, case, "passed"))
        elif words and words in error:
            verdicts.append(Verdict(SUITE, case, "refused", reason))
        else:  # may also fail in Accelerate
            launcher = (*STOCK, str(world_size))
            stock = stock or checks_of(name, tmp_path, *launcher, left_out=REFUSED)
            if stock[index][1]:
                last = stock[index][1].strip().splitlines()[-1]
                reason = f"also fails in Accelerate on CPUs: {last}"
                verdicts.append(Verdict(SUITE, case, "not applicable", reason))
            else:
                wrong.append(f"{case}\n{error}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("name", DOWNLOADS)
def test_scripts_that_download_are_counted(name: str, verdicts: list[Verdict]) -> None:
    assert find_spec(f"accelerate.test_utils.scripts.external_deps.{name}")
    reason = "downloads GLUE and BERT; these tests run offline"
    verdicts.append(Verdict(SUITE, f"external_deps/{name}.py", "not applicable", reason))


def written(world_size: int, folder: Path) -> str:
    """Return the path of a written configuration for a launch on CPUs."""
    options = {"use_cpu": True, "main_process_port": 0, "mixed_precision": "no"}
    kind = "NO" if world_size == 1 else "MULTI_GPU"  # MULTI_CPU starts only one process
    options |= {"distributed_type": kind, "num_processes": world_size}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(options), encoding="utf-8")
    return str(config)


def checks_of(
    name: str, folder: Path, *launcher: str, left_out: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Return the script's checks in order, each with its error or an empty string."""
    script, report = str(Path(__file__).with_name("checks.py")), folder / "report.json"
    report.unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, *launcher, script, name, str(report), *left_out],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return [(check, error) for check, error in json.loads(report.read_text(encoding="utf-8"))]
