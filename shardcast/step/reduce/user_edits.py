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
from shardcast.memory.weight_edits import checksum
from shardcast.messages import page, warn
from shardcast.step.decide.skip_report import HostCopy

LOOKS = (
    4  # reductions after which means are compared with what they were: .grad.data has no version
)
DROPS = 2  # reductions in a row whose means are cleared: a GAN's generator brings its critic one

LOCAL = (
    "only the part of a gradient that this rank owns is the mean over ranks, so whatever looks at "
    "several elements (torch.nn.utils.clip_grad_norm_, PCGrad, a norm by hand) gives each rank "
    "another result: call optimizer.gather_gradients() first, or use optimizer.clip_grad_norm_ "
    "(edits of each element by itself are fine)"
)
PERTURBED = (
    "weights were written after a backward, and another backward came before the step: where they "
    "were moved along .grad (SAM, FGM, AWP) each rank went its own way, for only the part of a "
    "gradient that this rank owns is the mean over ranks; call optimizer.gather_gradients() before "
    f"({page('gradients')})"
)
DROPPED = (
    "gradients of several backwards were cleared without a step: a script that reads .grad in "
    "place of a step (Fisher information, EWC, saliency, the norm of a task) sees the mean over "
    "ranks only in the part that this rank owns; call optimizer.gather_gradients() before"
)


class GradientEdits:
    """Notices edits of gradients and warns of those that would be silently wrong. Local.

    Args:
        grads: the gradient packs; the list may grow.
    Attributes:
        looks: reductions after which means are still compared with what they were, and weights
            with those of the last one of the same step.
    """

    def __init__(self, grads: Sequence[Gradients]) -> None:
        self._grads = grads
        self._noted: dict[Gradients, int] = {}  # versions when the last backward had ended
        self._sums: dict[Gradients, Tensor] = {}  # of the means then, in the first few reductions
        self.looks = LOOKS
        self._edited = Flag()
        self._weights: list[Tensor] = []  # checksums after the last backward of this step
        self._versions = -1  # of weights, likewise
        self._perturbed = Flag()
        self._dropped = 0  # reductions in a row whose means were cleared without a step
        self._warned: set[str] = set()
        self._gathered = False  # every .grad is the mean, on all ranks: all edits are right
        self._seen: list[tuple[Callable[[], Tensor | None], int]] = []
        self._version = 0

    def begin(self) -> None:
        """Gradients are reduced anew."""
        if self._versions not in (-1, self._weight_versions()):
            self._warn_once(PERTURBED)
        self._gathered = False

    def changed(self) -> None:
        """Gradients come, or were cleared: sharded ones, which are no ``.grad``, too."""
        self._version += 1
        self._noted, self._sums = {}, {}

    def gathered(self) -> None:
        """Every ``.grad`` is the mean now."""
        self._gathered, self._noted, self._sums = True, {}, {}
        self._weights, self._versions = [], -1

    def dropped(self) -> None:
        """Means were cleared that no step used."""
        if not self._gathered:
            self._dropped += 1
            if self._dropped == DROPS:
                self._warn_once(DROPPED)

    def used(self) -> None:
        """A step used the means."""
        self._dropped = 0

    def note(self) -> None:
        """A backward ended: in-place edits count from here."""
        self._noted = {grads: grads.version for grads in self._grads}
        self._versions = self._weight_versions()
        if self.looks:
            self.looks -= 1
            self._sums = {grads: checksum(grads.own) for grads in self._grads if grads.allocated}
            self._compare_weights()

    def _weight_versions(self) -> int:
        return sum(param._version for grads in self._grads for param in grads.pack.in_model)

    def _compare_weights(self) -> None:
        """Find what was written through ``.data`` since the last backward of this step."""
        packs = [grads.pack for grads in self._grads]
        before, self._weights = self._weights, []
        if any(pack.pending for pack in packs):  # what comes in is written just now
            return
        self._weights = [checksum(pack.data) for pack in packs]
        if len(before) == len(packs) > 0:
            pairs = zip(self._weights, before, strict=True)
            if self._perturbed.look(torch.stack([now != last for now, last in pairs]).any()):
                self._warn_once(PERTURBED)

    def check_in_place(self) -> None:
        """Warn of what torch.nn.utils.clip_grad_norm_ does, which would be silently wrong."""
        edited = any(grads.version != version for grads, version in self._noted.items())
        if self._sums:
            sums = [checksum(grads.own) != before for grads, before in self._sums.items()]
            edited = self._edited.look(torch.stack(sums).any()) or edited
        elif self._edited.read():
            edited = True
        self._noted, self._sums = {}, {}
        self._weights, self._versions = [], -1
        if self._perturbed.read():
            self._warn_once(PERTURBED)
        if edited:
            self._warn_once(f"gradients were edited in place after backward; {LOCAL}")

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


class Flag:
    """Whether something was seen on the device, without waiting for it: there one look later."""

    def __init__(self) -> None:
        self._copy: HostCopy | None = None

    def look(self, seen: Tensor) -> bool:
        """Take a 0-dim bool; gives this one on a host, the last one that is known elsewhere."""
        if _compat.is_host(seen.device):
            return bool(seen)
        before = self.read()
        if self._copy is None:
            self._copy = HostCopy(seen.device)
        self._copy.send(seen.double().view(1))
        return before

    def read(self) -> bool:
        """The last one that is known of an accelerator."""
        numbers = None if self._copy is None else self._copy.read()
        return bool(numbers and numbers[0])


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
