"""Says why a step was skipped: a warning, or the error of too many skipped steps in a row.

Arguments that the functions have in common: ``comm``, the ranks that know of it and all call this;
``too_many``, how many steps in a row were skipped where that is an error, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardcast import _compat
from shardcast.comm import Comm, warn_once_for
from shardcast.memory.gradients import Gradients

ELSEWHERE = "on other model-parallel ranks, which name it"


def tell_of_signal(comm: Comm, reason: str, remedy: str, too_many: int) -> None:
    """Warn of the reason that a signal had, or raise RuntimeError."""
    if too_many:
        raise RuntimeError(
            f"{too_many} steps in a row were skipped (max_skipped_steps), the last one {reason}. "
            f"{remedy}"
        )
    warn_once_for(comm, f"step skipped {reason}")


def tell_of_gradients(
    comm: Comm, packs: Mapping[int, Gradients], device: torch.device, too_many: int
) -> None:
    """Warn of the first gradients that are not finite, or raise RuntimeError.

    Args:
        packs: by owner, the first of each that has such an element.
    """
    where = "; ".join(_locate(comm, packs, device)) or ELSEWHERE
    if too_many:
        raise RuntimeError(
            f"{too_many} steps in a row were skipped because of non-finite gradients "
            f"(max_skipped_steps); first: {where}. Lower the learning rate or the loss scale, "
            "or look at the data of these steps; a script that reads .grad needs "
            "optimizer.gather_gradients() before"
        )
    reads = "; a script that reads .grad needs optimizer.gather_gradients() before"
    warn_once_for(comm, f"step skipped, non-finite gradient: {where}{reads * (comm.size > 1)}")


def _locate(comm: Comm, packs: Mapping[int, Gradients], device: torch.device) -> list[str]:
    """Name each owner's first non-finite element, and the ranks it came from.

    The owner noted whose they were, where it added them up itself. All ranks are here in the same
    step on CPU, so they can ask each other; on an accelerator the owner's span is named.
    """
    if not _compat.is_host(device):
        return [
            f"in the span of rank {owner} of the pack that begins with parameter "
            f"{grads.pack.layout.slots[0].name!r}"
            for owner, grads in packs.items()
        ]
    own = packs.get(comm.rank)
    elements = comm.exchange(None if own is None else _element(own), device)
    culprits = comm.exchange(None if own is None else [*own.culprits], device)
    return [
        f"{_who(owner, culprits[owner] or [], grads)}, {elements[owner][1]}"
        for owner, grads in packs.items()
    ]


def _element(grads: Gradients) -> tuple[int, str]:
    """Find the first non-finite element of an own span: its offset in the pack, and its name."""
    offset = grads.pack.own.start + int((~grads.own.isfinite()).to(torch.uint8).argmax())
    slot = next(slot for slot in grads.pack.layout.slots if offset < slot.end)
    return offset, f"parameter {slot.name!r}, element {offset - slot.offset}"


def _who(owner: int, culprits: list[int], grads: Gradients) -> str:
    if culprits:
        return f"rank {', '.join(map(str, culprits))}"
    if grads.whole:
        return f"rank {owner}"
    return f"the sum over ranks, at its owner {owner}"
