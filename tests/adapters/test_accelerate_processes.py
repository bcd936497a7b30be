"""shardcast.accelerate in two real processes, compared with Accelerate's DDP."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import metrics
import pytest
import torch
import train_accelerate
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from commands import python
from models import CASES, Tensors, assert_same_bits, values
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from shardcast.accelerate import ShardcastAccelerator
from shardcast.testing import SpawnedWorld

BATCHES, EPOCHS, ACCUMULATION, CLIP = 8, 2, 3, 0.5  # per rank: steps after 3, 6 and 8 batches
STEPS = EPOCHS * math.ceil(BATCHES / ACCUMULATION)


def fresh() -> None:
    """Reset Accelerate's state, which is in class attributes, between runs in one process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator_of(kind: str, **options: Any) -> Accelerator:
    fresh()
    cls = Accelerator if kind == "ddp" else ShardcastAccelerator
    if kind == "ddp":
        options.pop("shardcast_config", None)
    # Makes the order of the data depend only on seed and epoch, also after a restart.
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    return cls(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=loading,
        **options,
    )


class Training:
    """A script like Accelerate's examples, in parts."""

    def __init__(self, accelerator: Accelerator, case: str = "gpt") -> None:
        self.case = CASES[case]
        model = self.case.build(seed=accelerator.process_index)  # rank 0's weights must win
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        # The bias of an attention key has no effect: its gradient is rounding noise, which Adam
        # with its usual eps amplifies to the size of other updates, in a random direction.
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-2,
            eps=1e-5,
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [2e-2, 1e-2], total_steps=STEPS * accelerator.num_processes
        )
        torch.manual_seed(5)
        data = TensorDataset(*self.case.batch(0, size=2 * 2 * BATCHES))
        loader = DataLoader(data, batch_size=2, shuffle=True)
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def epoch(self, number: int) -> None:
        accelerator = self.accelerator
        self.loader.set_epoch(number)
        for batch in self.loader:
            with accelerator.accumulate(self.model):
                accelerator.backward(self.case.loss(self.model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def weights(self) -> Tensors:
        return values(self.accelerator.unwrap_model(self.model))


def skip_on_one_rank(group: Any, precision: str) -> list[tuple[bool, float, bool]]:
    accelerator = accelerator_of("shardcast", mixed_precision=precision)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for step in range(3):
        before = model.weight.detach().clone()
        bad = step == 1 and group.rank() == 1
        loss = model(torch.ones(2, 3)).sum() * (math.nan if bad else 1e-3)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        moved = not torch.equal(before, model.weight)
        seen.append((optimizer.step_was_skipped, scheduler.get_last_lr()[0], moved))
    return seen


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_one_ranks_nan_skips_the_step_and_the_scheduler_everywhere(
    gloo: SpawnedWorld, precision: str
) -> None:
    expected = [(False, 0.5, True), (True, 0.5, False), (False, 0.25, True)]
    assert gloo.run(skip_on_one_rank, precision) == [expected, expected]


def metrics_and_uneven_inputs(group: Any) -> tuple[list[int], str, list[int]]:
    accelerator = accelerator_of("shardcast")
    model = torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.arange(7.0)[:, None]), batch_size=2)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    seen: list[int] = []
    batches = []
    with accelerator.join_uneven_inputs([model]):
        for (x,) in loader:
            seen += accelerator.gather_for_metrics(x).flatten().int().tolist()
            batches.append(len(x))
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            return seen, "entered", batches
    except RuntimeError as error:
        return seen, str(error), batches


def test_metrics_are_gathered_once_and_uneven_inputs_are_refused(gloo: SpawnedWorld) -> None:
    for seen, message, batches in gloo.run(metrics_and_uneven_inputs):
        assert seen == list(range(7))
        assert len(batches) == 2
        assert "expected even_batches=True, got False" in message


# -- save_state and load_state ------------------------------------------------------------------


def around(
    _group: Any, verb: str, folder: Path, precision: str, kind: str = "shardcast"
) -> tuple[Tensors, Tensors]:
    """Return weights when saved or loaded, and after another epoch."""
    training = Training(accelerator_of(kind, mixed_precision=precision))
    if verb == "save":
        training.epoch(0)
        training.accelerator.save_state(str(folder))
    else:
        training.accelerator.load_state(str(folder))
    before = training.weights()
    training.epoch(1)
    return before, training.weights()


def test_a_state_loads_at_another_world_size(gloo: SpawnedWorld, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    from_two = gloo.run(around, "save", two, "bf16")[0][0]
    assert_same_bits(around(None, "load", two, "bf16")[0], from_two)
    from_one = around(None, "save", one, "bf16")[0]
    for before, _ in gloo.run(around, "load", one, "bf16"):
        assert_same_bits(before, from_one)


def test_a_state_that_stock_accelerate_saved_under_ddp_is_continued(
    gloo: SpawnedWorld, tmp_path: Path
) -> None:
    native = gloo.run(around, "save", tmp_path / "ddp", "no", "ddp")[0]
    ours = gloo.run(around, "load", tmp_path / "ddp", "no")[0]
    torch.testing.assert_close(ours, native, atol=1e-6, rtol=0)


class CrashError(Exception):
    """Simulates the end of the process."""


def interrupted(group: Any, directory: str, automatic: bool) -> tuple[Tensors, Tensors, list[str]]:
    """Save twice into one folder; the second save ends before its commit."""
    from accelerate.utils import ProjectConfiguration

    import shardcast.checkpoint

    project = ProjectConfiguration(
        project_dir=directory, automatic_checkpoint_naming=automatic, total_limit=1
    )
    accelerator = accelerator_of("shardcast", mixed_precision="bf16", project_config=project)
    training = Training(accelerator)
    folder = None if automatic else directory
    accelerator.save_state(folder)
    before = training.weights()
    training.epoch(0)
    complete = shardcast.checkpoint.save

    def crash(*_args: Any, **_options: Any) -> None:
        raise CrashError

    shardcast.checkpoint.save = crash
    try:
        with pytest.raises(CrashError):
            accelerator.save_state(folder)
    finally:
        shardcast.checkpoint.save = complete
    accelerator.load_state(folder)
    after = training.weights()
    saves = Path(accelerator.save_state(folder)).parent
    accelerator.wait_for_everyone()
    with pytest.raises(FileNotFoundError, match="expected a committed checkpoint in"):
        accelerator.load_state(f"{directory}/of_nobody")
    return before, after, sorted(path.name for path in saves.iterdir())


@pytest.mark.parametrize("automatic", [False, True])
def test_an_interrupted_save_leaves_the_one_before(
    gloo: SpawnedWorld, tmp_path: Path, automatic: bool
) -> None:
    (tmp_path / "of_the_user.txt").write_text("stays")
    expected = ["checkpoint_2"] if automatic else ["of_the_user.txt", "state-2"]
    for before, after, names in gloo.run(interrupted, str(tmp_path), automatic):
        assert_same_bits(before, after)
        assert names == expected, "older states are removed after the commit"


def damage(folder: Path) -> None:
    """Truncate one rank's shard."""
    path = next(folder.glob("shardcast/step-*/__0_0.distcp"))
    os.truncate(path, path.stat().st_size - 1)


def load_damaged(group: Any, directory: str) -> tuple[Tensors, Tensors, list[str], list[str]]:
    """Return the weights before and after a fallback, warnings, and errors without a fallback."""
    from accelerate.utils import ProjectConfiguration

    from shardcast.checkpoint import DamagedCheckpointError

    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True)
    accelerator = accelerator_of("shardcast", project_config=project)
    training = Training(accelerator)
    accelerator.save_state()
    first = training.weights()
    training.epoch(0)
    accelerator.save_state()
    older, newer = (Path(directory, "checkpoints", f"checkpoint_{n}") for n in (0, 1))
    states = Path(directory, "states")  # as if the run had ended before removing the older state
    if accelerator.is_main_process:
        damage(newer)
        shutil.copytree(older, states / "state-0")
        shutil.copytree(newer, states / "state-1")
    accelerator.wait_for_everyone()
    raised = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_state()
        after = training.weights()
        training.epoch(0)
        accelerator.load_state(str(states))
    assert_same_bits(after, training.weights())
    told = [str(w.message) for w in caught if "falling back" in str(w.message)]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        damage(older)
    accelerator.wait_for_everyone()
    for folder in (None, str(newer)):
        with pytest.raises(DamagedCheckpointError) as error:
            accelerator.load_state(folder)
        raised.append(str(error.value))
    if accelerator.is_main_process:
        for path in older.glob("shardcast/step-*/shardcast.json"):
            path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            (path.parent / "COMMITTED").write_text(digest)
    accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match="expected format 1, got 99"):
        accelerator.load_state(str(older))
    return first, after, told, raised


def test_a_damaged_state_is_passed_over_or_told_on_all_ranks(
    gloo: SpawnedWorld, tmp_path: Path
) -> None:
    for rank, result in enumerate(gloo.run(load_damaged, str(tmp_path))):
        before, after, told, (all_damaged, named) = result
        assert_same_bits(before, after)
        assert len(told) == (2 if rank == 0 else 0)
        assert all("__0_0.distcp" in text for text in (*told, all_damaged, named))
        assert "no intact checkpoint is left" in all_damaged


# -- the launcher -------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
TINY = (
    "--sequences 96 --validation_sequences 10 --context 32 --width 32 --depth 1 --batch_size 4 "
    "--accumulation 3 --log_interval 1 --corpus_mb 4 --with_tracking --epochs 1"
).split()


def launch(*arguments: str) -> str:
    done = python("-m", *arguments, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logged(directory: Path) -> dict[int, float]:
    return metrics.curve(metrics.read(directory), "train")


def resume(_group: Any, flags: list[str]) -> str:
    fresh()
    os.environ["SHARDCAST_KEEP_FP32"] = "norms"  # as in the first run's file
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        train_accelerate.train(train_accelerate.parse_arguments(flags))
    return told.getvalue()


@pytest.mark.timeout(240)
def test_the_example_script_trains_saves_and_resumes_in_two_processes(
    tmp_path: Path, gloo: SpawnedWorld
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    file = ROOT / "configs/accelerate/shardcast_cpu.yaml"
    script = ("launch/train_accelerate.py", *TINY, "--output", str(whole))
    launch("shardcast", "launch", "--config_file", str(file), *script, "--checkpointing_steps", "2")
    flags = [*TINY, "--output", str(again), "--resume_from_checkpoint", str(whole / "step_2")]
    out = gloo.run(resume, [*flags, "--cpu", "--mixed_precision", "bf16"])
    assert "resumed at epoch 0, step 2" in out[0]
    losses = logged(whole)
    assert list(losses) == [1, 2, 3, 4]
    assert logged(again) == {step: losses[step] for step in (3, 4)}
    assert metrics.curve(metrics.read(again), "validation") == metrics.curve(
        metrics.read(whole), "validation"
    )
    weights = load_file(whole / "model" / "model.safetensors")
    assert torch.isfinite(weights["head.weight"]).all()
