"""The arithmetic of blocks: on a CPU in pieces that stay in its cache, else one kernel each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.config import ShardcastConfig
from shardcast.extensions.published_forms.forms import Form
from shardcast.memory.codecs import shown, take_shown_
from shardcast.step.compiling import compiles, or_eager

CHUNK = 1 << 17  # elements per eager call on a CPU: all temporaries stay in its cache

Kernel = Callable[..., None]


class Kernels:
    """The kernels of one form.

    Tensors of values are of shape ``(stack, rows, columns)``, whole blocks; those of codes and
    scales of as many rows and block rows.
    """

    def __init__(self, form: Form, config: ShardcastConfig) -> None:
        self._form, self._config = form, config
        self._compiled: bool | None = None

    def round(self, masters: Tensor, outputs: Sequence[Tensor]) -> None:
        """Write what is published of masters into each of the outputs."""
        rows = self._rows(masters)
        self._run(_round, (masters, *outputs), [rows] * (1 + len(outputs)))

    def collapse(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Return the codes and scales of values."""
        rows = self._rows(values)
        blocks = rows // self._form.block_rows
        self._run(_collapse, (values, codes, scales), [rows, rows, blocks])

    def expand(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """The inverse of :meth:`collapse`, to the bit."""
        rows = self._rows(values)
        blocks = rows // self._form.block_rows
        self._run(_expand, (values, codes, scales), [rows, rows, blocks])

    def take_written(self, masters: Tensor, published: Tensor, last: Tensor) -> bool:
        """See :meth:`.Cast.take_written_`."""
        if _compat.is_host(masters.device):
            word = torch.int16 if published.numel() % 4 else torch.int64
            if torch.equal(last.view(word), published.view(word)):
                return False
            take_shown_(masters, published, last)
            return True
        call = _kernel(_take, self._form) if self._compiles(masters.device) else _take
        call(self._form, masters, published, last)
        return True

    def _rows(self, values: Tensor) -> int:
        """Return the rows of one call on a CPU."""
        height = self._form.block_rows
        return max(1, CHUNK // (height * values.shape[-1])) * height

    def _compiles(self, device: torch.device) -> bool:
        """Return whether kernels are compiled; on a CPU that takes longer than it saves."""
        if self._compiled is None:
            self._compiled = not _compat.is_host(device) and compiles(self._config, device)
        return self._compiled

    def _run(self, call: Kernel, tensors: Sequence[Tensor], rows: Sequence[int]) -> None:
        device = tensors[0].device
        if self._compiles(device):
            _kernel(call, self._form)(self._form, *tensors)
        elif not _compat.is_host(device):
            call(self._form, *tensors)
        else:
            pieces = (tensor.split(count, 1) for tensor, count in zip(tensors, rows, strict=True))
            for piece in zip(*pieces, strict=True):
                call(self._form, *piece)


def _round(form: Form, masters: Tensor, *outputs: Tensor) -> None:
    values = form.round(masters)
    for output in outputs:
        output.copy_(values)


def _collapse(form: Form, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    its_codes, its_scales = form.quantize(values)
    codes.copy_(its_codes)
    scales.copy_(its_scales)


def _expand(form: Form, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    values.copy_(form.dequantize(codes, scales))


def _take(_form: Form, masters: Tensor, published: Tensor, last: Tensor) -> None:
    masters.copy_(shown(masters, published, last))


@functools.cache  # one compiled function for all packs of a form
def _kernel(call: Kernel, form: Form) -> Kernel:
    def as_graph(*tensors: Any) -> None:
        call(form, *tensors)

    compiled = inductor.compiled(as_graph)

    def run(_form: Form, *tensors: Tensor) -> None:
        compiled(*tensors)

    return or_eager(run, call, f"{call.__name__.strip('_')} of {form.name}")
