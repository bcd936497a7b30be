"""Muon on matrices, AdamW on the rest.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/muon_adamw.py
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
matrices = [p for p in model.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if p.dim() < 2]
muon = torch.optim.Muon(matrices, lr=0.02)
adamw = torch.optim.AdamW(others, lr=1e-3)
optimizer = shardcast.shard(
    model, [muon, adamw], param_dtype=torch.bfloat16
)  # <- one owner per matrix
schedulers = [torch.optim.lr_scheduler.LinearLR(each) for each in optimizer.optimizers]

data = torch.Generator().manual_seed(rank)
for _ in range(50):
    inputs = torch.randn(32, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()
    optimizer.step()  # <- steps both
    optimizer.zero_grad()
    for scheduler in schedulers:
        scheduler.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
    print(optimizer.layout)

dist.destroy_process_group()
