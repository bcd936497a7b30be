"""A check for scripts that are being debugged: are copies of parameters equal, bit by bit?"""

from __future__ import annotations

import ctypes
import hashlib

from shardcast.comm import Comm
from shardcast.memory.pack import Pack
from shardcast.optimizer.engine import Engine


def check_copies(engine: Engine) -> None:
    """Compare, by hashes, what several ranks hold; see ``ShardedOptimizer.check_copies``."""
    engine.sync.wait()
    told: list[str] = []
    for shard in engine.shards:
        pack, sharing = shard.pack, shard.pack.layout.sharing
        hashes = _hashes(pack)
        around: dict[str, Comm] = {"data-parallel": engine.grid.holders(sharing)}
        around |= {name: engine.grid.group(name) for name in sharing.copies}
        for name, comm in around.items():
            everyone = comm.exchange(hashes, engine.device)
            for position, slot in enumerate(pack.layout.slots):
                found = [theirs[position] for theirs in everyone]
                other = next((r for r, there in enumerate(found) if there != found[0]), None)
                if other is not None:
                    told.append(f"{slot.name!r} between ranks 0 and {other} ({name})")

    def refuse() -> None:
        if told:
            raise RuntimeError(f"parameters that must be equal differ: {'; '.join(told)}")

    engine.grid.everyone.together(refuse, engine.device, "check_copies")


def _hashes(pack: Pack) -> list[bytes]:
    """Of each slot, 16 bytes; copies the pack to the host."""
    host, size = pack.data.cpu(), pack.data.element_size()
    places = ((host.data_ptr() + s.offset * size, s.numel * size) for s in pack.layout.slots)
    return [hashlib.blake2b(ctypes.string_at(*p), digest_size=16).digest() for p in places]
