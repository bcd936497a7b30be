"""``reproducible``: the same bits at any number of ranks, by sums in an order of their own."""

from __future__ import annotations

from shardcast.config import ShardcastConfig
from shardcast.extensions.reproducible.tree import MicroBatches
from shardcast.option_values import Option
from shardcast.plan.parallel_dims import ParallelDims


def _fits(config: ShardcastConfig, parallel_dims: ParallelDims, draws: str) -> None:
    """Raise ValueError for sums that the order of micro-batches would not be alone in."""
    ranks, total = parallel_dims.world_size, config.reproducible
    in_mesh = parallel_dims != ParallelDims(ranks)
    refused = {
        f"{ranks} ranks do not divide its {total} micro-batches; use a number of ranks that does, "
        "or another number of micro-batches": total is not True and total % ranks > 0,
        "a mesh, a pipeline and shard_ranks sum over other ranks too; shard over plain "
        "data-parallel ranks, all of them": in_mesh or isinstance(config.shard_ranks, int),
        f"reduce {config.reduce!r} leaves the order of sums to others; use 'all_to_all'": (
            config.reduce not in ("auto", "all_to_all")
        ),
        "grads 'sharded' has no room for sums of micro-batches; use grads 'full'": (
            config.grads == "sharded"
        ),
        f"norm_type {config.norm_type} is not summed exactly; use 2 or inf": (
            config.norm_type not in (2.0, float("inf"))
        ),
        f"{draws} draws random numbers in its step, or may; use an optimizer that does not": (
            bool(draws)
        ),
    }
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"reproducible: {reason}, or leave it out")


OPTION = Option(
    help="the same bits at any number of ranks that divides the micro-batches of a step over all "
    "ranks (docs/reproducible.md): their number, or true, which counts those of the first step",
    within=("true or a number of micro-batches >= 0", lambda total: total >= 0),
    micro_batches=lambda config, comm: MicroBatches(config.reproducible, comm),
    fits=_fits,
)
