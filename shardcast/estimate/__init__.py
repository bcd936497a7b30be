"""Estimate: memory, traffic and time of a job before it starts.

memory      what each rank holds, moves and sends
network     what a collective costs on a machine
time        the stages of a step on it
peers       the same of other systems
"""

from shardcast.estimate.memory import Estimate, StateOf, Traffic, estimate, state_of
from shardcast.estimate.peers import peer_times, peers, units_of
from shardcast.estimate.time import StepTime, step_time
from shardcast.plan.costs import PRESETS, Group, Machine, Protocol

__all__ = [
    "PRESETS",
    "Estimate",
    "Group",
    "Machine",
    "Protocol",
    "StateOf",
    "StepTime",
    "Traffic",
    "estimate",
    "peer_times",
    "peers",
    "state_of",
    "step_time",
    "units_of",
]
