"""The systems that are compared, each used as its documentation says.

All train with AdamW, ``fused`` if the system accepts it, and without clipping. All use bf16 except
one, which shows the cost of fp32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardcast
from benchmarks.floor import Floor
from benchmarks.models import Workload

LR = 1e-3
BF16 = torch.bfloat16
Batch = tuple[Tensor, Tensor]
Compute = Literal["bf16", "autocast", "fp32"]


class System:
    """A model that is trained on every rank; this base class only runs forward and backward.

    Args:
        compute: the precision of forward and backward: of the model itself, or under autocast.
    """

    def __init__(self, model: nn.Module, compute: Compute) -> None:
        self.model: Any = model
        self.autocast = compute == "autocast"
        self.local = f"local, {compute}"  # the same compute without communication or update
        self.optimizer: Any = None

    def micro(self, batch: Batch, last: bool, of: int) -> Tensor:
        """Run forward and backward of one of ``of`` micro-batches, and return the loss."""
        with nullcontext() if last else self.quiet():
            with torch.autocast(batch[0].device.type, BF16, enabled=self.autocast):
                loss = self.model(*batch)
            self.backward(loss / of if of > 1 else loss)
        return loss.detach()

    def quiet(self) -> AbstractContextManager[Any]:
        """Reduce nothing inside the block."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Run the optimizer phase, and clear the gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()


class Local(System):
    """The compute alone, with constant weights."""

    def __init__(self, model: nn.Module, _workload: Workload, *, compute: Compute) -> None:
        super().__init__(model.to(BF16) if compute == "bf16" else model, compute)


class DDP(System):
    def __init__(self, model: nn.Module, _workload: Workload, *, compute: Compute) -> None:
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=True), compute)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def quiet(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()


class TorchZeRO(System):
    def __init__(self, model: nn.Module, _workload: Workload, *, views: bool) -> None:
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=views), "autocast")
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            lr=LR,
            fused=True,
            parameters_as_bucket_view=views,
        )

    def quiet(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()


class FSDP2(System):
    """``fully_shard`` of every block and the root; parameters stay gathered until the step."""

    def __init__(self, model: nn.Module, workload: Workload, *, reduce: torch.dtype) -> None:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce)
        for module in model.modules():
            if isinstance(module, workload.block):
                fully_shard(module, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mp_policy=policy, reshard_after_forward=False)
        super().__init__(model, "bf16")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def micro(self, batch: Batch, last: bool, of: int) -> Tensor:
        self.model.set_requires_gradient_sync(last)
        return super().micro(batch, last, of)


class Fairscale(System):
    def __init__(self, model: nn.Module, _workload: Workload) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        self.optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
        optimizer = self.optimizer
        super().__init__(ShardedDataParallel(model, optimizer), "autocast")
        self.optimizer = optimizer

    def quiet(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()


class DeepSpeed(System):
    def __init__(self, model: nn.Module, workload: Workload, *, stage: int) -> None:
        import deepspeed

        self.sequences = workload.sequences
        config = {
            "train_micro_batch_size_per_gpu": workload.sequences,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # its default is 1.0
            "steps_per_print": 1 << 30,
        }
        engine, *_ = deepspeed.initialize(
            model=model,
            config=config,
            dist_init_required=False,
            optimizer=torch.optim.AdamW(model.parameters(), lr=LR, fused=True),
        )
        super().__init__(engine, "bf16")

    def micro(self, batch: Batch, last: bool, of: int) -> Tensor:
        if self.model.gradient_accumulation_steps() != of:
            self.model.set_train_batch_size(self.sequences * dist.get_world_size() * of)
        loss = self.model(*batch)
        self.model.backward(loss)  # divides by the number of micro-batches itself
        if not last:
            self.model.step()  # only counts; it updates at the last micro-batch
        return loss.detach()

    def step(self) -> None:
        self.model.step()


class Crude(System):
    """See :mod:`benchmarks.floor`."""

    def __init__(self, model: nn.Module, _workload: Workload) -> None:
        self.floor = Floor(model, LR)
        super().__init__(model, "bf16")

    def step(self) -> None:
        self.floor.step()


class Shardcast(System):
    def __init__(self, model: nn.Module, _workload: Workload, **fields: Any) -> None:
        super().__init__(model, "bf16")
        plain = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        self.optimizer = shardcast.shard(model, plain, param_dtype=BF16, **fields)

    def quiet(self) -> AbstractContextManager[Any]:
        return self.optimizer.no_sync()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Build = Callable[[nn.Module, Workload], System]

LOCAL: dict[str, Build] = {
    "local, bf16": partial(Local, compute="bf16"),
    "local, autocast": partial(Local, compute="autocast"),
    "local, fp32": partial(Local, compute="fp32"),
}
OWN: dict[str, Build] = {
    "shardcast": Shardcast,
    "shardcast, overlap_sync": partial(Shardcast, overlap_sync=True),
    "shardcast, overlap_sync, compile": partial(Shardcast, overlap_sync=True, fuse="compile"),
    "shardcast, configs/lean.yaml": partial(
        Shardcast, accumulate="sharded", master="split16", moments="bf16"
    ),
    "crude floor": Crude,
}
PEERS: dict[str, Build] = {
    "DDP, fp32": partial(DDP, compute="fp32"),
    "DDP + autocast": partial(DDP, compute="autocast"),
    "ZeroRedundancyOptimizer": partial(TorchZeRO, views=False),
    "ZeroRedundancyOptimizer, bucket views": partial(TorchZeRO, views=True),
    "FSDP2, reduce in bf16": partial(FSDP2, reduce=torch.bfloat16),
    "FSDP2, reduce in fp32": partial(FSDP2, reduce=torch.float32),
}
if importlib.util.find_spec("fairscale"):
    PEERS["fairscale OSS + ShardedDDP"] = Fairscale
if importlib.util.find_spec("deepspeed"):
    PEERS["DeepSpeed ZeRO-1"] = partial(DeepSpeed, stage=1)
    PEERS["DeepSpeed ZeRO-2"] = partial(DeepSpeed, stage=2)
SYSTEMS: dict[str, Build] = {**LOCAL, **OWN, **PEERS}
