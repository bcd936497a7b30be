"""Notice what a script does with gradients after a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.memory.gradients import Gradients, nothing


class GradientEdits:
    """Notices gradients that are replaced, and those with a graph of their own. Local.

    Args:
        grads: the gradient packs; the list may grow.
    """

    def __init__(self, grads: Sequence[Gradients]) -> None:
        self._grads = grads
        self._gathered = False  # every .grad is the mean, on all ranks: all edits are right
        self._told: set[str] = set()
        self._seen: list[tuple[Callable[[], Tensor | None], int]] = []
        self._version = 0

    def begin(self) -> None:
        """Hear that gradients are reduced anew."""
        self._gathered = False

    def changed(self) -> None:
        """Hear that gradients come, or were cleared."""
        self._version += 1

    def gathered(self) -> None:
        """Hear that every ``.grad`` is the mean now."""
        self._gathered = True

    def warn_of_set(self) -> None:
        """Warn of gradients that were set by hand after the means were cleared, without a step."""
        if not self._gathered:
            self._warn_once(
                "gradients were set by hand after those of a backward were dropped without a step: "
                "they are taken for means and not averaged over ranks; average them yourself, or "
                "drop gradients by a step that changes nothing (all .grad None)"
            )

    def warn_of_graph(self) -> None:
        """Warn of gradients that have a graph of their own, which the mean has not."""
        self._warn_once(
            "backward(create_graph=True): .grad becomes the mean over ranks, which has no graph, "
            "so a loss that is computed from .grad trains nothing; take the gradients for it from "
            "torch.autograd.grad(..., create_graph=True)"
        )

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warn_first(message)

    def version(self) -> int:
        """Return another number after a gradient came, was edited in place, replaced or cleared."""
        gradients = [param.grad for grads in self._grads for param in grads.pack.params]
        with _compat.without_torch_function():
            versions = [0 if grad is None else grad._version for grad in gradients]
        if len(gradients) != len(self._seen) or any(
            before() is not grad or version != seen
            for grad, version, (before, seen) in zip(gradients, versions, self._seen, strict=True)
        ):
            # Weakly, not by id, which a later gradient may have again.
            refs = [nothing if grad is None else weakref.ref(grad) for grad in gradients]
            self._seen = [*zip(refs, versions, strict=True)]
            self._version += 1
        return self._version
