"""``tools/speedrun.py``: what stands around a script that is not part of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import speedrun
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def test_drawn_tokens_are_in_the_format_of_the_scripts_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    speedrun.write_tokens(path, 1000, vocabulary=256, seed=0)
    header = torch.from_file(str(path), False, 256, dtype=torch.int32)
    assert header[:3].tolist() == [20240520, 1, 1000]
    tokens = torch.frombuffer(bytearray(path.read_bytes()[1024:]), dtype=torch.uint16).long()
    assert len(tokens) == 1000
    assert tokens.max() < 256
    assert len((tokens.diff() % 256).unique()) <= 64  # the next one can be learned


def test_an_edit_of_a_text_that_is_not_there_ends_the_program() -> None:
    assert speedrun.edited("a b", {"a": "c"}, {"c b": "d"}) == "d"
    with pytest.raises(SystemExit, match="has no 'x'"):
        speedrun.edited("a b", {"x": "y"})


def test_another_script_than_the_named_one_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "train_gpt_simple.py"
    other.write_text("print()")
    with pytest.raises(SystemExit, match=re.escape(speedrun.BLOB)):
        speedrun.script_at(other)
