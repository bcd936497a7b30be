"""Two trainers and a reader that samples: both have the same log-probabilities, to the bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import TORCHRUN, python

pytestmark = pytest.mark.timeout(150)

LINE = re.compile(r"step +(\d+)  version \S+  vowels \S+  changed +(\S+)%  largest gap (\S+)")


def test_a_reader_has_the_log_probabilities_of_the_trainers(tmp_path: Path):
    launcher = (*TORCHRUN[:-1], "--nproc-per-node=3")
    flags = "--steps 4 --batch-size 4 --context 8 --full-every 3 --log-interval 1".split()
    done = python(*launcher, "launch/rl_sync.py", *flags, "--folder", str(tmp_path), timeout=140)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = LINE.findall(done.stdout)
    assert [int(step) for step, _, _ in lines] == [0, 1, 2, 3, 4]
    assert {gap for _, _, gap in lines} == {"0"}
    assert float(lines[0][1]) == 100 > float(lines[-1][1]) > 0
