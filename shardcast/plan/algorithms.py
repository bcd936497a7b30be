"""How the gradients and the values of a pack travel: by which collective, and why.

Chosen when the layout is planned, from facts that are equal on all ranks, so it is printed,
compared and estimated like the rest of it. Algorithms that reduce a pack:

* ``all_to_all``: every rank sends each owner its piece; the owner sums in higher precision.
* ``two_level``: the same inside each node first, then between ranks of equal number on all nodes.
  Between nodes travel sums over a node, in the dtype of sums: of bf16 twice as many bytes in each
  message, but only one for each node in place of one for each rank. Rounded once, at the end.
* ``reduce_scatter``: the backend sums, in the wire dtype at every hop of a ring; chosen for fp32 on
  NCCL only. NCCL's kernels for symmetric memory (>= 2.27, NVLink) read all peers, sum in fp32 and
  round once, but whether a call gets one depends on how its buffers were registered, on its size
  and on the topology, and cannot be asked for: so low precision is never left to them.

Algorithms that sync it:

* ``all_gather``: one call, in place; needs spans of equal length.
* ``broadcast``: from each owner, all of them in one group of calls where the backend has groups.
* ``messages``: from rank to rank, on gloo, which copies what it gathers; of host memory only. They
  must be waited for in the step that sends them, so beside a forward they are broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.costs import PRESETS, Machine
from shardcast.plan.precision import MASTER_DTYPE, wire_dtype

GROUPED = ("nccl", "fake", "strict")  # backends that launch a group of calls as one; mocks too


class Topology(NamedTuple):
    """What joins the ranks.

    Attributes:
        backend: of the process group, by name.
        node: ranks of each node, numbered one after another; 1 where that is not so, or not known.
        on_host: whether packs are in host memory.
    """

    backend: str = "none"
    node: int = 1
    on_host: bool = True

    @property
    def machine(self) -> Machine:
        """H100 nodes: a choice needs the order of magnitude, and to be one everywhere."""
        h100 = PRESETS["h100"]
        call = h100.call if self.backend in GROUPED else h100.launch
        return replace(h100, ranks_per_node=self.node, call=call)

    @property
    def sends_messages(self) -> bool:
        """Gloo copies a card's memory for its collectives; messages it would read as the host's."""
        return self.backend == "gloo" and self.on_host


class Algorithms(NamedTuple):
    """Which algorithms reduce and sync a pack, and why; empty for a world of one."""

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
    owned: Sequence[int],
    storage: torch.dtype,
) -> Algorithms:
    """The algorithms of a pack; pure, so equal on all ranks.

    Raises:
        ValueError: ``reduce: two_level`` where ranks and nodes do not allow it.

    Args:
        lengths: elements of each rank's span.
        owned: elements of those spans that hold anything but padding.
    """
    size, numel = len(lengths), sum(lengths)
    if size == 1:
        return Algorithms()
    equal = len(set(lengths)) == 1
    several = 1 < topology.node < size and size % topology.node == 0  # ranks on several nodes
    group, wire = topology.machine.group(size), wire_dtype(storage, config)
    if config.reproducible:
        reduce, why = "all_to_all", "adds in a fixed order"
    elif config.reduce == "two_level" and topology.node >= size:
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
    elif equal and wire == MASTER_DTYPE and topology.backend == "nccl":
        reduce, why = "reduce_scatter", "NCCL sums fp32 in fp32"
    else:
        names = ["all_to_all", "two_level"] if equal and several else ["all_to_all"]
        costs = {name: group.reduce(name, numel * wire.itemsize) for name in names}
        reduce, why = _cheapest(costs, "rounded once")
    sends = topology.sends_messages
    spans = "messages" if sends else "broadcast"
    if config.sync == "auto":
        costs = {spans: group.sync(spans, sum(owned) * storage.itemsize, len(owned))}
        # Messages to each rank of another node leave this one as often; a ring leaves it once.
        if equal and (several or not sends):
            costs["all_gather"] = group.gather(numel * storage.itemsize)
        alone = "gloo copies what it gathers" if sends else "spans are not equal"
        sync, because = _cheapest(costs, alone)
    else:
        sync, because = spans if config.sync == "broadcast" else config.sync, "as asked"
    return Algorithms(reduce, sync, why, because, topology.node)


def _cheapest(costs: Mapping[str, float], alone: str) -> tuple[str, str]:
    """The algorithm that takes least time, and how long all take.

    Args:
        alone: why there is but one.
    """
    names = sorted(costs, key=costs.__getitem__)
    times = [f"{name} {1e3 * costs[name]:.2f} ms" for name in names]
    return names[0], " < ".join(times) if len(times) > 1 else alone
