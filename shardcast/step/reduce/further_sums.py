"""Sums of gradients over further groups than that of their pack, in a mesh or between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from shardcast.comm import Comm, Reduction, ReplicaSumReduction
from shardcast.plan.layout import PackLayout
from shardcast.plan.precision import MASTER_DTYPE, sum_dtype
from shardcast.step.reduce.bucket import Bucket


def reduced_further(first: Reduction, groups: Sequence[Comm], pack: PackLayout) -> Reduction:
    """Return the ``first`` reduction with further ones behind it, over each of the ``groups``."""
    reduction = first
    for group in groups:
        reduction = ReplicaSumReduction(reduction, group, pack, partial(_added, room=0))
    return reduction


def sum_of_copies(bucket: Bucket, pieces: Sequence[Tensor]) -> Tensor:
    """Sum ``pieces`` over holders of copies, and with them who of these has a gradient."""
    grads, layout = bucket.grads, bucket.grads.pack.layout
    own = grads.own.numel()
    total = _added(pieces, len(layout.slots))
    total[own:].fill_(1.0)  # to assign a number would wait for a GPU (torch < 2.13)
    for position in bucket.absent:
        total[own + position].fill_(0.0)
    for comm in bucket.sums:
        comm.all_reduce(total, layout)
    grads.joint = total[own:].clone()
    return total[:own]


def _added(pieces: Sequence[Tensor], room: int) -> Tensor:
    """Sum ``pieces`` in fp32, in the order of a mean, with ``room`` for more behind it."""
    numel, dtype = pieces[0].numel(), sum_dtype(pieces[0].dtype)
    total = pieces[0].new_empty(numel + room, dtype=dtype)
    part = total[:numel].copy_(pieces[0])
    for piece in pieces[1:]:
        part += piece  # of a slice of ``total`` Python would copy the sum onto itself
    return total.to(MASTER_DTYPE)
