"""Values of the host between ranks, and agreement on them: at set-up and for errors."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardcast.messages import by_rank

T = TypeVar("T")
Failure = tuple[str, str] | None  # kind and message of an error


class ObjectCollectives(ABC):
    """Collectives of picklable values, made of those of tensors.

    Every method must be called by all ranks of the group; ``device`` is one of a kind that the
    group's backend serves.
    """

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, output: Tensor, input: Tensor, about: object = "") -> Any: ...
    @abstractmethod
    def all_to_all(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int],
        about: object = "",
    ) -> Any: ...  # fmt: skip
    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int, about: object = "") -> None: ...

    def exchange(self, value: Any, device: torch.device) -> list[Any]:
        """All ranks' values, in rank order; small ones, for every rank gets all of them."""
        if self.size == 1:
            return [value]
        data = _bytes(value, device)
        lengths = self._lengths(data)
        padded = data.new_zeros(max(lengths))
        padded[: data.numel()] = data
        gathered = padded.new_empty(padded.numel() * self.size)
        self.all_gather(gathered, padded, "values")
        rows = gathered.cpu().view(self.size, -1)
        return _unpickled(row[:length] for row, length in zip(rows, lengths, strict=True))

    def gather(self, value: Any, device: torch.device) -> list[Any]:
        """All ranks' values, in rank order, on rank 0; nothing on the others."""
        if self.size == 1:
            return [value]
        data = _bytes(value, device)
        lengths = self._lengths(data)
        sent = [data.numel()] + [0] * (self.size - 1)
        received = lengths if self.rank == 0 else [0] * self.size
        gathered = data.new_empty(sum(received))  # not padded: one rank may have nearly everything
        self.all_to_all(gathered, data, received, sent, "values").wait()
        if self.rank != 0:
            return []
        gathered[: data.numel()] = data
        return _unpickled(gathered.cpu().split(lengths))

    def share(self, value: T, device: torch.device) -> T:
        """Rank 0's value on every rank; the values of the others are not read."""
        if self.size == 1:
            return value
        data = _bytes(value, device) if self.rank == 0 else None
        length = torch.tensor([0 if data is None else data.numel()], device=device)
        self.broadcast(length, 0, "values")
        if data is None:
            data = torch.empty(int(length), dtype=torch.uint8, device=device)
        self.broadcast(data, 0, "values")
        shared: T = _unpickled([data.cpu()])[0]
        return shared

    def agree(self, text: str, device: torch.device, about: object = "") -> bool:
        """Whether all ranks pass the same text; one collective of 8 bytes per rank."""
        if self.size == 1:
            return True
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        own = torch.tensor([digest], device=device)
        digests = own.repeat(self.size)
        self.all_gather(digests, own, about)
        return len(set(digests.tolist())) == 1

    def together(self, fn: Callable[[], T], device: torch.device, call: str = "") -> T:
        """Run ``fn`` on this rank; what it returns if all ranks succeed, else all ranks raise.

        The one way in which something that may fail on one rank alone is done on all of them: a
        rank that raised by itself would leave the others waiting in their next collective. All
        ranks must call it, for their own ``fn``, which must not contain collectives of this
        group. Where all succeed it costs one collective of 8 bytes per rank.

        Args:
            call: what is being done, for example ``"save"``; ranks that meet here in different
                calls all raise an error that names each rank's.

        Raises:
            Exception: on a rank whose ``fn`` raised: that very exception.
            ValueError, TypeError, RuntimeError: on the other ranks, with the ranks that failed
                and their messages; of the kind that was raised there if that is ValueError or
                TypeError, else RuntimeError.
        """
        error: Exception | None = None
        try:
            value = fn()
        except Exception as raised:  # whatever it is, the other ranks must raise too
            error = raised
        outcome = call if error is None else f"{call} failed on rank {self.rank}"
        if not self.agree(outcome, device, call):
            self._raise(call, error, device)
        if error is not None:
            raise error
        return value

    def collect(self, fn: Callable[[], T], device: torch.device, call: str = "") -> list[T]:
        """:meth:`together` for values that all ranks need: those of all ranks, in rank order.

        Args:
            fn: what it returns should be small: every rank gets all of it, pickled.
        """
        own = self.together(lambda: pickle.dumps(fn()), device, call)
        return [pickle.loads(value) for value in self.exchange(own, device)]

    def check_equal(self, lines: Sequence[str], device: torch.device) -> None:
        """Raise the same error on every rank if a description differs between ranks.

        Args:
            lines: what this rank has planned, one fact per line, details indented.

        Raises:
            RuntimeError: names the first line that differs, and what each rank has there.
        """
        if self.agree("\n".join(lines), device, "descriptions"):
            return
        # Parameters are indented deepest: a difference is named there before it is in totals.
        ordered = sorted(lines, key=lambda line: len(line.lstrip()) - len(line))
        # No rank gets the lines of all the others, which of a thousand ranks are gigabytes.
        of_rank_0 = self.share(ordered, device)
        longest = max(len(of_rank_0), len(ordered))
        differing = (n for n in range(longest) if of_rank_0[n : n + 1] != ordered[n : n + 1])
        positions = self.exchange(next(differing, None), device)
        position = min(position for position in positions if position is not None)
        fact = ordered[position].strip() if position < len(ordered) else "(nothing)"
        raise RuntimeError(
            "model: the ranks do not hold the same model and options; first difference: "
            f"{by_rank(enumerate(self.exchange(fact, device)))}. Build the same model, optimizer "
            "groups and config on every rank."
        )

    def _lengths(self, data: Tensor) -> list[int]:
        lengths = torch.empty(self.size, dtype=torch.int64, device=data.device)
        own = torch.tensor([data.numel()], device=data.device)
        self.all_gather(lengths, own, "values")
        return [int(length) for length in lengths.tolist()]

    def _raise(self, call: str, error: Exception | None, device: torch.device) -> None:
        """Raise on every rank: one failed, or they are in different calls."""
        outcomes: list[tuple[str, Failure]] = self.exchange((call, _failure(error)), device)
        if error is not None:
            raise error
        failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure}
        if failures:
            kinds = {kind for kind, _ in failures.values()}
            raised = {"ValueError": ValueError, "TypeError": TypeError}.get(
                kinds.pop() if len(kinds) == 1 else "", RuntimeError
            )
            raise raised(by_rank((rank, message) for rank, (_, message) in failures.items()))
        calls = [(rank, call or "(unnamed)") for rank, (call, _) in enumerate(outcomes)]
        raise RuntimeError(
            f"the ranks are in different calls: {by_rank(calls)}; make the same calls in the same "
            "order on every rank"
        )


def _failure(error: Exception | None) -> Failure:
    if error is None:
        return None
    kinds = (kind.__name__ for kind in (ValueError, TypeError) if isinstance(error, kind))
    own_words = isinstance(error, (ValueError, TypeError, RuntimeError, OSError))
    return next(kinds, ""), str(error) if own_words else f"{type(error).__name__}: {error}"


def _bytes(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def _unpickled(pieces: Iterable[Tensor]) -> list[Any]:
    """Values of contiguous bytes on the host."""
    return [
        pickle.loads(ctypes.string_at(piece.data_ptr(), piece.numel()))  # needs no numpy
        for piece in pieces
    ]
