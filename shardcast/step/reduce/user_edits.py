"""What a script did to gradients after backward, as far as it must be told of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.memory.gradients import Gradients, nothing
from shardcast.messages import warn
from shardcast.step.decide.skip_report import HostCopy

LOOKS = (
    4  # reductions after which means are compared with what they were: .grad.data has no version
)

LOCAL = (
    "only the part of a gradient that this rank owns is the mean over ranks, so whatever looks at "
    "several elements (torch.nn.utils.clip_grad_norm_, PCGrad, a norm by hand) gives each rank "
    "another result: call optimizer.gather_gradients() first, or use optimizer.clip_grad_norm_ "
    "(edits of each element by itself are fine)"
)


class GradientEdits:
    """Notices edits of gradients and warns of those that would be silently wrong. Local.

    Args:
        grads: the gradient packs; the list may grow.
    Attributes:
        looks: reductions after which means are still compared with what they were.
    """

    def __init__(self, grads: Sequence[Gradients]) -> None:
        self._grads = grads
        self._noted: dict[Gradients, int] = {}  # versions when the last backward had ended
        self._sums: dict[Gradients, Tensor] = {}  # of the means then, in the first few reductions
        self.looks = LOOKS
        self._edited: HostCopy | None = None  # on an accelerator, read in a later step
        self._warned: set[str] = set()
        self._gathered = False  # every .grad is the mean, on all ranks: all edits are right
        self._seen: list[tuple[Callable[[], Tensor | None], int]] = []
        self._version = 0

    def begin(self) -> None:
        """Gradients are reduced anew."""
        self._gathered = False

    def changed(self) -> None:
        """Gradients come, or were cleared: sharded ones, which are no ``.grad``, too."""
        self._version += 1
        self._noted, self._sums = {}, {}

    def gathered(self) -> None:
        """Every ``.grad`` is the mean now."""
        self._gathered, self._noted, self._sums = True, {}, {}

    def note(self) -> None:
        """A backward ended: in-place edits count from here."""
        self._noted = {grads: grads.version for grads in self._grads}
        if self.looks:
            self.looks -= 1
            self._sums = {grads: _checksum(grads.own) for grads in self._grads if grads.allocated}

    def check_in_place(self) -> None:
        """Warn of what torch.nn.utils.clip_grad_norm_ does, which would be silently wrong."""
        edited = any(grads.version != version for grads, version in self._noted.items())
        edited = self._changed_unseen() or edited
        self._noted, self._sums = {}, {}
        if edited:
            self._warn_once(f"gradients were edited in place after backward; {LOCAL}")

    def _changed_unseen(self) -> bool:
        """Whether a mean was written through ``.grad.data``; never waits for the device."""
        if not self._sums:
            arrived = None if self._edited is None else self._edited.read()
            return bool(arrived and arrived[0])
        sums = [_checksum(grads.own) != checksum for grads, checksum in self._sums.items()]
        changed = torch.stack(sums).any()
        if _compat.is_host(changed.device):
            return bool(changed)
        if self._edited is None:
            self._edited = HostCopy(changed.device)
        before = self._edited.read()
        self._edited.send(changed.double().view(1))
        return bool(before and before[0])

    def warn_of_replaced(self, spent: bool) -> None:
        """Warn of gradients that a script put in the place of ours.

        Args:
            spent: ours were cleared, without a step.
        """
        if self._gathered:
            return
        if not spent:
            self._warn_once(f"gradients were replaced after backward; {LOCAL}")
            return
        warn(
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
        if message not in self._warned:
            self._warned.add(message)
            warn(message)

    def version(self) -> int:
        """Another number after any gradient came, was edited in place, replaced or cleared."""
        found = [param.grad for grads in self._grads for param in grads.pack.params]
        if len(found) != len(self._seen) or any(
            before() is not grad or version != (0 if grad is None else grad._version)
            for grad, (before, version) in zip(found, self._seen, strict=True)
        ):
            # Weakly, not by id, which a later gradient may have again.
            self._seen = [
                (nothing, 0) if grad is None else (weakref.ref(grad), grad._version)
                for grad in found
            ]
            self._version += 1
        return self._version


def _checksum(own: Tensor) -> Tensor:
    """A sum over the bits of a span, 0-dim; the order of elements does not count."""
    return own.view(torch.int16 if own.element_size() == 2 else torch.int32).sum()


class ZeroGrad:
    """``model.zero_grad`` of one model; its copies and pickles have that of their class."""

    def __init__(self, model: nn.Module, cleared: Callable[[nn.Module, bool], None]) -> None:
        self._model, self._cleared = model, cleared

    def __call__(self, set_to_none: bool = True) -> None:
        self._cleared(self._model, set_to_none)
        type(self._model).zero_grad(self._model, set_to_none)

    def remove(self) -> None:
        vars(self._model).pop("zero_grad", None)

    def __reduce__(self) -> Any:
        return plain_zero_grad, (self._model,)


def plain_zero_grad(model: nn.Module) -> Any:
    """That of its class."""
    return MethodType(type(model).zero_grad, model)
