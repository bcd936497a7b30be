"""Messages to users: warnings at the script's line, and lists of facts by rank."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import time
import warnings
from collections.abc import Iterable
from typing import Any

LOG = logging.getLogger("shardcast")
SHOWN = 8  # largest number of ranks or facts that a message lists
INSIDE = ("shardcast", "torch")  # packages whose frames a warning skips


def safetensors() -> Any:
    """Return the package ``safetensors``, which is needed only for its own file format. Local.

    Raises:
        ImportError: it is not installed; the error says what to install.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "files of safetensors need the package safetensors, which is not installed here: "
            "pip install safetensors"
        ) from error
    return safetensors


NAMESAKE = (
    "the distribution shardcast {version}, a weight broadcaster of Prime Intellect, is "
    "installed next to shardcast-optim and has the same import name, so files of one may "
    "replace the other's; keep only one per environment: pip uninstall shardcast "
    "shardcast-optim, then install shardcast-optim again"
)


GRAD_SCALER = (
    "step() was called by torch.amp.GradScaler, whose infinity check is local to a rank: remove "
    "the GradScaler and call optimizer.scale_loss(loss).backward(), optimizer.step(); shardcast "
    "scales the loss and skips steps on all ranks itself"
)


def namesake() -> str | None:
    """Return advice if another distribution with the same import name is installed."""
    try:
        return NAMESAKE.format(version=importlib.metadata.version("shardcast"))
    except importlib.metadata.PackageNotFoundError:
        return None


def page(name: str) -> str:
    """Return the address of a documentation page, from the distribution's metadata, or a file.

    ``tools/release.sh`` writes the project's address into the metadata of a wheel, because a wheel
    has no ``docs/``.
    """
    try:
        addresses = importlib.metadata.metadata("shardcast-optim").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        addresses = []
    named = dict(address.split(", ", 1) for address in addresses)
    return f"{named.get('Documentation', 'docs')}/{name}.md"


def warn(message: str) -> None:
    """Warn at the line of the script that called this package, however deep the call is."""
    level = 1
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def note_speed(what: str, nbytes: int, began: float) -> None:
    """Log at INFO how many bytes took how long since ``began``, on the monotonic clock."""
    seconds = time.monotonic() - began
    size, unit = (nbytes / 1e9, "GB") if nbytes >= 1e8 else (nbytes / 1e6, "MB")
    speed = size / max(seconds, 1e-9)
    LOG.info("%s: %.3g %s in %.1f s, %.3g %s/s", what, size, unit, seconds, speed, unit)


def by_rank(facts: Iterable[tuple[int, object]]) -> str:
    """Return ``ranks 0, 2: one fact; rank 1: another``; lists at most :data:`SHOWN` of each."""
    ranks: dict[str, list[int]] = {}
    for rank, fact in facts:
        ranks.setdefault(str(fact), []).append(rank)
    shown = []
    for fact, holders in list(ranks.items())[:SHOWN]:
        more = f" and {len(holders) - SHOWN} more" if len(holders) > SHOWN else ""
        numbers = ", ".join(map(str, holders[:SHOWN])) + more
        shown.append(f"rank{'s' if len(holders) > 1 else ''} {numbers}: {fact}")
    if len(ranks) > SHOWN:
        shown.append(f"and {len(ranks) - SHOWN} others")
    return "; ".join(shown)
