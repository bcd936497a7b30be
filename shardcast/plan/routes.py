"""How the gradients and the values of a pack travel: by which collective, and why.

Chosen when the layout is planned, from facts that are equal on all ranks, so it is printed,
compared and estimated like the rest of it. Ways to reduce a pack:

* ``all_to_all``: every rank sends each owner its piece; the owner sums in higher precision.
* ``two_level``: the same inside each node first, then between ranks of equal number on all nodes.
  Between nodes travel sums over a node, in the dtype of sums: of bf16 twice as many bytes in each
  message, but only one for each node in place of one for each rank. Rounded once, at the end.
* ``reduce_scatter``: the backend sums, in the wire dtype at every hop of a ring; chosen for fp32 on
  NCCL only. NCCL's kernels for symmetric memory (>= 2.27, NVLink) read all peers, sum in fp32 and
  round once, but whether a call gets one depends on how its buffers were registered, on its size
  and on the topology, and cannot be asked for: so low precision is never left to them.

Ways to sync it:

* ``all_gather``: one call, in place; needs spans of equal length.
* ``broadcast``: from each owner, all of them in one group of calls where the backend has groups.
* ``messages``: from rank to rank, on gloo, which copies what it gathers; of host memory only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE, wire_dtype
from shardcast.plan.prices import BETWEEN, COPY, INSIDE

GROUPED = ("nccl", "fake", "strict")  # backends that launch a group of calls as one; mocks too
WIDENED = 2  # bytes of a sum for each of what is summed, see sum_dtype


class Fabric(NamedTuple):
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
    def sends_messages(self) -> bool:
        """Gloo copies a card's memory for its collectives; messages it would read as the host's."""
        return self.backend == "gloo" and self.on_host


class Route(NamedTuple):
    """How one pack is reduced and synced, and why so; empty for a world of one."""

    reduce: str = ""
    sync: str = ""
    reduce_why: str = ""
    sync_why: str = ""
    node: int = 1  # ranks of each node, as in the fabric

    def __str__(self) -> str:
        return f"reduce {self.reduce} ({self.reduce_why}), sync {self.sync} ({self.sync_why})"


def choose(
    config: ShardcastConfig,
    fabric: Fabric,
    lengths: Sequence[int],
    owned: Sequence[int],
    storage: torch.dtype,
) -> Route:
    """The route of a pack; pure, so equal on all ranks.

    Raises:
        ValueError: ``reduce: two_level`` where ranks and nodes do not allow it.

    Args:
        lengths: elements of each rank's span.
        owned: elements of those spans that hold anything but padding.
    """
    size, numel = len(lengths), sum(lengths)
    if size == 1:
        return Route()
    equal = len(set(lengths)) == 1
    wire = wire_dtype(storage, config)
    if config.reduce == "two_level":
        _check_two_level(size, equal, fabric)
    if config.reduce == "two_level" and fabric.node >= size:
        reduce, why = "all_to_all", "there is one node"
    elif config.reduce != "auto":
        reduce, why = config.reduce, "as asked"
    elif equal and wire == MASTER_DTYPE and fabric.backend == "nccl":
        reduce, why = "reduce_scatter", "NCCL sums fp32 in fp32"
    else:
        ways = reduce_costs(numel * wire.itemsize, size, equal, fabric)
        reduce, why = _cheapest(ways, "rounded once")
    itemsize = storage.itemsize
    costs = sync_costs(numel * itemsize, sum(owned) * itemsize, len(owned), size, equal, fabric)
    if config.sync == "auto":
        sends = fabric.sends_messages
        alone = "gloo copies what it gathers" if sends else "spans are not equal"
        sync, because = _cheapest(costs, alone)
    else:
        messages = config.sync == "broadcast" and fabric.sends_messages
        sync, because = "messages" if messages else config.sync, "as asked"
    return Route(reduce, sync, why, because, fabric.node)


def _check_two_level(size: int, equal: bool, fabric: Fabric) -> None:
    if not equal:
        raise ValueError(
            "reduce: two_level needs equal spans, which partition 'whole' does not have; use 'auto'"
        )
    if fabric.node < size and not can_two_level(size, fabric):
        raise ValueError(
            f"reduce: two_level needs several ranks on every node, the same number on each, "
            f"numbered one after another, which these {size} ranks are not; use 'auto', or start "
            "the ranks node by node"
        )


def _cheapest(costs: Mapping[str, float], alone: str) -> tuple[str, str]:
    """The way that takes least time, and how long all take; ``alone``: why there is but one."""
    ways = sorted(costs, key=costs.__getitem__)
    times = [f"{way} {1e3 * costs[way]:.2f} ms" for way in ways]
    return ways[0], " < ".join(times) if len(times) > 1 else alone


def sync_costs(
    nbytes: int, owned: int, owners: int, world_size: int, equal: bool, fabric: Fabric
) -> dict[str, float]:
    """Seconds of each way in which a pack can be synced on ``fabric``.

    Args:
        nbytes: of the pack.
        owned: of the spans that hold anything but padding.
        owners: the number of those spans.
        equal: whether all spans have one length.
    """
    link = INSIDE
    if fabric.node < world_size:  # rings between nodes use the network cards of all their ranks
        link = BETWEEN._replace(byte=max(INSIDE.byte, BETWEEN.byte / fabric.node))
    if fabric.sends_messages:
        return {"messages": link.begin + (world_size - 1) * link.hop + owned * link.byte}
    hops = link.begin + (world_size - 1) * link.hop
    calls = owners * (link.call if fabric.backend in GROUPED else link.begin)
    found = {"broadcast": hops + calls + owned * link.byte}
    if equal:
        crossing = nbytes * (world_size - 1) / world_size
        found["all_gather"] = hops + link.call + crossing * link.byte
    return found


def reduce_costs(nbytes: int, world_size: int, equal: bool, fabric: Fabric) -> dict[str, float]:
    """Seconds of each way in which a pack can be reduced and rounded once on ``fabric``.

    Args:
        nbytes: of the pack on the wire.
        equal: whether all spans have one length.
    """
    size, node = world_size, fabric.node
    if node >= size:
        link = INSIDE
        crossing = nbytes * (size - 1) / size
        return {"all_to_all": link.begin + (size - 1) * link.hop + crossing * link.byte}
    near = (node - 1) * INSIDE.hop
    far = (size - node) * BETWEEN.hop + nbytes * (size - node) / size * BETWEEN.byte
    found = {"all_to_all": BETWEEN.begin + near + far}
    if equal and can_two_level(size, fabric) and fabric.backend != "gloo":  # not measured there
        nodes = size // node
        first = INSIDE.begin + near + nbytes * ((node - 1) / node * INSIDE.byte + 2 * COPY)
        sums = WIDENED * nbytes / node * (nodes - 1) / nodes
        second = BETWEEN.begin + (nodes - 1) * BETWEEN.hop + sums * BETWEEN.byte
        found["two_level"] = first + second
    return found


def can_two_level(world_size: int, fabric: Fabric) -> bool:
    """Whether there are several nodes of several ranks each."""
    return 1 < fabric.node < world_size and world_size % fabric.node == 0
