"""Readers of a run: what they apply, what they refuse, and how they follow a folder."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MLP, assert_same_bits, install, run_world, values
from pairwise import thinned
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import shardcast
from shardcast import publish
from shardcast.checkpoint import storage
from shardcast.publish import Changes, FolderReader, FolderSender, WeightPatch
from shardcast.serving.folder import read_changes, write_changes

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:step skipped", "ignore:state_dict"),
]


def trainer(group: Any = None, seed: int = 0, **fields: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fields = {"fuse": "eager", "autocast": False, "max_skipped_steps": 1000, **fields}
    return model, shardcast.shard(model, optimizer, process_group=group, changes=True, **fields)


def reader_model() -> nn.Module:
    return MLP().to(torch.bfloat16)


def advance(model: nn.Module, optimizer: Any, seed: int) -> None:
    install(model, seed)
    if seed % 7 == 3:
        next(model.parameters()).grad.fill_(torch.inf)
    optimizer.step()
    optimizer.zero_grad()


def told(steps: int = 2, **fields: Any) -> tuple[list[Changes], dict[str, Tensor]]:
    """Return full changes, then those of each step, and the final weights."""
    model, optimizer = trainer(**fields)
    found = [optimizer.changes()]
    for step in range(steps):
        advance(model, optimizer, step)
        found.append(optimizer.changes(since=found[-1].version))
    return found, values(model)


# -- apply ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["model", "state", "nothing"])
def test_changes_are_applied_to_a_model_or_to_its_state(kind: str):
    changes, expected = told(5)
    model = reader_model()
    target: Any = model
    if kind != "model":
        target = {n: t.clone() for n, t in model.state_dict().items() if kind == "state"}
    version = None
    for each in changes:
        version = publish.apply(target, each, version)
    assert version == changes[-1].version
    assert_same_bits(values(model) if kind == "model" else target, expected)


@pytest.mark.parametrize(
    "fields", [{}, {"fuse": "auto"}, {"param_dtype": "fp32"}, {"master": "split16"}]
)
def test_a_change_is_what_differs_in_its_bits_and_no_more(fields: dict[str, Any]):
    """On two ranks; writes that a script has undone are not included."""

    def run(group: Any) -> list[dict[str, list[int]]]:
        model, optimizer = trainer(group, **fields)
        version, seen = optimizer.changes().version, []
        for step in range(4):
            before = values(model)
            with torch.no_grad():
                if step == 1:
                    model.a.bias[3] = 2.0
                elif step == 3:
                    model.a.weight.mul_(2)
                    model.a.weight.div_(2)
                else:
                    advance(model, optimizer, step)
            changes = optimizer.changes(since=version)
            version, after = changes.version, values(model)
            bits = {n: (before[n] != after[n]).view(-1).nonzero().view(-1).tolist() for n in before}
            seen += [{patch.name: patch.indices.tolist() for patch in changes}, bits]
        return seen

    one, other = run_world(2, run)[0]
    for step in range(0, 8, 2):
        for name, places in one[step + 1].items():
            assert sorted(one[step].get(name, []) + other[step].get(name, [])) == places
        assert bool(one[step] or other[step]) == (step != 6)


def test_patches_have_the_fields_of_vllms_checkpoint_weight_patch():
    (full, patch), _ = told(1)
    assert WeightPatch._fields == ("name", "shape", "dtype", "values", "indices")
    for each in (*full, *patch):
        assert each.values.shape == each.indices.shape
        assert (each.values.dtype, each.indices.dtype) == (each.dtype, torch.int32)


def refused(error: type[Exception], changes: Any, version: str | None, named: str) -> None:
    """Assert that the changes are refused and nothing is written."""
    target = reader_model()
    before = values(target)
    with pytest.raises(error, match=named):
        publish.apply(target, changes, version)
    assert_same_bits(values(target), before)


def test_changes_since_another_version_are_refused():
    changes, _ = told(3)
    for version in (None, changes[0].version, changes[3].version, told(1)[0][1].version):
        refused(publish.WrongVersionError, changes[2], version, changes[1].version)


def test_changes_that_are_not_what_was_sent_are_refused():
    (full, patch), _ = told(1)
    first, *rest = patch.patches
    more = first.values.clone()
    more[0] += 1
    moved = first.indices.clone()
    moved[0] += 1
    for other in (
        replace(patch, patches=(first._replace(values=more), *rest)),
        replace(patch, patches=(first._replace(indices=moved), *rest)),
        replace(patch, patches=(first._replace(name="b.weight"), *rest)),
        replace(patch, patches=tuple(rest)),
        replace(patch, version=full.version),
        replace(patch, aliases={"c.weight": "b.weight"}),
    ):
        refused(publish.DamagedChangesError, other, full.version, "checksum")
    out_of_range = first._replace(indices=first.indices + 7 * 13)
    other = replace(patch, patches=(out_of_range, *rest), checksum="")
    refused(publish.DamagedChangesError, other, full.version, "a.weight")


def test_parts_that_are_not_those_of_one_version_are_refused():
    def run(group: Any) -> list[Changes]:
        model, optimizer = trainer(group)
        found = [optimizer.changes()]
        for step in range(2):
            advance(model, optimizer, step)
            found.append(optimizer.changes(since=found[-1].version))
        return found

    (left, right), _ = run_world(2, run)
    since = left[1].version
    refused(publish.IncompleteChangesError, [left[2]], since, "parts 0 to 1")
    refused(publish.IncompleteChangesError, [left[2], left[2]], since, "parts 0 to 1")
    refused(publish.IncompleteChangesError, [left[2], right[1]], since, left[2].version)
    refused(publish.IncompleteChangesError, [], since, "none")
    less = replace(left[0], patches=left[0].patches[:-1], checksum="")
    refused(publish.IncompleteChangesError, [less, right[0]], None, left[0][-1].name)
    target = reader_model()
    version = publish.apply(target, [right[0], left[0]])
    version = publish.apply(target, (each for each in (left[1], right[1])), version)


def test_a_model_that_is_not_the_trainings_is_refused():
    changes, _ = told(1)
    first = {"a.weight": torch.zeros(13, 7, dtype=torch.bfloat16)}
    for other in (MLP(), nn.Linear(3, 3), first):
        with pytest.raises(publish.WrongModelError, match=r"a\.weight|a\.bias"):
            publish.apply(other, changes[0])
    assert not first["a.weight"].any()  # it would fit, but is not written without the others


def test_tied_weights_are_written_wherever_they_lie():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MLP()
    model.again = nn.Linear(7, 13)
    model.again.weight = model.a.weight
    model.again.bias = model.a.bias
    sharded = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), changes=True, autocast=False
    )
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    nothing: dict[str, Tensor] = {}
    changes = sharded.changes()
    for target in (state, nothing):
        publish.apply(target, changes)
        assert_same_bits(target, values(model))
    assert nothing["again.weight"] is nothing["a.weight"]


# -- asking ---------------------------------------------------------------------------------


def test_what_cannot_be_asked_is_refused_by_name():
    model, optimizer = trainer(averages={"ema": 0.5})
    advance(model, optimizer, 0)
    with optimizer.averaged("ema"), pytest.raises(RuntimeError, match="changes"):
        optimizer.changes()
    with pytest.raises(TypeError, match="since"):
        optimizer.changes(since=3)
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.changes()
    model = MLP()
    plain = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="changes=True"):
            plain.changes()


# -- a folder -------------------------------------------------------------------------------


def files(folder: Path, kind: str = "") -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if f".{kind}" in path.name)


def spoil(path: Path, seed: int) -> None:
    """Change a byte near the end."""
    data = bytearray(path.read_bytes())
    place = random.Random(seed).randrange(len(data) - 64, len(data))
    data[place] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("ranks", "steps", "fields"),
    [
        (1, 40, {"moments": "bf16"}),
        (2, 80, {}),
        (3, 30, {"master": "split16"}),
        (4, 30, {"param_dtype": "fp32"}),
    ],
)
def test_a_reader_follows_a_folder_through_all_that_happens(
    ranks: int, steps: int, fields: dict[str, Any], tmp_path: Path
):
    """Covers skipped steps, restarts of both sides, lost patches, spoiled bytes, slow readers."""

    def begin(group: Any) -> tuple[nn.Module, Any, FolderSender]:
        model, optimizer = trainer(group, seed=1, **fields)
        return model, optimizer, FolderSender(tmp_path, optimizer, full_every=8)

    def run(group: Any) -> tuple[int, int]:
        model, optimizer, sender = begin(group)
        target: Any = {}
        reader = FolderReader(tmp_path)
        met, damaged, draw = 0, 0, random.Random(ranks)
        for step in range(steps):
            advance(model, optimizer, step)
            if step % 3 != 1:
                version = sender.send()
            group.barrier().wait()
            if group.rank() == 0:
                act = draw.random()
                newest = files(tmp_path, "next")[-1:]
                if act < 0.06 and newest:  # lost before the reader sees it
                    newest[0].unlink()
                elif act < 0.12 and newest:
                    spoil(newest[0], step)
                elif act < 0.2:  # the reader restarts, with or without its weights
                    if draw.random() < 0.5:
                        target, reader = {}, FolderReader(tmp_path)
                    else:
                        reader = FolderReader(tmp_path, reader.version)
                if draw.random() < 0.7:
                    try:
                        reader.update(target)
                    except publish.DamagedChangesError:
                        damaged += 1
                    if reader.version == version and step % 3 != 1:
                        assert_same_bits(target, values(model))
                        met += 1
            group.barrier().wait()
            if step % 30 == 19:  # the script restarts
                state = optimizer.state_dict()
                model, optimizer, sender = begin(group)
                optimizer.load_state_dict(state)
        for _ in range(9):  # at the latest, a full version brings readers up to date
            sender.send()
        group.barrier().wait()
        if group.rank() == 0:
            reader.update(target)
            assert reader.version == sender.version
            assert_same_bits(target, values(model))
        group.barrier().wait()
        return met, damaged

    results, _ = run_world(ranks, run)
    met, damaged = results[0]
    assert met >= steps // 6
    assert damaged or steps < 80


def test_any_byte_of_a_file_is_refused_or_says_the_same(tmp_path: Path):
    (full, patch), expected = told(1)
    path, draw, refusals = tmp_path / "part", random.Random(0), 0
    write_changes(path, patch)
    data = path.read_bytes()
    for _ in range(150):
        spoiled = bytearray(data)
        spoiled[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(spoiled))
        target = reader_model()
        version = publish.apply(target, full)
        before = values(target)
        try:
            publish.apply(target, read_changes(path), version)
        except (publish.DamagedChangesError, publish.WrongVersionError):
            refusals += 1
            assert_same_bits(values(target), before)
        else:
            assert_same_bits(values(target), expected)
    assert refusals > 131  # of 150
    for length in (0, 7, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(publish.DamagedChangesError):
            read_changes(path)


OTHERS = (None, -1, 10**30, "x", [], {}, [1], [[1]], {"a": 1}, 1.5, True, ["13", 7], [-13, -7])


def test_a_forged_head_with_its_right_checksum_is_refused_by_name(tmp_path: Path):
    (full, patch), _ = told(1)
    whole, part, draw = tmp_path / "whole", tmp_path / "part", random.Random(0)
    named = publish.DamagedChangesError, publish.WrongVersionError, publish.WrongModelError
    named += (publish.IncompleteChangesError,)
    refused_heads = 0
    for changes in (full, patch):
        write_changes(whole, changes)
        with safe_open(whole, framework="pt") as file:
            text = file.metadata()["shardcast"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for _ in range(100):
            head = json.loads(text)
            where = draw.choice([head, draw.choice(head["patches"])])
            key = draw.choice([*where])
            if isinstance(where[key], list) and draw.random() < 0.5:
                where, key = where[key], 0
            where[key] = draw.choice(OTHERS)
            target, version = reader_model(), None
            if changes is patch:
                version = publish.apply(target, full)
            had = values(target)
            try:
                for _ in range(2):  # the second time with a correct checksum
                    save_file(tensors, part, metadata={"shardcast": json.dumps(head)})
                    read = read_changes(part)
                    head["checksum"] = read.computed_checksum()
                publish.apply(target, read, version)
            except named:
                refused_heads += 1
                assert_same_bits(values(target), had)
    assert refused_heads >= 180  # of 200; the others change nothing that a reader uses


@pytest.mark.parametrize(("ranks", "seed"), thinned(3, (1, 2, 3), range(3)))
def test_a_write_that_fails_on_one_rank_costs_no_more_than_that_version(
    ranks: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Writes of any file of any rank fail, including NEWEST; the next send updates all readers."""
    draw, inner = random.Random(10 * seed + ranks), storage.appearing
    # By step: the failing rank and file. Every fifth step has a full version, with three files.
    plan = {
        step: (draw.randrange(ranks), 0 if step % 5 else draw.randrange(3))
        for step in (0, *draw.sample(range(1, 25), 7))
    }
    left: dict[int, int] = {}  # by thread: number of files until the failure

    @contextlib.contextmanager
    def appearing(path: Path, prefix: str) -> Iterator[Path]:
        if files := left.get(threading.get_ident()):
            left[threading.get_ident()] = files - 1
            if files == 1:
                raise OSError(28, "No space left on device")
        with inner(path, prefix) as writing:
            yield writing

    monkeypatch.setattr(storage, "appearing", appearing)

    def run(group: Any) -> int:
        model, optimizer = trainer(group)
        sender, seen, failures = FolderSender(tmp_path, optimizer, full_every=5), 0, 0
        reader, target = FolderReader(tmp_path), dict[str, Tensor]()
        for step in range(26):
            advance(model, optimizer, step)
            rank, skipped = plan.get(step, (-1, 0))
            left[threading.get_ident()] = (skipped + 1) * (rank == group.rank())
            try:
                version = sender.send()
            except OSError:
                failures += 1
            left[threading.get_ident()] = 0
            group.barrier().wait()
            if group.rank() == 0:
                fresh, other = FolderReader(tmp_path), dict[str, Tensor]()
                for each, weights in ((reader, target), (fresh, other)):
                    each.update(weights)
                    if step not in plan:
                        assert each.version == sender.version == version
                        assert_same_bits(weights, values(model))
                        seen += 1
            group.barrier().wait()
        return failures if group.rank() else failures + 100 * seen

    results, _ = run_world(ranks, run)
    assert sum(results) % 100 >= 7 and results[0] // 100 == 2 * 18


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"00000000", b"no run\n", None])
def test_a_newest_that_is_damaged_stops_no_reader(text: bytes | None, tmp_path: Path):
    model, optimizer = trainer()
    sender = FolderSender(tmp_path, optimizer, full_every=50)
    reader, target = FolderReader(tmp_path), reader_model()
    for step in range(6):
        advance(model, optimizer, step)
        sender.send()
        if step == 2:
            newest = tmp_path / "NEWEST"
            newest.write_bytes(text) if text is not None else newest.unlink()
        for each, weights in ((reader, target), (FolderReader(tmp_path), reader_model())):
            assert each.update(weights) == sender.version
            assert_same_bits(values(weights), values(model))
    assert (tmp_path / "NEWEST").read_text() == str(sender.version).split("-")[0]


def test_name_and_files_of_a_later_run_stay_and_those_of_an_earlier_one_go(tmp_path: Path):
    """A job was restarted before its first processes have ended."""
    before, after = (FolderSender(tmp_path, trainer()[1], full_every=2) for _ in range(2))
    before.send()
    kept = after.send()
    for _ in range(5):  # three full versions
        before.send()
    assert FolderReader(tmp_path).update(reader_model()) == kept
    first, *_ = str(before.version).split("-")
    early = {path for path in files(tmp_path) if path.name.startswith(first)}
    last = FolderSender(tmp_path, trainer()[1], full_every=2)
    for _ in range(3):
        last.send()
    assert early and early.isdisjoint(files(tmp_path))
    assert FolderReader(tmp_path).update(reader_model()) == last.version
    with pytest.raises(ValueError, match="RUN-NUMBER-STEP"):
        FolderReader(tmp_path, "newest")


def test_a_version_without_all_its_parts_waits(tmp_path: Path):
    left = tmp_path / ".writing-ab-00000001-0.full.0-of-1.safetensors"
    left.write_bytes(b"by a writer that was killed")

    def run(group: Any) -> None:
        model, optimizer = trainer(group)
        sender, target = FolderSender(tmp_path, optimizer), reader_model()
        reader = FolderReader(tmp_path)

        def version_after_send_of(rank: int) -> Any:
            group.barrier().wait()
            if group.rank() == rank:
                sender.send()
            group.barrier().wait()
            return reader.update(target)

        assert reader.update(target) is None
        assert version_after_send_of(1) is None
        first = version_after_send_of(0)
        assert first is not None
        advance(model, optimizer, 0)
        assert version_after_send_of(0) == first
        assert first != version_after_send_of(1) == sender.version
        assert_same_bits(values(target), values(model))

    run_world(2, run)


def test_old_versions_go_and_who_is_too_far_behind_has_a_full_one(tmp_path: Path):
    model, optimizer = trainer()
    sender, slow = FolderSender(tmp_path, optimizer, full_every=4), FolderReader(tmp_path)
    target = reader_model()
    sender.send()
    slow.update(target)
    for step in range(20):
        advance(model, optimizer, step)
        sender.send()
    assert len(files(tmp_path, "full")) == 2
    assert len(files(tmp_path)) <= 2 * (4 + 2)
    assert slow.update(target) == sender.version
    assert_same_bits(values(target), values(model))
