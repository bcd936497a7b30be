"""A clip that was called before the step that folds it in."""

from __future__ import annotations

from shardcast.messages import warn
from shardcast.step.decide.decision import Decision
from shardcast.step.reduce.reducer import Reducer


class ClipAhead:
    """The decision of the last clip, as long as the gradients are those that it saw."""

    def __init__(self, reduce: Reducer) -> None:
        self._reduce = reduce
        self._decision: Decision | None = None
        self._seen = 0  # version of the gradients

    def note(self, decision: Decision | None) -> None:
        """Keep a decision on the present gradients; ``None`` forgets the last one."""
        self._decision, self._seen = decision, self._reduce.grad_version if decision else 0

    def pending(self) -> Decision | None:
        """What the coming step, or clip, is to go on from.

        Raises:
            RuntimeError: the gradients were edited since.
        """
        if self._decision is not None and self._reduce.touched:
            self._decision = None
            warn(
                "a backward came after clip_grad_norm_, so that this clip is lost: it would have "
                "been folded into the step; clip once, after the last backward of a step"
            )
        if self._decision is not None and self._reduce.grad_version != self._seen:
            raise RuntimeError(
                "step: gradients were edited, replaced or cleared after clip_grad_norm_, which "
                "clips them within the step; do it before you clip, or call optimizer.zero_grad()"
            )
        return self._decision
