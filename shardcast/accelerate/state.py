"""``save_state`` and ``load_state``: Accelerate's own files and every rank's shard."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.utils import broadcast_object_list
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from shardcast import checkpoint
from shardcast.accelerate import mesh
from shardcast.checkpoint.directory import delete, newest_sound, steps

if TYPE_CHECKING:
    from shardcast.accelerate.accelerator import ShardcastAccelerator
    from shardcast.accelerate.optimizer import ShardcastOptimizer

T = TypeVar("T")
SHARDS = "shardcast"  # next to Accelerate's own files: the checkpoint of shardcast.checkpoint
FURTHER = "shardcast_{}"  # the same for each further sharded optimizer
FOLDER = re.compile(r"state-(\d+)")
AUTOMATIC = re.compile(r"checkpoint_(\d+)")  # Accelerate's names


def save(
    accelerator: ShardcastAccelerator,
    output_dir: str | os.PathLike[str] | None,
    stock: Callable[..., Any],
) -> Path:
    """Write Accelerate's files and every rank's shard into a new folder. Collective: every rank.

    ``output_dir/state-N/`` holds Accelerate's files and ``shardcast/``. The latter is written last
    and commits the whole folder; older folders are removed after that. With automatic checkpoint
    naming the folder is the new ``checkpoint_N`` itself.
    """
    project = accelerator.project_configuration
    automatic, limit = project.automatic_checkpoint_naming, project.total_limit
    if not automatic:
        if output_dir is None:
            raise ValueError(
                "save_state: expected output_dir, got None; pass a folder, or turn "
                "automatic_checkpoint_naming on"
            )
        root = Path(output_dir)
        newest = _agreed(accelerator, lambda: max(_folders(root), default=-1))
        output_dir = root / f"state-{newest + 1}"
    step = accelerator.save_iteration
    project.total_limit = None  # Accelerate would delete old ones before there is a new one
    try:
        with accelerator.seen_by_stock():  # saved on rank 0 alone; ours by all
            folder = Path(stock(os.fspath(output_dir or "")))
    finally:
        project.total_limit = limit
    accelerator.wait_for_everyone()
    for path, prepared in reversed(_shards_of(accelerator, folder)):  # the first one commits all
        checkpoint.save(path, prepared.model, prepared.optimizer, step=step)
    accelerator.wait_for_everyone()
    keep, names = (limit, AUTOMATIC) if automatic else (1, FOLDER)
    if keep and accelerator.is_main_process:
        for old in [*_folders(folder.parent, names).values()][keep:]:
            delete(old)
    return folder


def load(
    accelerator: ShardcastAccelerator, input_dir: str | os.PathLike[str] | None, stock: partial[Any]
) -> None:
    """Load the newest committed state in ``input_dir``, or one that Accelerate saved under DDP.

    Rank 0 chooses the folder for all. If the newest one is damaged, it warns and takes the previous
    one, unless ``input_dir`` names the damaged one. Collective: every rank.
    """
    chosen = _agreed(accelerator, lambda: _committed(accelerator, input_dir))
    # DTensors do not take the model's file, which has whole tensors.
    cut = any(mesh.is_cut(prepared.model) for prepared in accelerator.sharded)
    if chosen is not None:
        shards = _shards_of(accelerator, Path(chosen))
        saved = [path for path in Path(chosen).glob(f"{SHARDS}*") if path.is_dir()]
        if len(shards) != len(saved):
            raise ValueError(
                f"load_state: expected the states of {len(shards)} sharded optimizers in {chosen}, "
                f"got {len(saved)}; prepare the models and optimizers of the run that saved it"
            )
        with accelerator.seen_by_stock(models=not cut):
            stock(chosen)
        # After the model's file, which is in param_dtype: the masters are exact.
        for path, prepared in shards:
            checkpoint.load(path, prepared.model, prepared.optimizer)
        return
    if input_dir is None or not (Path(input_dir) / "optimizer.bin").exists():
        raise FileNotFoundError(
            f"load_state: expected a committed checkpoint in {input_dir}, found none; saves that "
            "were interrupted do not count. Pass the folder that was given to save_state"
        )
    if cut:
        raise ValueError(
            f"load_state: expected a checkpoint of shardcast in {input_dir}, got one of "
            "Accelerate under DDP, which a tensor-parallel model cannot take; load it without "
            "tp, save it again, and load the new checkpoint"
        )
    options = {"map_location": "cpu"} | stock.keywords  # each rank keeps its part only
    with ExitStack() as hooks, accelerator.seen_by_stock(optimizers=True):
        for model in accelerator.bare_models:
            handle = model.register_load_state_dict_pre_hook(_without_prefix)
            hooks.callback(handle.remove)
        stock.func(os.fspath(input_dir), **options)


def _shards_of(
    accelerator: ShardcastAccelerator, folder: Path
) -> list[tuple[Path, ShardcastOptimizer]]:
    """Pair each sharded optimizer with the folder of its checkpoint."""
    names = [SHARDS, *(FURTHER.format(number) for number in range(1, len(accelerator.sharded)))]
    return [(folder / name, own) for name, own in zip(names, accelerator.sharded, strict=True)]


def _agreed(accelerator: ShardcastAccelerator, find: Callable[[], T]) -> T:
    """Return, or raise, on every rank the outcome of ``find()`` on rank 0. Collective."""
    outcome: list[object] = [None]
    if accelerator.process_index == 0:
        try:
            outcome = [find()]
        except (checkpoint.DamagedCheckpointError, ValueError) as error:
            outcome = [error]
    value: T | Exception = broadcast_object_list(outcome)[0]
    if isinstance(value, Exception):
        raise value
    return value


def _folders(root: Path, names: re.Pattern[str] = FOLDER) -> dict[int, Path]:
    """The numbered folders of ``root``, newest first."""
    paths = root.iterdir() if root.is_dir() else ()
    numbered = {int(match[1]): path for path in paths if (match := names.fullmatch(path.name))}
    return dict(sorted(numbered.items(), reverse=True))


def _committed(
    accelerator: ShardcastAccelerator, input_dir: str | os.PathLike[str] | None
) -> str | None:
    """The newest sound folder, or ``None`` if none was committed.

    Raises:
        DamagedCheckpointError: ``input_dir`` itself is damaged, or all folders are.
    """
    root, names = Path(accelerator.project_dir or "", "checkpoints"), AUTOMATIC
    if input_dir is not None:
        root, names = Path(input_dir).expanduser(), FOLDER
    named = bool(steps(root / SHARDS))
    folders = [root] if named else _folders(root, names).values()
    committed = [folder for folder in folders if steps(folder / SHARDS)]
    folder = newest_sound(committed, _damage, root, named=named)
    return None if folder is None else os.fspath(folder)


def _damage(folder: Path) -> checkpoint.DamagedCheckpointError | None:
    try:
        checkpoint.latest(folder / SHARDS)
    except checkpoint.DamagedCheckpointError as error:
        return error
    return None


def _without_prefix(model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Accept the names that parameters have inside a DDP wrapper; a ``load_state_dict`` hook.

    It does nothing if the model is loaded as part of another one, which may name it ``module``.
    """
    if not prefix and state.keys().isdisjoint(model.state_dict()):
        consume_prefix_in_state_dict_if_present(state, "module.")
