"""An average of the fp32 masters with a lower loss than the last weights.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/ema.py
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

model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = shardcast.shard(model, optimizer, averages={"ema": 0.98})  # <- averages fp32 masters
held_out = torch.randn(1024, 16, generator=torch.Generator().manual_seed(9)).to(device)


def error() -> float:
    with torch.no_grad():
        return (model(held_out).float() - held_out.roll(1, dims=1)).square().mean().item()


data = torch.Generator().manual_seed(rank)
for _ in range(300):
    inputs = torch.randn(32, 16, generator=data).to(device)
    noise = torch.randn(32, 16, generator=data).to(device)  # makes the weights jitter
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1) + noise)
    loss.backward()
    optimizer.step()  # <- also updates the average
    optimizer.zero_grad()
last = error()
with optimizer.averaged("ema"):  # <- on every rank: the average is in the model
    averaged = error()
if rank == 0:
    print(f"error of the last weights {last:.3f}, of the average {averaged:.3f}")

dist.destroy_process_group()
