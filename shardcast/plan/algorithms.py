"""Algorithms by which the gradients and the values of a pack travel: which collective, and why.

Chosen when the layout is planned, from facts that are equal on all ranks, so it is printed,
compared and estimated like the rest of it. Algorithms that reduce a pack, ``auto`` taking the first
that fits:

* ``reduce_scatter``: the backend sums, in the wire dtype at every hop of a ring. For equal spans in
  fp32 on NCCL. NCCL's kernels for symmetric memory (>= 2.27, NVLink) read all peers, sum in fp32
  and round once, but whether a call gets one depends on how its buffers were registered, on its
  size and on the topology, and cannot be asked for: so low precision is never left to them.
* ``two_level``: every rank sends each owner's piece to one rank of its node, which sums in higher
  precision; then these sums travel between ranks of equal number on all nodes. Rounded once, at
  the end. For equal spans on several nodes of more than two ranks each: sums are twice as long as
  what is summed, but only one of them leaves a node in place of one piece for each of its ranks.
* ``all_to_all``: every rank sends each owner its piece; the owner sums in higher precision.

Algorithms that sync it, likewise:

* ``messages``: from rank to rank, on gloo, which copies what it gathers; of host memory only. They
  must be waited for in the step that sends them, so during a forward they are broadcasts. Not for
  equal spans on several nodes of several ranks: a ring leaves a node once, messages once per rank.
* ``all_gather``: one call, in place; needs spans of equal length.
* ``broadcast``: from each owner, all of them in one group of calls where the backend has groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE, wire_dtype

PAIR = 2  # ranks of a node whose sums in higher precision are as long as what they sum
GROUPED = ("nccl", "fake", "strict")  # backends that launch a group of calls as one; mocks too


class Topology(NamedTuple):
    """The links that join the ranks.

    Attributes:
        backend: of the process group, by name.
        node: ranks of each node, numbered one after another; 1 where that is not so, or not known.
        on_host: whether packs are in host memory.
    """

    backend: str = "none"
    node: int = 1
    on_host: bool = True

    @property
    def sends_messages(self) -> bool:
        """Gloo copies a card's memory for its collectives; messages it would read as the host's."""
        return self.backend == "gloo" and self.on_host


class Algorithms(NamedTuple):
    """The algorithms that reduce and sync a pack, and why; empty for a world of one."""

    reduce: str = ""
    sync: str = ""
    reduce_why: str = ""
    sync_why: str = ""
    node: int = 1  # ranks of each node, as in the topology

    def __str__(self) -> str:
        return f"reduce {self.reduce} ({self.reduce_why}), sync {self.sync} ({self.sync_why})"


def choose(
    config: ShardcastConfig,
    topology: Topology,
    lengths: Sequence[int],
    storage: torch.dtype,
) -> Algorithms:
    """The algorithms of a pack; pure, so equal on all ranks.

    Raises:
        ValueError: ``reduce: two_level`` where ranks and nodes do not allow it.

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
