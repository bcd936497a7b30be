"""Notes on parameters of a sharded model: who holds them, and how they are copied.

A parameter in a pack is a view of low-precision memory. A copy of it is an ordinary parameter with
its own memory, in the model's original dtype, as under DDP. So an average, a momentum encoder or a
target network may be a copy of a sharded model, or of a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardcast.memory.convert import convert_tensor_
from shardcast.memory.pack import as_packed

COPY, PICKLE = "__deepcopy__", "__reduce_ex__"  # methods that copy and pickle look up


class PackedParam:
    """The note on one parameter; copies and pickles of the parameter have none.

    Args:
        dtype: the parameter's original dtype.
        wait: waits until its values have arrived.
        is_held: a sharded optimizer holds it; otherwise it was only converted with the model.

    Attributes:
        restore: restores the parameter in fp32, if its optimizer was closed without that.
    """

    restore: Callable[[], None] | None = None

    def __init__(
        self, param: nn.Parameter, dtype: torch.dtype, wait: Callable[[], None], is_held: bool
    ) -> None:
        self._param = param
        self.dtype, self._wait, self.is_held = dtype, wait, is_held

    def __call__(self, memo: dict[int, Any]) -> Any:
        """Copy the parameter; :func:`copy.deepcopy` calls it."""
        self._wait()
        with _without_note(self._param) as param:
            copied = type(param).__deepcopy__(param, memo)
        convert_tensor_(as_packed(copied), self.dtype)
        return copied

    def reduce(self, protocol: Any) -> Any:
        """Return the pickle of the parameter, without its note."""
        self._wait()
        with _without_note(self._param) as param:
            kind: Any = type(param)
            call, args, *more = kind.__reduce_ex__(param, protocol)
            # The state is the dictionary of attributes itself, which gets the note back afterwards.
            args = tuple(dict(each) if each is vars(param) else each for each in args)
        return (call, args, *more)


def note(
    param: nn.Parameter, dtype: torch.dtype, wait: Callable[[], None], is_held: bool = True
) -> None:
    """Put a note on ``param``; see :class:`PackedParam`."""
    packed = PackedParam(param, dtype, wait, is_held)
    vars(param).update({COPY: packed, PICKLE: packed.reduce})


def note_of(param: nn.Parameter) -> PackedParam | None:
    """Return the note on ``param``, if there is one."""
    found = vars(param).get(COPY)
    return found if isinstance(found, PackedParam) else None


def forget(param: nn.Parameter) -> None:
    """Remove the note."""
    if note_of(param) is not None:
        del vars(param)[COPY], vars(param)[PICKLE]


@contextmanager
def _without_note(param: nn.Parameter) -> Iterator[nn.Parameter]:
    """Copy or pickle ``param`` as usual; torch would include its attributes, and so the note."""
    notes = {name: vars(param).pop(name) for name in (COPY, PICKLE)}
    try:
        yield param
    finally:
        vars(param).update(notes)
