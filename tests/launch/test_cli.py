"""The ``shardcast`` command."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import train
import train_hybrid
import warm
import yaml
from commands import ROOT, python

import shardcast
from shardcast import checkpoint
from shardcast.cli import commands as cli
from shardcast.cli import main, self_test
from shardcast.cli.launch import split_config
from shardcast.config import ShardcastConfig
from shardcast.testing import spawn_world

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
Command = Callable[..., str]


def launch_file(folder: Path, **changes: object) -> str:
    path = folder / "both.yaml"
    path.write_text(yaml.safe_dump({**BOTH, **changes}))
    return str(path)


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


# -- small commands ---------------------------------------------------------------------------


def test_usage_lists_every_command_with_its_help(command: Command) -> None:
    assert (out := command()) == command("--help")
    for name, (module, help_text) in cli.COMMANDS.items():
        call = getattr(importlib.import_module(f"shardcast.cli.{module}"), name)
        assert call.__doc__.splitlines()[0] == help_text
        assert name in out and help_text in out
        assert command(name, "--help").startswith(f"usage: shardcast {name} ")


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from shardcast.cli import main\n"
        "for words in ([], ['--help'], ['--version'], ['lunch']):\n"
        "    main(words); assert sys.modules['torch'] is None, words"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_those_that_all_lists() -> None:
    assert {*shardcast.__all__} <= {*dir(shardcast)}
    for name in shardcast.__all__:
        assert getattr(shardcast, name).__module__.startswith("shardcast.")
    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        shardcast.shards  # noqa: B018


def test_it_is_also_a_module_and_tells_its_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardcast", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("shardcast", run_name="__main__")
    assert (end.value.code, capsys.readouterr().out) == (0, f"shardcast {shardcast.__version__}\n")


def test_config_writes_the_default_configuration_with_every_option_and_its_help(
    tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "shardcast.yaml"
    path.write_text("param_dtype: fp16\n")
    command("config", "--output", str(path), "--overwrite")
    assert ShardcastConfig.load(path) == ShardcastConfig()
    text = path.read_text()
    assert command("config") == text
    words, lines = " ".join(text.replace("##", "").split()), text.splitlines()
    options = {option.name: option.metadata["help"] for option in fields(ShardcastConfig)}
    assert all(" ".join(help_text.split()) in words for help_text in options.values())
    enabled = "\n".join(line.removeprefix("# ") for line in lines[3:] if not line.startswith("##"))
    path.write_text(enabled)
    assert ShardcastConfig.load(path) == ShardcastConfig(), "with every option written out"
    assert yaml.safe_load(enabled).keys() == options.keys() - {"group_fn", "cost_fn"}


def test_env_prints_versions_variables_and_the_configuration_line_by_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCAST_MAX_GRAD_NORM", "0.125")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # may be empty
    lines = command("env").splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["versions:", "machine:", "environment:", "configuration (* changed):"]
    values = dict(line.split(maxsplit=1) for line in lines if line not in titles)
    assert values["torch"].startswith(torch.__version__)
    assert values["accelerate"][0].isdigit() and "gloo" in values["backends"]
    assert values["WORLD_SIZE"] == "4"
    assert values["max_grad_norm*"] == "0.125" and values["param_dtype"] == "bf16"
    assert values["grad_dtype"] == "null" and values["offload"] == "false"
    monkeypatch.setenv("SHARDCAST_MAX_GRAD_NRM", "1")
    # An invalid configuration is shown, not raised.
    assert "SHARDCAST_MAX_GRAD_NRM; did you mean" in command("env")


def test_a_package_of_the_same_import_name_is_named_with_a_remedy(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "shardcast-0.3.4.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: shardcast\nVersion: 0.3.4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=r"shardcast 0\.3\.4.*pip uninstall") as warned:
        importlib.reload(shardcast)
    assert len(warned) == 1 and warned[0].filename == importlib.__file__
    assert "pip uninstall" in command("env")


def test_the_self_test_passes_here_and_shows_what_failed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked(check: Any, size: int, *args: Any, **options: Any) -> list[str]:
        with spawn_world(size, start_method="forkserver", **options) as world:
            return world.run(check, *args)

    def broken(*_args: object, **_options: object) -> None:
        raise RuntimeError("fp32 weights: expected plain torch.optim.AdamW's")

    monkeypatch.setattr(self_test, "spawn", forked)  # these processes need not import torch
    printed = command("test")
    for line in ("ok     one process", "ok     two processes over gloo", "NCCL"):
        assert line in printed
    monkeypatch.setattr(self_test, "spawn", broken)
    printed = command("test", status=1)
    assert "FAILED one process: RuntimeError: fp32 weights" in printed


@pytest.mark.parametrize("call", ["config", "--help", "--version"])
def test_a_pipe_that_is_closed_early_is_no_error(
    call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # like `shardcast config | head`
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main([call]) == 0
    assert capsys.readouterr().err == ""


# -- checkpoints ------------------------------------------------------------------------------


def test_inspect_shows_a_checkpoint_as_a_table_and_export_writes_plain_files(
    tmp_path: Path, command: Command
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    momentum = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    optimizer = shardcast.shard(model, momentum, averages={"ema": 0.9})
    model(torch.randn(2, 3)).float().sum().backward()
    optimizer.step()
    run, out = str(tmp_path / "run"), tmp_path / "out"
    checkpoint.save(run, model, optimizer, step=7)
    lines = command("inspect", run).splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines[: lines.index("")])
    assert facts["step"] == "7" and facts["saved"] == "by    1 ranks, partition even, SGD"
    assert facts["parameters"] == "8 trained, 9 others and buffers"
    assert facts["written"].startswith(f"by  torch {torch.__version__}, Python 3.")
    assert re.match(r"0\.0\d+ MB \(\d\d,\d+ bytes\) in 3 files", facts["size"])
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index("") + 2 :]}
    state = ["momentum_buffer,", "average.ema,", "average.ema.steps"]
    assert rows["0.weight"] == ["2x3", "float32", *state]
    assert rows["1.num_batches_tracked"] == ["-", "int64"]
    printed = command("export", run, str(out)).split()
    assert printed == [str(out / name) for name in ("model.safetensors", "optimizer.pt")]
    state = torch.load(out / "optimizer.pt", weights_only=True)
    assert sorted(state) == ["param_groups", "state"]
    told = command("export", run, str(out), status=2)
    assert "give a new or an empty directory" in told


@pytest.mark.parametrize("folder", ["", "state-{}", "checkpoint_{}", "checkpoint-{}"])
def test_inspect_and_export_find_the_checkpoint_in_the_folders_of_frameworks(
    folder: str, tmp_path: Path, command: Command
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
    for made in (9, 10):  # by number, not by name
        model(torch.randn(2, 3)).float().sum().backward()
        optimizer.step()
        checkpoint.save(tmp_path / folder.format(made) / "shardcast", model, optimizer, step=made)
    for number, given in enumerate((tmp_path, tmp_path / folder.format(10))):
        lines = command("inspect", str(given)).splitlines()
        assert "step        10, after 2 optimizer steps" in lines
        out = tmp_path / f"out-{number}"
        assert str(out / "optimizer.pt") in command("export", str(given), str(out)).split()
    (tmp_path / "none").mkdir()
    assert "no committed checkpoint in" in command("inspect", str(tmp_path / "none"), status=2)


# -- launch -----------------------------------------------------------------------------------

UNEDITED = """
import json, sys, torch
from pathlib import Path
from accelerate import Accelerator
a = Accelerator()
m = torch.nn.Linear(3, 3)
m, o = a.prepare(m, torch.optim.SGD(m.parameters(), 0.1))
a.backward(m(torch.ones(1, 3) * a.process_index).sum())
o.step()
both = a.gather(m.weight.detach().float()[None])
assert torch.equal(both[0], both[1]), both
c = a.shardcast_config
facts = [type(a).__name__, a.num_processes, str(m.weight.dtype), a.mixed_precision]
facts += [c.max_grad_norm, c.pack_mb]
Path(sys.argv[1], str(a.process_index)).write_text(json.dumps(facts))
"""


def test_one_file_configures_both_and_an_unedited_script_shards(tmp_path: Path) -> None:
    path = launch_file(tmp_path, shardcast_config={"max_grad_norm": 0.5, "pack_mb": 2.0})
    # An environment variable and a flag override the file, as without a launcher.
    arguments = ["--config_file", path, "--mixed_precision", "bf16", script(tmp_path, UNEDITED)]
    (out := tmp_path / "out").mkdir()
    words = ("-m", "shardcast", "launch", *arguments, str(out))
    done = python(*words, timeout=50, SHARDCAST_PACK_MB="4.0")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    expected = ["ShardcastAccelerator", 2, "torch.bfloat16", "bf16", 0.5, 4.0]
    written = {path.name: json.loads(path.read_text()) for path in out.iterdir()}
    assert written == {"0": expected, "1": expected}


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("s.py --a", "shardcast.run s.py --a"),
        ("-m shardcast.run s.py --a", "shardcast.run s.py --a"),
        ("-m package.s --a", "shardcast.run -m package.s --a"),
        ("--no_python s.py --a", "s.py --a"),
    ],
)
def test_every_script_is_started_by_the_runner_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, given: str, started: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text(NO_PROCESS)
    seen: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", seen.append)
    path = launch_file(tmp_path, num_processes=1, distributed_type="NO")
    command("launch", "--config_file", path, *given.split())
    (parsed,) = seen
    assert [parsed.training_script, *parsed.training_script_args] == started.split()
    assert bool(parsed.module) == started.startswith("shardcast.run")


def test_the_launch_files_in_configs_are_valid() -> None:
    paths = [*(ROOT / "configs/accelerate").glob("shardcast_*.yaml")]
    assert paths
    for path in paths:
        ours, accelerates = split_config(str(path))
        assert ours is not None and "mixed_precision" in accelerates
        ShardcastConfig.load(ours)


BY_ITSELF = """
import sys, torch
from shardcast.accelerate import ShardcastAccelerator
a = ShardcastAccelerator(shardcast_config={'param_dtype': 'fp16'})
m = torch.nn.Linear(3, 3)
m, o = a.prepare(m, torch.optim.SGD(m.parameters(), 0.1))
print(m.weight.dtype, sys.argv[1:])
"""
SHARDS_NOTHING = "import accelerate; a = accelerate.Accelerator(); print('end')"


@pytest.mark.parametrize(
    ("text", "words", "printed", "error"),
    [
        (BY_ITSELF, "-m script --steps 3", "torch.float16 ['--steps', '3']\n", ""),
        (SHARDS_NOTHING, "{}/script.py", "end\n", "NOTHING WAS SHARDED"),
    ],
    ids=["a module that shards by itself", "a script that shards nothing"],
)
def test_scripts_of_one_process_are_launched_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    text: str,
    words: str,
    printed: str,
    error: str,
) -> None:
    script(tmp_path, text)
    monkeypatch.setattr(sys, "executable", warm.executable())
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    path = launch_file(tmp_path, num_processes=1, distributed_type="NO", shardcast_config={})
    assert main(["launch", "--config_file", path, *words.format(tmp_path).split()]) == 0
    captured = capfd.readouterr()
    assert captured.out == printed, captured.err
    assert error in captured.err


# -- errors ---------------------------------------------------------------------------------------

FILES: dict[str, Any] = {
    "mine.yaml": {"param_dtype": "fp16"},
    "both.yaml": {**BOTH, "shardcast_config": {}},
    **{
        f"{name}.yaml": {**BOTH, "shardcast_config": {}, **changes}
        for name, changes in {
            "typo": {"shardcast_config": {"max_grad_nrm": 1.0}},
            "wrong": {"shardcast_config": {"pack_mb": -1}},
            "list": {"shardcast_config": ["a"]},
            "two": {"shardcast_config": {"param_dtype": "fp16"}, "mixed_precision": "bf16"},
            "fp8": {"mixed_precision": "fp8"},
            "fsdp": {"distributed_type": "FSDP"},
            "deepspeed": {"distributed_type": "DEEPSPEED"},
            "cpu": {"distributed_type": "MULTI_CPU"},
            "gpus": {"use_cpu": False, "num_processes": 8},
        }.items()
    },
    "script.py": NO_PROCESS,
    "misbuilt.py": """
import torch
def pair():
    model = torch.nn.Linear(10, 10)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def triple(): return (*pair(), None)
def unlike(): return torch.nn.Linear(2, 2), "AdamW"
""",
}
COUNT = "expected a whole number >= 1"
REFUSED = {
    "lunch": "unknown command 'lunch'",
    "config --output mine.yaml": "pass --overwrite",
    "inspect no": "no committed checkpoint",
    # launch: before a process starts
    "launch --config_file no.yaml script.py": "no.yaml",
    "launch --config_file typo.yaml script.py": "did you mean 'max_grad_norm'",
    "launch --config_file wrong.yaml script.py": "pack_mb: expected a finite number of MiB above 0",
    "launch --config_file list.yaml script.py": "expected a mapping of options, got list",
    "launch --config_file two.yaml script.py": (
        "mixed_precision is 'bf16' but the shardcast configuration has param_dtype 'fp16'"
    ),
    "launch --config_file fp8.yaml script.py": "expected no, bf16 or fp16, got fp8",
    "launch --config_file fsdp.yaml script.py": "expected MULTI_GPU or NO, got FSDP",
    "launch --config_file deepspeed.yaml script.py": "expected MULTI_GPU or NO, got DEEPSPEED",
    "launch --config_file both.yaml --use_fsdp script.py": "expected MULTI_GPU or NO, got FSDP",
    "launch --config_file cpu.yaml script.py": (
        "ACCELERATE_USE_CPU=true shardcast launch --multi_gpu --num_processes 2"
    ),
    "launch --config_file gpus.yaml script.py": (
        "MULTI_GPU with 8 processes, but this machine has no GPU"
    ),
    "SHARDCAST_CONFIG=mine.yaml launch --config_file both.yaml script.py": "two configurations",
    # estimate
    **{
        f"estimate {name}": "expected MODULE:FUNCTION"
        for name in ("no:build", "torch:nn2", "torch", "''")
    },
    "estimate misbuilt:pair --optimizer AdamW": "leave out --optimizer AdamW",
    "estimate misbuilt:triple": "got Linear, SGD, NoneType",
    "estimate misbuilt:unlike": "got Linear, str",
    **{
        f"estimate misbuilt:pair {option} {text}": f"{option}/{option.replace('_', '-')}: {COUNT}"
        for option in ("--ranks_per_node", "--world_size")
        for text in ("0", "-1", "1.5", "many")
    },
    "estimate misbuilt:pair --advise": "unrecognized arguments: --advise",
    # the training programs
    "launch/train.py --steps 0": "0 is not a positive number",
    "launch/train.py --step 3": "--step",  # torchrun accepts abbreviations
    "launch/train_hybrid.py --baseline --dp 2": "--baseline: it runs in one process",
    "launch/train_hybrid.py --dp 3": "--micro-batches 8 is not a multiple of --dp 3",
    "launch/train_hybrid.py --tp 3": "--heads 4 is not a multiple of --tp 3",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_that_cannot_do_what_it_is_told_says_why_and_does_nothing(
    line: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "misbuilt", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name, content in FILES.items():
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (tmp_path / name).write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    words = shlex.split(line)
    if "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    programs: dict[str, Any] = {
        "launch/train.py": train.parse_arguments,
        "launch/train_hybrid.py": train_hybrid.parse_arguments,
    }
    given = {"program": programs[words.pop(0)]} if words[0] in programs else {}
    assert REFUSED[line] in command(*words, **given, status=2)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
