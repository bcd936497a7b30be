"""The wire: codes and scales in place of the bf16 values that they stand for.

What is published of a pack lies on the grid of its form, so the owner finds codes and scales in the
values themselves, and all others get the same bits from them. A part of an owner is the codes of
all its blocks, then their scales, a byte each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.config import ShardcastConfig
from shardcast.extensions.published_forms.forms import Form
from shardcast.plan.casts import Parcel, Wire
from shardcast.plan.layout import PackLayout, Slot, Span
from shardcast.step.compiling import compiles, or_eager

CHUNK = 1 << 17  # elements per eager call on a CPU: all temporaries stay in its cache
PARTS = 16  # bytes of which parts begin at multiples


class Run(NamedTuple):
    """Whole blocks ``[start, stop)`` of a pack, in rows of ``width`` elements, of one owner."""

    start: int
    stop: int
    width: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class FormWire(Wire):
    """Codes and scales of one pack.

    Attributes:
        form: of its parameters.
        runs: of each owner.
        begins: of each owner's part, in bytes of a parcel.
    """

    def __init__(self, form: Form, layout: PackLayout, config: ShardcastConfig) -> None:
        self.form, self._config = form, config
        self.runs = [_runs(form, span, fragments) for span, fragments in _fragments(layout)]
        self.nbytes = [sum(map(self._run_bytes, runs)) for runs in self.runs]
        sizes = [-(-nbytes // PARTS) * PARTS for nbytes in self.nbytes]
        if layout.algorithms.sync == "all_gather":
            sizes = self.nbytes = [max(sizes)] * len(sizes)
        *self.begins, self.size = itertools.accumulate(sizes, initial=0)
        ranges = {tuple((r.start - s.start, r.stop - s.start, r.width) for r in runs)
                  for s, runs in zip(layout.spans, self.runs, strict=True)}  # fmt: skip
        # Owners whose parts are alike, of one run each, are unpacked in one launch.
        self.is_regular = len(ranges) == 1 and len(self.runs[0]) == 1
        self._compiled: bool | None = None

    def compiled(self, device: torch.device) -> bool:
        """Whether a compiled kernel computes; on a CPU it takes longer to compile than it saves."""
        if self._compiled is None:
            self._compiled = not _compat.is_host(device) and compiles(self._config, device)
        return self._compiled

    def parcel(self, data: Tensor, rank: int) -> Parcel:
        """See :meth:`.Wire.parcel`."""
        return FormParcel(self, data, rank)

    def _run_bytes(self, run: Run) -> int:
        return self.code_bytes(run.numel) + self.scales(run.numel)

    def code_bytes(self, numel: int) -> int:
        return numel * self.form.bits // 8

    def scales(self, numel: int) -> int:
        return numel // (self.form.block_rows * self.form.block_columns)


Kernel = Callable[[Form, Tensor, Tensor, Tensor], None]


class FormParcel(Parcel):
    """Codes and scales of all owners."""

    def __init__(self, wire: FormWire, values: Tensor, rank: int) -> None:
        self._wire, self._values, self._rank = wire, values, rank
        self.data = torch.empty(wire.size, dtype=torch.uint8, device=values.device)
        self.own_data = self._part(rank)
        for run, codes, scales in self._of(rank, 1):
            rows = values[run.start : run.stop].view(1, -1, run.width)
            self._each(_collapse, rows, codes, scales)

    def _part(self, owner: int) -> Tensor:
        begin = self._wire.begins[owner]
        return self.data[begin : begin + self._wire.nbytes[owner]]

    def span(self, span: Span) -> Tensor:
        return self._part(span.owner)

    def unpack(self) -> None:
        ranks, rank = len(self._wire.runs), self._rank
        if self._wire.is_regular and not _compat.is_host(self.data.device):
            groups = [(0, rank), (rank + 1, ranks - rank - 1)]
        else:
            groups = [(owner, 1) for owner in range(ranks) if owner != rank]
        for first, count in groups if ranks > 1 else ():
            for run, codes, scales in self._of(first, count) if count else ():
                values = self._values[run.start : run.start + count * run.numel]
                self._each(_expand, values.view(count, -1, run.width), codes, scales)

    def _of(self, first: int, count: int) -> Iterator[tuple[Run, Tensor, Tensor]]:
        """Runs of ``count`` owners with equal parts, their codes and scales as matrices.

        Of shapes ``(count, rows, bytes of a row)`` and ``(count, block rows, block columns)``.
        """
        wire, form = self._wire, self._wire.form
        begin = wire.begins[first]
        size = self.data.numel() if count == 1 else (wire.begins[first + 1] - begin) * count
        parts = self.data[begin : begin + size].view(count, -1)
        code, scale = 0, wire.code_bytes(sum(run.numel for run in wire.runs[first]))
        for run in wire.runs[first]:
            codes = parts[:, code : (code := code + wire.code_bytes(run.numel))]
            scales = parts[:, scale : (scale := scale + wire.scales(run.numel))]
            width = wire.code_bytes(run.width)
            if form.bits == 8:  # not before it is cut: a parcel may have an odd length
                codes = codes.view(torch.float8_e4m3fn)
            yield (
                run,
                codes.unflatten(-1, (-1, width)),
                scales.unflatten(-1, (-1, run.width // form.block_columns)),
            )

    def _each(self, call: Kernel, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Run a kernel over all rows; on a CPU a few at a time."""
        form = self._wire.form
        if self._wire.compiled(values.device):
            _kernel(call, form)(form, values, codes, scales)
        elif not _compat.is_host(values.device):
            call(form, values, codes, scales)
        else:
            blocks = max(1, CHUNK // (form.block_rows * values.shape[-1]))
            rows = blocks * form.block_rows
            for piece in zip(
                values.split(rows, 1), codes.split(rows, 1), scales.split(blocks, 1), strict=True
            ):
                call(form, *piece)


def _collapse(form: Form, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Values of shape ``(stack, rows, columns)`` to codes and scales, in place."""
    its_codes, its_scales = form.quantize(values)
    codes.copy_(its_codes)
    scales.copy_(its_scales)


def _expand(form: Form, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """The inverse of :func:`_collapse`, to the bit."""
    values.copy_(form.dequantize(codes, scales))


@functools.cache  # one compiled function for all packs of a form
def _kernel(call: Kernel, form: Form) -> Kernel:
    name = f"codes of {form.name}" if call is _collapse else f"values of {form.name}"
    return or_eager(inductor.compiled(call), call, name)


def _fragments(layout: PackLayout) -> list[tuple[Span, list[tuple[Slot, int, int]]]]:
    """Of each owner's span the slots in it, each with the elements ``[start, stop)`` of the pack.

    One walk along the parts: of a thousand ranks each span's own would take long.
    """
    found: list[tuple[Span, list[tuple[Slot, int, int]]]] = [(span, []) for span in layout.spans]
    for owner, slot, count in layout.parts():
        span, fragments = found[owner]
        start = max(slot.offset, span.start)
        fragments.append((slot, start, start + count))
    return found


def _runs(form: Form, span: Span, fragments: list[tuple[Slot, int, int]]) -> list[Run]:
    """The fewest runs: of rows of one width, over padding of whole blocks too, which is zeros."""
    runs: list[Run] = []
    for slot, start, stop in fragments:
        unit = form.unit(slot.shape)
        width = unit // form.block_rows
        if runs and runs[-1].width == width and (start - runs[-1].stop) % unit == 0:
            runs[-1] = Run(runs[-1].start, stop, width)
        else:
            runs.append(Run(start, stop, width))
    if len(runs) == 1:  # to the ends of the span, so that owners are alike
        start, stop, width = runs[0]
        unit = form.block_rows * width
        before, behind = start - span.start, span.stop - stop
        if before % unit == 0 and behind % unit == 0:
            runs = [Run(span.start, span.stop, width)]
    return runs
