"""Rank, world size and device of this process, from the launcher's environment."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    @classmethod
    def start(cls, device_type: str | None) -> Processes:
        """Join the process group of `torchrun` or `accelerate launch`, if there is a launcher.

        Without a `device_type`, several processes need GPUs unless Accelerate was told to use the
        CPU. One process uses a GPU if there is one.
        """
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if device_type is None:
            use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
            device_type = "cuda" if torch.cuda.is_available() and not use_cpu else "cpu"
            if device_type == "cpu" and world > 1 and not use_cpu:
                raise SystemExit(
                    f"error: {world} processes were started, but torch finds no GPU here; to train "
                    "on the CPU, over gloo, pass --device cpu (or set ACCELERATE_USE_CPU=true)"
                )
        if device_type == "cuda":
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            if world > 1 and "OMP_NUM_THREADS" not in os.environ:
                local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
                torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
        if world > 1:
            if device_type == "cuda":
                dist.init_process_group("nccl", device_id=device)
            else:
                dist.init_process_group("gloo")
        return cls(rank, world, device)

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def stop(self) -> None:
        """Destroy the process group and free its threads before the interpreter ends.

        A DDP model, which is full of reference cycles, keeps the group alive. If the group's
        threads call into the interpreter after its end, the process aborts.
        """
        if self.world > 1:
            gc.collect()
            dist.destroy_process_group()
