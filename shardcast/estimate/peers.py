"""Memory of others, each as its documentation says it is used, with AdamW in mixed precision."""

from __future__ import annotations


def peers(numel: int, moments: float, world_size: int) -> dict[str, float]:
    """Return the bytes per rank that others hold for ``numel`` parameters in mixed precision.

    Persistent tensors after a backward; activations, buckets in flight and temporary casts aside.
    Local.

    Args:
        numel: number of parameters.
        moments: state tensors of the optimizer for each parameter, 2 for Adam.
        world_size: number of data-parallel ranks.
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
