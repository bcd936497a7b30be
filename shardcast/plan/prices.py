"""Prices of moving bytes: alpha (seconds to begin, and per hop) and beta (bytes per second).

All of them: ``plan.routes`` ranks ways by the two links, and ``estimate`` predicts times by the
protocols and bandwidths of a machine.
"""

from __future__ import annotations

from typing import NamedTuple

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
    """

    begin: float
    inside: float
    between: float
    share: float = 1.0


# NCCL 2.18 to 2.28, src/graph/tuning.cc: baseLat and hwLat of rings (LL, LL128, Simple), for NVLink
# and for the network, in microseconds; a hop of LL inside a node takes 1.8 times as long where
# there are several, left out here. LL sends a flag with every 4 bytes, and loses as much again to
# polling: a quarter of the bandwidth; LL128 sends 120 of 128 bytes.
NCCL = (
    Protocol(6.6 * US, 0.6 * US, 2.7 * US, 1 / 4),
    Protocol(14.0 * US, 1.9 * US, 4.0 * US, 0.92),
    Protocol(8.4 * US, 3.4 * US, 14.0 * US),
)


class Link(NamedTuple):
    """Seconds to begin a collective, of a call within one, per hop, and per byte."""

    begin: float
    call: float
    hop: float
    byte: float


# Orders of magnitude, which is all that a choice needs: NVLink 4 as gathers use it, NDR, LL128.
INSIDE = Link(begin=15e-6, call=8e-6, hop=2e-6, byte=1 / 350e9)
BETWEEN = Link(begin=15e-6, call=8e-6, hop=4e-6, byte=1 / NDR)
COPY = 2 / 2.8e12  # seconds per byte that is read and written on the device
