"""Files with correct checksums and contents that no save writes."""

from __future__ import annotations

import copy
import math
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import job
from pairwise import WHOLE
from small_runs import METADATA, seal

from shardcast import checkpoint
from shardcast.checkpoint import directory

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

OTHERS: list[Any] = [None, 0, -1, 1 << 70, "x", [], {}, (), (1,), 1.5, True, b"x", ("a", "b")]
Place = tuple[Any, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield every place in a tree of containers and objects."""
    yield place
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.dtype, type)):
        items = vars(value).items()
    for key, inner in items if len(place) < 7 else ():
        yield from places(inner, (*place, key))


def forged(value: Any, place: Place, other: Any) -> Any:
    """Return a copy with ``other`` at a place."""
    if not place:
        return other
    key, *rest = place
    if isinstance(value, dict):
        return {**value, key: forged(value[key], tuple(rest), other)}
    if isinstance(value, (list, tuple)):
        made = [*value]
        made[key] = forged(value[key], tuple(rest), other)
        return made if isinstance(value, list) else tuple(made)
    new = copy.copy(value)
    object.__setattr__(new, key, forged(getattr(value, key), tuple(rest), other))
    return new


def read_all(folder: Path, out: Path) -> list[Callable[[], Any]]:
    return [
        lambda: [checkpoint.inspect(folder).tensors, checkpoint.inspect(folder).trained],
        lambda: checkpoint.inspect(folder).optimizer_steps,
        lambda: checkpoint.export(folder, out),
        lambda: checkpoint.load(folder, *job(steps=0)),
    ]


@pytest.mark.parametrize("part", range(3))
def test_forged_contents_with_right_checksums_end_in_an_error_that_names_the_checkpoint(
    part: int, made: Path, tmp_path: Path
):
    source, draw, refused = made / "step-000000002", random.Random(part), 0
    metadata = pickle.loads((source / METADATA).read_bytes())
    every = [*places(metadata)]
    count = 60 if WHOLE else 12
    for _ in range(count):
        run = Path(shutil.copytree(source, tmp_path / "run" / source.name))
        name = draw.choice([METADATA, METADATA, *(p.name for p in source.glob("*.distcp"))])
        data = (source / name).read_bytes()
        if name == METADATA:
            bad = forged(metadata, draw.choice(every), draw.choice(OTHERS))
            try:
                data = pickle.dumps(bad)
            except RuntimeError:  # torch 2.15 pickles only known memory formats
                shutil.rmtree(tmp_path / "run")
                continue
        else:
            at = draw.randrange(len(data) - 8)
            data = data[:at] + draw.randbytes(8) + data[at + 8 :]
        (run / name).write_bytes(data)
        seal(run)
        for call in read_all(tmp_path / "run", tmp_path / "out"):
            try:
                call()
            except (ValueError, RuntimeError) as error:
                refused += 1
                assert "checkpoint" in str(error) or "model" in str(error), error
        assert not [*tmp_path.glob(f"{directory.EXPORTING}*")]
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert refused > count


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_counts_of_steps_that_are_no_numbers_are_damage(
    number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint.save(tmp_path, *job(steps=1), step=1)
    monkeypatch.setattr(directory.Reader, "tensor", lambda *_: torch.tensor([1.0, number]))
    with pytest.raises(checkpoint.DamagedCheckpointError, match="contradict each other"):
        _ = checkpoint.inspect(tmp_path).optimizer_steps
