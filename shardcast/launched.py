"""What this process was started with, where it would go wrong in silence.

A configuration that nothing used is told when the process ends, and an agent of ``torchrun`` whose
restarts fail is told at the first :func:`shardcast.shard`.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings

from shardcast.config import CONFIG_VARIABLE, read_files

STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_expected = _sharded = False


def expect_sharding() -> None:
    """Tell at the end of the process if nothing was sharded: it runs under shardcast.run."""
    global _expected
    _expected = True


def expect_nothing() -> None:
    """This process is to train nothing, whatever configuration is in its environment."""
    atexit.unregister(_tell_unused)


def note_sharded(rank: int) -> None:
    """A model was sharded; warns on rank 0 where a restart of this group would fail."""
    global _sharded
    _sharded = True
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if rank == 0 and shared and restarts and os.environ.get(STORE) != "1":
        warnings.warn(
            "torchrun may restart these processes, but most restarts fail or hang: the new group "
            f"reads the addresses of the dead one from the agent's store. Set {STORE}=1 where "
            "torchrun is started",
            stacklevel=3,
        )


def _tell_unused() -> None:
    file = os.environ.get(CONFIG_VARIABLE)
    if hasattr(sys, "last_type") or os.environ.get("RANK", "0") != "0":
        return  # it ended by an error, or rank 0 tells
    if _expected and not _sharded:
        problem = (
            "shardcast.run was to shard the training of this script, but NOTHING WAS SHARDED. It "
            "expects an accelerate.Accelerator (or the Trainer) that prepares model and optimizer"
        )
    elif file and not read_files:
        problem = f"{CONFIG_VARIABLE}={file} HAD NO EFFECT: " + (
            "a configuration given in the script replaces it" if _sharded else "nothing read it"
        )
    else:
        return
    print(
        f"shardcast: WARNING: {problem}. A configuration is read by shardcast.shard(), "
        "ShardcastAccelerator, ShardcastTrainer, Lightning's strategy 'shardcast', and, for "
        "unedited scripts of Accelerate, `shardcast launch` and `python -m shardcast.run`",
        file=sys.stderr,
        flush=True,
    )


atexit.register(_tell_unused)
