"""Every file in examples/ runs on two ranks, and README shows the first one word for word."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run(_group: object, name: str, arguments: list[str]) -> str:
    """What one rank of an example prints; the process group is there already."""
    printed = io.StringIO()
    path = str(ROOT / "examples" / f"{name}.py")
    with (
        mock.patch("torch.distributed.init_process_group"),
        mock.patch("torch.distributed.destroy_process_group"),
        mock.patch.object(sys, "argv", [path, *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def figure(pattern: str, text: str) -> float:
    """The last number that stands behind ``pattern``."""
    return float(re.findall(pattern + r"\D*?([\d.]+)", text)[-1])


@pytest.mark.parametrize("name", [e for e in EXAMPLES if e != "checkpoints"])
def test_an_example_trains(gloo: SpawnedWorld, name: str):
    text, silent = gloo.run(run, name, [])
    assert not silent, "rank 0 alone prints"
    if name == "gan":
        assert figure("generated:", text) == pytest.approx(1.0, abs=0.3)
    elif name == "ema":
        assert figure("of the average", text) < 0.8
    elif name == "fp16":
        assert figure("^loss", text) < 0.5
    elif name == "accumulation":
        assert figure("micro-batch:", text) < 0.1
    elif name == "lean_memory":
        default, lean = (sum(map(int, re.findall(r"\d+", line))) for line in text.splitlines())
        assert lean < 0.6 * default
    else:
        assert figure("loss", text) < 0.5


def test_the_example_of_checkpoints_goes_on_where_it_ended(gloo: SpawnedWorld, tmp_path: Path):
    first, _ = gloo.run(run, "checkpoints", [str(tmp_path)])
    second, _ = gloo.run(run, "checkpoints", [str(tmp_path)])
    assert "from step 0 to 20" in first and "from step 20 to 40" in second
    assert figure("loss", second) < figure("loss", first)


def test_readme_shows_the_minimal_example_word_for_word():
    assert (ROOT / "examples" / "minimal.py").read_text() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_on_a_page(name: str):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 80


def test_the_page_of_options_is_what_the_configuration_says():
    import options  # launch/options.py

    assert options.main(["--check"]) == 0, "run python launch/options.py"
