"""The collectives of shardcast, and nothing else that talks to other ranks.

Tensor collectives run on the current stream: with ``async_op=False`` the process group launches
on the stream that computes (torch >= 2.8, PyTorch PR 148590), so no event, no ``record_stream``
and no side stream is needed, and whatever runs next sees the result. Those that return a work run
beside it until the work is waited for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat

REMEDY_INIT = (
    "call torch.distributed.init_process_group(...) on every rank before shardcast.shard(...)"
)


BROADCAST = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


T = TypeVar("T")
SHOWN = 8  # ranks that an error names one by one
TAG, TURNS = 0x5C000000, 1 << 16  # our sends, apart from those of a script


class Works:
    """Several pieces of asynchronous work, waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are done."""
        for work in self._works:
            work.wait()


class Comm:
    """The ranks that share one model: a process group, or this process alone.

    Ranks here are group ranks, ``0 .. size-1``. Every method must be called by all ranks of the
    group in the same order; on a world of one they do nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # Held weakly: a model that outlives destroy_process_group() must not keep the threads of
        # gloo, which take the interpreter when they let go of a tensor. A process that ends while
        # they do is aborted ("terminate called without an active exception").
        self._group = _compat.weak_group(group)
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self._turn = 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for this process alone."""
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group of the sharded model was destroyed: destroy it when training "
                "is over, or shard the model again with a new group"
            )
        return group

    @classmethod
    def resolve(cls, process_group: dist.ProcessGroup | None) -> Comm:
        """The group to use: the given one, else the default one, else this process alone.

        Raises:
            ValueError: this rank is not a member of ``process_group``.
            RuntimeError: ``WORLD_SIZE`` announces several processes but no group joins them.
        """
        announced = int(os.environ.get("WORLD_SIZE", "1"))
        if process_group is not None:
            member = isinstance(process_group, dist.ProcessGroup)
            if not member or process_group.rank() < 0:
                raise ValueError(
                    "process_group: expected a group that contains this rank, got "
                    f"{process_group!r}; call shard() only on the ranks of the group"
                )
            return cls(process_group)
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
            assert group is not None  # is_initialized() says so; for the type checker
            if announced > 1 and group.size() == 1:
                raise RuntimeError(
                    f"process_group: WORLD_SIZE is {announced} but the default process group has "
                    "one rank: each process would train alone; initialise the group with all "
                    "ranks (for Accelerate on CPU: ACCELERATE_USE_CPU=true accelerate launch "
                    "--multi_gpu --num_processes N)"
                )
            return cls(group)
        if announced > 1:
            raise RuntimeError(
                f"process_group: WORLD_SIZE is {announced} but torch.distributed is not "
                f"initialised; {REMEDY_INIT}"
            )
        return cls(None)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` (any shape and strides) on every rank by that of ``source``."""
        if self.size == 1:
            return
        received = tensor.contiguous()
        # As bytes what gloo does not know: 16-bit integers, fp8.
        known = received.dtype in BROADCAST
        wire = received if known else received.view(-1).view(torch.uint8)
        dist.broadcast(wire, group=self.group, group_src=source)
        if received is not tensor:
            # Of an expanded dimension, whose elements share memory, one element is written.
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
            tensor[once].copy_(received[once])

    def start_broadcast(self, tensor: Tensor, source: int) -> Any:
        """Start to overwrite a contiguous float ``tensor``; returns the work.

        Nobody may write it on ``source``, or use it elsewhere, until ``work.wait()``.
        """
        return dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)

    def send_to_all(self, pieces: Sequence[Tensor]) -> Works:
        """Start to overwrite ``pieces[r]``, contiguous, by that of rank ``r``; returns the work.

        Where :meth:`sends_messages`. Empty pieces are left out. It must be waited for, at once:
        a message that is dropped breaks the connection, and one that outlives a profiler that
        saw its start corrupts memory (torch 2.13).
        """
        return self._send_and_receive(pieces, [pieces[self.rank]] * self.size)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by the sum over ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Concatenate the ranks' 1-d ``input`` of equal length; it may be a view of ``output``."""
        if self.size > 1:
            assert self.group is not None  # so says the size; for the type checker
            _compat.all_gather_flat(output, input, self.group)

    def start_all_gather(self, output: Tensor, input: Tensor) -> Any:
        """Start :meth:`all_gather`; returns the work, before whose end nobody may use either."""
        assert self.group is not None
        return _compat.all_gather_flat(output, input, self.group, async_op=True)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> Any:
        """Start to exchange 1-d pieces: ``sent[r]`` elements go to rank ``r``; returns the work.

        The caller must keep both tensors unchanged and alive until ``work.wait()``. The piece
        that stays here need not be in ``output``: read it from ``input``.
        """
        if self.sends_messages(input.device):
            return self._send_and_receive(output.split(list(received)), input.split(list(sent)))
        return dist.all_to_all_single(
            output, input, list(received), list(sent), group=self.group, async_op=True
        )

    def sends_messages(self, device: torch.device) -> bool:
        """Whether spans travel as messages from rank to rank rather than in collectives.

        On gloo: its all-to-all copies the own piece too, its broadcasts wait for one another,
        and both run on the threads of collectives (``launch/benchmark.py collectives``).
        """
        return device.type == "cpu" and self.backend(device) == "gloo"

    def _send_and_receive(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Works:
        self._turn = (self._turn + 1) % TURNS  # several may be under way between the same ranks
        options: dict[str, Any] = {"group": self.group, "tag": TAG + self._turn}
        works = []
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            if inputs[to].numel():
                works.append(dist.isend(inputs[to], group_dst=to, **options))
            if outputs[source].numel():
                works.append(dist.irecv(outputs[source], group_src=source, **options))
        return Works(works)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        """Start to sum 1-d ``input`` over ranks, one equal piece for each; returns the work."""
        assert self.group is not None
        return _compat.reduce_scatter_flat(output, input, self.group, async_op=True)

    def exchange(self, value: Any, device: torch.device) -> list[Any]:
        """All ranks' picklable values, in rank order. For set-up and errors, never for a step."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        sizes = torch.empty(self.size, dtype=torch.int64, device=device)
        self.all_gather(sizes, torch.tensor([data.numel()], device=device))
        lengths = [int(size) for size in sizes.tolist()]
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: data.numel()] = data
        gathered = torch.empty(longest * self.size, dtype=torch.uint8, device=device)
        self.all_gather(gathered, padded)
        pieces = gathered.cpu().view(self.size, longest)
        return [
            pickle.loads(ctypes.string_at(pieces[rank].data_ptr(), length))  # needs no numpy
            for rank, length in enumerate(lengths)
        ]

    def together(self, fn: Callable[[], T], device: torch.device, call: str = "") -> T:
        """Run ``fn`` on this rank; what it returns if all ranks succeed, else all ranks raise.

        The one way in which something that may fail on one rank alone is done on all of them: a
        rank that raised by itself would leave the others waiting in their next collective. All
        ranks must call it, for their own ``fn``, which must not contain collectives of this
        group. Where all succeed it costs one collective of 16 bytes per rank.

        Args:
            device: where the flags are exchanged, of a kind that the group's backend serves.
            call: what is being done, for example ``"save"``; ranks that meet here in different
                calls all raise an error that names each rank's.

        Raises:
            Exception: on a rank whose ``fn`` raised: that very exception.
            ValueError, TypeError, RuntimeError: on the other ranks, with the ranks that failed
                and their messages; of the kind that was raised there if that is ValueError or
                TypeError, else RuntimeError.
        """
        value, error = _attempt(fn)
        if self.size > 1:
            known = hashlib.sha256(call.encode()).digest()[:7]
            mine = torch.tensor(
                [error is not None, int.from_bytes(known, "little")], dtype=torch.int64
            ).to(device)
            flags = mine.repeat(self.size)
            self.all_gather(flags, mine)
            told = flags.view(self.size, 2).tolist()
            if any(failed or theirs != told[0][1] for failed, theirs in told):
                _raise_together(self.exchange((call, _told(error)), device), error)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # there is one where there is no error

    def collect(self, fn: Callable[[], T], device: torch.device, call: str = "") -> list[T]:
        """:meth:`together` for values that all ranks need: those of all ranks, in rank order.

        Args:
            fn: what it returns should be small: every rank gets all of it, pickled.
        """
        mine = self.together(lambda: pickle.dumps(fn()), device, call)
        return [pickle.loads(value) for value in self.exchange(mine, device)]

    def backend(self, device: torch.device) -> str:
        """Name of the backend that moves tensors of ``device``, e.g. ``gloo`` or ``nccl``."""
        group = self.group
        if group is None:
            return "none"
        try:
            return group._get_backend(device).name()
        except RuntimeError:  # a mock group has no backend objects
            return group.name()


Told = tuple[str, str] | None  # kind and message of an error


def _attempt(fn: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return fn(), None
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return None, error


def _told(error: Exception | None) -> Told:
    if error is None:
        return None
    kinds = (kind.__name__ for kind in (ValueError, TypeError) if isinstance(error, kind))
    own_words = isinstance(error, (ValueError, TypeError, RuntimeError, OSError))
    return next(kinds, ""), str(error) if own_words else f"{type(error).__name__}: {error}"


def _raise_together(everyone: Sequence[tuple[str, Told]], error: Exception | None) -> None:
    """Raise if a rank failed or was in another call; ``error`` is this rank's own."""
    if error is not None:
        raise error
    failed = {rank: told for rank, (_, told) in enumerate(everyone) if told is not None}
    if failed:
        kinds = {kind for kind, _ in failed.values()}
        raised = {"ValueError": ValueError, "TypeError": TypeError}.get(
            kinds.pop() if len(kinds) == 1 else "", RuntimeError
        )
        raise raised(_by_rank((rank, message) for rank, (_, message) in failed.items()))
    if len({call for call, _ in everyone}) > 1:
        raise RuntimeError(
            "the ranks are in different calls: "
            + _by_rank((rank, call or "(unnamed)") for rank, (call, _) in enumerate(everyone))
            + "; make the same calls in the same order on every rank"
        )


def _by_rank(facts: Iterable[tuple[int, str]]) -> str:
    """``ranks 0, 2: one fact; rank 1: another``; of many ranks, or facts, the first ones."""
    ranks: dict[str, list[int]] = {}
    for rank, fact in facts:
        ranks.setdefault(fact, []).append(rank)
    shown = []
    for fact, those in list(ranks.items())[:SHOWN]:
        more = f" and {len(those) - SHOWN} more" if len(those) > SHOWN else ""
        names = ", ".join(map(str, those[:SHOWN])) + more
        shown.append(f"rank{'s' if len(those) > 1 else ''} {names}: {fact}")
    rest = len(ranks) - SHOWN
    return "; ".join([*shown, f"and {rest} others"] if rest > 0 else shown)


def same_everywhere(comm: Comm, lines: Sequence[str], device: torch.device) -> None:
    """Compare a description across ranks; raise the same error on every rank if one differs.

    Args:
        lines: what this rank has planned, one fact per line, details indented.

    Raises:
        RuntimeError: names the first line that differs, and what each rank has there.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    digests = mine.repeat(comm.size)
    comm.all_gather(digests, mine)  # 32 bytes per rank, whatever the models: it cannot mismatch
    if bool((digests.view(comm.size, 32) == mine).all()):
        return
    # Parameters are indented deepest: a difference is named there before it is in totals.
    ordered = sorted(lines, key=lambda line: len(line.lstrip()) - len(line))
    everyone = comm.exchange(ordered, device)
    for position in range(max(len(theirs) for theirs in everyone)):
        facts = [
            theirs[position].strip() if position < len(theirs) else "(nothing)"
            for theirs in everyone
        ]
        if len(set(facts)) > 1:
            shown = _by_rank(enumerate(facts))
            raise RuntimeError(
                f"model: the ranks do not hold the same model and options; first difference: "
                f"{shown}. Build the same model, optimizer groups and config on every rank."
            )
