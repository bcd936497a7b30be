"""The gather of a pack's gradients: every rank has the means that all owners have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcast.memory.gradients import Gradients
from shardcast.memory.local_param import LocalParam


@torch.no_grad()
def gather(grads: Gradients, present: Sequence[bool]) -> None:
    """Have the means of all owners in ``grads.data``, and shown where ``present``.

    Every rank of the pack must call it, after :meth:`.Gradients.landed`.

    Args:
        present: per slot, whether some rank has a gradient.
    """
    pack, own, kept = grads.pack, grads.pack.own, grads.data
    # In the dtype that ranks have which add fewer gradients up.
    data = kept if grads.narrow_dtype is None else kept.to(grads.narrow_dtype)
    if len(pack.layout.lengths) == 1:
        pack.comm.all_gather(data, data[own.start : own.stop], pack.layout)
    else:
        spans = pack.layout.owned_spans
        pieces = [(span.owner, data[span.start : span.stop]) for span in spans]
        if pieces:
            pack.comm.broadcast_all(pieces, pack.layout)
    if data is not kept:
        kept[: own.start].copy_(data[: own.start])
        kept[own.stop :].copy_(data[own.stop :])
    grads.reveal()
    grads.take_back()
    for position, param in enumerate(pack.params):
        if present[position]:
            if isinstance(param, LocalParam):
                param.grad = None  # it was a part of the sum, and is all of it now
            grads.show(position)
