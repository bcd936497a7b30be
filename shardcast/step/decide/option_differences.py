"""Names the options, or what else ranks must have alike in a step, in which they differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardcast.comm import Comm, warn_first
from shardcast.messages import by_rank
from shardcast.step.decide.signal import COUNT, LEFT, known
from shardcast.step.history import HISTORY, SUMMED

REMEDY = (
    "Every owner would update its part of the model in its own way: give all ranks the same value, "
    "for example average what a scheduler such as ReduceLROnPlateau is given over the ranks first."
)
LEFT_REMEDY = (
    "A layer was replaced after shardcast.shard, and what is in its place is not trained there: "
    "replace layers before shardcast.shard, on every rank"
)
COUNT_REMEDY = "call it on every rank, in each micro-batch; count(0) where a rank has no batch"
HISTORY_REMEDY = (
    "Some ranks would train other gradients than the others: call backward, zero_grad() and step() "
    "on all ranks alike, and decide what is to be skipped from numbers that are equal on all ranks"
)
SUMMED_REMEDY = (
    "What is assigned may be a part of that sum, or all of it: assign after the last backward of a "
    "step, or call optimizer.gather_gradients() and edit .grad in place"
)
UNTRAINED = (
    "The gradient of a parameter is zero on the ranks that do not train it; freeze and unfreeze on "
    "all ranks alike"
)
# By what differs; where several facts do, of the first one here.
REMEDIES = {
    SUMMED: SUMMED_REMEDY,
    **dict.fromkeys(HISTORY, HISTORY_REMEDY),
    COUNT: COUNT_REMEDY,
    LEFT: LEFT_REMEDY,
}


def error_of(values: Mapping[str, str], comm: Comm, device: torch.device) -> RuntimeError:
    """Return the error for options that differ, with groups, ranks and values.

    All ranks of ``comm`` call it on a CPU, and tell each other their ``values``, by name.
    """
    text = _differences(known(values, comm, device), "None")
    if not text:  # they are known of this rank alone
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        text = f"the ranks differ in options; rank {comm.rank} has {shown}"
    remedies = (remedy for fact, remedy in REMEDIES.items() if fact in text)
    remedy = next(remedies, REMEDY)
    return RuntimeError(f"step: {text}. {remedy}")


def warn_of_training(untrained: Mapping[str, str], comm: Comm, device: torch.device) -> None:
    """Warn of parameters that some ranks train and others do not; called as :func:`error_of`."""
    text = _differences(known(untrained, comm, device), "True")
    warn_first(f"step: {text or 'the ranks train different parameters'}. {UNTRAINED}", UNTRAINED)


def _differences(values_by_rank: Mapping[int, Mapping[str, str]], usual: str) -> str:
    """List names whose values differ, with these by rank; ``usual`` where one has none."""
    texts = []
    for name in dict.fromkeys(name for values in values_by_rank.values() for name in values):
        facts = [(rank, values.get(name, usual)) for rank, values in values_by_rank.items()]
        if len({value for _, value in facts}) > 1:
            texts.append(f"{name} differs ({by_rank(facts)})")
    return "; ".join(texts)
