"""Descriptions that must be equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shardcast.comm.group import Comm
from shardcast.messages import by_rank


def same_everywhere(comm: Comm, lines: Sequence[str], device: torch.device) -> None:
    """Compare a description across ranks; raise the same error on every rank if one differs.

    Args:
        lines: what this rank has planned, one fact per line, details indented.

    Raises:
        RuntimeError: names the first line that differs, and what each rank has there.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    digests = mine.repeat(comm.size)
    comm.all_gather(digests, mine, "descriptions")  # whatever the models: it cannot mismatch
    if bool((digests.view(comm.size, 32) == mine).all()):
        return
    # Parameters are indented deepest: a difference is named there before it is in totals.
    ordered = sorted(lines, key=lambda line: len(line.lstrip()) - len(line))
    # No rank gets the lines of all the others, which of a thousand ranks are gigabytes.
    first = comm.share(ordered, device)
    longest = max(len(first), len(ordered))
    here = (n for n in range(longest) if first[n : n + 1] != ordered[n : n + 1])
    positions = comm.exchange(next(here, None), device)
    position = min(position for position in positions if position is not None)
    fact = ordered[position].strip() if position < len(ordered) else "(nothing)"
    raise RuntimeError(
        "model: the ranks do not hold the same model and options; first difference: "
        f"{by_rank(enumerate(comm.exchange(fact, device)))}. Build the same model, optimizer "
        "groups and config on every rank."
    )
