"""Masters and moments in host memory.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/offload.py
"""

import torch
import torch.distributed as dist
from torch import nn

import shardcast

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = shardcast.shard(
    model,
    optimizer,
    param_dtype=torch.bfloat16,
    accumulate="sharded",
    offload=True,  # <- the host keeps masters and moments and updates them
)

data = torch.Generator().manual_seed(rank)
for _ in range(50):
    inputs = torch.randn(32, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    memory = optimizer.memory_report()
    device = memory.total - memory.host
    print(f"{device:,} bytes on the device, {memory.host:,} in host memory; loss {loss.item():.3f}")

dist.destroy_process_group()
