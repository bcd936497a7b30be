"""A forward hook that is not copied or pickled with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook that belongs to one model; copies and pickles of the model get an idle one.

    Otherwise ``copy.deepcopy(model)``, as for an EMA, would copy masters and process groups.
    """

    def __init__(
        self,
        call: Callable[..., object] | None = None,
        before_copy: Callable[[], object] | None = None,
    ) -> None:
        self._call, self._before_copy = call, before_copy

    def __call__(self, *args: object) -> object:
        return None if self._call is None else self._call(*args)

    def __getattr__(self, name: str) -> Any:
        remedy = ""
        if name == "__name__":  # torch.jit.script reads it
            remedy = ": a sharded model cannot be scripted; script it after optimizer.close()"
        raise AttributeError(f"'Hook' object has no attribute {name!r}{remedy}")

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        if self._before_copy is not None:
            self._before_copy()
        return Hook, ()
