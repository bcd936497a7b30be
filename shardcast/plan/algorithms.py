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
from shardcast.plan.costs import PRESETS, Group, Machine
from shardcast.plan.precision import MASTER_DTYPE, wire_dtype

GROUPED = ("nccl", "fake", "strict")  # backends that launch a group of calls as one; mocks too


class Topology(NamedTuple):
    """What joins the ranks.

    Attributes:
        backend: of the process group, by name.
        node: ranks of each node, numbered one after another; 1 where that is not so, or not known.
        on_host: whether packs are in host memory.
        between: bytes per second of a rank's share of its node's network cards; a guess, unless
            it is about ``shard_ranks``.
    """

    backend: str = "none"
    node: int = 1
    on_host: bool = True
    between: float = PRESETS["h100"].between

    @classmethod
    def of(cls, machine: Machine) -> Topology:
        """That of ranks that fill the nodes of ``machine``."""
        return cls(machine.backend, machine.ranks_per_node)

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
    wire = wire_dtype(storage, config)
    if config.reproducible:
        reduce, why = "all_to_all", "adds in a fixed order"
    elif config.reduce == "two_level" and topology.node >= size:
        reduce, why = "all_to_all", "there is one node"
    elif config.reduce == "two_level" and not (equal and can_two_level(size, topology)):
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
        possible = reduce_costs(numel * wire.itemsize, size, equal, topology)
        reduce, why = _cheapest(possible, "rounded once")
    itemsize = storage.itemsize
    costs = sync_costs(numel * itemsize, sum(owned) * itemsize, len(owned), size, equal, topology)
    if config.sync == "auto":
        sends = topology.sends_messages
        alone = "gloo copies what it gathers" if sends else "spans are not equal"
        sync, because = _cheapest(costs, alone)
    else:
        messages = config.sync == "broadcast" and topology.sends_messages
        sync, because = "messages" if messages else config.sync, "as asked"
    return Algorithms(reduce, sync, why, because, topology.node)


def _cheapest(costs: Mapping[str, float], alone: str) -> tuple[str, str]:
    """The algorithm that takes least time, and how long all take.

    Args:
        alone: why there is but one.
    """
    names = sorted(costs, key=costs.__getitem__)
    times = [f"{name} {1e3 * costs[name]:.2f} ms" for name in names]
    return names[0], " < ".join(times) if len(times) > 1 else alone


def sync_costs(
    nbytes: float, owned: float, owners: int, world_size: int, equal: bool, topology: Topology
) -> dict[str, float]:
    """Seconds of each algorithm that can sync a pack on ``topology``.

    Args:
        nbytes: of the pack.
        owned: bytes of the spans that hold anything but padding.
        owners: the number of those spans.
        equal: whether all spans have one length.
    """
    group, sends = group_of(world_size, topology), topology.sends_messages
    # Messages to each rank of another node leave this one as often; a ring leaves it once.
    gathers = equal and (not sends or can_two_level(world_size, topology))
    costs = {"all_gather": group.gather(nbytes)} if gathers else {}
    alone = {"messages": group.exchange(owned)} if sends else {}
    return costs | (alone or {"broadcast": group.broadcasts(owned, owners)})


def reduce_costs(
    nbytes: float, world_size: int, equal: bool, topology: Topology
) -> dict[str, float]:
    """Seconds of each algorithm that can reduce a pack, and round once, on ``topology``.

    Args:
        nbytes: of the pack on the wire.
        equal: whether all spans have one length.
    """
    group = group_of(world_size, topology)
    costs = {"all_to_all": group.exchange(nbytes)}
    if equal and can_two_level(world_size, topology):
        costs["two_level"] = group.two_level(nbytes)
    return costs


def group_of(world_size: int, topology: Topology) -> Group:
    """The ranks on H100 nodes: a choice needs the order of magnitude, and to be one everywhere."""
    machine = PRESETS["h100"]
    call = machine.call if topology.backend in GROUPED else machine.launch
    machine = replace(machine, ranks_per_node=topology.node, call=call, between=topology.between)
    return machine.group(world_size)


def syncs_at_once(algorithm: str, backend: str, overlaps: bool) -> bool:
    """Whether packs of one algorithm are synced in one launch, or by messages at the same time.

    Args:
        overlaps: beside the next forward, which waits for each pack by itself.
    """
    return not overlaps and (algorithm == "messages" or backend in GROUPED)


def can_two_level(world_size: int, topology: Topology) -> bool:
    """Whether there are several nodes of several ranks each."""
    return 1 < topology.node < world_size and world_size % topology.node == 0
