"""Forms other than fp32 in the eager update on CPU: windows that stay in the cache.

The functions of :mod:`shardcast.memory.forms`, with the same bits, in place and with as few
operations as there are names for: each is a pass over the window. What is rare (a tie of a split
master, a weight that was set to zero by hand) costs a look, and more only where it is found.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardcast.memory import forms
from shardcast.memory.forms import TIE, Bytes, Form, Raw, Rounded, Split
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.update import rules
from shardcast.step.update.rules import Flat

Encode = Callable[[], None]


class Windows:
    """Buffers for the fp32 values of windows.

    Args:
        size: elements in a window; a multiple of the rows of all that is decoded.
        count: state tensors.
    """

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._values = [torch.empty(size, dtype=MASTER_DTYPE) for _ in range(1 + count)]
        self._spare = torch.empty(size, dtype=MASTER_DTYPE)
        self._bits = torch.empty(size, dtype=torch.int32)
        self._places = torch.arange(size, dtype=torch.int32)

    def decoded(self, flat: Flat) -> tuple[Flat, Encode]:
        """Operands in fp32, and what encodes them when they were updated."""
        numel, row = flat.grad.numel(), flat.forms.row
        if numel % row:
            return rules.decoded(flat)
        kept = [(flat.forms.master, flat.master), *zip(flat.forms.state, flat.state, strict=True)]
        master, *state = (
            self._decode(form, raw, row, buffer[:numel])
            for (form, raw), buffer in zip(kept, self._values, strict=True)
        )

        def encode() -> None:
            self._encode(flat.forms.master, flat.master, row, master)
            for number, (form, raw, values) in enumerate(
                zip(flat.forms.state, flat.state, state, strict=True)
            ):
                if flat.draw is not None and number % 2 == 0:
                    first, seed = int(flat.draw.origin[0]), int(flat.draw.seed(number))
                    forms.hash_(self._bits, self._places, first, seed, self._ints)
                self._encode(form, raw, row, values, high=number % 2 == 1)

        return Flat.exact(master, flat.grad, state, flat.published), encode

    @property
    def _ints(self) -> Tensor:
        return self._spare.view(torch.int32)

    def _decode(self, form: Form, raw: Raw, row: int, out: Tensor) -> Tensor:
        if isinstance(form, Split):
            return _join(raw, row, out)
        if isinstance(form, Rounded):
            return out.copy_(raw[0])
        if isinstance(form, Bytes):
            codes, scales = raw
            out.copy_(codes).div_(form.steps)
            if form.signed:
                out.mul_(torch.abs(out, out=self._spare[: out.numel()]))
            else:
                out.square_().square_()
            out.view(-1, row).mul_(scales[:, None])
            return out
        return raw[0]

    def _encode(self, form: Form, raw: Raw, row: int, values: Tensor, high: bool = False) -> None:
        if isinstance(form, Split):
            _split(raw, row, values)
        elif isinstance(form, Rounded):
            drawn, sums = (buffer[: values.numel()] for buffer in (self._bits, self._ints))
            if high:
                torch.bitwise_right_shift(drawn, 16, out=sums).bitwise_and_(0xFFFF)
            else:
                torch.bitwise_and(drawn, 0xFFFF, out=sums)
            sums.add_(values.view(torch.int32)).bitwise_right_shift_(16)
            raw[0].view(torch.int16).copy_(sums)
        elif isinstance(form, Bytes):
            self._to_bytes(form, raw, row, values)

    def _to_bytes(self, form: Bytes, raw: Raw, row: int, values: Tensor) -> None:
        codes, scales = raw
        root = torch.abs(values, out=self._spare[: values.numel()])
        torch.amax(root.view(-1, row), 1, out=scales)
        tiny = torch.finfo(MASTER_DTYPE).tiny
        root.view(-1, row).div_(scales.clamp_min(tiny)[:, None])
        if form.signed:
            root.sqrt_().mul_(form.steps).round_()
            codes.copy_(root.copysign_(values))
        else:
            least = torch.sign(root.sqrt_().sqrt_(), out=values)  # 1 for all but zeros
            torch.maximum(root.mul_(form.steps).round_(), least, out=root)
            whole = self._bits[: values.numel()]
            codes.copy_(whole.copy_(root))  # from integers it is 3 times as fast


def _join(raw: Raw, row: int, out: Tensor) -> Tensor:
    """Split masters in fp32."""
    published, rest, ties = raw
    bits = out.copy_(published).view(torch.int32).add_(rest)
    if ties.any():
        rows = ties.nonzero()
        lanes = torch.arange(row, dtype=ties.dtype)
        there = ((ties[rows] >> lanes) & 1).bool()
        bits[(rows * row + torch.arange(row))[there]] += 2 * TIE
    if out.amax().isnan():  # as beside a weight that was set to zero by hand
        out.copy_(forms.decode_flat(Split(), raw, row))
    return out


def _split(raw: Raw, row: int, values: Tensor) -> None:
    published, rest, ties = raw
    bits = values.view(torch.int32)
    published.copy_(values)
    rest.copy_(bits)  # the lower half is the distance from the upper one, but for its carry
    ties.zero_()
    rows = (rest.view(-1, row).amin(1) == -TIE).nonzero()
    if rows.numel():  # a distance of +TIE or -TIE; of each 65,536 elements one
        inside = rows * row + torch.arange(row)
        upper = published[inside].to(MASTER_DTYPE).view(torch.int32)
        tie = bits[inside] - upper == TIE
        lanes = torch.arange(row, dtype=ties.dtype)
        ties[rows[:, 0]] = (tie.to(ties.dtype) << lanes).sum(1, dtype=ties.dtype)
