"""The process groups of a mesh, whose ranks plan alike what they hold in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from shardcast.comm import ProcessGroups
from shardcast.optimizer.setup import Plan
from shardcast.plan.pack_groups import Tie
from shardcast.plan.validate import check_matched


class MeshGroups(ProcessGroups):
    """The process groups of a mesh; they agree on what some of their ranks hold as well."""

    def check_alike(self, plan: Plan, device: torch.device) -> None:
        """Raise a RuntimeError on every rank, naming the first difference, where plans differ.

        Of a pipeline also a ValueError for weights that two stages would not treat alike, and for
        patterns that match nothing in any stage.
        """
        dims = self.parallel_dims
        self.everyone.check_equal(plan.options, device)
        # All ranks must hear of it, not only the data-parallel ones of a stage that differ.
        alike = [(self.dp, plan.facts())]
        for dim in dims.replicating:  # what is held as copies
            packs = [pack for pack in plan.new if dim in pack.pack_groups.replicate]
            facts = [
                f"    {slot.name} {slot.shape} {pack.dtype}, group {pack.group}, trained: "
                f"{pack.requires_grad}, held as copies over {dim}"
                for pack in packs
                for slot in pack.slots
            ]
            alike.append((self.comm(dim), facts))
        alike += [(self.comm(dim), plan.experts(dim)) for dim in dims.experts]
        for comm, facts in alike:
            self.everyone.together(partial(comm.check_equal, facts, device), device)
        if dims.in_pipeline:
            line = self.comm(dims.pipeline)
            everywhere = line.exchange((plan.unmatched, _tied(plan, dims.ties)), device)
            unmatched, stages = zip(*everywhere, strict=True)
            check_matched(sorted(set(plan.unmatched).intersection(*unmatched)))
            self.everyone.together(partial(_check_tied, stages), device)


def _tied(plan: Plan, ties: Sequence[Tie]) -> dict[Tie, str]:
    """Return what both stages must have alike of a weight that they share."""
    plans = {name: f"{param.dtype}, in no group" for name, param in plan.outside.items()}
    for pack in plan.new:
        trained = "trained" if pack.requires_grad else "frozen"
        fact = f"{pack.dtype}, {trained}, in group {pack.group}"
        plans |= {slot.name: fact for slot in pack.slots if pack.pack_groups.replicate}
    facts = {tie: plans.get(tie.first, plans.get(tie.second)) for tie in ties}
    return {tie: fact or "not among the new parameters" for tie, fact in facts.items()}


def _check_tied(stages: Sequence[Mapping[Tie, str]]) -> None:
    """Raise ValueError for a weight that its two stages would not treat alike.

    Args:
        stages: of each stage its ties, and what is planned for the weight there.
    """
    for tie, fact in ((tie, fact) for facts in stages for tie, fact in facts.items()):
        unlike = next((facts[tie] for facts in stages if facts.get(tie, fact) != fact), None)
        if unlike is not None:
            raise ValueError(
                f"tied: expected {tie.first!r} and {tie.second!r} to be alike on their two stages, "
                f"got {fact} and {unlike}; put both into the same group of the optimizer or leave "
                "both out, freeze neither or both, and name both or none in keep_fp32"
            )
