"""Estimate what a job holds, sends and launches, before it starts.

memory      what each rank holds and sends, and how many collectives it launches
peers       what other systems hold
"""

from shardcast.estimate.memory import Estimate, estimate, peers
from shardcast.step.update.held import state_tensors

__all__ = ["Estimate", "estimate", "peers", "state_tensors"]
