"""Step hooks: what an option does in every step besides the step's own stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardcast.step.decide.decision import Decision


class StepHook:
    """Takes part in each step of one optimizer; this one does nothing.

    A class of an option, in a module of :mod:`shardcast.extensions`. All ranks have the same hooks
    in the same order, that of the options, and ``step()`` calls them where this table says, without
    autograd. A method may issue collectives where it does so on all ranks, and waits for no
    device::

        reduce     before_reduce()           also in clip_grad_norm_, gather_gradients
        decide
        update     before_update(decision)   after_update(decision)
        sync                                 after_sync()

    What it keeps besides is small: state that belongs to elements of parameters is an
    :class:`.Epilogue`'s, and what ranks are to agree on a :class:`.Signal`'s.

    Attributes:
        name: of its bytes in ``memory_report()``, and of its state in checkpoints.
    """

    name = ""

    def attach(self) -> None:
        """Install hooks on the model, after set-up and again after each added group."""

    def close(self) -> None:
        """Remove them, before a group is added and at the end; waits for no other rank."""

    def begin_backward(self) -> None:
        """Called when backward reaches an output of the root module (eager only). Local."""

    def refuse(self, call: str) -> None:
        """Raise a RuntimeError where masters and state, which ``call`` needs, are not there."""

    def before_reduce(self) -> None:
        """See the gradients of this rank; maybe several times before a step."""

    def before_update(self, decision: Decision) -> None:
        """See the means in the own spans, and what is decided."""

    def after_update(self, decision: Decision) -> None:
        """See the new masters and own spans; other spans of the packs are old."""

    def after_sync(self) -> None:
        """See the new parameters; with ``overlap_sync`` they are under way still."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists of them, equal on all ranks; empty: nothing is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave; not called where a checkpoint has none."""

    def nbytes(self) -> int | None:
        """Return the bytes that it holds on this rank; with ``None`` they are not reported."""
        return None
