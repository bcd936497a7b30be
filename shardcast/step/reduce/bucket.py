"""Reduce: where the gradients of one pack stand, and the way of them to the mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Buffer, Buffers, Comm, ProcessGroups, Reduction
from shardcast.memory.gradients import Gradients, own_part
from shardcast.memory.local_param import LocalParam
from shardcast.step.history import ASSIGNED, SUMMED, listed
from shardcast.step.reduce.mean import Divisor, Mean, mean_in_chunks_


class State(Enum):
    """The state of the gradients of a pack, which methods of its bucket change.

    ``send()`` leads from the first two to SENT, ``land()`` to LANDED, ``use()`` and ``forget()`` to
    USED. ``reopen()`` leads from there to COLLECTING, and from LANDED to ADDING, or to COLLECTING
    where no mean is kept.
    """

    COLLECTING = "this rank's own, or there are none"
    ADDING = "this rank's own, to be added to means of this step"
    SENT = "on their way to the owners"
    LANDED = "the mean, in the own span"
    USED = "the same, which a step used or a script cleared: new gradients replace it"


OPEN = State.COLLECTING, State.ADDING
BEGUN = State.LANDED, State.ADDING  # with means of this step


def land_all(buckets: Iterable[Bucket]) -> None:
    """Finish what a failed backward, or no backward, left in flight."""
    for bucket in buckets:
        if bucket.state is State.SENT:
            with torch.no_grad():
                bucket.land()


def assigned_in(buckets: Iterable[Bucket], process_groups: ProcessGroups) -> dict[str, str]:
    """Return what a script assigned between backwards, for the history of a step, by fact."""
    assigned = [bucket for bucket in buckets if bucket.assigned]
    facts = {ASSIGNED: listed([name for bucket in assigned for name in bucket.assigned])}
    # Summed over model-parallel ranks as well a gradient may be a part of the sum, or all of it.
    data = {process_groups.parallel_dims.replicas}
    parts = [
        name
        for bucket in assigned
        if not data.issuperset(bucket.grads.pack.layout.pack_groups.reduce)
        for name in bucket.assigned
    ]
    if parts:  # its number makes it a difference between ranks, wherever it happens
        facts[SUMMED] = f"{listed(parts)} by rank {process_groups.everyone.rank}"
    return facts


@dataclass(eq=False)
class Bucket:
    """The gradients of one pack, sent to the owners exactly once in each reduction.

    If more gradients come after a reduction (several backwards before a step), the means move to
    an fp32 *carry* of the gradients, and are added back when the pack is reduced again.

    Attributes:
        sums: further groups over which gradients are summed.
        repeated: mesh dimensions along which a gradient that is whole is left to the ranks of
            coordinate 0.
        arrived: slots with a gradient in the running backward, or in one that failed.
        left: slots with a gradient of backwards that failed, as long as it is not sent.
        counts: further gradients need no more than to be put into ``arrived``, in
            :attr:`.Reducer.counting`.
        absent: slots without a gradient here when it was last sent: the own span has others'.
        assigned: names of gradients that a script put in the place of reduced ones.
        late: it is sent at the end only: its further sums are with ranks whose backward waits for
            others than ours.
    """

    grads: Gradients
    mean: Mean
    divisor: Divisor
    sums: Sequence[Comm] = ()
    repeated: Sequence[str] = ()
    state: State = State.COLLECTING
    arrived: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    counts: bool = False
    absent: set[int] = field(default_factory=set)
    assigned: list[str] = field(default_factory=list)
    late: bool = field(init=False)
    _reduction: Reduction | None = None
    _unchanged: tuple[Tensor, int] | None = None  # gradients under way, and their version

    def __post_init__(self) -> None:
        self.late = self.grads.pack.layout.pack_groups.sums_replicas

    @property
    def first(self) -> str:
        """The name of its first parameter, for errors."""
        return self.grads.pack.layout.slots[0].name

    @property
    def complete(self) -> bool:
        """Return whether all gradients have come in this backward."""
        return len(self.arrived) == len(self.grads.pack.params)

    def use(self) -> None:
        """Hear that a step used the mean."""
        if self.state is State.LANDED:  # not where ranks have nothing to send
            self.state = State.USED

    def forget(self) -> None:
        """Hear that all gradients were cleared, by whomever."""
        self.use()
        if self.state is State.ADDING:
            self.state = State.COLLECTING
        self.grads.forget()
        self.left.clear()
        self.assigned.clear()

    def drop_cleared(self) -> None:
        """Zero the means of gradients that are no more; of used ones other ranks' alone too."""
        params = self.grads.pack.params
        gone = {n for n, is_here in enumerate(self.grads.presence()) if not is_here}
        # What was lent is no gradient of this rank, and still a script can clear it: the owner
        # alone would not know that a mean is gone of which only others had a gradient.
        known = gone - self.absent
        if self.grads.lent:
            known |= {position for position in self.grads.lent if params[position].grad is None}
        self.grads.gone = known
        means = self.grads.own if self.grads.carry is None else self.grads.carry
        for position in gone if self.state is State.USED else self.grads.gone:
            means[own_part(self.grads.pack, position)].zero_()
            if self.late and self.grads.joint is not None:
                self.grads.joint[position].fill_(0.0)

    def drop_assigned(self) -> None:
        """Drop, before a pass, what was added up of gradients that a script replaced meanwhile.

        As under DDP ``p.grad = x`` is all of this rank's gradient, to be averaged over ranks.
        """
        grads = self.grads
        if self.state in OPEN and grads.carry is None:
            return
        # What failed backwards have brought is nothing that a script assigned, and in the place of
        # zeros it replaces nothing.
        kept_out = self.left | grads.zeroed
        positions = [position for position in grads.given() if position not in kept_out]
        slots = grads.pack.layout.slots
        self.assigned += [slots[position].name for position in positions]
        if grads.carry is not None:
            for position in positions:
                grads.carry[own_part(grads.pack, position)].zero_()

    def reopen(self) -> None:
        """Make room for gradients to come, and keep the means of those that are there, if any.

        Used means of ranks that have a gradient where this one has none count no more.
        """
        if self.state in OPEN:
            return
        assert self.state is not State.SENT
        grads, is_used = self.grads, self.state is State.USED
        grads.gone = ()
        kept: set[int] = set()
        if is_used:
            grads.take_back()
        else:
            presence = grads.presence()
            kept = {position for position in self.absent if not presence[position]}
        present = [n for n, param in enumerate(grads.pack.params) if param.grad is not None]
        if present:
            with _compat.without_torch_function():
                kept.update(position for position in present if grads.holds(position))
        grads.take_back()  # or whoever has none in the next backward would seem to have one
        # Usually none: all gradients were set to None, all are overwritten.
        grads.carry = grads.reopen(kept)
        self.state = State.COLLECTING if is_used or grads.carry is None else State.ADDING

    def collect(self) -> None:
        """Take in all gradients that are there."""
        assert self.state in OPEN
        pack = self.grads.pack
        # Asked first: sharded gradients are shown no more when they are collected.
        pairs = zip(pack.layout.slots, pack.params, strict=True) if self.repeated else ()
        repeated = [
            slot
            for slot, param in pairs
            if isinstance(param, LocalParam) and param.repeats(self.repeated)
        ]
        self.absent = self.grads.collect()
        self.left.clear()
        for slot in repeated:
            self.grads.data[slot.offset : slot.end].zero_()

    def send(self, buffers: Buffers) -> None:
        """Start the collective, into one of the ``buffers``."""
        assert self.state in OPEN
        self._reduction = self.grads.send(buffers)
        if self.sums and not self.late:
            from shardcast.step.reduce.further_sums import reduced_further

            self._reduction = reduced_further(self._reduction, self.sums, self.grads.pack.layout)
        self.state, data = State.SENT, self.grads.data
        self._unchanged = data, data._version

    @property
    def is_edited(self) -> bool:
        """Return whether a script has written to gradients since they were sent."""
        return self._unchanged is not None and self._unchanged[0]._version != self._unchanged[1]

    def advance(self) -> None:
        """Launch what follows on the collective under way: the first one of two, if there are."""
        if self._reduction is not None:
            self._reduction.advance()

    def land(self) -> Buffer | None:
        """Wait for the collective, if one is under way, and write the mean over the own span.

        Returns:
            The receive buffer, free again.
        """
        reduction, grads = self._reduction, self.grads
        if reduction is None:
            return None
        pieces, divisor = reduction.wait(), self.divisor.value
        if self.late:
            from shardcast.step.reduce.further_sums import sum_of_copies

            pieces = [sum_of_copies(self, pieces)]
        usual = self.divisor.given is None and not self.sums
        mean = self.mean if usual else mean_in_chunks_  # compiled anew for each other divisor
        if reduction.mean_ is not None:
            mean = reduction.mean_
        mean(pieces, divisor, grads.carry, grads.own)
        self._reduction = self._unchanged = grads.carry = None
        self.state = State.LANDED
        grads.landed(pieces if reduction.by_rank else pieces[:1])
        if self.absent:
            grads.lend(position for position in self.absent if grads.owned[position])
        return reduction.received
