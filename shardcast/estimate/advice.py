"""A job beside other systems, how sure the figures are, and which options would be better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardcast.config import ShardcastConfig
from shardcast.estimate.memory import Estimate, estimate, state_tensors
from shardcast.estimate.peers import peer_times, peers, units_of
from shardcast.plan.costs import Machine
from shardcast.plan.originals import OptimizerList
from shardcast.plan.step_time import StepTime, step_time

ROOM = 0.7  # of a device's memory that a rank may take, so that activations have the rest
GAIN = 0.003  # of a step, below which an option is not worth its name
PACK_SIZES = (4, 8, 32, 64, 128, 256)  # MiB
# In the order in which they are tried where memory is short, those with the same bits first.
LEAN: tuple[dict[str, Any], ...] = (
    {"grads": "sharded"}, {"master": "split16"}, {"moments": "bf16"}, {"moments": "int8"},
    {"offload": True},
)  # fmt: skip
# What the predictions may be off by: docs/estimate.md has measurements of others beside them.
DOUBTS: Mapping[str, dict[str, float]] = {
    "latency x 3": {"latency": 3.0},
    "network / 2": {"network": 0.5},
}


@dataclass(frozen=True)
class TrainingJob:
    """A model and its optimizers on a machine.

    Attributes:
        stages: of a pipeline, of which the one that holds most counts.
        tokens: of one rank in a step.
    """

    stages: Sequence[tuple[nn.Module, OptimizerList]]
    machine: Machine
    tokens: int

    def fullest(
        self, size: int, config: ShardcastConfig
    ) -> tuple[nn.Module, OptimizerList, Estimate]:
        """The stage that holds most on ``size`` data-parallel ranks.

        Raises:
            TypeError, ValueError: what ``shard()`` refuses too.
        """
        return max(
            (
                (model, originals, estimate(model, originals, size, config, self.machine))
                for model, originals in self.stages
            ),
            key=lambda stage: stage[2].total,
        )


@dataclass(frozen=True)
class Comparison:
    """One world size: shardcast, and others by the same formulas.

    Attributes:
        held: bytes of shardcast.
        time: of its step.
        peers: bytes per rank that others hold.
        peer_times: of their steps.
        latency: the share of the step that is neither bytes nor operations.
        doubts: seconds of the step over those of the fastest of the others, as predicted and with
            other constants, by name.
    """

    held: Estimate
    time: StepTime
    peers: Mapping[str, float]
    peer_times: Mapping[str, StepTime]
    latency: float
    doubts: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """The step over that of the fastest of the others."""
        return self.time.step / min(time.step for time in self.peer_times.values())


def figures(job: TrainingJob, size: int, config: ShardcastConfig) -> Comparison:
    """What a job holds and how long its step takes, beside others; errors as of ``estimate``."""
    model, originals, held = job.fullest(size, config)
    moments, units, numel = moments_of(originals), units_of(model), _numel(model)

    def on(machine: Machine) -> tuple[StepTime, dict[str, StepTime]]:
        group, products = machine.group(size), sum(held.products)
        return (
            step_time(held, config, machine, numel, job.tokens),
            peer_times(units, moments, group, job.tokens, products),
        )

    time, others = on(job.machine)
    idle, _ = on(job.machine.scaled(latency=0.0))
    doubts = {}
    for name, constants in DOUBTS.items():
        own, of_others = on(job.machine.scaled(**constants))
        doubts[name] = own.step / min(other.step for other in of_others.values())
    latency = 1 - idle.step / time.step
    return Comparison(held, time, peers(numel, moments, size), others, latency, doubts)


def advise(job: TrainingJob, size: int, config: ShardcastConfig) -> dict[str, Any]:
    """The options that make a step faster, or fit the memory where ``config`` does not.

    One option after another is tried: ``overlap_sync``, ranks to shard over, sizes of packs; where
    a rank takes more than :data:`ROOM` of its device, those that save memory, first.
    """
    changes: dict[str, Any] = {}

    def cost(trial: Mapping[str, Any]) -> tuple[float, float]:
        """Bytes that do not fit, then seconds."""
        trial_config = config.replace(**trial)
        model, _, held = job.fullest(size, trial_config)
        over = held.total - held.host - ROOM * job.machine.capacity
        time = step_time(held, trial_config, job.machine, _numel(model), job.tokens)
        return max(0.0, over), time.step

    best = cost(changes)

    def attempt(**options: Any) -> None:
        nonlocal changes, best
        trial = {**changes, **options}
        try:
            over, seconds = cost(trial)
        except (ValueError, TypeError):  # one that this job cannot have
            return
        if (over, seconds) < (best[0], best[1] * (1 - GAIN)):
            changes, best = trial, (over, seconds)

    if best[0] and config.shard_ranks != "all":
        attempt(shard_ranks="all")
    for option in LEAN if size > 1 or best[0] else ():
        if best[0]:
            attempt(**option)
    if size > 1:
        attempt(overlap_sync=True)  # first: it hides what fewer ranks would save
        ranks = job.machine.ranks_per_node
        while 1 < ranks < size:
            if size % ranks == 0:
                attempt(shard_ranks=ranks)
            ranks *= 2
        attempt(shard_ranks="all")
        for mib in PACK_SIZES:
            attempt(pack_mb=float(mib))
    return changes


def moments_of(originals: OptimizerList) -> float:
    """State tensors per parameter, in the mean over all elements."""
    elements = moments = 0
    for _, owner, group in originals.numbered():
        numel = sum(param.numel() for param in group["params"])
        elements += numel
        moments += numel * state_tensors(owner, group)
    return moments / max(1, elements)


def _numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())
