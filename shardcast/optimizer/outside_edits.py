"""Parameters that no sharded optimizer holds, but that a script moves all the same.

An average or a counter that the model has as a parameter is made low like all that is not trained,
and its small changes are rounded away. A parameter that an optimizer of the script's own trains has
gradients that nobody averages over ranks. Neither shows in a loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import is_dense
from shardcast.memory.weight_edits import checksum
from shardcast.messages import warn
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.options import to_device
from shardcast.step.decide.skip_report import HostCopy
from shardcast.step.reduce.reducer import is_reduced

WRITES = 3  # looks in a row before which a parameter was written; one may be a load of weights


class OutsideEdits:
    """Warns of them. Local; looks in the steps 1, 2, 4, 8, ... and waits for no device.

    Args:
        outside: by name, parameters of the model that no optimizer holds.
        given: dtypes by name, as they were given to ``shard``.
        alone: there are no other ranks.

    Attributes:
        params: that are looked at, by name; none after the warning.
    """

    def __init__(
        self, outside: Mapping[str, nn.Parameter], given: Mapping[str, torch.dtype], alone: bool
    ) -> None:
        lowered = {
            name
            for name, param in outside.items()
            if given.get(name) == MASTER_DTYPE and param.dtype != MASTER_DTYPE
        }
        self.params = {
            name: param
            for name, param in outside.items()
            if (name in lowered or (param.requires_grad and not alone)) and is_dense(param)
        }
        self._lowered, self._alone = lowered, alone
        self._steps = 0
        self._marks: list[tuple[int, int]] = []
        self._sums = self._writes = torch.empty(0)
        self._copy: HostCopy | None = None

    def __call__(self) -> None:
        """After a step."""
        self._steps += 1
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not self.params or self._steps.bit_count() != 1 or capturing:
            return
        params = self.params.values()
        marks = [(param._version, param.data_ptr()) for param in params]
        device = next(iter(params)).device
        sums = torch.stack([checksum(_compat.local_tensor(param)).to(device) for param in params])
        if self._copy is None:
            self._copy, self._writes = HostCopy(device), torch.zeros_like(sums)
        else:
            self._warn()
            seen = [now != before for now, before in zip(marks, self._marks, strict=True)]
            written = (sums != self._sums) | to_device(seen, torch.bool, device)
            self._writes = torch.where(written, self._writes + 1, 0)
            self._copy.send(self._writes)
        self._marks, self._sums = marks, sums
        self._warn()

    def _warn(self) -> None:
        """Of the first one, once its number is here."""
        writes = None if self._copy is None else self._copy.read()
        for (name, param), count in zip(self.params.items(), writes or (), strict=False):
            if count >= WRITES and not is_reduced(param):  # by the optimizer of another model
                self.params = {}
                warn(self._message(name, param))
                return

    def _message(self, name: str, param: Tensor) -> str:
        message = f"parameter {name!r} is written in every step, but no sharded optimizer holds it"
        if name in self._lowered:
            message += (
                f"; shardcast.shard made it {param.dtype}, where the small changes of an average "
                f"or a counter are rounded away: give keep_fp32=({name!r},), or a pattern of all "
                "such names"
            )
        if param.requires_grad and not self._alone:
            message += (
                "; if another optimizer trains it, nobody averages its gradients over ranks: shard "
                "both together, shardcast.shard(model, [one, other])"
            )
        return message
