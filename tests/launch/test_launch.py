"""The training program: its text, its model, its metrics, and whole runs under the launchers."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
from dataclasses import fields, replace
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
from corpus import Corpus
from gpt import GPT, GPTConfig, gpt_7b
from processes import Processes
from train import main, parse_arguments, train

import shardcast
from shardcast import estimate as estimates
from shardcast.testing import SpawnedWorld

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TINY = GPTConfig(context=16, width=32, depth=2, heads=2)
TINY_RUN = (
    "--device cpu --steps 6 --warmup-steps 2 --width 32 --depth 1 --heads 2 --context 32 "
    "--batch-size 4 --log-interval 2 --validation-interval 3 --validation-sequences 8 "
    "--sample-bytes 8 --max-grad-norm 1 --corpus-mb 1"
).split()


# -- text --------------------------------------------------------------------------------------


@pytest.fixture
def text_directory(tmp_path: Path) -> Path:
    """60 files of 400 bytes; every byte of a file is the file's number."""
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes([number]) * 400)
    return tmp_path


def test_files_are_trained_on_or_held_out_wherever_they_lie_and_a_single_one_is_cut(
    text_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus = Corpus.load([text_directory], context=8)
    train, held_out = set(corpus.train.tolist()), set(corpus.held_out.tolist())
    assert train | held_out == set(range(60)) and not train & held_out
    assert len(held_out) == 3  # one file in twenty
    capped = Corpus.load([text_directory], context=8, max_bytes=15_900)
    assert capped.train.numel() + capped.held_out.numel() == 15_900
    moved = tmp_path_factory.mktemp("elsewhere") / "text"
    text_directory.rename(moved)
    assert Corpus.load([moved], context=8).digest == corpus.digest
    (path := moved.parent / "one.txt").write_bytes(bytes(range(250)) * 4)
    single = Corpus.load([path], context=8)
    assert bytes(torch.cat([single.train, single.held_out])) == path.read_bytes()
    assert single.held_out.numel() == 50
    with pytest.raises(FileNotFoundError, match="absent"):
        Corpus.load([moved / "absent"], context=8)
    path.write_bytes(b"only a little")
    with pytest.raises(ValueError, match="held-out text has 0 bytes"):
        Corpus.load([path], context=8)


def test_batches_depend_on_step_and_index_alone_and_ranks_share_the_held_out_ones(
    text_directory: Path,
) -> None:
    corpus = Corpus.load([text_directory], context=8)
    tokens, targets = corpus.train_batch(seed=1, step=2, index=3, size=4)
    assert tokens.shape == targets.shape == (4, 8) and targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    torch.manual_seed(99)
    assert torch.equal(tokens, corpus.train_batch(seed=1, step=2, index=3, size=4)[0])
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(tokens, corpus.train_batch(*other, size=4)[0])

    def rows(rank: int, world: int) -> list[tuple[int, ...]]:
        batches = corpus.held_out_batches(10, size=3, rank=rank, world=world)
        return [tuple(row) for tokens, _ in batches for row in tokens.tolist()]

    assert len(rows(0, 1)) == 10
    for world in (2, 3):
        of_ranks = sorted(row for rank in range(world) for row in rows(rank, world))
        assert of_ranks == sorted(rows(0, 1))


# -- model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_begins_at_the_entropy_of_a_byte_and_does_not_look_ahead(dtype: torch.dtype) -> None:
    model, tokens = GPT(TINY).to(dtype), torch.randint(256, (3, 16))
    (changed := tokens.clone())[:, 9] += 1
    changed %= 256
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 16, 256) and before.dtype == dtype
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.equal(before[:, 9:], after[:, 9:])
    loss = model(tokens, tokens)
    assert loss.shape == () and loss.dtype == torch.float32 and 5.0 < loss.item() < 6.0  # ln 256
    told = model.generate(tokens[:1, :3], 20, torch.Generator().manual_seed(0))
    assert told.shape == (1, 23) and torch.equal(told[:, :3], tokens[:1, :3])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pipeline_stages_one_after_the_other_are_the_whole_model(count: int) -> None:
    network = GPT(replace(TINY, depth=5, tie_head=True))
    stages = [copy.deepcopy(network).keep(number, count) for number in range(count)]
    tokens = torch.randint(256, (2, 16))
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, network(tokens))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    tied = ["head.weight"] * (count > 1)
    assert sorted(names) == sorted([*dict(network.named_parameters()), *tied])
    with pytest.raises(ValueError, match="6 pipeline stages need as many blocks, there are 5"):
        network.keep(0, 6)


# -- arguments, metrics, configurations ----------------------------------------------------------


def run_records(corpus: str = "x", **validation: float) -> list[metrics.Record]:
    losses = [
        {"kind": "validation", "step": int(step[1:]), "loss": loss}
        for step, loss in validation.items()
    ]
    return [{"kind": "run", "corpus": corpus}, *losses]


def test_runs_are_compared_at_common_steps_on_the_same_text() -> None:
    comparison = metrics.compare(
        run_records(s1=5.0, s2=4.0, s3=2.0), run_records(s1=5.0, s2=3.9, s3=2.01, s4=9.0)
    )
    assert comparison.steps == [1, 2, 3]
    assert str(comparison) == (
        "largest difference of the validation losses: 2.500 % (step 2: 4.0000 and 3.9000 nats)\n"
        "final difference of the validation losses: 0.500 % (step 3: 2.0000 and 2.0100 nats)"
    )
    for other, why in (
        (run_records(s2=1.0), "no step"),
        (run_records("y", s1=1), "different text"),
    ):
        with pytest.raises(ValueError, match=why):
            metrics.compare(run_records(s1=1.0), other)


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


def run(*command: str) -> str:
    """Run in a process of its own and return what it printed; its failure fails the test."""
    finished = python(*command)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


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
    assert "after ten steps how long it takes" in done.stdout.split("== 1 of 2")[0]
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
    assert "DDP + autocast alone" in noise and "2.0756 and 2.0838, 0.40 % apart" in noise
    assert end.splitlines()[-1] == f"picture: {tmp_path / 'comparison.png'}"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "warning" not in (done.stdout + done.stderr).lower()
    assert done.stderr == ""
    for records in runs:  # the ring in the picture is on its line
        world, nbytes = comparison.measured_memory(records)
        assert nbytes == comparison.memory_over_ranks(records)[world]


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


def test_train_with_plain_python(tmp_path: Path) -> None:
    out = run("launch/train.py", *TINY_RUN, "--output", str(tmp_path))
    check_run(tmp_path, world=1)
    assert "memory per rank" in out
    # No terminal: a line at every log interval instead of the bar.
    lines = re.findall(r"^step (\d+): loss [\d.]+, [\d,]+ tokens/s, grad norm", out, re.MULTILINE)
    assert lines == ["2", "3", "4", "6"]


@pytest.mark.parametrize("config", ["bf16", "fp16", "fp32"])
def test_train_with_the_example_configurations(
    tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCAST_CONFIG", str(ROOT / "configs" / f"{config}.yaml"))
    if config == "fp16":  # some Python's text overflows at the scale of the file, 65536
        monkeypatch.setenv("SHARDCAST_LOSS_SCALE_INIT", "1024")
    main([*TINY_RUN, "--output", str(tmp_path)])
    check_run(tmp_path, world=1)


def train_in(group: dist.ProcessGroup, flags: list[str]) -> None:
    train(parse_arguments(flags), Processes(group.rank(), group.size(), torch.device("cpu")))


def test_two_processes_under_torchrun_follow_the_ddp_baseline(
    tmp_path: Path, gloo: SpawnedWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, ours = (tmp_path / name for name in ("one", "two", "ours"))
    flags = [*TINY_RUN, "--accumulation", "2"]
    run(*TORCHRUN, "launch/train.py", *flags, "--output", str(ours))
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
    # Two ranks see in two micro-batches what one rank sees in four.
    losses = [metrics.curve(metrics.read(directory), "train") for directory in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # bf16 autocast


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    first = metrics.Metrics(tmp_path, enabled=True)
    first.write("train", step=1, loss=2.0)
    with (tmp_path / metrics.FILE).open("a") as file:
        file.write('{"kind": "train", "st')
    assert metrics.curve(metrics.read(tmp_path), "train") == {1: 2.0}
    metrics.Metrics(tmp_path, enabled=True, append=True).write("train", step=2, loss=1.0)
    assert metrics.curve(metrics.read(tmp_path), "train") == {1: 2.0, 2: 1.0}


def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process is told to stop as ever
    flags = [*TINY_RUN, "--checkpoint-dir", str(tmp_path / "saved"), "--output", str(tmp_path)]
    main([*flags, "--steps", "1"])
    with pytest.raises(ValueError, match="give another directory"):
        main([*flags, "--steps", "1", "--seed", "5"])


def test_processes_without_a_gpu_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="8 processes were started, but torch finds no GPU"):
        main([flag for flag in TINY_RUN if flag not in ("--device", "cpu")])
