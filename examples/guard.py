"""A bad batch on one rank is skipped on all ranks, because of its gradient norm.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/guard.py
"""

import torch
import torch.distributed as dist
from torch import nn

import shardcast

BROKEN = 60  # the step whose batch one rank cannot learn from
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# Steps whose norm is more than 6 standard deviations above the mean of the last 32 accepted ones
# change nothing; "action": "clip" would clip them to that bound.
optimizer = shardcast.shard(
    model, optimizer, param_dtype=torch.bfloat16, guard={"norm": 6.0, "window": 32}
)

data = torch.Generator().manual_seed(rank)
for step in range(100):
    inputs = torch.randn(32, 16, generator=data).to(device)
    targets = inputs.sum(dim=1, keepdim=True) / 4
    if step == BROKEN and rank == dist.get_world_size() - 1:
        targets = targets * 1e4
    loss = nn.functional.mse_loss(model(inputs).float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"skipped by the guard: {optimizer.guarded_steps}")
    print(f"loss {loss.item():.3f}")

dist.destroy_process_group()
