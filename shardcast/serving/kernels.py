"""The arithmetic of blocks: in cache-sized pieces on a CPU, otherwise compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import shown
from shardcast.serving.forms import FORMS, Form
from shardcast.step.compiling import compiles, or_eager

BITS = torch.int16  # bf16 values are written as this, see Form.dequantize_bits
CACHED = 1 << 17  # elements per eager call on a CPU, so that all temporaries stay in cache

Kernel = Callable[..., None]


class Kernels:
    """The kernels of one form.

    Tensors of values have the shape ``(stack, rows, columns)``, in whole blocks. Codes, as bytes,
    have the same number of rows, and scales the number of block rows.
    """

    def __init__(self, form: Form, config: ShardcastConfig) -> None:
        self._form, self._config = form, config
        self._compiled: bool | None = None

    def round(self, masters: Tensor, output: Tensor) -> None:
        """Write the published values of masters to the output."""
        rows, columns = self._rows(masters), self._form.block_columns
        self._run(_round, (masters, output.view(BITS)), [rows] * 2, [columns] * 2)

    def collapse(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Return the codes and scales of values."""
        rows = self._rows(values)
        blocks = rows // self._form.block_rows
        self._run(_collapse, (values, codes, scales), [rows, rows, blocks], self._block)

    def expand(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Return the values of codes and scales; the bitwise inverse of :meth:`collapse`."""
        rows = self._rows(values)
        blocks = rows // self._form.block_rows
        given = values.view(BITS), codes, scales
        self._run(_expand, given, [rows, rows, blocks], self._block)

    def take_written(self, masters: Tensor, published: Tensor, last: Tensor) -> bool:
        """Copy published values that differ from the last ones into the masters; all are 1-d.

        The comparison is bitwise. Returns whether there may be such values; does not wait for a
        device.
        """
        if _compat.is_host(masters.device) and _compat.has_bits_of(last, published):
            return False
        if not self._compiles(masters.device):
            _take(self._form, masters, published, last)
            return True
        width = self._form.block_columns
        width = 0 if masters.numel() % width else width
        given = [_compat.rows_of(it, width) for it in (masters, published, last)]
        _kernel(_take, self._form)(self._form, *given)
        return True

    @property
    def _block(self) -> Sequence[int]:
        """Elements of values, bytes of codes, and scales per row of a block."""
        columns = self._form.block_columns
        return columns, columns * self._form.bits // 8, 1

    def _rows(self, values: Tensor) -> int:
        """Return the number of rows per call on a CPU."""
        height = self._form.block_rows
        return max(1, CACHED // (height * values.shape[-1])) * height

    def _compiles(self, device: torch.device) -> bool:
        """Return whether kernels are compiled; on a CPU that takes longer than it saves."""
        if self._compiled is None:
            self._compiled = not _compat.is_host(device) and compiles(self._config, device)
        return self._compiled

    def _run(
        self, call: Kernel, tensors: Sequence[Tensor], rows: Sequence[int], block: Sequence[int]
    ) -> None:
        """Call a function of the form.

        Args:
            rows: rows of each tensor in one call on a CPU.
            block: elements of each tensor in one row of a block.
        """
        device = tensors[0].device
        if self._compiles(device):
            widths = block if self._form.block_rows == 1 else [0] * len(block)
            given = [_in_blocks(it, width) for it, width in zip(tensors, widths, strict=True)]
            _kernel(call, self._form)(self._form, *given)
        elif not _compat.is_host(device):
            call(self._form, *tensors)
        else:
            pieces = (tensor.split(count, 1) for tensor, count in zip(tensors, rows, strict=True))
            for piece in zip(*pieces, strict=True):
                call(self._form, *piece)


def _round(form: Form, masters: Tensor, output: Tensor) -> None:
    output.copy_(form.round_bits(masters))


def _collapse(form: Form, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    new_codes, new_scales = form.quantize(values)
    codes.copy_(new_codes.view(torch.uint8))
    scales.copy_(new_scales)


def _expand(form: Form, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    values.copy_(form.dequantize_bits(codes, scales))


def _take(_form: Form, masters: Tensor, published: Tensor, last: Tensor) -> None:
    masters.copy_(shown(masters, published, last))


def _in_blocks(tensor: Tensor, width: int) -> Tensor:
    """Return the same memory with a block of ``width`` elements per row, if ``width`` is not 0.

    If a compiler knows a block's length, it reduces it as a row and fuses later work into the same
    kernel. In a matrix of unknown width it does neither.
    """
    if width:
        return _compat.rows_of(tensor, width, len(tensor))
    return _compat.own_storage(tensor)


@functools.cache  # one compiled function for all packs of a form
def _kernel(call: Kernel, form: Form) -> Kernel:
    what, name = call.__name__.strip("_"), form.name

    def as_graph(*tensors: Any) -> None:
        call(FORMS[name], *tensors)  # a global, so that a compiler treats its numbers as constants

    as_graph.__name__ = what
    compiled = inductor.compiled(as_graph)

    def run(_form: Form, *tensors: Tensor) -> None:
        compiled(*tensors)

    return or_eager(run, call, f"{what} of {name}")
