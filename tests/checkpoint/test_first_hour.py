"""First uses of checkpoints and their mistakes: saves at the top of a loop, plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, everything, job, on_each_rank, parts, run_world, whole
from small_runs import saved_by
from torch import nn

from shardcast import checkpoint, shard

SAVES = ("save", "save_async")


@pytest.mark.parametrize("name", SAVES)
def test_a_loop_that_saves_at_its_top_goes_on_at_other_ranks(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
):
    run_world(2, lambda group: checkpoint.save(tmp_path, *job(group, 3), step=3, extra={"lr": 1}))
    (folder,) = tmp_path.iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def resuming(group: Any) -> None:
        model, optimizer = job(group, 0)
        resumed = checkpoint.resume(tmp_path, model, optimizer)
        assert resumed is not None and resumed.step == 3
        assert saved_by(name, tmp_path, model, optimizer, step=3, extra={"lr": 2}) == folder

    with caplog.at_level("INFO", "shardcast"):
        run_world(3, resuming)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (line,) = (r.getMessage() for r in caplog.records if "nothing is written" in r.getMessage())
    assert line.startswith(f"{name}: {str(folder)!r} was just loaded")


@pytest.mark.parametrize("name", SAVES)
def test_what_was_edited_since_it_was_loaded_is_saved_if_it_may_overwrite(
    tmp_path: Path, name: str
):
    run_world(2, lambda group: checkpoint.save(tmp_path, *job(group, 3), step=3))

    def resuming(group: Any) -> Any:
        model, optimizer = job(group, 0)
        checkpoint.load(tmp_path, model, optimizer)
        with torch.no_grad():
            next(model.parameters()).zero_()
        with pytest.raises(ValueError, match=r"with other contents.*pass overwrite=True"):
            getattr(checkpoint, name)(tmp_path, model, optimizer, step=3)
        saved_by(name, tmp_path, model, optimizer, step=3, overwrite=True)
        return parts(optimizer)

    edited, _ = run_world(3, resuming)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"], "no other file is left"

    def loading(group: Any) -> Any:
        model, optimizer = job(group, 0)
        checkpoint.load(tmp_path, model, optimizer)
        assert not next(model.parameters()).any()
        return parts(optimizer)

    assert_same_bits(whole(run_world(2, loading)[0]), whole(edited))


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("what", ["0.weight", "1.weight", "1.running_mean"])
@on_each_rank(2)
def test_what_was_edited_since_it_was_loaded_is_no_checkpoint_of_before(
    group: Any, tmp_path: Path, name: str, what: str
):
    """This holds for trained and frozen weights and buffers, edited on one rank only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = shard(model, optimizer, process_group=group)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    checkpoint.load(tmp_path, model, optimizer)
    saved_by(name, tmp_path, model, optimizer, step=1, extra="another")
    if group.rank() == 0:
        model.state_dict()[what].fill_(7.0)
    with pytest.raises((ValueError, RuntimeError), match="exists already, with other contents"):
        saved_by(name, tmp_path, model, optimizer, step=1)


def test_a_checkpoint_that_was_removed_since_it_was_loaded_is_saved_again(tmp_path: Path):
    model, optimizer = job(None, 2)
    folder = checkpoint.save(tmp_path, model, optimizer, step=2)
    checkpoint.load(tmp_path, model, optimizer)
    folder.rename(tmp_path / "gone")
    assert checkpoint.save(tmp_path, model, optimizer, step=2) == folder
    assert checkpoint.inspect(folder).step == 2


# -- paths of the wrong kind --------------------------------------------------------------------


def test_a_checkpoint_in_the_place_of_a_plain_file_names_load_and_export(tmp_path: Path):
    model, optimizer = job(None, 1)
    one = checkpoint.save(tmp_path / "run", model, optimizer, step=1)
    for folder in (tmp_path / "run", one):
        with pytest.raises(ValueError, match=r"checkpoint\.load\(.*checkpoint\.export"):
            checkpoint.load_plain(model, optimizer, folder)


@pytest.mark.parametrize("place", ["weights", "state"])
@pytest.mark.parametrize("name", ["none.pt", "none.safetensors", "none"])
def test_a_plain_file_that_is_missing_is_named(tmp_path: Path, place: str, name: str):
    model, optimizer = job(None, 1)
    path = tmp_path / name
    given = (path,) if place == "weights" else (model.state_dict(), path)
    with pytest.raises(FileNotFoundError, match=f"{place}.*{name}.*check the path"):
        checkpoint.load_plain(model, optimizer, *given)


def test_resume_without_a_checkpoint_logs_the_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """With a mistyped path, a run would silently train from the start."""
    with caplog.at_level("INFO", "shardcast"):
        assert checkpoint.resume(tmp_path / "typo", *job(None, 1)) is None
    assert "typo" in caplog.text and "resume" in caplog.text


@pytest.mark.parametrize("name", [*SAVES, "load", "resume", "import_dcp"])
def test_a_model_in_the_place_of_the_path_says_the_order(tmp_path: Path, name: str):
    model, optimizer = job(None, 1)
    options = {"step": 1} if name in SAVES else {}
    with pytest.raises(TypeError, match=r"directory: expected a path, got \w+; it comes first"):
        getattr(checkpoint, name)(model, optimizer, tmp_path, **options)


# -- a part of a checkpoint ---------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, classes: int = 4, adapter: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        self.adapter = nn.Linear(16, 16) if adapter else nn.Identity()
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.adapter(self.body(x)))


def made(group: Any, kind: Any = torch.optim.AdamW, lr: float = 1e-2, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(**options)
    optimizer = kind(model.parameters(), lr=lr)
    return model, shard(model, optimizer, param_dtype="fp32", process_group=group)


def trained(group: Any, steps: int, model: Any, optimizer: Any) -> Any:
    for step in range(steps):
        seed = 100 * step + (0 if group is None else group.rank())
        data = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_name(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the plain state by parameter on rank 0, else nothing."""
    state = optimizer.full_state_dict().get("state", {})
    names = [*dict(model.named_parameters())]
    return {names[number]: values for number, values in state.items()}


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A run of two ranks, with its masters and its plain state by name."""

    def saving(group: Any) -> Any:
        model, optimizer = trained(group, 3, *made(group))
        checkpoint.save(tmp_path, model, optimizer, step=3)
        values = {**optimizer.full_parameters(), **dict(model.named_buffers())}
        return values, by_name(model, optimizer)

    values, state = run_world(2, saving)[0][0]
    return tmp_path, values, state


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("options", [{"classes": 7}, {"adapter": True}], ids=["head", "layer"])
def test_a_new_head_or_layer_begins_anew_and_all_that_is_named_goes_on(
    base: Any, options: dict[str, Any], state: bool
):
    folder, values, states = base
    only = ["body.*", "head.*"] if "adapter" in options else ["body.*"]

    def loading(group: Any) -> None:
        model, optimizer = trained(group, 1, *made(group, lr=5e-4, **options))
        fresh, begun = optimizer.full_parameters(), by_name(model, optimizer)
        with pytest.raises(ValueError, match="build the model as it was"):
            checkpoint.load(folder, model, optimizer)
        resumed = checkpoint.load(folder, model, optimizer, only=only, state=state)
        assert (resumed.step, optimizer.param_groups[0]["lr"]) == (3, 5e-4)
        loaded, now = optimizer.full_parameters(), by_name(model, optimizer)
        for name in loaded:  # on rank 0
            is_chosen = name.startswith(("body", "head") if len(only) == 2 else "body")
            assert torch.equal(loaded[name], (values if is_chosen else fresh)[name])
            if state or not is_chosen:
                assert_same_bits(now[name], (states if is_chosen else begun)[name])
            else:
                assert not any(value.any() for value in now.get(name, {}).values())
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, values[name])
        trained(group, 2, model, optimizer)

    run_world(3, loading)


def test_weights_without_state_load_into_another_optimizer(base: Any):
    folder, values, _ = base
    model, optimizer = made(None, torch.optim.SGD)
    with pytest.raises(ValueError, match="it has the state of AdamW, expected SGD"):
        checkpoint.load(folder, model, optimizer)
    checkpoint.load(folder, model, optimizer, state=False)
    masters = optimizer.full_parameters()
    assert_same_bits(masters, {name: values[name] for name in masters})


@pytest.mark.parametrize(
    ("only", "error", "message"),
    [
        (["bodi.*"], ValueError, r"only: pattern 'bodi\.\*' matches no parameter or buffer"),
        (["body.*", "head.*"], ValueError, r"'head\.\w+' has shape .* what differs with only="),
        (["adapter.*"], ValueError, r"it lacks 2 .*'adapter\.bias'.* what differs with only="),
        ([3], TypeError, "only: expected glob patterns of names, got int 3"),
    ],
)
@on_each_rank(2)
def test_a_part_that_does_not_fit_is_named_and_changes_nothing(
    group: Any, base: Any, only: Any, error: Any, message: str
):
    pair = made(group, classes=7, adapter=True)
    before = everything(*pair)
    with pytest.raises(error, match=message):
        checkpoint.load(base[0], *pair, only=only)
    assert_same_bits(everything(*pair), before)


def test_a_plain_state_that_has_names_in_another_order_is_refused(tmp_path: Path):
    model = Net()
    plain = torch.optim.AdamW(reversed([*model.named_parameters()]), lr=1e-2)
    model(torch.randn(6, 8)).sum().backward()
    plain.step()
    pair = made(None)
    with pytest.raises(ValueError, match=r"is 'head\.bias', expected 'body\.0\.weight'"):
        checkpoint.load_plain(*pair, model.state_dict(), plain.state_dict())
    right = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    right.step()
    checkpoint.load_plain(*pair, model.state_dict(), right.state_dict())
    (group,) = (state := right.state_dict())["param_groups"]
    group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    checkpoint.load_plain(*pair, model.state_dict(), state)
