"""Saves and loads that are refused by name on all ranks, and change nothing."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import CASES, adamw, advance, assert_same_bits, everything, job, of, run_world, sharded
from small_runs import DATA, METADATA, seal, truncate
from torch import nn

from shardcast.checkpoint import (
    DamagedCheckpointError,
    export,
    import_dcp,
    inspect,
    latest,
    load,
    load_plain,
    resume,
    save,
    save_async,
    unpickling,
)
from shardcast.checkpoint.directory import MANIFEST, MARKER
from shardcast.checkpoint.storage import digest_of
from shardcast.optimizer.sharded import packed_of

NEWEST = "step-000000002"
Edit = Callable[[dict[str, Any]], Any]
Spoil = Callable[[Path], Any]


def saving(**changed: Any) -> Any:
    return lambda run, rank, model, optimizer: save(
        run, model, **{"optimizer": optimizer, "step": 3, **changed}
    )


def loading(path: str = ".", verb: Any = load, **options: Any) -> Any:
    return lambda run, rank, *pair: verb(run / path, *pair, **options)


def plain(weights: dict[str, Any] | None = None, state: dict[str, Any] | None = None) -> Any:
    """Return a ``load_plain`` with changed values on rank 1; a None means a missing value.

    Rank 0, whose values are right, must raise too and not hang.
    """

    def act(run: Path, rank: int, *pair: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = adamw(model)
        advance(model, optimizer, 0, 1)
        changes = (weights or {}, state or {}) if rank == 1 else ({}, {})
        right = zip((model.state_dict(), optimizer.state_dict()), changes, strict=True)
        edited = [{**values, **change} for values, change in right]
        load_plain(*pair, *({k: v for k, v in e.items() if v is not None} for e in edited))

    return act


def in_newest(name: str, act: Spoil) -> Spoil:
    return lambda run: act(run / NEWEST / name)


def nonsense(path: Path) -> None:
    path.write_bytes(b"nonsense")


def by_a_stranger(run: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (run / "ran",))

    torch.save({"a": Evil()}, run / "evil.pt")
    in_newest(METADATA, lambda path: path.write_bytes(pickle.dumps(os.getcwd)))(run)


def by_a_strangers_getattr(run: Path) -> None:
    """Pickle an attribute of an allowed class, in the way in which enum members are pickled."""

    class Evil:
        def __reduce__(self) -> Any:
            return (getattr, (torch.Size, "__subclasses__"))

    in_newest(METADATA, lambda path: path.write_bytes(pickle.dumps(Evil())))(run)


def swapped(run: Path) -> None:
    for folder in run.glob("step-*"):
        for old, new in ((DATA, "x"), ("__1_0.distcp", DATA), ("x", "__1_0.distcp")):
            (folder / old).rename(folder / new)


def kept_without_manifest(run: Path) -> None:
    (run / NEWEST).rename(run / "best")
    (run / "best" / MANIFEST).unlink()


adafactor = of("Adafactor")


def two_groups(model: nn.Module, count: int = 1) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[:count]}, {"params": params[count:]}])


def with_extra_state(run: Path) -> None:
    model = CASES["mlp"].build()
    extra = {"get_extra_state": lambda self: {"a": 1}, "set_extra_state": lambda self, state: None}
    model.__class__ = type("Counted", (type(model),), extra)
    save(run / "extra", model, sharded(model, None, param_dtype=torch.bfloat16), step=1)


CUT = {"optimizer": adafactor, "partition": "even", "elementwise": True}
ADAM = {"optimizer": lambda model: torch.optim.Adam(model.parameters())}
HERE = loading(NEWEST)
DCP = loading(NEWEST, import_dcp)
nothing: Spoil = lambda _: None  # noqa: E731


class Refused(NamedTuple):
    """The error and its text, the call on each rank, a prior change, options of the pair."""

    kind: type[Exception]
    told: str
    act: Any
    spoil: Spoil = nothing
    options: dict[str, Any] = {}  # noqa: RUF012 - never modified


VALUE, READ = partial(Refused, ValueError), partial(Refused, RuntimeError)
DAMAGED = partial(Refused, DamagedCheckpointError)
REFUSED = {
    # save
    "a step below 0": VALUE("step", saving(step=-1)),
    "to keep none": VALUE("keep", saving(keep=0)),
    "into a file": Refused(
        NotADirectoryError,
        "expected the folder of one run.* got the file",
        lambda run, rank, *pair: save(run / NEWEST / MARKER, *pair, step=3),
    ),
    "below a file": Refused(
        NotADirectoryError,
        f"expected the folder of one run.* got the file '.*{MARKER}'",
        lambda run, rank, *pair: save(run / NEWEST / MARKER / "run", *pair, step=3),
    ),
    "what weights_only does not read": VALUE("extra", saving(extra={"a": nn.Tanh()})),
    "a step that exists": VALUE("exists already, with other", saving(step=2)),
    "a step that other ranks saved": VALUE(
        "exists already, with other",
        lambda run, rank, *pair: save(run / "one", *pair, step=1),
        lambda run: save(run / "one", *job(), step=1),
    ),
    "a plain optimizer": Refused(
        TypeError,
        "optimizer",
        lambda run, rank, model, optimizer: save(
            run, model, packed_of(optimizer).originals.optimizers[0], step=3
        ),
    ),
    "other arguments on a rank": VALUE(
        "rank 1: .*4", lambda run, rank, *pair: save(run, *pair, step=3 + rank)
    ),
    # load
    "no checkpoint": Refused(FileNotFoundError, "no committed checkpoint", loading("none")),
    "a misspelt one": Refused(
        FileNotFoundError, "'.*step-000000009'; check the path", loading("step-000000009", resume)
    ),
    "a file": Refused(
        NotADirectoryError, "got the file .*load_plain", loading(f"{NEWEST}/{MARKER}")
    ),
    "one below a file": Refused(
        NotADirectoryError, f"got the file '.*{MARKER}'", loading(f"{NEWEST}/{MARKER}/run", resume)
    ),
    "a kept one without manifest": DAMAGED(
        r"shardcast\.json'", loading("best", resume), kept_without_manifest
    ),
    "swapped files": DAMAGED("no intact checkpoint.*distcp", loading(), swapped),
    "a renamed directory": DAMAGED(
        "step 2; the dir.* was renamed",
        loading("step-000000008"),
        lambda run: (run / NEWEST).rename(run / "step-000000008"),
    ),
    "a later format": VALUE(
        "expected format 1, got 2",
        HERE,
        in_newest("", lambda path: seal(path, lambda it: it.update(format=2))),
    ),
    "another model": VALUE(
        r"it lacks \d+ parameters or buffers, among them '", HERE, options={"case": "scalars"}
    ),
    "another optimizer": VALUE(
        r"state of AdamW, expected Adam; .*state=False\)", HERE, options=ADAM
    ),
    "other groups": VALUE(
        "expected 2 param_groups, got 1", HERE, options={"optimizer": two_groups}
    ),
    "a parameter in another group": VALUE(
        r"parameter '\S+' is in param_group 0 of the optimizer only",
        loading("two"),
        lambda run: save(run / "two", *job(optimizer=two_groups), step=1),
        {"optimizer": partial(two_groups, count=2)},
    ),
    "extra state that the model lacks": VALUE(
        "extra state '_extra_state' is in the checkpoint only; build the model",
        loading("extra"),
        with_extra_state,
    ),
    "state that cannot be cut": VALUE(
        r"parameter 'a\.weight' .* use partition 'whole'",
        loading("factored"),
        lambda run: save(run / "factored", *job(optimizer=adafactor), step=1),
        CUT,
    ),
    # load_plain
    "a parameter is missing": VALUE(r"lacks 1 .*'c\.bias'", plain({"c.bias": None})),
    "one too many": VALUE("does not have, 1 .*'d'", plain({"d": torch.zeros(3)})),
    "another shape": VALUE(
        r"'c\.bias' has shape \(4,\), expected \(3,\)", plain({"c.bias": torch.zeros(4)})
    ),
    "more than weights": VALUE("got dict at 'a'", plain({"a": {}})),
    "groups of another size": VALUE(
        "expected groups with", plain(state={"param_groups": [{"params": [0]}]})
    ),
    "a state of rank 0 alone": VALUE("got no .state.; every rank", plain(state={"state": None})),
    "a moment of another shape": VALUE(
        r"'exp_avg' of parameter .* has shape \(5,\)",
        plain(state={"state": {0: {"exp_avg": torch.zeros(5)}}}),
    ),
    "a file that would run code": READ(
        "weights_only",
        lambda run, rank, *pair: load_plain(*pair, run / "evil.pt"),
        by_a_stranger,
    ),
    # import_dcp
    "metadata that would run code": READ("cannot be read.*unexpected posix", DCP, by_a_stranger),
    "a getattr of what is not an enum": READ(
        "unexpected getattr of .*Size", DCP, by_a_strangers_getattr
    ),
    "no metadata": READ(r"\.metadata' cannot be read", DCP, in_newest(METADATA, nonsense)),
    "too short a file": READ(rf"{DATA}' has \d+ bytes, expected", DCP, in_newest(DATA, truncate)),
    "chunks outside": READ(
        "outside of its directory", DCP, in_newest("", lambda path: point(path, "../x"))
    ),
    "another key": VALUE(
        "nothing under 'weights', but 'extra', 'model', 'optimizer'",
        loading(NEWEST, import_dcp, model_key="weights"),
    ),
    "a flat state": VALUE("no param_groups under 'optim'", DCP),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_on_all_ranks_and_changes_nothing(made: Path, tmp_path: Path, what: str):
    error, message, act, spoil, options = REFUSED[what]
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path)
    files = {path: digest_of(path) for path in tmp_path.rglob("*") if path.is_file()}

    def attempt(group: Any) -> None:
        pair = job(group, 4, **options)
        before = everything(*pair)
        with pytest.raises(error, match=message):
            act(tmp_path, group.rank(), *pair)
        assert_same_bits(everything(*pair), before)

    run_world(2, attempt)
    assert {path: digest_of(path) for path in tmp_path.rglob("*") if path.is_file()} == files


def test_what_is_right_is_not_refused(made: Path, tmp_path: Path):
    """Control of the table: the same calls work on the same run."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)

    def attempt(group: Any) -> None:
        assert resume(tmp_path / "none", *job(group)) is None
        saving()(tmp_path, group.rank(), *job(group))
        for act in (HERE, plain(), loading(NEWEST, import_dcp, optimizer_key=None)):
            model, optimizer = job(group, 4)
            before = everything(model, optimizer)
            act(tmp_path, group.rank(), model, optimizer)
            with pytest.raises(AssertionError):
                assert_same_bits(everything(model, optimizer), before)

    run_world(2, attempt)
    assert latest(tmp_path) == tmp_path / "step-000000003"


@pytest.mark.parametrize("form", ["one", "list", "file"])
def test_one_ranks_part_of_a_state_is_not_taken_for_a_plain_state(tmp_path: Path, form: str):
    def refused(group: Any) -> None:
        # Shapes show no difference: each parameter is 1-d and has one owner, which has all of it.
        pairs = [(m := nn.LayerNorm(4), sharded(m, group, partition="whole")) for _ in range(2)]
        (model, optimizer), other = pairs
        advance(model, optimizer, 0, 1)
        before, part = everything(*other), optimizer.state_dict()
        torch.save(part, path := tmp_path / str(group.rank()))
        given: Any = {"one": part, "list": [part], "file": path}[form]
        with pytest.raises(ValueError, match=r"got one rank's part"):
            load_plain(*other, model.state_dict(), given)
        with pytest.raises(ValueError, match="expected a model's state_dict"):
            load_plain(*other, path if form == "file" else part)
        assert_same_bits(everything(*other), before)

    run_world(2, refused)


# -- edited by hand, with correct checksums -------------------------------------------------------


def point(folder: Path, where: str, offset: int = 0) -> None:
    """Make ``.metadata`` refer to another place for the chunks of one file."""
    path = folder / METADATA
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        if place.relative_path == DATA:
            place.relative_path, place.offset = where, place.offset + offset
    path.write_bytes(pickle.dumps(metadata))


def listing(name: str, size: Any = None) -> Edit:
    return lambda manifest: manifest["files"].update({name: size or manifest["files"][DATA]})


def unlisted(name: str) -> Edit:
    return lambda manifest: manifest["files"].pop(name) and None


EDITS: dict[str, tuple[Edit | tuple[str, int], str]] = {
    "no step": (lambda manifest: manifest.pop("step") and None, "None as 'step', expected int"),
    "a list": (lambda _: [1], "cannot be read"),
    "no size": (listing("x", {"a": 1}), "'x', no size"),
    "a path above": (listing("../x"), r"'\.\./x', which is no plain file name"),
    "an absolute path": (listing("/etc/hostname"), "'/etc/hostname', which is no plain"),
    "no metadata": (unlisted(METADATA), r"does not list '\.metadata'"),
    "data not listed": (unlisted(DATA), f"'{DATA}', which .* not list"),
    "chunks above": (("../x", 0), "outside of its directory"),
    "chunks beyond": ((DATA, 1 << 40), "refers to byte"),
}


@pytest.mark.parametrize("what", EDITS)
def test_what_was_edited_by_hand_is_refused_although_its_sums_hold(
    made: Path, tmp_path: Path, what: str
):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    newest, (edit, message), pair = tmp_path / NEWEST, EDITS[what], job()
    seal(newest, nothing)
    assert load(newest, *pair).step == 2, "the control"
    if isinstance(edit, tuple):
        point(newest, *edit)
    seal(newest, nothing if isinstance(edit, tuple) else edit)
    before = everything(*pair)
    for verb, arguments in ((load, pair), (inspect, ()), (export, (tmp_path / "out",))):
        with pytest.raises(DamagedCheckpointError, match=message):
            verb(newest, *arguments)
    assert_same_bits(everything(*pair), before)
    with pytest.warns(UserWarning, match="falling back"):
        assert load(tmp_path, *pair).step == 1


# -- written by an unknown version ----------------------------------------------------------------


def written_elsewhere(folder: Path) -> None:
    """Write metadata with an unknown class and correct checksums."""
    path = folder / METADATA
    path.write_bytes(path.read_bytes().replace(b"ChunkStorageMetadata", b"ChunkStorageMetadat4"))
    seal(folder, lambda manifest: manifest.update(torch="9.9.0", python="3.99.1"))


def test_what_another_version_wrote_is_named_with_both_and_never_takes_an_older_ones_place(
    made: Path, tmp_path: Path
):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    written_elsewhere(tmp_path / NEWEST)
    both = rf"torch 9\.9\.0 and Python 3\.99\.1.* by torch {re.escape(torch.__version__)} and Py"

    def attempt(group: Any) -> None:
        pair = job(group, 4)
        before = everything(*pair)
        for act in (loading(), loading(NEWEST), loading(verb=resume), saving(step=2)):
            with pytest.raises(ValueError, match=both):
                act(tmp_path, group.rank(), *pair)
        assert_same_bits(everything(*pair), before)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback would warn
        run_world(2, attempt)
        for verb in (latest, inspect):
            with pytest.raises(ValueError, match=both):
                verb(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001", NEWEST]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_could_not_be_read_again_is_an_error_of_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
):
    def attempt(group: Any) -> None:
        pair = job(group)
        with pytest.raises(RuntimeError, match=r"unexpected .*BytesStorageMetadata"):
            save(tmp_path, *pair, step=1)
        with pytest.raises(RuntimeError, match=r"unexpected .*BytesStorageMetadata"):
            save_async(tmp_path, *pair, step=1).wait()

    known = unpickling.CLASSES - {"BytesStorageMetadata"}  # ranks' messages do not contain it
    with monkeypatch.context() as patch:
        patch.setattr(unpickling, "CLASSES", known)
        run_world(ranks, attempt)
    assert list(tmp_path.iterdir()) == []
    run_world(ranks, lambda group: save(tmp_path, *job(group), step=1))  # the control
    assert latest(tmp_path) is not None
