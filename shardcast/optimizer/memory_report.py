"""The result of ``memory_report()``: bytes by kind, in one line; and what ``shard()`` logs."""

from __future__ import annotations

from collections import Counter

import torch

from shardcast.optimizer.packed import PackedOptimizer
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.signal import Signal
from shardcast.step.step_hook import StepHook


class MemoryReport(dict[str, int]):
    """Bytes that this rank holds, by kind; ``print`` shows them in one line, with the total."""

    @property
    def total(self) -> int:
        """The sum of all kinds, in bytes."""
        return sum(self.values())

    def __str__(self) -> str:
        scale, unit = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        rows = [*self.items(), ("total", self.total)]
        return ", ".join(f"{kind} {nbytes / scale:.3f} {unit}" for kind, nbytes in rows)


def report_of(packed: PackedOptimizer) -> MemoryReport:
    """Add up what this rank holds. Local."""
    report = MemoryReport(parameters=0, gradients=0, masters=0, state=0)
    for shard in packed.shards:
        report["parameters"] += shard.pack.data.nbytes
        if shard.grads is not None:
            report["gradients"] += packed.reduce.nbytes(shard.pack)
        report["masters"] += shard.nbytes
    report["state"] = sum(update.nbytes() for update in packed.updates)
    if under_way := packed.sync.nbytes:
        report["parcels"] = under_way
    parts: list[StepHook | Signal] = [*packed.step_hooks, *packed.decider.signals]
    report.update({hook.name: nbytes for hook in parts if (nbytes := hook.nbytes()) is not None})
    return report


def summary_of(packed: PackedOptimizer) -> str:
    """Say in one line what was sharded, and what this rank holds of it. Local."""
    packs, comm = packed.layout.packs, packed.process_groups.shard
    numels: Counter[torch.dtype] = Counter()
    for pack in packs:
        numels[pack.dtype] += sum(slot.numel for slot in pack.slots)
    dtypes = ", ".join(f"{n:,} in {str(d).removeprefix('torch.')}" for d, n in numels.items())
    frozen = packed.precision.frozen_bytes(packed.outside.values())
    trained = [shard for shard in packed.shards if shard.pack.layout.requires_grad]
    owned = sum(shard.pack.own.numel for shard in trained)
    total = sum(numels.values())
    gradients = sum(shard.pack.own.numel * shard.pack.layout.dtype.itemsize for shard in trained)
    report = report_of(packed)
    held = report["parameters"] + report["masters"] + gradients
    count = sum(slot.numel for shard in trained for slot in shard.pack.layout.slots)
    ddp, share = MASTER_DTYPE.itemsize * (total + count), owned / max(1, count)
    beside = f"; beside it {_size(frozen)} of parameters that are not trained stay fp32, as they "
    beside += "came, which convert_rest=True halves"
    return (
        f"sharded {sum(len(pack.slots) for pack in packs)} parameters ({dtypes}) of "
        f"{packed.originals.name} in {len(packs)} packs over {comm.size} of {packed.comm.size} "
        f"data-parallel ranks; weights, gradients and masters take {_size(held)} per rank "
        f"(DDP: {_size(ddp)}), the optimizer's state {share:.0%} of DDP's"
        f"{beside * bool(frozen)}{_rounded(packed)}"
    )


def _rounded(packed: PackedOptimizer) -> str:
    """Say how many masters begin with the digits of a lower dtype, in which the model came."""
    numels: Counter[torch.dtype] = Counter()
    for shard in packed.shards:
        for slot, given in zip(shard.pack.layout.slots, shard.given_dtypes, strict=True):
            if given != MASTER_DTYPE and shard.pack.layout.requires_grad:
                numels[given] += slot.numel
    came = " and ".join(f"{n:,} in {str(d).removeprefix('torch.')}" for d, n in numels.items())
    text = f"; {came} as they came, so that their masters begin rounded: pass a model in fp32"
    return text * bool(numels)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3f} MB"
