"""Algorithms for a pack's gradients and parameters: which collective, and why.

They are chosen with the layout, from facts that are equal on all ranks. So they are printed,
compared and estimated with it. Algorithms that reduce a pack (``auto`` takes the first that fits):

* ``reduce_scatter``: the backend sums, in the wire dtype at every hop of a ring. For equal spans in
  fp32 on NCCL. NCCL's kernels for symmetric memory (>= 2.27, NVLink) read all peers, sum in fp32
  and round once. But their use depends on buffer registration, size and topology, and cannot be
  requested. So low precision is never left to them.
* ``two_level``: every rank sends each owner's piece to one rank of its node, which sums in higher
  precision. Then these sums are exchanged between ranks of equal number on all nodes, and rounded
  once at the end. For equal spans on several nodes of more than two ranks each: a sum is twice as
  long as a piece, but one sum leaves a node instead of one piece per rank.
* ``all_to_all``: every rank sends each owner its piece; the owner sums in higher precision.

Algorithms that sync a pack, likewise:

* ``messages``: from rank to rank. For host memory on gloo, whose collectives copy what they gather.
  They must be waited for in the step that sends them, so during a forward broadcasts replace them.
  Not for equal spans on several nodes of several ranks: a ring leaves a node once, messages leave
  it once per rank.
* ``all_gather``: one call, in place; needs spans of equal length.
* ``broadcast``: from each owner, in one group of calls if the backend has groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE, wire_dtype

PAIR = 2  # with so many ranks per node, a sum is as long as its pieces together
# backends that launch a group of calls at once, including mocks
GROUPED = ("nccl", "fake", "strict")


class Topology(NamedTuple):
    """The links between ranks.

    Attributes:
        backend: name of the process group's backend.
        node: ranks per node, numbered consecutively; 1 if that does not hold or is unknown.
        on_host: whether packs are in host memory.
    """

    backend: str = "none"
    node: int = 1
    on_host: bool = True

    @property
    def sends_messages(self) -> bool:
        """Whether gloo can send messages: only from host memory, unlike its collectives."""
        return self.backend == "gloo" and self.on_host


class Algorithms(NamedTuple):
    """The algorithms that reduce and sync a pack, with reasons; empty for one rank."""

    reduce: str = ""
    sync: str = ""
    reduce_why: str = ""
    sync_why: str = ""
    node: int = 1  # ranks per node, as in Topology

    def __str__(self) -> str:
        return f"reduce {self.reduce} ({self.reduce_why}), sync {self.sync} ({self.sync_why})"


def choose(
    config: ShardcastConfig,
    topology: Topology,
    lengths: Sequence[int],
    storage: torch.dtype,
) -> Algorithms:
    """Choose the algorithms of a pack. Pure, so equal on all ranks.

    Raises:
        ValueError: ranks and nodes do not allow ``reduce: two_level``.

    Args:
        lengths: elements of each rank's span.
        storage: dtype of the pack.
    """
    size = len(lengths)
    if size == 1:
        return Algorithms()
    equal = len(set(lengths)) == 1
    several = 1 < topology.node < size and size % topology.node == 0  # ranks on several nodes
    if config.reduce == "two_level" and topology.node >= size:
        reduce, why = "all_to_all", "there is one node"
    elif config.reduce == "two_level" and not (equal and several):
        needs = "several ranks on every node, the same number on each, numbered one after another"
        needs = needs if equal else "equal spans, which partition 'whole' does not have"
        raise ValueError(
            f"reduce: two_level needs {needs}; got {size} ranks, {topology.node} on each node; use "
            "'auto', or start the ranks node by node"
        )
    elif config.reduce != "auto":
        reduce, why = config.reduce, "as asked"
    elif equal and wire_dtype(storage, config) == MASTER_DTYPE and topology.backend == "nccl":
        reduce, why = "reduce_scatter", "NCCL sums fp32 in fp32"
    elif equal and several and topology.node > PAIR:
        reduce, why = "two_level", f"one sum of {topology.node} ranks leaves a node"
    else:
        reduce, why = "all_to_all", "rounded once"
    sends = topology.sends_messages
    if config.sync != "auto":
        by_owner = "messages" if sends else "broadcast"
        sync, because = by_owner if config.sync == "broadcast" else config.sync, "as asked"
    elif sends and not (equal and several):
        sync, because = "messages", "gloo copies what it gathers"
    elif equal:
        sync, because = "all_gather", "spans are equal"
    else:
        sync, because = "broadcast", "spans are not equal"
    return Algorithms(reduce, sync, why, because, topology.node)
