"""The process groups that a pack of parameters takes part in, by name."""

from __future__ import annotations

from typing import NamedTuple

PLAIN = "dp"  # the group that cuts packs, unless a parameter says otherwise


class PackGroups(NamedTuple):
    """The process groups of a pack, by name; see :class:`shardcast.comm.ProcessGroups`.

    Attributes:
        shard: the group whose ranks own the spans.
        replicate: groups whose ranks hold equal copies, which begin equal and stay so.
        reduce: groups over whose ranks gradients are added after they are reduced, in fp32.
        is_primary: norms and checkpoints take this rank's copy. Only this field differs between
            ranks that share a pack.
    """

    shard: str = PLAIN
    replicate: tuple[str, ...] = ()
    reduce: tuple[str, ...] = ()
    is_primary: bool = True

    @property
    def sums_replicas(self) -> bool:
        """Return whether gradients of copies are added up."""
        return bool(self.reduce) and not set(self.replicate).isdisjoint(self.reduce)

    def __str__(self) -> str:
        facts = [] if self.shard == PLAIN else [f"cut over {self.shard}"]
        facts += [f"copies over {' and '.join(self.replicate)}"] if self.replicate else []
        facts += [f"summed over {' and '.join(self.reduce)}"] if self.reduce else []
        return ", ".join(facts)


class Tie(NamedTuple):
    """One weight that two pipeline stages hold under two names: those of its first holder, and of
    the other one."""

    first: str
    second: str

    @property
    def group(self) -> str:
        """The name of the group of its holders."""
        return f"tie of {self.first} and {self.second}"
