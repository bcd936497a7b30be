"""Records of a rank's collectives, and the comparison of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Collective:
    """One collective as one rank called it.

    It uses the names of current ``torch.distributed`` functions for any torch version:
    ``all_gather_into_tensor`` is logged as ``all_gather_single``, ``reduce_scatter_tensor`` as
    ``reduce_scatter_single``.
    """

    seq: int
    """Position in this rank's order in this group, from 0."""
    op: str
    """Name of the function, such as ``all_reduce``."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor that this rank sends. For ``broadcast``, ``scatter`` and
    ``reduce_scatter`` that of the result on every rank; for ``all_to_all`` the first one sent."""
    dtype: torch.dtype | None = None
    """``None`` for ``barrier`` only."""
    source: int | None = None
    """Group rank that sends, in ``broadcast`` and ``scatter``."""
    dest: int | None = None
    """Group rank that receives, in ``reduce`` and ``gather``."""
    reduce_op: str | None = None
    """``"SUM"``, ``"AVG"``, ``"MAX"`` … if the collective reduces."""
    input_splits: tuple[int, ...] | None = None
    """All-to-all only: sent to each rank (rows for ``all_to_all_single``, else elements)."""
    output_splits: tuple[int, ...] | None = None
    """All-to-all only: received from each rank."""
    async_op: bool = False
    """Whether the call returned before the collective was done."""
    nbytes: int = 0
    """Bytes that this rank sends or receives, whichever is more."""
    group: str = ""
    """Dimension of the mesh, or ``group_desc`` of the group; empty for the default group."""
    launched_with: int | None = None
    """``seq`` of the first collective in a joint launch; ``None``: launched alone."""

    @property
    def launch(self) -> int:
        """Number of its launch; collectives of one group of calls have the same number."""
        return self.seq if self.launched_with is None else self.launched_with

    @property
    def signature(self) -> tuple[object, ...]:
        """The part that must be equal on all ranks of a collective.

        Ranks may differ in the order, splits and sizes of an all-to-all, in ``async_op``, and in
        their count (``seq``).
        """
        shape = None if self.op.startswith("all_to_all") else self.shape
        return (self.op, shape, self.dtype, self.source, self.dest, self.reduce_op, self.group)

    def __str__(self) -> str:
        tensor = "" if self.dtype is None else f"{_short(self.dtype)}{list(self.shape)}"
        details = {
            "reduce_op": self.reduce_op,
            "source": self.source,
            "dest": self.dest,
            "input_splits": self.input_splits,
            "output_splits": self.output_splits,
            "async_op": self.async_op or None,
            "group": self.group or None,
        }
        facts = [f"{name}={value}" for name, value in details.items() if value is not None]
        return f"#{self.seq} {self.op}({', '.join([tensor, *facts] if tensor else facts)})"


def assert_same_sequence(logs: Sequence[Sequence[Collective]]) -> None:
    """Assert that every rank issued the same collectives in the same order.

    Ranks may differ where :attr:`Collective.signature` allows it: in the splits of an all-to-all
    and in ``async_op``.

    Args:
        logs: one log per rank: ``ThreadedWorld.logs``, or the ``log`` of one fake group per rank.

    Raises:
        AssertionError: the ranks differ; shows each rank's call at the first difference, and just
            before.
    """
    for position in range(max(map(len, logs), default=0)):
        groups: dict[object, list[int]] = {}
        for rank, log in enumerate(logs):
            signature = log[position].signature if position < len(log) else None
            groups.setdefault(signature, []).append(rank)
        if len(groups) > 1:
            raise AssertionError(_difference(logs, position, list(groups.values())))


def _difference(
    logs: Sequence[Sequence[Collective]], position: int, groups: Sequence[Sequence[int]]
) -> str:
    lines = [f"the ranks' collectives differ at position {position}:"]
    for ranks in groups:
        log = logs[ranks[0]]
        call = str(log[position]) if position < len(log) else f"nothing: its log ends at {len(log)}"
        lines.append(f"  {name_ranks(ranks)}: {call}")
    if position:
        lines.append(f"  the last common one: {logs[0][position - 1]}")
    return "\n".join(lines)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 2, 3`` or ``ranks 0, 1, 2 … 1023 (1000)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 8:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[:3]))} … {ranks[-1]} ({len(ranks)} ranks)"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
