"""``model.zero_grad()`` where gradients of micro-batches are in sums, which no ``.grad`` shows."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from shardcast.step.reduce.reducer import Reducer


class ZeroGrad:
    """``model.zero_grad`` of one model; its copies and pickles have that of their class."""

    def __init__(self, model: nn.Module, reducer: Reducer) -> None:
        self._model, self._reducer = model, reducer
        model.zero_grad = self  # type: ignore[method-assign]

    def __call__(self, set_to_none: bool = True) -> None:
        self._clear(set_to_none)
        type(self._model).zero_grad(self._model, set_to_none)

    def _clear(self, set_to_none: bool) -> None:
        """Clear the sums of the parameters of this model, maybe one of several."""
        params, buckets = {*self._model.parameters()}, self._reducer.buckets
        if all(params.issuperset(pack.in_model) for pack in buckets):
            self._reducer.cleared(set_to_none)
            return
        for pack, bucket in buckets.items():
            for position, param in enumerate(pack.in_model):
                if param in params:
                    bucket.grads.discard(position)

    def remove(self) -> None:
        """Give the model the method of its class again."""
        vars(self._model).pop("zero_grad", None)

    def __reduce__(self) -> Any:
        return plain_zero_grad, (self._model,)


def plain_zero_grad(model: nn.Module) -> Any:
    """Return ``zero_grad`` of its class."""
    return MethodType(type(model).zero_grad, model)
