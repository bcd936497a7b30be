"""``broadcast_buffers``: buffers, such as BatchNorm's statistics, are rank 0's, as under DDP.

All dense buffers travel in one message: before a forward in training, as under DDP, and after each
step, so that ranks evaluate alike without a collective during evaluation.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardcast import _compat
from shardcast.comm import copy_strided_, is_dense, warn_first
from shardcast.hook import Hook
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option, read_patterns
from shardcast.step.decide.decision import Decision
from shardcast.step.step_hook import StepHook

OUTSIDE = (  # run before the graph of a compiled forward
    "shardcast sends the buffers of the model before a forward: compile without fullgraph, or "
    "pass broadcast_buffers=False to shardcast.shard"
)


class Place(NamedTuple):
    """The place of a buffer, and its properties when the ranks compared theirs."""

    name: str
    module: nn.Module
    key: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def buffer(self) -> Tensor | None:
        """Return the current buffer; ``None`` if its properties have changed."""
        buffer = self.module._buffers.get(self.key)
        local = None if buffer is None else _compat.local_tensor(buffer)
        if local is None or not is_dense(local):
            return None
        kind = local.shape, local.dtype, local.device
        return local if kind == (self.shape, self.dtype, self.device) else None


class Buffers(StepHook):
    """Broadcasts the buffers of the stages: all of them in each step, before the sync.

    A forward of a root in training mode, with gradients enabled, sends the root's buffers if the
    forward before it was synchronized, or there was none. That is once per accumulation, as under
    DDP. Unlike DDP, a forward in evaluation mode or without gradients sends nothing, so rank 0 may
    evaluate alone. With one data-parallel rank nothing is sent.
    """

    name = "broadcast_buffers"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._stages, self._roots = optimizer.stages, optimizer.called
        self._comm, self._reduce = optimizer.comm, optimizer.reduce
        patterns = optimizer.config.broadcast_buffers
        # patterns of buffers that stay local to each rank
        self._left_out = () if isinstance(patterns, bool) else patterns
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Register the current buffers, and send them before forwards of roots."""
        stages = self._stages if self._comm.size > 1 else ()
        self._modules = [pair for stage in stages for pair in stage.named_modules()]
        self._warned = set[str]()
        self._known = set[tuple[nn.Module, str]]()
        self._places: list[Place] = []
        seen = set[Tensor]()
        for name, module, key, buffer in self._new():
            local = _compat.local_tensor(buffer)
            if buffer not in seen and is_dense(local) and not self._is_left_out(name):
                of_local = local.shape, local.dtype, local.device
                self._places.append(Place(name, module, key, *of_local))
            seen.add(buffer)
        self._of_root: dict[nn.Module, list[Place]] = {}
        self._due: dict[nn.Module, bool] = {}  # whether its next forward sends buffers first
        hook = torch.compiler.disable(self._before_forward, reason=OUTSIDE)
        for root in self._roots:
            inside = {*root.modules()}
            if places := [place for place in self._places if place.module in inside]:
                self._of_root[root], self._due[root] = places, True
                self._handles.append(root.register_forward_pre_hook(Hook(hook)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def after_update(self, decision: Decision) -> None:
        """Send rank 0's buffers to all ranks."""
        self._warn_of_new()
        self._broadcast(self._places)

    def sent(self) -> dict[str, Tensor] | None:
        """Return the buffers that equal rank 0's; ``None`` if one of them changed its kind here."""
        dense = {p.name: buffer.data for p in self._places if (buffer := p.buffer()) is not None}
        return dense if len(dense) == len(self._places) else None

    def before(self, root: nn.Module) -> None:
        """Send the buffers of a root before its forward, if they are due. Collective."""
        if self._due.get(root):
            self._broadcast(self._of_root[root])
            self._due[root] = self._reduce.synchronises

    def _before_forward(self, root: nn.Module, _args: object) -> None:
        # Inside a backward, activation checkpointing recomputes a forward.
        if root.training and torch.is_grad_enabled() and _compat.current_backward() == -1:
            self._broadcast(self._of_root[root] if self._due[root] else ())
            self._due[root] = self._reduce.synchronises

    @torch.no_grad()
    def _broadcast(self, places: Sequence[Place]) -> None:
        """Send buffers in one message, as bytes. Its length does not depend on a rank's edits."""
        for device in dict.fromkeys(place.device for place in places):
            alike = [place for place in places if place.device == device]
            buffers = [place.buffer() for place in alike]
            # ``.data``, so that a graph of an earlier forward that saved the buffer stays usable.
            dense = [
                self._missing(place) if buffer is None else buffer.data.contiguous()
                for place, buffer in zip(alike, buffers, strict=True)
            ]
            pieces = [value.reshape(-1).view(torch.uint8) for value in dense]
            message = torch.cat(pieces)
            self._comm.broadcast(message, 0, "buffers")
            if self._comm.rank != 0:
                torch._foreach_copy_(pieces, message.split([piece.numel() for piece in pieces]))
                for buffer, value in zip(buffers, dense, strict=True):
                    if buffer is not None and not buffer.is_contiguous():
                        copy_strided_(buffer.data, value)

    def _missing(self, place: Place) -> Tensor:
        """Return bytes that replace a changed buffer; if it is rank 0's, others get NaN or -1."""
        if place.name not in self._warned:
            self._warned.add(place.name)
            warn_first(
                f"broadcast_buffers: {place.name!r} was {place.dtype} of {tuple(place.shape)} "
                "when the model was sharded, and has changed on this rank, so it is no longer "
                "broadcast: give it its final shape before shardcast.shard, or keep it equal "
                f"yourself and leave it out, broadcast_buffers=({place.name!r},)"
            )
        nbytes = place.shape.numel() * place.dtype.itemsize
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=place.device)

    def _warn_of_new(self) -> None:
        """Warn once about new buffers, which other ranks may not have."""
        new = [name for name, *_ in self._new() if not self._is_left_out(name)]
        if new:
            names = ", ".join(map(repr, new))
            warn_first(
                f"broadcast_buffers: {names} did not exist when the model was sharded, so each "
                "rank keeps its own values: register buffers before shardcast.shard, or keep "
                f"them equal yourself and leave them out, broadcast_buffers=({new[0]!r},)"
            )

    def _is_left_out(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._left_out)

    def _new(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """Yield each buffer that is new since the last call: name, module, key there, value."""
        for path, module in self._modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and (module, key) not in self._known:
                    self._known.add((module, key))
                    yield f"{path}.{key}" if path else key, module, key, buffer


OPTION = Option(
    help="give all ranks rank 0's buffers before forwards in training, as DDP does, and after "
    "every step; a list of glob patterns names buffers to leave out; false: off",
    read=read_patterns,
    hook=Buffers,
)
