"""Weights that a script loads into the model between two steps, which must be alike on all ranks.

Each owner takes what is loaded for its own span: loaded on one rank alone, another model would be
trained in the spans of that rank.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.memory.slices import slices
from shardcast.step.history import listed

ODD = 0x1E3779B97F4A7C15  # tells the order of chunks
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Loads:
    """The parameters that were loaded since the last step, each with a hash of what it was before.

    Weights that are loaded and put back, to evaluate others in between, are no difference.
    """

    def __init__(self) -> None:
        self._before: dict[nn.Parameter, tuple[str, int]] = {}
        self._own: set[nn.Parameter] = set()  # whose values are no other rank's
        self._told: list[nn.Parameter] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def note(self, param: nn.Parameter, name: str, is_shared: bool) -> None:
        """Note a parameter that is loaded next. Local; waits for the device.

        Args:
            is_shared: all data-parallel ranks hold it; they hold different experts.
        """
        if param not in self._before:
            self._before[param] = name, _hash(param)
            if not is_shared:
                self._own.add(param)

    def changed(self) -> str:
        """Name the parameters whose bits are others than before, with a hash of their values."""
        self._told = [*self._before]
        if not self._before:
            return ""
        changed = {}
        for param, (name, before) in self._before.items():
            if (after := _hash(param)) != before:
                changed[name] = None if param in self._own else after
        if not changed:
            return ""
        return f"{listed([*changed])} (values {zlib.crc32(repr([*changed.items()]).encode()):08x})"

    def clear(self) -> None:
        """Forget those that :meth:`changed` has told last: a step has compared them."""
        for param in self._told:
            self._before.pop(param, None)
        self._told.clear()


@torch.no_grad()
def _hash(param: Tensor) -> int:
    data = _compat.local_tensor(param).detach().reshape(-1)
    words, total = data.view(BITS[data.element_size()]), 0
    for part in slices(words.numel()):
        piece = words[part].long()
        weights = torch.arange(1, 1 + piece.numel(), device=piece.device)
        total = (total * ODD + int((piece * weights).sum())) % (1 << 64)
    return total
