"""The launcher of this process: what it has set, and what it should have set."""

from __future__ import annotations

import os

from shardcast.messages import warn

STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

sharded = False  # whether shard() was called; shardcast.run checks it when the script ends


def is_first_process() -> bool:
    """Return whether this is the job's first process by its launcher's numbers."""
    return os.environ.get("RANK", "0") == "0"


def note_sharded(rank: int) -> None:
    """Note that a model was sharded; warn on rank 0 if a restart of this group would fail."""
    global sharded
    sharded = True
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if rank == 0 and shared and restarts and os.environ.get(STORE) != "1":
        warn(
            "torchrun may restart these processes, but most restarts fail or hang: the new group "
            f"reads the addresses of the dead one from the agent's store. Set {STORE}=1 where "
            "torchrun is started",
        )
