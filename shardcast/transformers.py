"""Transformers: Hugging Face's Trainer with a sharded optimizer.

    trainer = ShardcastTrainer(model=model, args=args, ..., shardcast_config="bf16.yaml")

in place of ``Trainer``, or the mixin before a Trainer class of one's own::

    class MyShardcastTrainer(ShardcastTrainerMixin, MyTrainer): ...

Everything else is Trainer's and :mod:`shardcast.accelerate`'s: ``bf16=True`` and ``fp16=True`` of
the arguments decide ``param_dtype``; a checkpoint directory has a committed checkpoint of every
rank's shard in ``shardcast/`` in place of ``optimizer.pt``, and loads at any world size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardcast import checkpoint
from shardcast.accelerate import ConfigSource, ShardcastAccelerator, enable
from shardcast.checkpoint.directory import steps

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "shardcast.transformers needs transformers, which is not installed here: "
        "pip install 'shardcast-optim[transformers]'"
    ) from error

FOLDER = "shardcast"  # of a checkpoint directory
SCHEDULER = "scheduler.pt"  # Trainer's own name


class ShardcastTrainerMixin:
    """Put before a Trainer class: it then shards its optimizer. Every rank calls ``train()``.

    Args:
        args, kwargs: those of the Trainer.
        shardcast_config: a config, a mapping or a YAML file; ``None`` reads the environment.
    """

    accelerator: Any
    args: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, *args: Any, shardcast_config: ConfigSource = None, **kwargs: Any) -> None:
        self._shardcast_config = shardcast_config
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer does; its accelerator then shards what it prepares."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        enable(self.accelerator, self._shardcast_config)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        _save(self, output_dir, super()._save_optimizer_and_scheduler)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        _load(self, checkpoint, super()._load_optimizer_and_scheduler)  # type: ignore[misc]


class ShardcastTrainer(ShardcastTrainerMixin, Trainer):
    """``transformers.Trainer`` with a sharded optimizer; see :class:`ShardcastTrainerMixin`."""


def adapt() -> None:
    """Have the stock Trainer save every rank's shard too; ``python -m shardcast.run`` calls it.

    Trainer itself asks rank 0 alone for the optimizer's state: the other shards would be lost.
    """
    if getattr(Trainer, "_shardcast_adapted", False):
        return
    save, load = Trainer._save_optimizer_and_scheduler, Trainer._load_optimizer_and_scheduler
    Trainer._save_optimizer_and_scheduler = lambda self, folder: _save(
        self, folder, partial(save, self)
    )
    Trainer._load_optimizer_and_scheduler = lambda self, folder: _load(
        self, folder, partial(load, self)
    )
    Trainer._shardcast_adapted = True


def _shards(accelerator: Any) -> bool:
    return isinstance(accelerator, ShardcastAccelerator) and accelerator.is_sharding


def _save(trainer: Any, output_dir: str, stock: Callable[[str], None]) -> None:
    """Every rank writes its shard, committed as a whole; rank 0 the scheduler."""
    accelerator = trainer.accelerator
    if not _shards(accelerator):
        stock(output_dir)
        return
    folder = Path(output_dir, FOLDER)
    if trainer.args.should_save:
        os.makedirs(output_dir, exist_ok=True)
        torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))
    # Trainer may save a step a second time; a committed checkpoint is never overwritten.
    number = max(steps(folder), default=-1) + 1
    pair = accelerator.sharded_model, accelerator.sharded_optimizer
    checkpoint.save(folder, *pair, step=number, keep=1)


def _load(trainer: Any, directory: str | None, stock: Callable[[str | None], None]) -> None:
    """From ``shardcast/``; what the stock Trainer saved is taken too."""
    accelerator = trainer.accelerator
    if directory is None or not _shards(accelerator) or not Path(directory, FOLDER).is_dir():
        stock(directory)
        return
    pair = accelerator.sharded_model, accelerator.sharded_optimizer
    checkpoint.load(Path(directory, FOLDER), *pair)
    state = torch.load(Path(directory, SCHEDULER), weights_only=True)
    trainer.lr_scheduler.load_state_dict(state)
