"""The smallest complete script, for CPUs and GPUs.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/minimal.py
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
optimizer = shardcast.shard(model, optimizer, param_dtype="bf16", max_grad_norm=1.0)

data = torch.Generator().manual_seed(rank)  # every rank has its own batches
for step in range(100):
    inputs = torch.randn(32, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()  # gradients travel to their owners while it runs
    optimizer.step()  # unscale, clip, update, cast and sync
    optimizer.zero_grad()
    if rank == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}, {optimizer.memory_report()}")

dist.destroy_process_group()
