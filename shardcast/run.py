"""Run an unchanged Accelerate script with shardcast: ``python -m shardcast.run script.py ...``.

It replaces two constructors: every ``accelerate.Accelerator`` in the script becomes a
``ShardcastAccelerator``, and every Trainer of transformers shards. ``SHARDCAST_CONFIG`` and
``SHARDCAST_<OPTION>`` configure them. A script that shards nothing gets a warning at its end.
``shardcast launch`` starts every script this way. Under another launcher::

    SHARDCAST_CONFIG=bf16.yaml accelerate launch --multi_gpu -m shardcast.run script.py ...
"""

from __future__ import annotations

import os
import runpy
import sys
from argparse import ArgumentParser
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import torch

from shardcast import launched

TRAINER = "transformers.trainer"
USAGE = "python -m shardcast.run (script.py | -m module) [arguments of the script]"

UNUSED = (
    "shardcast: WARNING: shardcast.run should have sharded this script's training, but NOTHING "
    "WAS SHARDED. It expects an accelerate.Accelerator (or the Trainer) that prepares model and "
    "optimizer, or a call of shardcast.shard()"
)


def main() -> None:
    """Take the script or module from the command line and run it as ``__main__``."""
    module, arguments = sys.argv[1:2] == ["-m"], sys.argv[1:]
    arguments = arguments[module:]
    if not arguments or arguments[0].startswith("-"):
        ArgumentParser(usage=USAGE).error(
            f"expected a script, got {' '.join(arguments) or 'nothing'}"
        )
    script = arguments[0]
    if not module and not os.path.isfile(script):
        ArgumentParser(usage=USAGE).error(f"script {script!r} does not exist")
    install()
    sys.argv = arguments
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))  # as python does for a script
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if not launched.sharded and launched.is_first_process():
        print(UNUSED, file=sys.stderr, flush=True)
    # Scripts of Accelerate and the Trainer seldom destroy the group. A gloo thread that releases a
    # tensor at interpreter exit would abort the process. After an error this is left out, because
    # it could wait for ranks that wait for this one.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def install() -> None:
    """Replace ``accelerate.Accelerator`` by a ``ShardcastAccelerator``, also for later imports."""
    from shardcast.accelerate import ShardcastAccelerator  # its error names the missing extra

    import accelerate  # isort: skip

    accelerate.Accelerator = accelerate.accelerator.Accelerator = ShardcastAccelerator
    if (trainer := sys.modules.get(TRAINER)) is not None:
        trainer.Trainer.__new__ = new_trainer
    else:  # importing it here would cost every script seconds
        sys.meta_path.insert(0, TrainerFinder())


def new_trainer(kind: type, *_args: object, **_kwargs: object) -> object:
    """Replacement of ``Trainer.__new__``: make an object of a class that shards.

    The stock Trainer saves only rank 0's optimizer state, so the other shards would be lost.
    """
    from shardcast.transformers import sharding

    return object.__new__(sharding(kind))


class TrainerFinder(MetaPathFinder):
    """Import hook that makes Trainer shard when the script imports it."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of the other finders, whose loader also replaces the constructor."""
        if name != TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                module.Trainer.__new__ = new_trainer

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    main()
