"""A pytest plugin: writes a row of the part when a test begins, and updates it when it ends.

If a test hangs or leaves the card with a sticky error, the process ends. The part continues with
the next test in a new process.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest
import torch

from gpu.bench import Bench

bench = Bench(os.environ["GPU_KIT_DEVICE"] == "cpu", Path(os.environ["GPU_KIT_PART"]))
stack = Path(os.environ["GPU_KIT_STACK"]).open("w")  # noqa: SIM115, until the process ends


def pytest_runtest_logstart(nodeid: str) -> None:
    bench.note(test=nodeid, result="begun")
    faulthandler.dump_traceback_later(float(os.environ["GPU_KIT_LIMIT"]), exit=True, file=stack)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = bench.figures[-1]
    if row["result"] == "begun" and (report.when == "call" or not report.passed):
        row["result"], row["seconds"] = report.outcome, round(report.duration, 2)
        if not report.passed:
            row["why"] = report.longreprtext[-600:]


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()
    bench.write()
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:  # any CUDA error here would fail all later tests
            row = bench.figures[-1]
            row["result"], row["why"] = "crashed", f"{row.get('why', '')} {error}"[-600:]
            bench.write()
            os._exit(3)
