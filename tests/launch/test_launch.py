"""The training program: configurations, metrics, and whole runs under the launchers."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import fields
from pathlib import Path

import comparison
import metrics
import picture
import pytest
import torch
import torch.distributed as dist
import warm
import yaml
from commands import TORCHRUN, command, python
from gpt import gpt_7b
from processes import Processes
from train import main, parse_arguments, train

import shardcast
from shardcast import estimate as estimates
from shardcast.testing import SpawnedWorld

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TINY_RUN = (
    "--device cpu --steps 6 --warmup-steps 2 --width 32 --depth 1 --heads 2 --context 32 "
    "--batch-size 4 --log-interval 2 --validation-interval 3 --validation-sequences 8 "
    "--sample-bytes 8 --max-grad-norm 1 --corpus-mb 1"
).split()


def test_the_example_configurations_name_every_option_with_its_default() -> None:
    defaults = shardcast.ShardcastConfig().to_dict()
    named = set()
    for path in (ROOT / "configs").glob("*.yaml"):
        named |= yaml.safe_load(path.read_text()).keys()
        shardcast.ShardcastConfig.load(path)
        commented = re.findall(r"^# (\w+: .*)$", path.read_text(), re.MULTILINE)
        for option, value in ((k, v) for c in commented for k, v in yaml.safe_load(c).items()):
            assert value == defaults[option], f"{path.name}: {option}"
            named.add(option)
    options = {option.name for option in fields(shardcast.ShardcastConfig)}
    assert named == options - {"group_fn", "cost_fn"}  # functions: in code only


# -- whole runs ----------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_the_quickstart_ends_with_a_table_and_a_picture_and_warns_of_nothing(
    tmp_path: Path,
) -> None:
    satisfied = python("launch/satisfied.py", "plot").returncode == 0
    if not satisfied or sys.prefix == sys.base_prefix:
        pytest.skip("the quickstart would install another torch, or matplotlib, first")
    variables = {"VENV": str(Path(warm.executable()).parents[1]), "OUTPUT": str(tmp_path)}
    done = command("bash", "launch/quickstart.sh", *TINY_RUN, timeout=280, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ten steps" in done.stdout.split("== 1 of 2")[0]
    end = done.stdout.split("== comparison ==")[1]
    names, loss, measured, estimated, seconds = end.split("\n\n")[1].splitlines()
    assert names.split() == ["DDP", "+", "autocast", "shardcast"]
    runs = [metrics.read(tmp_path / name) for name in ("ddp", "shardcast")]
    final = [f"{metrics.curve(records, 'validation')[6]:.4f}" for records in runs]
    assert loss.split()[-2:] == final
    assert [float(value) for value in measured.split()[-2:]] == [0.48, 0.27]
    assert [float(value) for value in estimated.split()[-2:]] == [0.48, 0.11]
    assert all(float(value) > 0 for value in seconds.split()[-2:])
    noise = end.splitlines()[-2]
    assert "DDP + autocast alone" in noise and "2.0756 and 2.1101, 1.66 % apart" in noise
    assert end.splitlines()[-1] == f"picture: {tmp_path / 'comparison.png'}"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "warning" not in (done.stdout + done.stderr).lower()
    assert done.stderr == ""
    for records in runs:  # the picture's ring is on its line
        world, nbytes = comparison.measured_memory(records)
        assert nbytes == comparison.memory_over_ranks(records)[world]


SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.sh"))


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "environment.sh"])
def test_a_shell_script_asked_for_help_prints_its_usage_and_does_nothing_else(name: str) -> None:
    done = command("bash", f"launch/{name}", "--help", timeout=60, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout.lower() and "virtual environment .venv" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("finds", ["True", "False"])
def test_a_launcher_starts_one_process_per_gpu_or_two_without_one(
    finds: str, tmp_path: Path
) -> None:
    """The programs are in an inactive virtual environment and print their arguments."""
    (programs := tmp_path / "bin").mkdir()
    for name, line in (("torchrun", '"$@"'), ("accelerate", '"$@"'), ("python", finds)):
        (programs / name).write_text(f"#!/bin/sh\necho {line}\n")
        (programs / name).chmod(0o755)

    def started(script: str, **env: str) -> str:
        env |= {"VENV": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = command("bash", f"launch/{script}.sh", "--steps", "9", **env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    there = finds == "True"
    assert f"--nproc-per-node={'gpu' if there else 2} " in started("torchrun")
    assert "--nproc-per-node=3 " in started("torchrun", NPROC="3")
    file = "configs/accelerate/" + ("multi_gpu.yaml" if there else "cpu_two_processes.yaml")
    assert f"--config_file {file} launch/train.py --steps 9" in started("accelerate")
    assert "my.yaml --num_processes 3" in started(
        "accelerate", ACCELERATE_CONFIG="my.yaml", NPROC="3"
    )


def test_every_row_of_the_readme_is_what_the_estimate_says() -> None:
    with torch.device("meta"):
        model = gpt_7b()
    numel = sum(param.numel() for param in model.parameters())
    expected = {
        {"ZeRO-1": "DeepSpeed ZeRO-1", "ZeRO-2": "DeepSpeed ZeRO-2"}.get(name, name): nbytes
        for name, nbytes in estimates.peers(numel, 2, 8).items()
    }
    adamw = torch.optim.AdamW(model.parameters())
    local = estimates.estimate(model, adamw, 8, shardcast.ShardcastConfig(), micro_batches=8)
    expected["shardcast, up to eight micro-batches in `no_sync()`"] = local.total
    each = shardcast.ShardcastConfig(accumulate="sharded")
    sharded = estimates.estimate(model, adamw, 8, each, micro_batches=8)
    expected["shardcast, eight micro-batches, "] = sharded.total
    rows = re.findall(r"^\| (.*?) \| ([\d.]+) \|", README.replace("*", ""), re.MULTILINE)
    (lean,) = (row for row, _ in rows if "lean.yaml" in row)
    drawn = (by_size[8] for by_size in picture.memory_of_7b().values())
    pictured = dict(zip(("DDP + autocast", "shardcast", lean), drawn, strict=True))
    for name, nbytes in expected.items():
        (shown,) = (value for row, value in rows if row.startswith(name))
        assert shown == f"{nbytes / 1e9:.1f}", name
    for name, nbytes in pictured.items():
        assert dict(rows)[name] == f"{nbytes / 1e9:.1f}", name
    assert len(rows) == len({*expected, *pictured})


def test_a_bf16_model_without_masters_trains_worse_as_its_page_says(tmp_path: Path) -> None:
    runs = picture.recorded(picture.BF16_LOSS)
    page = (ROOT / "docs" / "precision.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (\d\.\d+) \| \d+ \|$", page, re.MULTILINE)
    losses = {name: metrics.curve(records, "validation")[600] for name, records in runs.items()}
    assert {name: f"{loss:.3f}" for name, loss in losses.items()} == dict(rows)
    assert losses["bf16 without masters"] > 1.1 * losses["DDP + autocast"]
    main([*TINY_RUN, "--baseline", "bf16", "--output", str(tmp_path)])
    memory = metrics.values_of(check_run(tmp_path, world=1), "memory")
    assert memory["state"] == 2 * memory["parameters"] == 2 * 2 * 30_176


def test_a_slurm_job_gives_each_task_the_cores_that_it_asked_for(tmp_path: Path) -> None:
    for name, line in (("scontrol", "echo node1"), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {
        "SUBMIT_DIR": str(ROOT),
        "JOB_NODELIST": "node[1-2]",
        "JOB_ID": "7",
        "JOB_NUM_NODES": "2",
    }
    job |= {"GPUS_ON_NODE": "4", "CPUS_PER_TASK": "12"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    variables = {f"SLURM_{name}": value for name, value in job.items()}
    done = command("bash", "launch/slurm.sbatch", "--steps", "3", PATH=path, **variables)
    words = done.stdout.split()
    assert "--cpus-per-task=12" in words[: words.index("torchrun")], done.stderr
    assert words[-3:] == ["launch/train.py", "--steps", "3"]


def check_run(directory: Path, world: int) -> list[metrics.Record]:
    records = metrics.read(directory)
    assert records[0]["world"] == world
    assert [r["step"] for r in records if r["kind"] == "train"] == [2, 3, 4, 6]
    assert list(metrics.curve(records, "validation")) == [3, 6]
    assert 0 < metrics.curve(records, "validation")[6] < 6
    train = [r for r in records if r["kind"] == "train"]
    assert all(r["grad_norm"] > 0 and r["tokens_per_second"] > 0 for r in train)
    assert train[-1]["skipped_steps"] == 0
    assert records[-1]["text"].startswith("def ")
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    return records


@pytest.mark.parametrize("config", ["bf16", "fp16", "fp32"])
def test_train_with_the_example_configurations(
    tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCAST_CONFIG", str(ROOT / "configs" / f"{config}.yaml"))
    if config == "fp16":  # the file's scale, 65536, can overflow on Python's source text
        monkeypatch.setenv("SHARDCAST_LOSS_SCALE_INIT", "1024")
    main([*TINY_RUN, "--output", str(tmp_path)])
    check_run(tmp_path, world=1)


def train_in(group: dist.ProcessGroup, flags: list[str]) -> None:
    train(parse_arguments(flags), Processes(group.rank(), group.size(), torch.device("cpu")))


def test_two_processes_follow_the_ddp_baseline(
    tmp_path: Path, gloo: SpawnedWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, ours = (tmp_path / name for name in ("one", "two", "ours"))
    flags = [*TINY_RUN, "--accumulation", "2"]
    gloo.run(train_in, [*flags, "--output", str(ours)])
    baseline = [*TINY_RUN, "--baseline", "ddp", "--accumulation"]
    gloo.run(train_in, [*baseline, "2", "--output", str(two)])
    main([*baseline, "4", "--output", str(one)])
    check_run(one, world=1)
    check_run(two, world=2)
    check_run(ours, world=2)

    main(["--compare", str(two), str(ours), "--output", str(tmp_path)])
    assert "largest difference of the validation losses" in capsys.readouterr().out
    assert (tmp_path / "comparison.png").is_file()
    assert max(metrics.compare(metrics.read(two), metrics.read(ours)).differences) < 1.0
    # Two micro-batches on two ranks are the same data as four on one rank.
    losses = [metrics.curve(metrics.read(directory), "train") for directory in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # bf16 autocast


def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep this process's handlers
    flags = [*TINY_RUN, "--checkpoint-dir", str(tmp_path / "saved"), "--output", str(tmp_path)]
    main([*flags, "--steps", "1"])
    with pytest.raises(ValueError, match="give another directory"):
        main([*flags, "--steps", "1", "--seed", "5"])


def test_processes_without_a_gpu_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="8 processes were started, but torch finds no GPU"):
        main([flag for flag in TINY_RUN if flag not in ("--device", "cpu")])


# -- two trainers and a reader that samples -------------------------------------------------------

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
