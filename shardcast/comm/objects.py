"""A process group for set-up and errors: exchanges host values and agrees on them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat
from shardcast.comm.group import TensorCollectives, Work
from shardcast.messages import by_rank
from shardcast.plan.algorithms import Topology

T = TypeVar("T")
REMEDY_INIT = (
    "call torch.distributed.init_process_group(...) on every rank before shardcast.shard(...)"
)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Comm(TensorCollectives):
    """The ranks that share one model, with collectives of picklable values.

    torch's own object collectives use the current device, which may not be the model's. All ranks
    of the group must call every method; ``device`` must be of a kind that the group's backend
    supports.
    """

    @classmethod
    def resolve(cls, process_group: dist.ProcessGroup | None) -> Comm:
        """Return the group to use: the given one, else the default one, else this process alone.

        Raises:
            ValueError: this rank is not a member of ``process_group``.
            RuntimeError: ``WORLD_SIZE`` is above 1 but there is no process group.
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
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if announced > 1 and group is None:
            raise RuntimeError(
                f"process_group: WORLD_SIZE is {announced} but torch.distributed is not "
                f"initialized; {REMEDY_INIT}"
            )
        if announced > 1 and group is not None and group.size() == 1:
            raise RuntimeError(
                f"process_group: WORLD_SIZE is {announced} but the default process group has "
                "one rank: each process would train alone; initialize the group with all "
                "ranks (for Accelerate on CPU: ACCELERATE_USE_CPU=true accelerate launch "
                "--multi_gpu --num_processes N)"
            )
        return cls(group)

    def topology(self, device: torch.device) -> Topology:
        """Return the links between ranks, equal on all ranks. Collective: 8 bytes per rank."""
        backend, on_host = self.backend(device), device.type == "cpu"
        machines = self._numbers(_digest(machine()), device, "the machines")
        node = machines.count(machines[0])
        firsts = machines[::node]
        apart = len(set(firsts)) == len(firsts)
        apart &= machines == [first for first in firsts for _ in range(node)]
        return Topology(backend, node if apart else 1, on_host)

    def exchange(self, value: T, device: torch.device) -> list[T]:
        """Return all ranks' values in rank order. Keep them small: every rank gets all of them."""
        if self.size == 1:
            return [value]
        data = _bytes(value, device)
        lengths = self._numbers(data.numel(), device, "values")
        padded = data.new_zeros(max(lengths))
        padded[: data.numel()] = data
        gathered = padded.new_empty(padded.numel() * self.size)
        self.all_gather(gathered, padded, "values")
        rows = self._on_host(gathered).view(self.size, -1)
        return _unpickled(row[:length] for row, length in zip(rows, lengths, strict=True))

    def gather(self, value: T, device: torch.device) -> list[T]:
        """Return all ranks' values in rank order on rank 0; other ranks get nothing."""
        if self.size == 1:
            return [value]
        data = _bytes(value, device)
        lengths = self._numbers(data.numel(), device, "values")
        sent = [data.numel()] + [0] * (self.size - 1)
        received = lengths if self.rank == 0 else [0] * self.size
        # not padded, because one rank may have nearly everything
        gathered = data.new_empty(sum(received))
        self.all_to_all(gathered, data, received, sent, "values").wait()
        if self.rank != 0:
            return []
        gathered[: data.numel()] = data
        return _unpickled(self._on_host(gathered).split(lengths))

    def share(self, value: T, device: torch.device) -> T:
        """Return rank 0's value on every rank; the other ranks' values are ignored."""
        if self.size == 1:
            return value
        data = _bytes(value, device) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()], device=device)
        self.broadcast(length, 0, "values")
        if self.rank != 0:
            data = torch.empty(int(self._on_host(length)), dtype=torch.uint8, device=device)
        self.broadcast(data, 0, "values")
        shared: T = _unpickled([self._on_host(data)])[0]
        return shared

    def agree(self, text: str, device: torch.device, about: object = "") -> bool:
        """Return whether all ranks pass the same text. Collective: 8 bytes per rank."""
        return len(set(self._numbers(_digest(text), device, about))) == 1

    def together(self, fn: Callable[[], T], device: torch.device, call: str = "") -> T:
        """Run ``fn`` on this rank. Return its result if all ranks succeed; else all ranks raise.

        Use this for anything that may fail on one rank alone: a rank that raised by itself would
        leave the others waiting in their next collective. ``fn`` must not contain collectives of
        this group.

        Collective: every rank, each with its own ``fn``. On success it costs 8 bytes per rank.

        Args:
            call: name of the caller, such as ``"save"``. If ranks meet here in different calls, all
                of them raise an error that names each rank's call.

        Raises:
            Exception: on a rank whose ``fn`` raised: that exception.
            ValueError, TypeError, RuntimeError: on the other ranks, with the failed ranks and their
                messages. The type is the failed rank's if that is ValueError or TypeError, else
                RuntimeError.
        """
        error: Exception | None = None
        try:
            value = fn()
        except Exception as raised:  # for any exception the other ranks must raise, too
            error = raised
        outcome = call if error is None else f"{call} failed on rank {self.rank}"
        alike = self.agree(outcome, device, call)
        failures = [] if alike else self.exchange((call, failure_of(error)), device)
        if error is not None:
            raise error
        if not alike:
            raise raised_elsewhere(failures)
        return value

    def collect(self, fn: Callable[[], T], device: torch.device, call: str = "") -> list[T]:
        """:meth:`together`, but return the results of all ranks, in rank order.

        Args:
            fn: its result should be small, because every rank gets all results, pickled.
        """
        own = self.together(lambda: pickle.dumps(fn()), device, call)
        return [pickle.loads(value) for value in self.exchange(own, device)]

    def check_equal(self, lines: Sequence[str], device: torch.device) -> None:
        """Raise the same error on every rank if a description differs between ranks.

        Args:
            lines: this rank's plan, one fact per line, details indented.

        Raises:
            RuntimeError: names the first line that differs, and each rank's version.
        """
        if not self.agree("\n".join(lines), device, "descriptions"):
            raise differing(self, lines, device)

    def _on_host(self, values: Tensor) -> Tensor:
        """Return received data on the host; on an accelerator this waits for it."""
        with Work(self, "a collective", "values"):
            return values.cpu()

    def _numbers(self, number: int, device: torch.device, about: object) -> list[int]:
        """Return all ranks' integers, in rank order."""
        if self.size == 1:
            return [number]
        own = torch.tensor([number], device=device)
        numbers = own.repeat(self.size)
        with Work(self, "an all-gather", about):  # the host waits for the collective, too
            _compat.all_gather_flat(numbers, own, self.group)
            return [int(number) for number in numbers.tolist()]


def machine() -> str:
    """Return an id that processes of one machine share, even in different containers."""
    try:
        return BOOT_ID.read_text()
    except OSError:  # not Linux
        return socket.gethostname()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _bytes(value: object, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def _unpickled(pieces: Iterable[Tensor]) -> list[Any]:
    """Unpickle the values of contiguous bytes on the host."""
    return [
        pickle.loads(ctypes.string_at(piece.data_ptr(), piece.numel()))  # works without NumPy
        for piece in pieces
    ]


def differing(comm: Comm, lines: Sequence[str], device: torch.device) -> RuntimeError:
    """Return an error that names the first line that differs, and each rank's version of it.

    Collective: every rank of ``comm``.
    """
    # Parameters are indented deepest, so that an error names them before totals.
    ordered = sorted(lines, key=lambda line: len(line.lstrip()) - len(line))
    # No rank gets the lines of all others; for a thousand ranks these are gigabytes.
    reference = comm.share(ordered, device)  # rank 0's
    longest = max(len(reference), len(ordered))
    places = (n for n in range(longest) if reference[n : n + 1] != ordered[n : n + 1])
    first = min(comm.exchange(next(places, longest), device))
    fact = ordered[first].strip() if first < len(ordered) else "(nothing)"
    return RuntimeError(
        "model: the ranks do not hold the same model and options; first difference: "
        f"{by_rank(enumerate(comm.exchange(fact, device)))}. Build the same model, optimizer "
        "groups and config on every rank."
    )


def failure_of(error: Exception | None) -> tuple[str, str] | None:
    """Return the type and message of an error."""
    if error is None:
        return None
    kinds = (kind.__name__ for kind in (ValueError, TypeError) if isinstance(error, kind))
    own_words = isinstance(error, (ValueError, TypeError, RuntimeError, OSError))
    return next(kinds, ""), str(error) if own_words else f"{type(error).__name__}: {error}"


def raised_elsewhere(outcomes: Sequence[tuple[str, tuple[str, str] | None]]) -> Exception:
    """Return the error for a rank without one: others failed, or are in different calls.

    Args:
        outcomes: call and failure of each rank.
    """
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure}
    if failures:
        kinds = {kind for kind, _ in failures.values()}
        raised = {"ValueError": ValueError, "TypeError": TypeError}.get(
            kinds.pop() if len(kinds) == 1 else "", RuntimeError
        )
        return raised(by_rank((rank, message) for rank, (_, message) in failures.items()))
    calls = [(rank, call or "(unnamed)") for rank, (call, _) in enumerate(outcomes)]
    return RuntimeError(
        f"the ranks are in different calls: {by_rank(calls)}; make the same calls in the same "
        "order on every rank"
    )
