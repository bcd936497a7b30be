"""An average of weights, in fp32 at their owners.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/ema.py
"""

import torch
import torch.distributed as dist
from torch import nn

import shardcast

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = shardcast.shard(model, optimizer, averages={"ema": 0.99})  # <- of the fp32 masters

data = torch.Generator().manual_seed(rank)
for _ in range(100):
    inputs = torch.randn(32, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()
    optimizer.step()  # <- averages, too
    optimizer.zero_grad()
with optimizer.averaged("ema"), torch.no_grad():  # <- on every rank: the average is in the model
    output = model(inputs).float()
if rank == 0:
    error = (output - inputs.roll(1, 1)).square().mean()
    print(f"loss {loss.item():.3f}, of the average {error:.3f}")

dist.destroy_process_group()
