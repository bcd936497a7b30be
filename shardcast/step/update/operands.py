"""What the update of a flat range works on: memory, in the forms in which values are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast.memory.forms import ROW, Exact, Form, Raw, chances

SALT = 0x27D4EB2F  # from one state tensor's seed to that of the next, and of the next pack's


class Forms(NamedTuple):
    """How masters and state tensors are kept, in rows of ``row`` elements."""

    master: Form
    state: tuple[Form, ...]
    row: int = ROW

    @property
    def exact(self) -> bool:
        return all(isinstance(form, Exact) for form in (self.master, *self.state))


class Draw(NamedTuple):
    """What stochastic rounding depends on.

    Attributes:
        origin: int32 of the first element's position in its pack, and of the pack's salt.
        step: 0-dim fp32, this step's number.
    """

    origin: Tensor
    step: Tensor

    def at(self, start: int) -> Draw:
        """The same for what begins ``start`` elements further."""
        origin = self.origin.clone()
        origin[:1] += start
        return self._replace(origin=origin)

    def seed(self, number: int) -> Tensor:
        """Of the state tensors ``number`` and after it: another one for each step and pack."""
        salt = (self.origin[1] + number * SALT) & 0x7FFFFFFF
        return self.step.to(torch.int32) * 0x165667B1 + salt

    def chances(self, number: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """For the state tensors ``number`` and after it, int32; see :func:`.forms.chances`."""
        both = chances(self.origin[0], shape.numel(), self.seed(number))
        return both[0].view(shape), both[1].view(shape)


class Flat(NamedTuple):
    """The operands of one range: 1-d tensors of equal length, and some with one element per row.

    Attributes:
        master: in the form of ``forms``, overwritten.
        grad: any floating dtype, read only.
        state: each in its form, in the order of ``rule.state``, overwritten.
        published: the low-precision parameter elements, overwritten by the cast of the new
            masters; ``None`` where the master itself is the parameter, or contains it.
        draw: only where a form rounds stochastically.
    """

    master: Raw
    grad: Tensor
    state: tuple[Raw, ...]
    published: Tensor | None
    forms: Forms
    draw: Draw | None = None

    def map(self, change: Callable[[Tensor, bool], Tensor]) -> Flat:
        """The same with every operand changed by ``change(operand, one per row)``."""

        def changed(form: Form, raw: Raw) -> Raw:
            kinds = form.pieces(self.forms.row)
            return tuple(
                change(piece, count < self.forms.row)
                for piece, (_, count) in zip(raw, kinds, strict=True)
            )

        return self._replace(
            master=changed(self.forms.master, self.master),
            grad=change(self.grad, False),
            state=tuple(map(changed, self.forms.state, self.state)),
            published=None if self.published is None else change(self.published, False),
        )

    def cut(self, start: int, stop: int) -> Flat:
        """Elements ``[start, stop)``; where a form has one number per row, from a row's first."""
        if start == 0 and stop >= self.grad.numel():
            return self
        row = self.forms.row
        rows = slice(start // row, -(-stop // row))
        part = self.map(lambda operand, per_row: operand[rows if per_row else slice(start, stop)])
        return part if self.draw is None or not start else part._replace(draw=self.draw.at(start))

    def split(self, size: int) -> Iterator[Flat]:
        """Parts of ``size`` elements and of the rest, without ``draw``.

        Args:
            size: whole rows, where a form has one number per row.
        """
        if self.grad.numel() <= size:
            yield self
            return
        row = self.forms.row

        def parts(form: Form, raw: Raw) -> Iterator[Raw]:
            counts = (size if count == row else size // row for _, count in form.pieces(row))
            return zip(*map(torch.Tensor.split, raw, counts), strict=True)

        kept = map(parts, (self.forms.master, *self.forms.state), (self.master, *self.state))
        grads = self.grad.split(size)
        casts = [None] * len(grads) if self.published is None else self.published.split(size)
        for grad, published, (master, *state) in zip(
            grads, casts, zip(*kept, strict=True), strict=True
        ):
            yield Flat(master, grad, tuple(state), published, self.forms)


def by_rows(flat: Flat, least: int, run: Callable[[Flat], None]) -> None:
    """``run`` on whole rows, ``least`` of them at least.

    Spans and runs of parameters begin with a row. Only the last one of a world of one may end
    within it, and goes through a padded copy.
    """
    numel, row = flat.grad.numel(), flat.forms.row
    whole = numel // row * row if numel >= least * row else 0
    if whole:
        run(flat.cut(0, whole))
    if whole == numel:
        return
    rest = flat.cut(whole, numel)
    copies: list[tuple[Tensor, Tensor]] = []

    def padded(operand: Tensor, per_row: bool) -> Tensor:
        copy = operand.new_zeros(least if per_row else least * row)
        copy[: operand.numel()] = operand
        if operand is not rest.grad:
            copies.append((operand, copy))
        return copy

    run(rest.map(padded))
    for operand, copy in copies:
        operand.copy_(copy[: operand.numel()])
