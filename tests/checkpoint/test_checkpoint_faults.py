"""Saves that are cut off anywhere, and files that are not what was written."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_saves
import pytest
import torch
from faults import Counting, at_each_point, no_space
from models import CASES, advance, assert_same_bits, everything, install, run_world, sharded
from torch import nn

from shardcast import checkpoint
from shardcast.checkpoint import directory
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(120)
BF16 = torch.bfloat16


def job(group: Any = None, steps: int = 1, case: str = "tiny", **fields: Any) -> Any:
    model = CASES[case].build()
    optimizer = sharded(model, group, **{"param_dtype": BF16, **fields})
    advance(model, optimizer, 0, steps)
    return model, optimizer


def loaded(folder: Path) -> tuple[int, Any]:
    model, optimizer = job(steps=0)
    step = checkpoint.load(folder, model, optimizer).step
    return step, everything(model, optimizer)


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_save_cut_off_at_any_point_leaves_the_old_or_the_new_state(tmp_path: Path, how: str):
    model, optimizer = job()
    checkpoint.save(tmp_path / "first", model, optimizer, step=1)
    first = everything(model, optimizer)
    install(model, 1)
    optimizer.step()
    states = first, everything(model, optimizer)

    def second_save(name: str, reached: Counting) -> Path:
        folder = shutil.copytree(tmp_path / "first", tmp_path / name)
        with at_each_point(reached):
            checkpoint.save(folder, model, optimizer, step=2, keep=1)
        return folder

    counting = Counting()
    second_save("whole", counting)
    assert {"create", "write", "flush", "rename", "acknowledge", "mkdir", "remove"} == {
        point.split()[0] for point in counting.seen
    }
    committed = max(n for n, p in enumerate(counting.seen) if p.startswith("rename .writing"))
    found = set()
    # Chunks are many small writes, which differ in nothing: every third will do.
    chosen = [n for n, p in enumerate(counting.seen) if not p.startswith("write __0") or n % 3 == 0]
    for number in chosen:
        if how == "exit":
            kill = Counting(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    second_save(str(number), kill)
                os._exit(1)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), counting.seen[number]
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a deletion that fails only warns
                try:
                    second_save(str(number), Counting(number, no_space))
                except OSError:
                    pass
                else:
                    assert number > committed
        folder = tmp_path / str(number)
        step, state = loaded(folder)
        assert_same_bits(state, states[step - 1])
        found.add(step)
        checkpoint.save(folder, model, optimizer, step=3)  # and it goes on
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
        shutil.rmtree(folder)
    assert found == {1, 2}


def kill_some(told: Path) -> None:
    with told.open("w") as file, contextlib.redirect_stdout(file):
        try:
            kill_saves.main(["--random=10", "--points=150"])
        except Exception:
            traceback.print_exc(file=file)
            raise


@pytest.mark.slow
def test_killed_processes_leave_one_step_whole(tmp_path: Path):
    """Two gloo processes; `kill_saves.py --random 100 --points 1` does more."""
    told = tmp_path / "told"
    killer = multiprocessing.get_context("forkserver").Process(target=kill_some, args=(told,))
    killer.start()
    killer.join(100)
    killer.kill()  # if it has not ended
    assert killer.exitcode == 0, told.read_text()
    assert len(re.findall(r"^\d\d+ kills", told.read_text(), re.MULTILINE)) == 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two ranks."""
    folder = tmp_path_factory.mktemp("made")

    def saving(group: Any) -> None:
        model, optimizer = job(group, case="mlp")
        checkpoint.save(folder, model, optimizer, step=1)
        install(model, 1)
        optimizer.step()
        checkpoint.save(folder, model, optimizer, step=2)

    run_world(2, saving)
    return folder


def test_one_rank_that_fails_makes_all_raise_and_none_hang(tmp_path: Path):
    world = ThreadedWorld(2)
    pairs, others = world.run(job, 2), world.run(job, 0)

    def saving(group: Any, step: int) -> str:
        try:
            checkpoint.save(tmp_path, *pairs[group.rank()], step=step)
        except Exception as error:
            return str(error)
        return ""

    def loading(group: Any) -> int:
        return checkpoint.load(tmp_path, *others[group.rank()]).step

    points = Counting()
    assert world.run(saving, 1) == ["", ""]
    with at_each_point(points):
        assert world.run(saving, 2) == ["", ""]
    chosen = [n for n, p in enumerate(points.seen) if not p.startswith("write __") or n % 3 == 0]
    for step, number in enumerate(chosen, start=3):
        for left in tmp_path.glob(".writing*"):  # a save removes it; that this fails is no matter
            shutil.rmtree(left)
        with at_each_point(Counting(number, no_space)):
            assert all("No space" in told for told in world.run(saving, step))
        assert_same_sequence(world.logs)
        # A failed flush of the parent, or acknowledgement, comes after the commit.
        assert world.run(loading) == [max(directory.steps(tmp_path))] * 2


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


NAMES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "shardcast.json", "COMMITTED"]


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_named_and_changes_nothing_and_the_one_before_is_taken(
    made: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "step-000000002"
    damage(newest / name)
    model, optimizer = job(case="mlp", steps=5)
    before = everything(model, optimizer)
    with pytest.raises(checkpoint.DamagedCheckpointError) as caught:
        checkpoint.load(newest, model, optimizer)
    told = str(caught.value)
    assert name in told or (name == "COMMITTED" and "shardcast.json" in told)
    if name.endswith("distcp"):
        assert ".weight'" in told or ".bias'" in told, "a parameter in the file is named"
    assert_same_bits(everything(model, optimizer), before)
    with pytest.warns(UserWarning, match="falling back"):
        assert checkpoint.latest(tmp_path).name == "step-000000001"
    with pytest.warns(UserWarning, match="falling back"):
        assert checkpoint.load(tmp_path, model, optimizer).step == 1
    with pytest.warns(UserWarning, match="set aside"):
        checkpoint.save(tmp_path, model, optimizer, step=2)
    assert checkpoint.latest(tmp_path).name == "step-000000002"


def test_swapped_files_and_renamed_directories_are_noticed(made: Path, tmp_path: Path):
    shutil.copytree(made / "step-000000001", tmp_path / "step-000000001")
    for one, two in (NAMES[:2], NAMES[1::-1]):
        shutil.copy(made / "step-000000001" / one, tmp_path / "step-000000001" / two)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"no sound checkpoint.*distcp"):
        checkpoint.latest(tmp_path)
    shutil.copytree(made / "step-000000002", tmp_path / "step-000000008")
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"step 2; the dir.* was renamed"):
        checkpoint.inspect(tmp_path / "step-000000008")


def test_a_path_that_is_no_checkpoint_is_not_taken_for_a_new_run(made: Path, tmp_path: Path):
    kept = shutil.copytree(made / "step-000000001", tmp_path / "best")
    (kept / "shardcast.json").unlink()
    misspelt = made / "step-000000009"

    def attempt(group: Any) -> None:
        model, optimizer = job(group, case="mlp")
        for act in (checkpoint.resume, checkpoint.load):
            with pytest.raises(FileNotFoundError, match=r"no '.*step-000000009'; check the path"):
                act(misspelt, model, optimizer)
            with pytest.raises(NotADirectoryError, match="is a file; give its checkpoint"):
                act(kept / "COMMITTED", model, optimizer)
            with pytest.raises(checkpoint.DamagedCheckpointError, match=r"shardcast\.json'"):
                act(kept, model, optimizer)

    run_world(2, attempt)
    with pytest.raises(FileNotFoundError, match="check the path"):
        checkpoint.latest(misspelt)


def test_a_manifest_that_one_rank_cannot_read_again_makes_all_raise(
    made: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest_of, ranks, calls = directory.manifest_of, dict[int, int](), list[int]()

    def read(folder: Path) -> Any:
        rank = ranks[threading.get_ident()]
        calls.append(rank)
        if rank == 1 and calls.count(1) == 2:
            raise OSError(116, "Stale file handle")
        return manifest_of(folder)

    monkeypatch.setattr(directory, "manifest_of", read)

    def attempt(group: Any) -> None:
        ranks[threading.get_ident()] = group.rank()
        model, optimizer = job(group, case="mlp")
        before = everything(model, optimizer)
        with pytest.raises((OSError, RuntimeError), match="Stale file handle"):
            checkpoint.load(made, model, optimizer)
        assert_same_bits(everything(model, optimizer), before)

    run_world(2, attempt)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}])


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("scalars", {}, r"it lacks \d+ parameters or buffers, among them '"),
        ("mlp", {"optimizer": adam}, "state of AdamW, expected Adam"),
        ("mlp", {"optimizer": two_groups}, "expected 2 param_groups, got 1"),
    ],
)
def test_what_does_not_belong_is_refused_before_anything_changes(
    made: Path, case: str, options: dict[str, Any], message: str
):
    def attempt(group: Any) -> None:
        model, optimizer = job(group, 4, case, **options)
        before = everything(model, optimizer)
        with pytest.raises(ValueError, match=message):
            checkpoint.load(made, model, optimizer)
        assert_same_bits(everything(model, optimizer), before)

    run_world(2, attempt)


def test_state_that_cannot_be_cut_is_refused_by_an_even_partition(tmp_path: Path):
    factored = lambda m: torch.optim.Adafactor(m.parameters())  # noqa: E731
    model, optimizer = job(case="mlp", optimizer=factored)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    other = sharded(
        CASES["mlp"].build(), None, factored, param_dtype=BF16, partition="even", elementwise=True
    )
    with pytest.raises(ValueError, match=r"parameter 'a\.weight' .* use partition 'whole'"):
        checkpoint.load(tmp_path, other.model, other)


def test_arguments_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, optimizer = job()

    def refused(error: type[Exception], match: str, **changed: Any) -> None:
        given = {"optimizer": optimizer, "step": 2, **changed}
        with pytest.raises(error, match=match):
            checkpoint.save(tmp_path, model, **given)

    assert checkpoint.resume(tmp_path, model, optimizer) is None
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        checkpoint.load(tmp_path, model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    refused(ValueError, "step", step=-1)
    refused(ValueError, "keep", keep=0)
    refused(ValueError, "extra", extra={"model": model})
    refused(TypeError, "optimizer", optimizer=optimizer.originals.optimizers[0])
    refused(ValueError, "exists already", step=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: type("U", (), {"free": 10}))
        refused(RuntimeError, "bytes free")
    for step in (2, 3, 4):
        checkpoint.save(tmp_path, model, optimizer, step=step, keep=2)
    assert list(directory.steps(tmp_path)) == [4, 3]


@pytest.mark.parametrize(
    ("damage", "name"),
    [(truncate, "__0_0.distcp"), (flip, "__0_0.distcp"), (Path.unlink, directory.MARKER)],
)
def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(
    tmp_path: Path, damage: Callable[[Path], None], name: str
):
    model, optimizer = job()
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, model, optimizer, step=step)
    damage(tmp_path / "step-000000003" / name)
    checkpoint.save(tmp_path, model, optimizer, step=4, keep=2)
    assert list(directory.steps(tmp_path)) == [4, 3, 2]
    checkpoint.save(tmp_path, model, optimizer, step=5, keep=2)
    assert list(directory.steps(tmp_path)) == [5, 4]


def test_ranks_with_other_arguments_all_raise(tmp_path: Path):
    def attempt(group: Any) -> None:
        model, optimizer = job(group)
        with pytest.raises(ValueError, match=r"rank 1: .*2"):
            checkpoint.save(tmp_path, model, optimizer, step=1 + group.rank())

    run_world(2, attempt)
    assert not directory.steps(tmp_path)


class Picky(nn.Linear):
    """Has an extra state, and takes none on one rank."""

    state: Any = 1
    refuses = False

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise RuntimeError("not mine")


def test_extra_state_that_cannot_be_saved_or_is_refused_on_a_rank_makes_all_raise(tmp_path: Path):
    def attempt(group: Any) -> None:
        model = Picky(2, 2)
        model.refuses = group.rank() == 1
        optimizer = sharded(model, group)
        model.state = Path("/")  # could be saved, but not read back with weights_only
        with pytest.raises(ValueError, match=r"what get_extra_state\(\) .* pathlib.*Path that"):
            checkpoint.save(tmp_path, model, optimizer, step=1)
        assert not list(tmp_path.iterdir())
        model.state = 1
        checkpoint.save(tmp_path, model, optimizer, step=1)
        with pytest.raises(RuntimeError, match=r"not mine.*load again"):
            checkpoint.load(tmp_path, model, optimizer)

    run_world(2, attempt)


def test_metadata_of_a_stranger_runs_nothing(tmp_path: Path):
    import pickle

    from shardcast.checkpoint.dcp import Reader

    (tmp_path / ".metadata").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(RuntimeError, match=r"cannot be read.*unexpected posix"):
        Reader(tmp_path)
