"""Run a script of Accelerate and record its checks: ``checks.py NAME REPORT [LEFT_OUT ...]``.

Its ``main`` is unchanged. If a check raises an error, the error is recorded and ``main`` continues.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from accelerate.state import GradientState

NOTED: list[tuple[str, str]] = []
RUNNING: list[str] = []


def noted(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(check)
    def call(*args: Any, **kwargs: Any) -> None:
        if RUNNING:  # called by another check
            return check(*args, **kwargs)
        RUNNING.append(name)
        told = {key: value for key, value in kwargs.items() if isinstance(value, bool)}
        words = ", ".join(f"{key}={value}" for key, value in told.items())
        try:
            check(*args, **kwargs)
            NOTED.append((f"{name}({words})", ""))
        except Exception:
            NOTED.append((f"{name}({words})", traceback.format_exc()))
            GradientState._reset_state()  # as checks do at the end
        finally:
            RUNNING.clear()

    return call


def skip(*_: Any, **__: Any) -> None:
    raise RuntimeError("left out")


def main() -> None:
    name, report, *left_out = sys.argv[1:]
    module = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    for key, value in list(vars(module).items()):
        own = isinstance(value, FunctionType) and value.__module__ == module.__name__
        if own and (key.startswith("test_") or "check" in key):
            setattr(module, key, noted(key, skip if key in left_out else value))
    module.main()
    if os.environ.get("RANK", "0") == "0":
        Path(report).write_text(json.dumps(NOTED), encoding="utf-8")


if __name__ == "__main__":
    main()
