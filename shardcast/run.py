"""Run an unedited script of Accelerate with shardcast: ``python -m shardcast.run script.py ...``.

Every ``accelerate.Accelerator`` that the script makes is a ``ShardcastAccelerator``, configured
by ``SHARDCAST_CONFIG`` and ``SHARDCAST_<FIELD>``; a script that shards nothing is told so at its
end. ``shardcast launch`` starts every script this way. Under another launcher::

    SHARDCAST_CONFIG=bf16.yaml accelerate launch --multi_gpu -m shardcast.run script.py ...
"""

from __future__ import annotations

import os
import runpy
import sys
from argparse import ArgumentParser
from typing import Any

import torch

from shardcast import launched

USAGE = "python -m shardcast.run (script.py | -m module) [arguments of the script]"

UNUSED = (
    "shardcast: WARNING: shardcast.run was to shard the training of this script, but NOTHING WAS "
    "SHARDED. It expects an accelerate.Accelerator (or the Trainer) that prepares model and "
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
    if not launched.sharded and os.environ.get("RANK", "0") == "0":
        print(UNUSED, file=sys.stderr, flush=True)
    # Scripts of Accelerate and the Trainer seldom do. A thread of gloo that lets go of a tensor
    # while the interpreter ends would abort the process. Not after an error: it could wait there
    # for ranks that wait for this one.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def install() -> None:
    """From now on ``from accelerate import Accelerator`` gives a ``ShardcastAccelerator``."""
    from shardcast.accelerate import ShardcastAccelerator  # says which extra is missing

    import accelerate  # isort: skip

    class RunAccelerator(ShardcastAccelerator):
        """One that finds the Trainer of transformers, where the script has imported it by then."""

        provisional = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if "transformers.trainer" in sys.modules:
                from shardcast.transformers import adapt

                adapt()
            super().__init__(*args, **kwargs)

    RunAccelerator.__name__ = ShardcastAccelerator.__name__
    # Where pickle finds it.
    RunAccelerator.__module__, RunAccelerator.__qualname__ = "accelerate.accelerator", "Accelerator"
    accelerate.Accelerator = RunAccelerator
    accelerate.accelerator.Accelerator = RunAccelerator


if __name__ == "__main__":
    main()
