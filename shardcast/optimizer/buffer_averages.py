"""Averages of buffers such as BatchNorm's statistics, beside those of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import Comm
from shardcast.option_values import AverageOptions
from shardcast.step.update.epilogues import AVERAGE, STEPS, Average


class BufferAverages:
    """The buffers that ``state_dict`` saves, and the averages with ``use_buffers`` of them.

    Floating-point buffers are averaged in fp32 on every rank; like buffers, the averages that the
    model gets are those of rank 0. An average begins as the buffers of the first step that is made.

    Args:
        comm: the data-parallel ranks.

    Attributes:
        active: there are such averages.
        of_training: the buffers of the training by name, where an average is in the model.
    """

    def __init__(
        self, stages: Sequence[nn.Module], averages: Sequence[AverageOptions], comm: Comm
    ) -> None:
        self._stages, self._comm = stages, comm
        self._averages = [Average(options) for options in averages if options.use_buffers]
        self._values: dict[str, Tensor] = {}  # 1-d, of all averaged buffers in turn
        self._steps: dict[str, Tensor] = {}  # 0-dim fp64, that an average has taken part in
        for average in self._averages if self.averaged() else ():
            flat = self._flat()
            self._values[average.options.name] = torch.zeros_like(flat)
            self._steps[average.options.name] = flat.new_zeros((), dtype=torch.float64)
        self.active = bool(self._values)
        self.of_training: dict[str, Tensor] = {}

    def saved(self) -> dict[str, Tensor]:
        """The buffers that ``state_dict`` saves, each under its first name.

        Asked of the modules, since hooks may give the keys of ``state_dict`` other names.
        """
        names: dict[Tensor, str] = {}
        for prefix, module in (pair for stage in self._stages for pair in stage.named_modules()):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    names.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
        return {name: buffer for buffer, name in names.items()}

    def averaged(self) -> dict[str, Tensor]:
        """The floating-point ones of them, of DTensors the local part; none if no option asks."""
        if not self._averages:
            return {}
        local = {name: _compat.local_tensor(buffer) for name, buffer in self.saved().items()}
        return {name: buffer for name, buffer in local.items() if buffer.is_floating_point()}

    def _flat(self) -> Tensor:
        return torch.cat([buffer.reshape(-1).float() for buffer in self.averaged().values()])

    @property
    def nbytes(self) -> int:
        """Bytes of the averages."""
        return sum(values.nbytes for values in self._values.values())

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Average the buffers after a step; waits for no device.

        Args:
            skip: 0-dim bool, the step was skipped.
        """
        flat = self._flat()
        for average in self._averages:
            values, steps = self._values[average.options.name], self._steps[average.options.name]
            steps += ~skip
            (weight,) = average.numbers(steps)
            lerped = torch.lerp(values, flat, torch.where(steps > 1, weight, 1.0).float())
            values.copy_(torch.where(skip, values, lerped))

    @contextmanager
    def switched(self, name: str) -> Iterator[None]:
        """Have an average in the model, if it has buffers; undo all writes in the end."""
        buffers = {name: _compat.local_tensor(buffer) for name, buffer in self.saved().items()}
        versions = {name: _version(buffer) for name, buffer in buffers.items()}
        with torch.no_grad():
            self.of_training = {name: buffer.clone() for name, buffer in buffers.items()}
            if name in self._values:
                flat = torch.where(self._steps[name] > 0, self._values[name], self._flat())
                self._comm.broadcast(flat, 0, "averages of buffers")
                for buffer, part in zip(self.averaged().values(), self._split(flat), strict=True):
                    buffer.copy_(part)
        try:
            yield
        finally:
            running = self._running()
            for key, buffer in buffers.items():
                # A copy into one that nobody wrote would have it sent after each step; torch does
                # not count what BatchNorm writes.
                if _version(buffer) != versions[key] or buffer in running:
                    with torch.no_grad():
                        buffer.copy_(self.of_training[key])
            self.of_training = {}

    def _running(self) -> set[Tensor]:
        modules = [module for stage in self._stages for module in stage.modules()]
        running = [m for m in modules if getattr(m, "track_running_stats", False)]
        return {buffer for module in running for buffer in module.buffers(recurse=False)}

    def _split(self, flat: Tensor) -> Iterator[Tensor]:
        start = 0
        for buffer in self.averaged().values():
            yield flat[start : start + math.prod(buffer.shape)].view(buffer.shape)
            start += math.prod(buffer.shape)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By buffer, its averages and their numbers of steps, as of a parameter; the memory."""
        state: dict[str, dict[str, Tensor]] = {name: {} for name in self.averaged()}
        for average, values in self._values.items():
            for entries, part in zip(state.values(), self._split(values), strict=True):
                entries[AVERAGE + average] = part
                entries[AVERAGE + average + STEPS] = self._steps[average]
        return state

    def check(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise ``ValueError`` where :meth:`load` would write values of another shape. Local."""
        for name, entries in self.state().items():
            for key, tensor in entries.items():
                loaded = state.get(name, {}).get(key)
                if loaded is not None and loaded.shape != tensor.shape:
                    raise ValueError(
                        f"state_dict: {key!r} of buffer {name!r} has shape {tuple(loaded.shape)}, "
                        f"expected {tuple(tensor.shape)}"
                    )

    @torch.no_grad()
    def begin(self, name: str, weights: Mapping[str, Tensor], steps: int) -> None:
        """Go on from an existing average, where it has all buffers; see ``load_average``. Local."""
        buffers = self.averaged()
        if name in self._values and buffers.keys() <= weights.keys():
            for buffer_name, part in zip(buffers, self._split(self._values[name]), strict=True):
                part.copy_(_compat.local_tensor(weights[buffer_name]))
            self._steps[name].fill_(max(1, steps))

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take what :meth:`state` gave; an average that it lacks begins anew. Local."""
        own = self.state()
        for steps in self._steps.values():
            steps.zero_()
        for name, entries in own.items():
            for key, tensor in entries.items():
                if (loaded := state.get(name, {}).get(key)) is not None:
                    tensor.copy_(loaded)


def _version(buffer: Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version
