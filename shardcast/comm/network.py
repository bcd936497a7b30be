"""What the network cards of this machine can send, as the kernel says."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

DEVICES = Path("/sys/class")
RATE = re.compile(r"([\d.]+) Gb/sec")


def network_bytes() -> float:
    """Bytes per second in each direction: of all RDMA ports that are up, else of the fastest card.

    0 where that is not known.
    """
    rates = []
    for port in DEVICES.glob("infiniband/*/ports/*"):
        with suppress(OSError):
            rate = RATE.match((port / "rate").read_text())
            if rate and "ACTIVE" in (port / "state").read_text():
                rates.append(float(rate[1]) * 1e9 / 8)
    if rates:
        return sum(rates)
    speeds = [0.0]
    for card in DEVICES.glob("net/*/speed"):
        with suppress(OSError, ValueError):  # of a card that is down, or has none
            speeds.append(float(card.read_text()) * 1e6 / 8)
    return max(speeds)
