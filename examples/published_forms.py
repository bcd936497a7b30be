"""Weights that are mxfp8 in every forward, and their codes for an inference engine.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/published_forms.py
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

model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = shardcast.shard(model, optimizer, published={"mxfp8": "*.weight"})  # <- patterns

data = torch.Generator().manual_seed(rank)
for _ in range(100):
    inputs = torch.randn(32, 32, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()
    optimizer.step()  # <- owners round the new masters to the grid, once
    optimizer.zero_grad()

weight = optimizer.published("2.weight")  # <- codes and scales
served = weight.dequantize()  # as an inference engine computes it
if rank == 0:
    nbytes = weight.codes.nbytes + weight.scales.nbytes
    same = torch.equal(served, model[2].weight)
    print(f"loss {loss:.3f}, {nbytes} bytes in place of {served.nbytes}, equal values: {same}")

dist.destroy_process_group()
