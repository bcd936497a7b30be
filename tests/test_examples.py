"""Every file in examples/ runs on two or more ranks, and README quotes minimal.py word for word.

tools/conformance/ecosystem runs with_trl_grpo; with_ray_train runs only if Ray is installed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardcast.testing import SpawnedWorld, threaded_world

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
ON_MESHES = ["experts", "pipeline", "tensor_parallel"]
WITH_FRAMEWORKS = ["with_accelerate", "with_lightning", "with_trainer"]
ELSEWHERE = ["checkpoints", "unit_test_mock_groups", "with_ray_train", "with_trl_grpo"]
ON_TWO_RANKS = sorted({*EXAMPLES} - {*ON_MESHES, *WITH_FRAMEWORKS, *ELSEWHERE})


def path_of(name: str) -> str:
    return str(ROOT / "examples" / f"{name}.py")


@contextlib.contextmanager
def in_process_group(name: str, arguments: list[str]) -> Any:
    """Capture what the script prints, and let it use the current process group."""
    printed = io.StringIO()
    start = dist.init_process_group  # a threaded world calls it inside this context
    with (
        mock.patch(
            "torch.distributed.init_process_group",
            lambda *args, **kwargs: None if dist.is_initialized() else start(*args, **kwargs),
        ),
        mock.patch("torch.distributed.destroy_process_group"),
        mock.patch.object(sys, "argv", [path_of(name), *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        yield printed


def run(_group: object, name: str, arguments: list[str]) -> str:
    """Run an example on one rank; return what it prints."""
    with in_process_group(name, arguments) as printed:
        runpy.run_path(path_of(name), run_name="__main__")
    return printed.getvalue()


def figure(pattern: str, text: str) -> float:
    """Return the last number after ``pattern``."""
    return float(re.findall(pattern + r"\D*?([\d.]+)", text)[-1])


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_an_example_trains(gloo: SpawnedWorld, name: str):
    text, silent = gloo.run(run, name, [])
    assert not silent, "only rank 0 prints"
    if name == "gan":
        assert figure("generated values:", text) == pytest.approx(1.0, abs=0.3)
    elif name == "ema":
        assert figure("of the average", text) < 0.7 * figure("last weights", text)
    elif name == "fp16":
        assert figure("^loss", text) < 0.5
    elif name == "accumulation":
        assert figure("micro-batch:", text) < 0.1
    elif name == "guard":
        assert figure("guard:", text) == 1 and figure("loss", text) < 0.1
    elif name == "failing_rank":
        assert "step 61 without rank 1: ValueError: a sample" in text and figure("loss", text) < 0.1
    elif name == "lean_memory":
        default, lean = (figure("total", line) for line in text.splitlines())
        assert lean < 0.6 * default
    elif name == "published_forms":
        assert figure("loss", text.split(",")[0]) < 0.5 and "equal values: True" in text
    elif name == "following":
        assert "equal bits: True" in text and 0 < figure(" True,", text.replace("%", "")) < 100
    elif name == "offload":
        assert figure("in host memory", text) and "265,216 in host memory" in text
    else:
        assert figure("loss", text) < 0.5


@pytest.mark.parametrize("name", ON_MESHES)
def test_an_example_trains_on_a_mesh(name: str):
    # Not with runpy, which replaces sys.modules["__main__"]: with several threads the example
    # stays there, and processes that start later run it.
    example = compile(Path(path_of(name)).read_text(), path_of(name), "exec")
    main = sys.modules["__main__"]
    with in_process_group(name, []) as printed:
        threaded_world({"world": 4}, lambda _: exec(example, {"__name__": "__main__"}))
    assert sys.modules["__main__"] is main
    assert figure("loss", printed.getvalue()) < 0.5


def run_in_framework(_group: object, name: str, folder: str) -> str:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    before = Path.cwd()
    os.chdir(folder)  # the frameworks write into runs/
    try:
        return run(None, name, [])
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", WITH_FRAMEWORKS)
@pytest.mark.filterwarnings("ignore")  # advice of Lightning and transformers
def test_an_example_trains_in_a_framework(gloo: SpawnedWorld, name: str, tmp_path: Path):
    text, _ = gloo.run(run_in_framework, name, str(tmp_path))
    assert figure("loss", text) < 1.0


def test_the_example_of_ray_train_trains(capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("ray.train")
    runpy.run_path(path_of("with_ray_train"), run_name="__main__")
    assert figure("2 workers, loss", capfd.readouterr().out) < 0.5


@pytest.mark.parametrize("test", ["both_ranks", "tensor_parallel", "mean", "one_rank"])
def test_the_example_of_unit_tests_passes(test: str):
    names = runpy.run_path(path_of("unit_test_mock_groups"))
    (function,) = [names[name] for name in names if name.startswith("test_") and test in name]
    function()


def test_the_example_of_checkpoints_goes_on_where_it_ended(gloo: SpawnedWorld, tmp_path: Path):
    first, _ = gloo.run(run, "checkpoints", [str(tmp_path)])
    second, _ = gloo.run(run, "checkpoints", [str(tmp_path)])
    assert "from step 0 to 20" in first and "from step 20 to 40" in second
    assert figure("loss", second) < figure("loss", first)


def test_readme_shows_the_minimal_example_word_for_word():
    assert (ROOT / "examples" / "minimal.py").read_text() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["getting-started", "hybrid", "testing"])
def test_the_fragments_of_a_page_are_those_of_its_examples(page: str):
    """The code blocks after a link to an example are parts of it; comments may differ."""

    def code(text: str) -> str:
        return re.sub(r"#.*|\s+", "", text)

    sections = re.split(r"\(\.\./examples/(\w+)\.py\)", (ROOT / f"docs/{page}.md").read_text())
    for name, text in zip(sections[1::2], sections[2::2], strict=True):
        fragments = re.findall(r"```python\n(.*?)```", text.split("\n## ")[0], re.DOTALL)
        source = code(Path(path_of(name)).read_text())
        assert fragments and all(code(fragment) in source for fragment in fragments), name
