"""The eager update on CPU: windows that stay in the cache, in place, a pass per operation.

The functions of :mod:`shardcast.memory.forms` with the same bits, in as few operations as there
are names for. What is rare (a tie of a split master, a weight that was set to zero by hand, a byte
that is zero) costs a look, and more only where it is found. Constants are 0-dim tensors: with a
number of Python each operation takes two microseconds more.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardcast.memory import forms
from shardcast.memory.forms import HASH, MIXING, TIE, Bytes, Form, Raw, Rounded, Split
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.update.operands import Flat
from shardcast.step.update.rules import Numbers, Rule

INTEGER = torch.int32  # of the size of MASTER_DTYPE
BLOCK = 16  # rows that are searched for ties at a time
HALF, LOWER = (torch.tensor(n, dtype=INTEGER, device="cpu") for n in (16, 0xFFFF))
MIX = [
    [torch.tensor(n, dtype=INTEGER, device="cpu") for n in (shift, (1 << 32 - shift) - 1, factor)]
    for shift, factor in MIXING
]
STEPS = {n: torch.tensor(float(n), dtype=MASTER_DTYPE, device="cpu") for n in (127, 255)}
# Its sum with a small number has that, rounded, in the lowest bits.
WHOLE = torch.tensor(1.5 * 2.0**23, dtype=MASTER_DTYPE, device="cpu")


class Windows:
    """Buffers for windows of one size, in whole rows unless every form is exact."""

    def __init__(self, size: int, states: int) -> None:
        self._size = size
        buffers = torch.empty(3 + states, size, dtype=MASTER_DTYPE)
        self._grad, self._spare, *self._values = buffers.unbind()

    def update(self, rule: Rule, flat: Flat, numbers: Numbers, factor: Tensor | None) -> None:
        """Unscale, clip, update and cast so many elements, or a multiple of it.

        Args:
            numbers: from ``rule.numbers``, of a step as a float.
            factor: 0-dim fp32 multiplier of the gradient, or ``None`` for 1.
        """
        row, kinds = flat.forms.row, (flat.forms.master, *flat.forms.state)
        if flat.draw is not None:
            places = torch.arange(self._size, dtype=INTEGER).add_(flat.draw.origin[0]).mul_(HASH)
            further = torch.tensor(self._size, dtype=INTEGER) * HASH
            seeds = [flat.draw.seed(number) for number in range(len(flat.state))]
        for part in flat.split(self._size):
            raws = (part.master, *part.state)
            master, *state = map(self._decode, kinds, raws, [row] * len(kinds), self._values)
            grad = self._scaled(part.grad, factor, rule.edits)
            rule.apply_(master, grad, tuple(state), numbers, self._spare)
            if part.published is not None:
                part.published.copy_(master)
            elif isinstance(part.forms.master, Split):
                _split(part.master, row, master)
            for number, (form, raw, values) in enumerate(
                zip(kinds[1:], part.state, state, strict=True)
            ):
                if isinstance(form, Bytes):
                    self._to_bytes(form, raw, row, values)
                elif isinstance(form, Rounded):
                    if number % 2 == 0:
                        self._draw(places, seeds[number])
                    self._round(raw[0], values, high=number % 2 == 1)
            if flat.draw is not None:
                places += further

    def _scaled(self, grad: Tensor, factor: Tensor | None, edits: bool) -> Tensor:
        """The gradient in fp32, a copy where the rule overwrites it."""
        if edits or grad.dtype != MASTER_DTYPE:
            copy = self._grad.copy_(grad)
            return copy if factor is None else copy.mul_(factor)
        return grad if factor is None else torch.mul(grad, factor, out=self._grad)

    def _decode(self, form: Form, raw: Raw, row: int, out: Tensor) -> Tensor:
        if isinstance(form, Split):
            return _join(raw, row, out)
        if isinstance(form, Rounded):
            return out.copy_(raw[0])
        if isinstance(form, Bytes):
            codes, scales = raw
            out.copy_(codes).div_(STEPS[form.steps])
            if form.signed:
                out.mul_(torch.abs(out, out=self._spare))
            else:
                out.square_().square_()
            out.view(-1, row).mul_(scales[:, None])
            return out
        return raw[0]  # exact: the memory itself

    def _to_bytes(self, form: Bytes, raw: Raw, row: int, values: Tensor) -> None:
        codes, scales = raw
        root, spare = self._grad, self._spare
        size = torch.abs(values, out=root) if form.signed else values
        torch.amax(size.view(-1, row), 1, out=scales)
        divisors = scales.clamp_min(torch.finfo(MASTER_DTYPE).tiny)[:, None]
        torch.div(size.view(-1, row), divisors, out=root.view(-1, row))
        steps = root.sqrt_() if form.signed else root.sqrt_().sqrt_()
        steps.mul_(STEPS[form.steps])
        if form.signed:
            steps.mul_(torch.sign(values, out=spare))
        codes.copy_(torch.add(steps, WHOLE, out=spare).view(INTEGER))
        if not form.signed and not codes.all():
            codes.copy_(torch.maximum(codes, steps != 0))  # 1 for all but zeros

    def _draw(self, places: Tensor, seed: Tensor) -> None:
        """The bits of :func:`.forms.chances`, both numbers in one, of multiplied places."""
        bits, spare = self._grad.view(INTEGER), self._spare.view(INTEGER)
        torch.bitwise_xor(places, seed, out=bits)
        for shift, mask, factor in MIX:
            torch.bitwise_right_shift(bits, shift, out=spare).bitwise_and_(mask)
            bits.bitwise_xor_(spare).mul_(factor)

    def _round(self, raw: Tensor, values: Tensor, high: bool) -> None:
        """By chance, as was drawn last; gradients are no longer needed."""
        bits, sums = self._grad.view(INTEGER), self._spare.view(INTEGER)
        if high:
            torch.bitwise_right_shift(bits, HALF, out=sums).bitwise_and_(LOWER)
        else:
            torch.bitwise_and(bits, LOWER, out=sums)
        sums.add_(values.view(INTEGER)).bitwise_right_shift_(HALF)
        raw.view(torch.int16).copy_(sums)


def _join(raw: Raw, row: int, out: Tensor) -> Tensor:
    """Split masters in fp32."""
    published, rest, ties = raw
    bits = out.copy_(published).view(INTEGER).add_(rest)
    rows = ties.nonzero().squeeze(1)
    if len(rows):
        there = ties.index_select(0, rows)[:, None] >> torch.arange(row, dtype=ties.dtype)
        bits.view(-1, row).index_add_(0, rows, there.bitwise_and_(1).to(INTEGER), alpha=2 * TIE)
    if math.isnan(out.sum()):  # as beside a weight that was set to zero by hand
        out.copy_(forms.decode_flat(Split(), raw, row))
    return out


def _split(raw: Raw, row: int, values: Tensor) -> None:
    published, rest, ties = raw
    bits = values.view(INTEGER)
    published.copy_(values)
    rest.copy_(bits)  # the lower half is the distance from the upper one, but for its carry
    ties.zero_()
    length = BLOCK * row if values.numel() % (BLOCK * row) == 0 else row
    found = (rest.view(-1, length).amin(1) == -TIE).nonzero().squeeze(1)
    if len(found):  # a distance of +TIE, below an even half, or -TIE; of 65,536 elements one
        inside = bits.view(-1, length).index_select(0, found).bitwise_and_(4 * TIE - 1)
        upper = (inside == TIE).to(ties.dtype).view(-1, length // row, row)
        words = (upper << torch.arange(row, dtype=ties.dtype)).sum(-1, dtype=ties.dtype)
        ties.view(-1, length // row).index_copy_(0, found, words)
