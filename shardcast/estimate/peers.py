"""What others hold and how long their step takes, by the same formulas, on the same machine.

Each as its documentation says it is used, with AdamW in mixed precision; sources beside the terms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import nn

from shardcast.plan.costs import Group
from shardcast.plan.step_time import StepTime, arrivals, compute_times, hidden

DDP_BUCKET = 25 * 2**20  # bytes; torch's default bucket_cap_mb
FP32, LOW = 4, 2  # bytes


def peers(numel: int, moments: float, world_size: int) -> dict[str, float]:
    """Bytes per rank that others hold for ``numel`` parameters in mixed precision.

    Persistent tensors after a backward; activations, buckets in flight and temporary casts aside.
    """
    exact = 4.0 * (1 + moments)  # fp32 weights and moments
    return {
        "DDP + autocast": numel * (exact + 4),
        # torch's: fp32 weights and gradients on every rank, moments cut.
        "ZeroRedundancyOptimizer": numel * (4 + 4 + 4.0 * moments / world_size),
        "ZeRO-1": numel * (2 + 2 + exact / world_size),
        "ZeRO-2": numel * (2 + (2 + exact) / world_size),
        "FSDP": numel * (exact + 4) / world_size,
        # Its docs/source/api-guide/dist_optimizer.md: 6 + 12 / d with bf16 parameters, whose
        # gradients are kept in fp32.
        "Megatron": numel * (2 + 4 + exact / world_size),
        # Its README: 24-bit weights (bf16 and a byte), a byte per moment, bf16 gradients.
        "FlashOptim + DDP": numel * (2 + 1 + moments + 2),
    }


def peer_times(
    units: Sequence[int], moments: float, group: Group, tokens: int, products: float = 0.0
) -> dict[str, StepTime]:
    """Seconds of their steps, without accumulation or activation checkpointing.

    Args:
        units: parameters of each layer, in the order of the forward; see :func:`units_of`.
        moments: state tensors per parameter.
        group: the data-parallel ranks.
        tokens: of one rank in a step.
        products: operations of Muon's matrix products for the whole model, which DDP and FSDP2
            are taken to make on every rank, and Megatron to spread evenly.
    """
    seconds = products / group.machine.flops
    times = {
        "DDP + autocast": (_ddp(sum(units), moments, group, tokens), seconds),
        "FSDP2": (_fsdp2(units, moments, group, tokens), seconds),
        "Megatron": (_megatron(sum(units), moments, group, tokens), seconds / group.size),
    }
    return {
        name: dataclasses.replace(time, update=time.update + more)
        for name, (time, more) in times.items()
    }


def units_of(model: nn.Module) -> list[int]:
    """Parameters of each layer that FSDP2 would be told of, in the order of the model.

    Layers are what stands in an outermost ``ModuleList`` or ``Sequential``; what is outside of all
    of them is one more, the first.
    """
    seen: set[nn.Parameter] = set()
    units: list[int] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if not isinstance(module, (nn.ModuleList, nn.Sequential)):
                walk(child)
                continue
            new = {param for param in child.parameters() if param not in seen}
            seen.update(new)
            if new:
                units.append(sum(param.numel() for param in new))

    walk(model)
    outside = sum(param.numel() for param in model.parameters() if param not in seen)
    return [outside, *units] if outside else units


def _ddp(numel: int, moments: float, group: Group, tokens: int) -> StepTime:
    """All-reduce of fp32 gradients, bucket by bucket; everything else on every rank."""
    machine = group.machine
    forward, backward = compute_times(numel, tokens, machine)
    sizes = _buckets(numel * FP32, DDP_BUCKET)
    works = [group.all_reduce(size) for size in sizes]
    beside = hidden(works, arrivals(sizes, backward), backward)
    copies = 2 * 2 * FP32 * numel * (group.size > 1)  # into buckets and back
    return StepTime(
        compute=forward + backward,
        reduce=sum(works) + copies / machine.memory,
        decide=FP32 * numel / machine.memory,
        # And autocast's casts of weights: each read in fp32 and written in low precision.
        update=(_update(moments) + FP32 + LOW) * numel / machine.memory,
        sync=0.0,
        in_backward=beside,
        in_forward=0.0,
    )


def _fsdp2(units: Sequence[int], moments: float, group: Group, tokens: int) -> StepTime:
    """Layers gathered in forward and again in backward, gradients scattered, all in bf16."""
    machine, numel = group.machine, sum(units)
    forward, backward = compute_times(numel, tokens, machine)
    gathers = [group.gather(LOW * unit) for unit in units]
    # In the order of the backward: while a layer computes, the one before it is gathered and the
    # gradients of the one after it are scattered, through the same links.
    both = [2 * seconds for seconds in reversed(gathers)]
    under = hidden(gathers[::-1], arrivals(units[::-1], forward), forward)
    beside = hidden(both, arrivals(units[::-1], backward), backward)
    # Each gather casts its shard first, and both copy between layers and flat buffers.
    copies = 2 * numel * (FP32 + LOW) / group.size + 3 * 2 * LOW * numel * (group.size > 1)
    owned = numel / group.size
    return StepTime(
        compute=forward + backward,
        reduce=sum(gathers) + copies / machine.memory,
        decide=FP32 * owned / machine.memory + group.all_reduce(8),
        update=_update(moments) * owned / machine.memory,
        sync=2 * sum(gathers),
        in_backward=beside,
        in_forward=under,
    )


def _megatron(numel: int, moments: float, group: Group, tokens: int) -> StepTime:
    """Its distributed optimizer with ``--overlap-grad-reduce``: fp32 gradients scattered.

    Buckets of max(40 M, 1 M * ranks) parameters (megatron/core/distributed). Parameters are
    gathered after the update, not beside the next forward (``--overlap-param-gather`` is off by
    default, as ``overlap_sync`` is here). Gradients are added in fp32 within the matrix products,
    to a buffer that each step clears, and are scaled by the number of ranks before they are sent
    (``reset`` and ``start_grad_sync`` in its param_and_grad_buffer.py; its default check for NaN
    would read them once more).
    """
    machine = group.machine
    forward, backward = compute_times(numel, tokens, machine)
    sizes = _buckets(numel, max(40_000_000, 1_000_000 * group.size))
    works = [group.gather(FP32 * size) for size in sizes]
    beside = hidden(works, arrivals(sizes, backward), backward)
    owned = numel / group.size
    return StepTime(
        compute=forward + backward,
        reduce=sum(works) + (FP32 + 2 * FP32 * (group.size > 1)) * numel / machine.memory,
        decide=FP32 * owned / machine.memory + group.all_reduce(8),
        update=(_update(moments) + LOW) * owned / machine.memory,
        sync=sum(group.gather(LOW * size) for size in sizes),
        in_backward=beside,
        in_forward=0.0,
    )


def _update(moments: float) -> float:
    """Bytes per parameter: its fp32 gradient is read, weight and moments are read and written."""
    return FP32 + 2 * FP32 * (1 + moments)


def _buckets(total: int, cap: int) -> list[int]:
    count = max(1, math.ceil(total / cap))
    return [total // count] * count
