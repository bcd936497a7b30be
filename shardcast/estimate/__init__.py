"""Estimate: memory, traffic and time of a job before it starts.

memory      what each rank holds, moves and sends; the time of that is in shardcast.plan.step_time
peers       the same of other systems
advice      both side by side, how sure that is, and better options
"""

from shardcast.estimate.advice import Comparison, TrainingJob, advise, figures
from shardcast.estimate.memory import Estimate, estimate, state_tensors
from shardcast.estimate.peers import peer_times, peers, units_of
from shardcast.plan.costs import PRESETS, Group, Machine, Protocol
from shardcast.plan.step_time import StepTime, step_time

__all__ = [
    "PRESETS",
    "Comparison",
    "Estimate",
    "Group",
    "Machine",
    "Protocol",
    "StepTime",
    "TrainingJob",
    "advise",
    "estimate",
    "figures",
    "peer_times",
    "peers",
    "state_tensors",
    "step_time",
    "units_of",
]
