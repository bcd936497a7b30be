"""Masters and moments in a third of the memory.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/lean_memory.py
"""

import torch
import torch.distributed as dist
from torch import nn

import shardcast

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")


def trained(**options: object) -> dict[str, int]:
    """Return bytes by kind after 20 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = shardcast.shard(model, optimizer, param_dtype=torch.bfloat16, **options)
    data = torch.Generator().manual_seed(rank)
    for _ in range(20):
        inputs = torch.randn(32, 64, generator=data).to(device)
        loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.memory_report()


default = trained()
lean = trained(
    accumulate="sharded",  # <- each rank keeps its own part of the gradients
    master="split16",  # <- only the bits that the bf16 parameter lacks
    moments="int8",  # <- a byte per moment, and a scale per 64 elements
)
if rank == 0:
    print(f"default {default}\nlean    {lean}")

dist.destroy_process_group()
