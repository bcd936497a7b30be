"""The ``shardcast`` command."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from commands import python

import shardcast
from shardcast import checkpoint
from shardcast.cli import commands as cli
from shardcast.cli import main
from shardcast.cli.launch import split_config
from shardcast.config import ShardcastConfig
from shardcast.testing import spawn_world

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
BOTH = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "main_process_port": 0,
    "mixed_precision": "no",
}
NO_PROCESS = "raise SystemExit('a process was started')"


def shell(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", *command, timeout=50, **environment)


def launch_file(folder: Path, **changes: object) -> str:
    path = folder / "both.yaml"
    path.write_text(yaml.safe_dump({**BOTH, **changes}))
    return str(path)


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


# -- the command ------------------------------------------------------------------------------


def test_usage_lists_every_command_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, call in cli.COMMANDS.items():
        assert name in out and (call.__doc__ or "").splitlines()[0] in out
    assert main(["lunch"]) == 2
    assert "unknown command 'lunch'" in capsys.readouterr().err


def test_it_is_also_a_module_and_tells_its_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardcast", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("shardcast", run_name="__main__")
    assert (end.value.code, capsys.readouterr().out) == (0, f"shardcast {shardcast.__version__}\n")


# -- config -----------------------------------------------------------------------------------


def test_the_written_file_is_the_default_configuration(tmp_path: Path) -> None:
    path = tmp_path / "shardcast.yaml"
    assert main(["config", "--output", str(path)]) == 0
    assert ShardcastConfig.load(path) == ShardcastConfig()
    lines = path.read_text().splitlines()
    enabled = "\n".join(line.removeprefix("# ") for line in lines[3:] if not line.startswith("##"))
    path.write_text(enabled)
    assert ShardcastConfig.load(path) == ShardcastConfig(), "also with every option written out"
    named = yaml.safe_load(enabled).keys()
    options = {option.name for option in dataclasses.fields(ShardcastConfig)}
    assert named == options - {"group_fn", "cost_fn"}


def test_the_written_file_holds_every_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    words = " ".join(capsys.readouterr().out.replace("##", "").split())
    for option in dataclasses.fields(ShardcastConfig):
        assert " ".join(option.metadata["help"].split()) in words, option.name


def test_a_file_is_not_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("param_dtype: fp16\n")
    assert main(["config", "--output", str(path)]) == 2
    assert "pass --overwrite" in capsys.readouterr().err
    assert path.read_text() == "param_dtype: fp16\n"
    assert main(["config", "--output", str(path), "--overwrite"]) == 0
    assert ShardcastConfig.load(path) == ShardcastConfig()


# -- env --------------------------------------------------------------------------------------


def test_env_prints_versions_variables_and_the_configuration_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCAST_MAX_GRAD_NORM", "0.125")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # may be empty
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["versions:", "machine:", "environment:", "configuration (* changed):"]
    found = dict(line.split(maxsplit=1) for line in lines if line not in titles)
    assert found["torch"].startswith(torch.__version__)
    assert found["accelerate"][0].isdigit() and "gloo" in found["backends"]
    assert found["WORLD_SIZE"] == "4"
    assert found["max_grad_norm*"] == "0.125" and found["param_dtype"] == "bf16"
    assert found["grad_dtype"] == "null" and found["offload"] == "false"
    monkeypatch.setenv("SHARDCAST_MAX_GRAD_NRM", "1")
    assert main(["env"]) == 0, "a wrong configuration is what is looked for: it is shown"
    assert "SHARDCAST_MAX_GRAD_NRM; did you mean" in capsys.readouterr().out


def test_a_package_of_the_same_import_name_is_named_with_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "shardcast-0.3.4.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: shardcast\nVersion: 0.3.4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=r"shardcast 0\.3\.4.*pip uninstall") as warned:
        importlib.reload(shardcast)
    assert len(warned) == 1 and warned[0].filename == importlib.__file__
    assert main(["env"]) == 0
    assert "pip uninstall" in capsys.readouterr().out


# -- test -------------------------------------------------------------------------------------


def test_the_self_test_passes_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked(check: Any, size: int, *args: Any, **options: Any) -> list[str]:
        with spawn_world(size, start_method="forkserver", **options) as world:
            return world.run(check, *args)

    monkeypatch.setattr(cli, "spawn", forked)  # processes that need not import torch
    assert main(["test"]) == 0
    printed = capsys.readouterr().out
    assert "ok     one process" in printed
    assert "ok     two processes over gloo" in printed
    assert "NCCL" in printed


def test_the_self_test_shows_what_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_options: object) -> None:
        raise RuntimeError("fp32 weights: expected those of plain torch.optim.AdamW")

    monkeypatch.setattr(cli, "spawn", broken)
    assert main(["test"]) == 1
    assert "FAILED one process: RuntimeError: fp32 weights" in capsys.readouterr().out


# -- launch -----------------------------------------------------------------------------------


def test_one_file_configures_both_and_an_unedited_script_shards(tmp_path: Path) -> None:
    text = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from accelerate import Accelerator\n"
        "a = Accelerator()\n"
        "m = torch.nn.Linear(3, 3)\n"
        "m, o = a.prepare(m, torch.optim.SGD(m.parameters(), 0.1))\n"
        "a.backward(m(torch.ones(1, 3) * a.process_index).sum())\n"
        "o.step()\n"
        "both = a.gather(m.weight.detach().float()[None])\n"
        "assert torch.equal(both[0], both[1]), both\n"
        "c = a.shardcast_config\n"
        "found = [type(a).__name__, a.num_processes, str(m.weight.dtype), a.mixed_precision,\n"
        "         c.max_grad_norm, c.pack_mb]\n"
        "Path(sys.argv[1], str(a.process_index)).write_text(json.dumps(found))\n"
    )
    path = launch_file(tmp_path, shardcast_config={"max_grad_norm": 0.5, "pack_mb": 2.0})
    # An environment variable and a flag win over the file, as they do without a launcher.
    arguments = ["--config_file", path, "--mixed_precision", "bf16", script(tmp_path, text)]
    out = tmp_path / "out"
    out.mkdir()
    done = shell("shardcast", "launch", *arguments, str(out), SHARDCAST_PACK_MB="4.0")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    expected = ["ShardcastAccelerator", 2, "torch.bfloat16", "bf16", 0.5, 4.0]
    found = {path.name: json.loads(path.read_text()) for path in out.iterdir()}
    assert found == {"0": expected, "1": expected}


@pytest.mark.parametrize(
    ("given", "started"),
    [
        (["s.py", "--a"], ["shardcast.run", "s.py", "--a"]),
        (["-m", "shardcast.run", "s.py", "--a"], ["shardcast.run", "s.py", "--a"]),
        (["-m", "package.s", "--a"], ["shardcast.run", "-m", "package.s", "--a"]),
        (["--no_python", "s.py", "--a"], ["s.py", "--a"]),
    ],
)
def test_every_script_is_started_by_the_runner_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], started: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text(NO_PROCESS)
    seen: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", seen.append)
    path = launch_file(tmp_path, num_processes=1, distributed_type="NO")
    assert main(["launch", "--config_file", path, *given]) == 0
    (parsed,) = seen
    assert [parsed.training_script, *parsed.training_script_args] == started
    assert bool(parsed.module) == (started[0] == "shardcast.run")


def test_stock_accelerate_refuses_the_file_that_shardcast_launch_takes(tmp_path: Path) -> None:
    """What the troubleshooting page explains."""
    path = launch_file(tmp_path, shardcast_config={})
    arguments = ["--config_file", path, script(tmp_path, NO_PROCESS)]
    parsed = launch_command_parser().parse_args(arguments)
    with pytest.raises(ValueError, match=r"had unknown keys \(\['shardcast_config'\]\)"):
        launch_command(parsed)
    assert "unknown keys (['shardcast_config'])" in (ROOT / "docs/troubleshooting.md").read_text()


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"shardcast_config": {"max_grad_nrm": 1.0}}, [], "did you mean 'max_grad_norm'"),
        ({"shardcast_config": {"pack_mb": -1}}, [], "pack_mb: expected a number of MiB above 0"),
        ({"shardcast_config": ["a"]}, [], "expected a mapping of options, got list"),
        (
            {"shardcast_config": {"param_dtype": "fp16"}, "mixed_precision": "bf16"},
            [],
            "mixed_precision is 'bf16' but the shardcast configuration has param_dtype 'fp16'",
        ),
        ({"mixed_precision": "fp8"}, [], "expected no, bf16 or fp16, got fp8"),
        ({"distributed_type": "FSDP"}, [], "expected MULTI_GPU or NO, got FSDP"),
        ({"distributed_type": "DEEPSPEED"}, [], "expected MULTI_GPU or NO, got DEEPSPEED"),
        ({}, ["--use_fsdp"], "expected MULTI_GPU or NO, got FSDP"),
        ({"distributed_type": "MULTI_CPU"}, [], "Accelerate starts one process with --cpu or"),
    ],
)
def test_mistakes_are_found_before_a_process_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    flags: list[str],
    message: str,
) -> None:
    path = launch_file(tmp_path, **{"shardcast_config": {}, **changes})
    status = main(["launch", "--config_file", path, *flags, script(tmp_path, NO_PROCESS)])
    assert status == 2
    assert message in capsys.readouterr().err


def test_two_configurations_at_once_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCAST_CONFIG", str(ROOT / "configs/bf16.yaml"))
    path = launch_file(tmp_path, shardcast_config={})
    assert main(["launch", "--config_file", path, script(tmp_path, NO_PROCESS)]) == 2
    assert "two configurations" in capsys.readouterr().err
    assert main(["launch", "--config_file", str(tmp_path / "no.yaml"), "script.py"]) == 2
    assert "no.yaml" in capsys.readouterr().err


def test_the_launch_files_in_configs_are_valid() -> None:
    for path in (ROOT / "configs/accelerate").glob("shardcast_*.yaml"):
        ours, rest = split_config(str(path))
        assert ours is not None and "mixed_precision" in rest
        ShardcastConfig.load(ours)


@pytest.fixture
def one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """``shardcast launch`` of one process by this one; what it prints, and its errors."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")

    def launched(*arguments: str) -> tuple[str, str]:
        path = launch_file(tmp_path, num_processes=1, distributed_type="NO", shardcast_config={})
        assert main(["launch", "--config_file", path, *arguments]) == 0
        captured = capfd.readouterr()
        return captured.out, captured.err

    return launched


def test_a_module_and_a_script_that_enables_by_itself_run_too(
    tmp_path: Path, one_process: Callable[..., tuple[str, str]]
) -> None:
    text = (
        "import sys, torch\n"
        "from accelerate import Accelerator\n"
        "from shardcast.accelerate import enable\n"
        "a = enable(Accelerator(), {'param_dtype': 'fp16'})\n"
        "m = torch.nn.Linear(3, 3)\n"
        "m, o = a.prepare(m, torch.optim.SGD(m.parameters(), 0.1))\n"
        "print(m.weight.dtype, sys.argv[1:])\n"
    )
    script(tmp_path, text)
    out, err = one_process("-m", "script", "--steps", "3")
    assert out == "torch.float16 ['--steps', '3']\n", err


def test_a_script_that_shards_nothing_is_told_so_at_its_end(
    tmp_path: Path, one_process: Callable[..., tuple[str, str]]
) -> None:
    text = "import accelerate; a = accelerate.Accelerator(); print('end')"
    out, err = one_process(script(tmp_path, text))
    assert out == "end\n", err
    assert "NOTHING WAS SHARDED" in err


def test_processes_for_gpus_that_are_not_there_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    arguments = ["launch", "--config_file", "configs/accelerate/shardcast_multi_gpu.yaml"]
    monkeypatch.chdir(ROOT)
    assert main([*arguments, script(tmp_path, NO_PROCESS)]) == 2
    told = capsys.readouterr().err
    assert "MULTI_GPU with 8 processes, but this machine has no GPU" in told
    assert "use_cpu: true" in told


def test_inspect_shows_a_checkpoint_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = shardcast.shard(model, torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9))
    model(torch.randn(2, 3)).float().sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, model, optimizer, step=7)
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines[: lines.index("")])
    assert facts["step"] == "7" and facts["saved"] == "by    1 ranks, partition even, SGD"
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index("") + 2 :]}
    assert rows["0.weight"] == ["2x3", "float32", "momentum_buffer"]
    assert rows["1.num_batches_tracked"] == ["-", "int64"]
    assert main(["inspect", str(tmp_path / "no")]) == 2
    assert "no committed checkpoint" in capsys.readouterr().err


def test_a_pipe_that_is_closed_early_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `shardcast config | head` does
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["config"]) == 0
    assert capsys.readouterr().err == ""


def test_export_writes_plain_files_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 3)).float().sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "run", model, optimizer, step=1)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(tmp_path / "out" / n) for n in ("model.safetensors", "optimizer.pt")]
    state = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert sorted(state) == ["param_groups", "state"]
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "give a new or an empty directory" in capsys.readouterr().err


JOB = """
import pathlib, torch, shardcast
from shardcast import checkpoint

def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = shardcast.shard(model, optimizer, param_dtype=torch.float32, reproducible=2)
    def train(step):
        for micro in range(2):
            data = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + micro))
            model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, train

def record(flips):
    model, optimizer, train = make()
    for step in (1, 2, 3):
        train(step)
        if flips and step == 2:
            with torch.no_grad():
                model.weight.view(torch.int32)[1, 2] ^= 1
        checkpoint.save("run", model, optimizer, step=step)
"""


@pytest.mark.parametrize("flips", [False, True])
def test_replay_names_the_element_that_parts(
    flips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "job_to_replay.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "job_to_replay", raising=False)
    importlib.import_module("job_to_replay").record(flips)
    assert main(["replay", "run", "job_to_replay:make"]) == int(flips)
    printed = capsys.readouterr().out
    assert ("'weight'" in printed and "element 6:" in printed) == flips, printed
    assert main(["replay", "run", "job_to_replay:record"]) == 2
    assert main(["replay", "run", "job_to_replay:no"]) == 2
