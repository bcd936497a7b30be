"""Gradient accumulation with the mean over all tokens of all ranks and micro-batches.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/accumulation.py
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

import shardcast

MICRO_BATCHES = 4
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = shardcast.shard(model, optimizer, param_dtype=torch.bfloat16)

data = torch.Generator().manual_seed(rank)
for _ in range(50):
    lengths = torch.randint(4, 16, (MICRO_BATCHES,), generator=data).tolist()
    batches = [torch.randint(0, 100, (8, n), generator=data).to(device) for n in lengths]
    for number, batch in enumerate(batches, 1):
        last = number == MICRO_BATCHES
        with contextlib.nullcontext() if last else optimizer.no_sync():  # <- sent once per step
            logits = model(batch).float()
            target = (batch + 1) % 100
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), target.flatten(), reduction="sum"
            )
            optimizer.count(batch.numel())  # <- sums are divided by the tokens of all ranks
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"loss per token of the last micro-batch: {loss.item() / batch.numel():.3f}")

dist.destroy_process_group()
