"""An average of weights, in fp32: torchrun --nproc-per-node=2 examples/ema.py."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import shardcast

DECAY = 0.99
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
average = copy.deepcopy(model).requires_grad_(False)  # <- before shard(): it stays fp32
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = shardcast.shard(model, optimizer, param_dtype=torch.bfloat16)

data = torch.Generator().manual_seed(rank)
for _ in range(100):
    inputs = torch.randn(32, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, param in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(
                param.float(), 1 - DECAY
            )  # <- every rank has the whole model: nothing is sent
if rank == 0:
    output = average(inputs)
    print(
        f"loss {loss.item():.3f}, of the average {(output - inputs.roll(1, 1)).square().mean():.3f}"
    )

dist.destroy_process_group()
