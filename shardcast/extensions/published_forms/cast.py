"""The cast of masters to a form, behind the update of their owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.extensions.published_forms.forms import Form
from shardcast.extensions.published_forms.kernels import Kernels
from shardcast.plan.casts import Cast, Run
from shardcast.plan.layout import Fragment, Slot, Span


class FormCast(Cast):
    """The cast to one form.

    Attributes:
        form: that one.
    """

    def __init__(self, form: Form, config: ShardcastConfig) -> None:
        self.form, self.name, self._kernels = form, form.name, Kernels(form, config)

    def unit(self, shape: tuple[int, ...]) -> int:
        return self.form.unit(shape)

    def __call__(self, masters: Tensor, shape: tuple[int, ...]) -> Tensor:
        width = self.unit(shape) // self.form.block_rows
        return self.form.round(masters.view(-1, width)).view(-1)

    def runs(self, fragments: Sequence[Fragment]) -> Sequence[Run]:
        return runs_of(self.form, None, ((it.slot, it.start, it.stop) for it in fragments))

    def publish_(self, masters: Tensor, width: int, outputs: Sequence[Tensor]) -> None:
        rows = [output.view(1, -1, width) for output in outputs]
        self._kernels.round(masters.view(1, -1, width), rows)

    def take_written_(self, masters: Tensor, published: Tensor, last: Tensor) -> bool:
        return self._kernels.take_written(masters, published, last)


def runs_of(form: Form, span: Span | None, fragments: Iterable[tuple[Slot, int, int]]) -> list[Run]:
    """The fewest runs: of rows of one width, over padding of whole blocks too, which is zeros.

    Args:
        span: what is one run reaches to its ends, so that owners of equal spans are alike.
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
