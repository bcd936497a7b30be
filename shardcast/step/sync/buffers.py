"""Sync: buffers that forwards write, such as BatchNorm's statistics, are rank 0's after a step.

A rank cannot send a buffer whenever it writes it, as ranks may run different branches. So the
buffers that travel are agreed on: in the first, second, 4th, 8th, ... step each rank says which of
them were written (through ``.data`` too, by their contents), and all send from then on what any
rank wrote. Causal masks, position numbers and the frequencies of rotary embeddings are never
written, and cost nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import Comm, copy_strided_, is_dense
from shardcast.memory.gradients import nothing
from shardcast.memory.weight_edits import checksum
from shardcast.messages import warn


class Buffers:
    """Broadcasts buffers of ``stages``. Calling it is collective, in the order of the stream.

    Args:
        comm: the data-parallel ranks, more than one; all of them have the same buffers.
    """

    def __init__(self, stages: Sequence[nn.Module], comm: Comm) -> None:
        self._stages, self._comm = stages, comm
        self._calls = 0
        self._sent: dict[str, str] = {}  # name to kind
        self._places: list[tuple[nn.Module, str]] = []  # of those
        self._message: tuple[Tensor, ...] = ()  # the last one, in pieces
        self._seen: dict[str, tuple[Callable[[], Tensor | None], int, int]] = {}
        self._look()

    @torch.no_grad()
    def __call__(self) -> None:
        self._calls += 1
        # A captured CUDA graph cannot wait for an answer; ranks capture the same step.
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._calls.bit_count() == 1 and not capturing:
            self._agree()
        if self._sent:
            self._broadcast()
        if self._calls == 1 and not capturing:
            self._look()  # what was written so far, by loading weights and by us, counts no more

    def _named(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """Each buffer with its name, its module and the name there."""
        for number, stage in enumerate(self._stages):
            for path, module in stage.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    full = f"{path}.{name}" if path else name
                    yield f"{number}:{full}", module, name, _compat.local_tensor(buffer)

    def _look(self) -> dict[str, tuple[str, bool]]:
        """Shape and dtype of this rank's buffers, and whether each was written since the last look.

        A buffer that is not dense has an empty text. Running statistics count as written.
        """
        seen: dict[str, tuple[Callable[[], Tensor | None], int, int]] = {}
        kinds = {}
        named = [*self._named()]
        checksums = _checksums([buffer for *_, buffer in named])
        for (name, module, _, buffer), content in zip(named, checksums, strict=True):
            version = 0 if buffer.is_inference() else buffer._version
            last_buffer, *last_marks = self._seen.get(name, (nothing, 0, 0))
            written = last_buffer() is not buffer or [version, content] != last_marks
            running = bool(getattr(module, "track_running_stats", False))
            kinds[name] = _kind(buffer), written or running
            seen[name] = weakref.ref(buffer), version, content
        self._seen = seen
        return kinds

    def _agree(self) -> None:
        """Find out which buffers any rank has written; the host waits for the others."""
        device = next(buffer.device for *_, buffer in self._named())
        by_rank = self._comm.exchange(self._look(), device)
        if self._calls == 2:
            self._sent = {}  # the first step's may have been written by load_state_dict alone
        unequal: list[str] = []
        for name in by_rank[0]:
            on_ranks = [of_rank.get(name, ("", False)) for of_rank in by_rank]
            if any(written for _, written in on_ranks):
                kinds = {kind for kind, _ in on_ranks}
                self._sent.pop(name, None)
                if len(kinds) == 1 and "" not in kinds:
                    self._sent[name] = kinds.pop()
                elif self._calls > 1:
                    unequal.append(repr(name.partition(":")[2]))
        self._places = [(m, key) for name, m, key, _ in self._named() if name in self._sent]
        self._message = ()
        if unequal:
            warn(
                f"broadcast_buffers: {', '.join(unequal)} changes in training and is not made "
                "equal on all ranks: it is sparse or quantised, or its shape or dtype differs "
                "between ranks; keep it equal yourself, or make it no buffer"
            )

    def _broadcast(self) -> None:
        """In one message, as bytes."""
        buffers = [_compat.local_tensor(module._buffers[key]) for module, key in self._places]
        dense = [buffer.contiguous() for buffer in buffers]
        pieces = [value.reshape(-1).view(torch.uint8) for value in dense]
        for number, (buffer, kind) in enumerate(zip(buffers, self._sent.values(), strict=True)):
            # A script gave it another shape, on this rank perhaps: the message keeps its length,
            # and this piece of it is not looked at, until ranks agree anew.
            if _kind(buffer) != kind and self._message:
                pieces[number] = self._message[number]
        message = torch.cat(pieces)
        self._comm.broadcast(message, 0, "buffers")
        self._message = message.split([piece.numel() for piece in pieces])
        if self._comm.rank != 0:
            torch._foreach_copy_(pieces, self._message)
            for buffer, value in zip(buffers, dense, strict=True):
                if value is not buffer:
                    copy_strided_(buffer, value)


def _checksums(buffers: Sequence[Tensor]) -> list[int]:
    """Of each buffer that is dense, for a write through ``.data`` is not counted; 0 of others."""
    sums = {n: checksum(buffer) for n, buffer in enumerate(buffers) if is_dense(buffer)}
    device = next((total.device for total in sums.values()), None)
    values = torch.stack([total.to(device) for total in sums.values()]).tolist() if sums else []
    known = dict(zip(sums, values, strict=True))
    return [known.get(number, 0) for number in range(len(buffers))]


def _kind(buffer: Tensor) -> str:
    return f"{tuple(buffer.shape)} {buffer.dtype}" if is_dense(buffer) else ""
