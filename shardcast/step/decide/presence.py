"""Presence: the parameters with a gradient on some rank, which a step updates.

Every rank knows all of them, so that it can also count the steps of parameters that others own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.memory.gradients import Gradients
from shardcast.memory.pack import Pack
from shardcast.messages import by_rank
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.signal import Signal, known, to_device

CLEARED = 1 << 32  # more than the number of ranks; sums of it are exact in fp64


class Presence(Signal):
    """The slots with a gradient, on this rank and on any rank.

    Each slot has a place in the control vector. A rank with a gradient adds -1 there; if replicas
    are summed, it adds minus the number of replicas with one. A rank on which the gradient was
    cleared after its reduction adds :data:`CLEARED`. The last place is always 0, so a maximum is at
    least 0. Packs of experts differ between data-parallel ranks, so these have a block of places
    for every expert.

    Args:
        grads: the gradient packs that are reduced; the list may grow.

    Attributes:
        made: number of steps made, see :class:`.SkipReport`.
    """

    def __init__(
        self, grads: Sequence[Gradients], process_groups: ProcessGroups, device: torch.device
    ) -> None:
        self._grads, self._process_groups, self._device = grads, process_groups, device
        self._places: list[slice] = []  # per pack, places of its slots in the control vector
        self._numel = 0
        self._asks = process_groups.dp.size > 1
        self._here: tuple[int, ...] = ()  # this rank's summands, for all packs in order
        self._uploaded: dict[tuple[int, ...], Tensor] = {}
        self._zero = torch.zeros(1, dtype=torch.float64, device=device)
        # From the last decision: the sum over all ranks, and its meaning.
        self._total = self._zero
        self._present: Mapping[Pack, tuple[bool, ...]] = {}
        self._missed = self._zero[:0]  # steps that did not update each place
        self.made = self._zero.clone()

    def numel(self) -> int:
        self._arrange()
        return self._numel + 1

    def local(self) -> Tensor:
        """Return this rank's part; each pattern is uploaded once."""
        self._arrange()
        self._here = tuple(
            -1 if is_here else CLEARED * (slot in gone)
            for grads in self._grads
            for gone in (grads.gone,)
            for slot, is_here in enumerate(grads.presence())
        )
        if self._here not in self._uploaded:
            if len(self._uploaded) > 8:
                self._uploaded.clear()
            numbers, slots = [0] * (self._numel + 1), iter(self._here)
            for places in self._places:
                numbers[places] = islice(slots, places.stop - places.start)
            self._uploaded[self._here] = to_device(numbers, torch.float64, self._device)
        counts = self._uploaded[self._here]
        for grads, places in zip(self._grads, self._places, strict=True):
            if grads.holders is not None:
                counts = counts.clone()
                counts[places] -= grads.holders
        return counts

    def read(self, total: Tensor) -> Tensor:
        """Return whether a gradient exists on some ranks and was cleared on others."""
        if not self._asks:
            return self._zero
        # The remainder has the sign of the total: it is above 0 if CLEARED and -1 both occur.
        return torch.fmod(total, CLEARED).amax(0, keepdim=True)

    def error(self, mistakes: Sequence[float]) -> Exception:
        """Return an error that names a parameter and the ranks."""
        names = [slot.name for grads in self._grads for slot in grads.pack.layout.slots]
        here = dict(zip(names, self._here, strict=True))
        told = known(here, self._process_groups.dp, self._device)
        texts = {CLEARED: "cleared", 0: "not there", -1: "kept"}
        for name in names:
            states = [(rank, texts[of_rank.get(name, 0)]) for rank, of_rank in told.items()]
            if {"cleared", "kept"} <= {text for _, text in states}:
                return RuntimeError(
                    f"step: after the backward .grad of {name!r} was kept on some ranks and "
                    f"cleared on others ({by_rank(states)}); clear gradients on all ranks alike"
                )
        cleared = [name for name, state in here.items() if state > 0]
        return RuntimeError(
            "step: after the backward .grad of some parameters was cleared on some ranks and kept "
            f"on others; this rank cleared {', '.join(cleared) or 'none'}; do it on all ranks alike"
        )

    def _arrange(self) -> None:
        """Assign places to each pack, in the same order on all ranks, if there are new ones."""
        if len(self._places) == len(self._grads):
            return
        self._places, self._numel = [], 0
        self._uploaded.clear()
        for grads in self._grads:
            pack_groups, slots = grads.pack.layout.pack_groups, len(grads.owned)
            blocks, own_block = self._process_groups.parallel_dims.expert_blocks(pack_groups)
            start = self._numel + own_block * slots
            self._places.append(slice(start, start + slots))
            self._numel += blocks * slots
            self._asks = self._asks or pack_groups.sums_replicas
        # Packs are only ever added, at the end; no step has updated them yet.
        new = self.made.expand(self._numel + 1 - self._missed.numel())
        self._missed = torch.cat([self._missed, new])

    def anywhere(self, total: Tensor) -> Mapping[Pack, tuple[bool, ...]]:
        """Return, by pack, the slots with a gradient on some rank.

        A gradient on this rank is present. Other ranks' counts are read only for a slot without
        one. On an accelerator, where that waits for the all-reduce, they are read only if this rank
        owns a part of the slot.
        """
        self._total = total
        local = [here < 0 for here in self._here]
        on_host = _compat.is_host(self._device)
        owned = (on_host or owns for grads in self._grads for owns in grads.owned)
        if self._asks and any(owns and not has for owns, has in zip(owned, local, strict=True)):
            present = [-count % CLEARED > 0 for count in total.tolist()]
            local = [it for places in self._places for it in present[places]]
        slots = iter(local)
        self._present = {
            grads.pack: tuple(islice(slots, len(grads.owned))) for grads in self._grads
        }
        return self._present

    # -- the steps of each parameter --------------------------------------------------------------

    def conclude(self, decision: Decision) -> None:
        """Count the places that the step does not update. Never waits for a device.

        The result is equal on all ranks.

        Usually there are none, and nothing is launched.
        """
        present = decision.present
        if all(map(all, present.values())):
            return
        # A rank reads only the slots that it needs; the sum has all of them.
        absent = torch.fmod(self._total, CLEARED).eq_(0)
        if present is not self._present:  # a script edited gradients after the decision
            for grads, places in zip(self._grads, self._places, strict=True):
                slots = zip(present[grads.pack], self._present[grads.pack], strict=True)
                for place, (now, before) in enumerate(slots, places.start):
                    if now != before:
                        absent[place].fill_(float(not now))
        self._missed.addcmul_(absent, decision.taken)

    def steps(self, grads: Gradients) -> Tensor:
        """Return how many steps updated each slot of a pack, 1-d fp32, equal on all ranks."""
        places = self._slots(grads)
        return (self.made - self._missed[places]).float()

    def take_steps(self, grads: Gradients, steps: Sequence[float]) -> None:
        """Continue from other counts, equal on all ranks, such as a loaded state's."""
        places = self._slots(grads)
        self._missed[places] = self.made - self._missed.new_tensor(steps)

    def _slots(self, grads: Gradients) -> slice:
        self._arrange()
        return self._places[self._grads.index(grads)]
