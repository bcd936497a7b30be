"""The encoding of a published form: codes and scales, sent instead of the values.

A pack's published values lie on the grid of its form. So the owner computes codes and scales from
the values, and all other ranks get the same bits from them. An owner's part has the codes of all
its blocks, then their scales, one byte each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.layout import PackLayout, Slot, Span
from shardcast.plan.publishing import Encoded, Encoding
from shardcast.serving.forms import Form
from shardcast.serving.kernels import Kernels

PARTS = 16  # parts start at multiples of this many bytes


class Run(NamedTuple):
    """Elements ``[start, stop)`` of a pack that are cast together.

    Attributes:
        width: length of their rows, for casts that combine rows.
    """

    start: int
    stop: int
    width: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def runs_of(form: Form, span: Span | None, fragments: Iterable[tuple[Slot, int, int]]) -> list[Run]:
    """Return the fewest runs: over rows of one width, including whole blocks of padding (zeros).

    Args:
        span: if one run suffices, it covers the whole span, so that owners of equal spans are
            alike.
        fragments: slots in an own span, each with its elements ``[start, stop)`` of the pack.
    """
    runs: list[Run] = []
    for slot, start, stop in fragments:
        unit = form.unit(slot.shape)
        width = unit // form.block_rows
        if runs and runs[-1].width == width and (start - runs[-1].stop) % unit == 0:
            runs[-1] = Run(runs[-1].start, stop, width)
        else:
            runs.append(Run(start, stop, width))
    if span is not None and len(runs) == 1:
        start, stop, width = runs[0]
        unit = form.block_rows * width
        if (start - span.start) % unit == 0 and (span.stop - stop) % unit == 0:
            runs = [Run(span.start, span.stop, width)]
    return runs


class FormEncoding(Encoding):
    """Codes and scales of one pack.

    Attributes:
        form: form of its parameters.
        kernels: kernels of the form.
        runs: runs of each owner.
        begins: start of each owner's part, in bytes.
    """

    def __init__(self, form: Form, layout: PackLayout, config: ShardcastConfig) -> None:
        self.form, self.kernels = form, Kernels(form, config)
        self.runs = [runs_of(form, span, fragments) for span, fragments in _fragments(layout)]
        self.nbytes = [sum(map(self._run_bytes, runs)) for runs in self.runs]
        sizes = [-(-nbytes // PARTS) * PARTS for nbytes in self.nbytes]
        if layout.algorithms.sync == "all_gather":
            sizes = self.nbytes = [max(sizes)] * len(sizes)
        *self.begins, self.size = itertools.accumulate(sizes, initial=0)
        ranges = {
            tuple((r.start - s.start, r.stop - s.start, r.width) for r in runs)
            for s, runs in zip(layout.spans, self.runs, strict=True)
        }
        # Owners with equal parts of one run each are decoded in one launch.
        self.is_regular = len(ranges) == 1 and len(self.runs[0]) == 1

    def encode(self, data: Tensor, rank: int) -> EncodedForm:
        """See :meth:`.Encoding.encode`."""
        return EncodedForm(self, data, rank)

    def _run_bytes(self, run: Run) -> int:
        return self.code_bytes(run.numel) + self.scales(run.numel)

    def code_bytes(self, numel: int) -> int:
        return numel * self.form.bits // 8

    def scales(self, numel: int) -> int:
        return numel // (self.form.block_rows * self.form.block_columns)


class EncodedForm(Encoded):
    """Codes and scales of all owners."""

    def __init__(self, encoding: FormEncoding, values: Tensor, rank: int) -> None:
        self._encoding, self._values, self._rank = encoding, values, rank
        self.data = torch.empty(encoding.size, dtype=torch.uint8, device=values.device)
        self.own_data = self._part(rank)
        for run, codes, scales in self._of(rank, 1):
            rows = values[run.start : run.stop].view(1, -1, run.width)
            encoding.kernels.collapse(rows, codes, scales)

    def _part(self, owner: int) -> Tensor:
        begin = self._encoding.begins[owner]
        return self.data[begin : begin + self._encoding.nbytes[owner]]

    def span(self, span: Span) -> Tensor:
        return self._part(span.owner)

    def decode(self) -> None:
        ranks, rank = len(self._encoding.runs), self._rank
        if self._encoding.is_regular and not _compat.is_host(self.data.device):
            groups = [(0, rank), (rank + 1, ranks - rank - 1)]
        else:
            groups = [(owner, 1) for owner in range(ranks) if owner != rank]
        for first, count in groups if ranks > 1 else ():
            for run, codes, scales in self._of(first, count) if count else ():
                values = self._values[run.start : run.start + count * run.numel]
                values = values.view(count, -1, run.width)
                self._encoding.kernels.expand(values, codes, scales)

    def _of(self, first: int, count: int) -> Iterator[tuple[Run, Tensor, Tensor]]:
        """Return the runs of ``count`` owners with equal parts, with codes and scales as matrices.

        Their shapes are ``(count, rows, bytes of a row)`` and
        ``(count, block rows, block columns)``.
        """
        encoding, form = self._encoding, self._encoding.form
        begin = encoding.begins[first]
        size = self.data.numel() if count == 1 else (encoding.begins[first + 1] - begin) * count
        parts = self.data[begin : begin + size].view(count, -1)
        code, scale = 0, encoding.code_bytes(sum(run.numel for run in encoding.runs[first]))
        for run in encoding.runs[first]:
            codes = parts[:, code : (code := code + encoding.code_bytes(run.numel))]
            scales = parts[:, scale : (scale := scale + encoding.scales(run.numel))]
            width = encoding.code_bytes(run.width)
            yield (
                run,
                codes.unflatten(-1, (-1, width)),
                scales.unflatten(-1, (-1, run.width // form.block_columns)),
            )


def _fragments(layout: PackLayout) -> list[tuple[Span, list[tuple[Slot, int, int]]]]:
    """Return the slots in each owner's span, each with elements ``[start, stop)`` of the pack.

    It walks once along the parts, because a thousand ranks' own lists would take long.
    """
    owned: list[tuple[Span, list[tuple[Slot, int, int]]]] = [(span, []) for span in layout.spans]
    for owner, slot, count in layout.parts():
        span, fragments = owned[owner]
        start = max(slot.offset, span.start)
        fragments.append((slot, start, start + count))
    return owned
