"""Estimate: memory, traffic and time of a job before it starts.

memory      what each rank holds, moves and sends
time        the stages of a step on a machine
peers       the same of other systems
advice      both side by side, how sure that is, and better options
"""

from shardcast.estimate.advice import Comparison, TrainingJob, advise, figures
from shardcast.estimate.memory import Estimate, estimate, state_tensors
from shardcast.estimate.peers import peer_times, peers, units_of
from shardcast.estimate.time import StepTime, step_time
from shardcast.plan.costs import PRESETS, Group, Machine, Protocol

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
