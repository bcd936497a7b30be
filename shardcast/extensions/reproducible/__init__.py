"""``reproducible``: the same bits at any number of ranks, by sums in an order of their own."""

from __future__ import annotations

from shardcast.extensions.reproducible.tree import MicroBatches
from shardcast.option_values import Option

OPTION = Option(
    help="the same bits at any number of ranks that divides the micro-batches of a step over all "
    "ranks (docs/reproducible.md): their number, or true, which counts those of the first step",
    within=("true or a number of micro-batches >= 0", lambda total: total >= 0),
    micro_batches=lambda config, comm: MicroBatches(config.reproducible, comm),
)
