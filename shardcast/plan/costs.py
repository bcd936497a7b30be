"""The cost model: what a collective takes on a machine, in seconds, and what of it is hidden.

The choice of algorithms and ``shardcast estimate`` use it: alpha (seconds to begin, and per hop)
and beta (bytes per second).

The formulas are those by which NCCL itself chooses an algorithm (``src/graph/tuning.cc``): a ring
over ``W`` ranks on ``M`` nodes makes ``W - M`` hops inside nodes and ``M - 1`` between them, and
every byte crosses each link once. What a ring sends between nodes leaves through all network cards
of a node; in an exchange (all-to-all) each rank sends through its own share of them, and nothing is
summed on the way, which is why it is the dearer one on more than one node.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardcast.option_values import read_yaml

US, GB = 1e-6, 1e9

# Bandwidths of one rank in each direction, as nccl-tests report them for large sizes ("busbw"); its
# issues are NVIDIA's own words where a maintainer answers.
NVLINK4 = 370 * GB  # of 450 (nccl-tests #212; nccl #1281: reduce-scatter 360, all-gather 350)
NVLINK3 = 230 * GB  # of 300 (nccl-tests #149)
NDR = 48 * GB  # 400 Gb/s, a card per GPU: 46 to 49 (nccl-tests #267, #290)
HDR = 24 * GB  # 200 Gb/s, a card per GPU as in a DGX A100 (nccl-tests #119: 96 through four)
# One card of 100 Gb/s for eight ranks, of which NCCL reaches three quarters (nccl #495: 600 of 800
# Gb/s through eight such).
ETHERNET = 0.75 * 12.5 * GB / 8


class Protocol(NamedTuple):
    """One way of moving bytes; a collective uses the one that is fastest for its size.

    Attributes:
        begin: seconds of every collective, whatever its size.
        inside, between: seconds of a hop to a rank of the same node, and of another one.
        share: of the bandwidth that it reaches.
        most: bytes per second that it never exceeds, on one node, two nodes, and more.
        posted: seconds that a ring over several nodes takes for each of its hops at least.
        tree: whether an all-reduce goes along a tree of nodes, and nothing else goes this way;
            ``None``: along either.
        message: bytes of a message from one rank to another that goes this way, at most.
    """

    begin: float
    inside: float
    between: float
    share: float = 1.0
    most: tuple[float, float, float] = (math.inf,) * 3
    posted: float = 0.0
    tree: bool | None = None
    message: float = math.inf


def nccl(single: float, two: float, more: float, posted: float) -> tuple[Protocol, ...]:
    """NCCL's LL, LL128 and Simple, as rings and as trees: 2.18 to 2.30, ``src/graph/tuning.cc``.

    ``baseLat`` and ``hwLat`` for NVLink and for the network, in microseconds, and the shares of the
    bandwidth. Left out: the correction of trees for middle sizes, NVLink SHARP, CollNet, and PAT,
    which has one rank per node.

    Args:
        single, two, more: GB/s of LL (``llMaxBws``), which sends a flag with every 4 bytes.
        posted: microseconds to post a message on the network (``getNetOverhead``).
    """
    most, post = (single * GB, two * GB, more * GB), posted * US
    return (
        Protocol(6.6 * US, 0.6 * US, 2.7 * US, 1 / 2, most, post, tree=False, message=16384),
        Protocol(14.0 * US, 1.9 * US, 4.0 * US, 0.92, posted=post, tree=False, message=0),
        Protocol(8.4 * US, 3.4 * US, 14.0 * US, posted=3 * post, tree=False),
        Protocol(6.8 * US, 0.6 * US, 5.0 * US, 0.92 / 3.8, most, tree=True),
        Protocol(14.0 * US, 1.25 * US, 8.5 * US, 0.92 * 120 / 128, tree=True),
        Protocol(8.4 * US, 4.0 * US, 14.0 * US, 0.92, tree=True),
    )


# Hosts of DGX H100 are Intel's, of DGX A100 AMD's.
NCCL, NCCL_A100 = nccl(141, 39, 20.4, 1.0), nccl(87.7, 22.5, 19.0, 2.0)

WIDENED = 2  # bytes of a sum for each of what is summed, see sum_dtype


@dataclass(frozen=True)
class Machine:
    """Nodes of accelerators, and what joins them; bandwidths in bytes per second.

    Attributes:
        name: of the preset or the file.
        ranks_per_node: ranks that share the links ``inside``.
        inside: of one rank in each direction, as a collective reaches it.
        between: of one rank's share of its node's network cards, in each direction.
        protocols: the ways of moving bytes, of which the fastest is taken.
        channels: of a collective; packs of one launch are spread over them.
        exchanged: messages to other ranks that are under way at a time in an exchange.
        backend: of the process group, which decides how a sync travels.
        call: seconds of each of several broadcasts that are launched as one.
        launch: seconds of the host per collective; a device waits for it if it is done earlier.
        memory: that an update reads and writes.
        host: between host and device, for ``offload``.
        capacity: bytes of a device's memory.
        flops: per second that a model's forward and backward reach.
    """

    name: str
    ranks_per_node: int
    inside: float
    between: float
    memory: float
    host: float
    flops: float
    protocols: tuple[Protocol, ...] = NCCL
    exchanged: int = 8  # NCCL: 16 elements of a work, a send and a receive for each peer
    capacity: float = 80 * GB
    channels: int = 16  # NCCL on H100 nodes (nccl #1649: "the default number of SMs is 16")
    backend: str = "nccl"
    call: float = 8 * US  # one of a group of calls
    launch: float = 15 * US  # assumed: torch's dispatch, c10d and cudaLaunchKernel

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Machine:
        """A preset by its name, or a YAML file: ``base`` names a preset, other keys replace.

        Keys: ``ranks_per_node``; ``inside``, ``between``, ``memory`` and ``host`` in GB/s (10^9
        bytes); ``tflops``; ``launch_us``; and ``begin_us``, ``inside_us`` and ``between_us``,
        measured latencies, which take the place of NCCL's protocols if one of them is given.

        Raises:
            ValueError: neither a preset nor a file, an unknown key, or a value that is no number
                above 0.
        """
        if str(source) in PRESETS:
            return PRESETS[str(source)]
        path = Path(source)
        if not path.is_file():
            raise ValueError(
                f"machine: expected one of {', '.join(PRESETS)} or a YAML file, got {str(source)!r}"
            )
        base, *numbers = {"base": "h100", **read_yaml(path)}.items()
        if base[1] not in PRESETS:
            raise ValueError(f"{path}: base: expected one of {', '.join(PRESETS)}, got {base[1]!r}")
        for key, value in numbers:
            if key not in UNITS:
                raise ValueError(f"{path}: unknown key {key!r}; known: base, {', '.join(UNITS)}")
            kinds = (int,) if key == "ranks_per_node" else (int, float)
            if type(value) not in kinds or not value > 0:
                kind = "whole number" if kinds == (int,) else "number"
                raise ValueError(f"{path}: {key}: expected a {kind} above 0, got {value!r}")
        machine = PRESETS[base[1]]
        fields = {UNITS[key][0]: value * UNITS[key][1] for key, value in numbers}
        names = ("begin", "inside", "between")
        hops = {key: fields.pop(f"hop {key}") for key in names if f"hop {key}" in fields}
        if hops:
            simple = next(p for p in reversed(machine.protocols) if not p.tree)
            fields["protocols"] = (simple._replace(posted=0.0, tree=None, **hops),)
        return dataclasses.replace(machine, name=path.stem, **fields)

    def scaled(self, latency: float = 1.0, network: float = 1.0) -> Machine:
        """A copy with other latencies, of the host too where they are less, and between nodes with
        another bandwidth."""
        protocols = tuple(
            p._replace(
                begin=latency * p.begin, inside=latency * p.inside, between=latency * p.between,
                posted=latency * p.posted,
            )
            for p in self.protocols
        )  # fmt: skip
        host = min(1.0, latency)
        return dataclasses.replace(
            self, protocols=protocols, between=network * self.between, launch=host * self.launch,
            call=host * self.call,
        )  # fmt: skip

    def beside(self, tp: int) -> Machine:
        """As data-parallel ranks see it, of which each has ``tp`` neighbours' accelerators too."""
        return dataclasses.replace(self, ranks_per_node=max(1, self.ranks_per_node // tp))

    def group(self, size: int) -> Group:
        """``size`` ranks that fill one node after another."""
        return Group(self, size, min(size, self.ranks_per_node))


# Key of a YAML file: attribute (of a protocol: hop ...), unit.
UNITS: dict[str, tuple[str, Any]] = {
    "ranks_per_node": ("ranks_per_node", 1), "inside": ("inside", GB), "between": ("between", GB),
    "memory": ("memory", GB), "capacity": ("capacity", GB), "host": ("host", GB),
    "tflops": ("flops", 1e12), "launch_us": ("launch", US), "begin_us": ("hop begin", US),
    "inside_us": ("hop inside", US), "between_us": ("hop between", US),
}  # fmt: skip

# Memory is 0.85 of the data sheet's, flops 0.4 of the dense bf16 ones: assumptions, as is the
# host's (PCIe, pinned, one direction).
PRESETS = {
    machine.name: machine
    for machine in (
        # SXM: 3.35 TB/s, 989 Tflop/s; PCIe 5.
        Machine("h100", 8, NVLINK4, NDR, 0.85 * 3350 * GB, 50 * GB, 0.4 * 989e12),
        # 80 GB SXM: 2.04 TB/s, 312 Tflop/s; PCIe 4.
        Machine("a100", 8, NVLINK3, HDR, 0.85 * 2039 * GB, 25 * GB, 0.4 * 312e12, NCCL_A100),
        # The nodes of h100 behind one Ethernet card.
        Machine(
            "h100-ethernet", 8, NVLINK4, ETHERNET, 0.85 * 3350 * GB, 50 * GB,
            0.4 * 989e12,
        ),
        # Processes on one machine that talk over loopback: a guess for one rank of two cores;
        # launch/benchmark.py costmodel measures it and prints a file for --machine.
        Machine(
            "gloo", 1 << 20, 1.5 * GB, 1.5 * GB, 8 * GB, 8 * GB, 5e10,
            (Protocol(100 * US, 100 * US, 100 * US),), exchanged=1, backend="gloo", launch=50 * US,
        ),
    )
}  # fmt: skip
"""Machines by name, for :meth:`Machine.load`."""


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: how many, and how many of them share a node.

    Every method takes the bytes of the whole tensor, of which each rank has or gets all or
    1 / ``size``, and gives seconds, 0 for a group of one.

    Attributes:
        machine: whose links they use.
        size: number of ranks.
        per_node: how many of them share a node.
    """

    machine: Machine
    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the ranks are on."""
        return math.ceil(self.size / self.per_node)

    def reduce(self, algorithm: str, nbytes: float) -> float:
        """A pack's gradients to their owners; algorithms as in :mod:`shardcast.plan.algorithms`."""
        if algorithm == "reduce_scatter":
            return self.gather(nbytes)
        return self.two_level(nbytes) if algorithm == "two_level" else self.exchange(nbytes)

    def sync(self, algorithm: str, nbytes: float, owners: int, packs: int = 1) -> float:
        """The values of so many owners' spans to everybody, in one launch."""
        if algorithm == "all_gather":
            return self.gather(nbytes, packs)
        if algorithm == "broadcast":
            return self.broadcasts(nbytes, owners)
        return self.exchange(nbytes)

    def gather(self, nbytes: float, packs: int = 1) -> float:
        """An all-gather or a reduce-scatter, as a ring; of several packs in one launch.

        Packs of one launch share the channels out, and on each channel the part of one pack goes
        round before that of the next one (``scheduleCollTasksToPlan`` in NCCL's enqueue.cc).
        """
        crossing = nbytes * (self.size - 1) / self.size
        rounds = math.ceil(packs / self.machine.channels) + (packs > 1)
        return self._fastest(lambda p: rounds * self._hops(p) + crossing / self._flow(p))

    def all_reduce(self, nbytes: float) -> float:
        """As a ring, or as a tree of nodes, whichever is faster."""
        crossing = 2 * nbytes * (self.size - 1) / self.size
        depth, near = math.ceil(math.log2(self.nodes)), self.per_node - 1

        def through(protocol: Protocol) -> float:
            chain = near * protocol.inside + depth * protocol.between
            ring = self._hops(protocol)
            hops = {True: chain, False: ring, None: min(chain, ring)}[protocol.tree]
            return 2 * hops + crossing / self._flow(protocol)

        return self._fastest(through, trees=True)

    def broadcasts(self, nbytes: float, owners: int) -> float:
        """Each owner's part of ``nbytes`` to all others, in one launch.

        A rank that has passed on one begins the next: only the first waits for the whole chain.
        Gloo takes one owner after another, so it uses a link one way at a time.
        """
        if not owners:
            return 0.0
        calls, ways = owners * self.machine.call, 1
        if self.machine.backend == "gloo" and self.nodes > 1:
            ways = 2
        return self._fastest(lambda p: calls + self._hops(p) + ways * nbytes / self._flow(p))

    def exchange(self, nbytes: float) -> float:
        """An all-to-all: each rank sends 1 / ``size`` of its ``nbytes`` to each other one."""
        inside, outside = self.per_node - 1, self.size - self.per_node
        return self._messages(nbytes / self.size, inside, outside)

    def two_level(self, nbytes: float) -> float:
        """An exchange inside each node, and one of sums, which are longer, between nodes."""
        number, nodes = self.per_node, self.nodes
        within = dataclasses.replace(self, size=number).exchange(nbytes)
        between = self._messages(WIDENED * nbytes / number / nodes, 0, nodes - 1)
        return within + 2 * nbytes / self.machine.memory + between

    def _messages(self, nbytes: float, inside: int, outside: int) -> float:
        """Seconds to send so many messages of ``nbytes`` to ranks of the node, and to others."""
        machine = self.machine
        near, far = (math.ceil(count / machine.exchanged) for count in (inside, outside))
        flowing = nbytes * max(inside / machine.inside, outside / machine.between)
        return self._fastest(
            lambda p: (
                math.inf
                if p.message < nbytes
                else near * p.inside + far * p.between + flowing / p.share
            )
        )

    def _hops(self, protocol: Protocol) -> float:
        """Seconds in which a byte goes once round the ring."""
        near, far = self.size - self.nodes, self.nodes - 1
        inside = max(protocol.inside, protocol.posted) if far else protocol.inside
        return near * inside + far * protocol.between

    def _flow(self, protocol: Protocol) -> float:
        """Bytes per second from a rank of a ring to the next."""
        inside = self.machine.inside if self.per_node > 1 else math.inf
        leaving = self.per_node * self.machine.between if self.nodes > 1 else math.inf
        return min(min(inside, leaving) * protocol.share, protocol.most[min(self.nodes, 3) - 1])

    def _fastest(self, seconds: Callable[[Protocol], float], trees: bool = False) -> float:
        if self.size == 1:
            return 0.0
        protocols = (p for p in self.machine.protocols if trees or not p.tree)
        device = min(p.begin + seconds(p) for p in protocols)
        return max(self.machine.launch, device)
