"""Step hooks: actions of an option in every step, besides the step's own phases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardcast.step.decide.decision import Decision


class StepHook:
    """Actions in each step of one optimizer; this base class does nothing.

    An option in :mod:`shardcast.extensions` derives from it. All ranks have the same hooks in the
    same order, that of the options. ``step()`` calls them without autograd, at the points below. A
    method may issue collectives if it does so on all ranks. It must not wait for a device::

        reduce     before_reduce()           also in clip_grad_norm_, gather_gradients
        decide
        update     before_update(decision)   after_update(decision)
        sync                                 after_sync()

    Its own state should be small: per-element state belongs to an :class:`.Epilogue`, and values
    that ranks must agree on belong to a :class:`.Signal`.

    Attributes:
        name: name of its bytes in ``memory_report()``, and of its state in checkpoints.
    """

    name = ""

    def attach(self) -> None:
        """Install hooks on the model. Called after set-up, and again after each added group."""

    def close(self) -> None:
        """Remove them. Called before a group is added and at the end; waits for no other rank."""

    def begin_backward(self) -> None:
        """Called when backward reaches an output of the root module (eager only). Local."""

    def refuse(self, call: str) -> None:
        """Raise RuntimeError if ``call`` needs masters and state and they are not there."""

    def before_reduce(self) -> None:
        """Called with this rank's gradients complete, possibly several times before a step."""

    def before_update(self, decision: Decision) -> None:
        """Called with the means in each rank's spans, and the decision."""

    def after_update(self, decision: Decision) -> None:
        """Called with new masters and own spans; the packs' other spans are still old."""

    def after_sync(self) -> None:
        """Called with the new parameters; with ``overlap_sync`` they are still being sent."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, equal on all ranks; empty: nothing is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. Not called if a checkpoint has none."""

    def nbytes(self) -> int | None:
        """Return its bytes on this rank; ``None``: not reported."""
        return None
