"""fp16 with the built-in loss scale.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/fp16.py
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
optimizer = shardcast.shard(model, optimizer, param_dtype=torch.float16, max_grad_norm=1.0)

data = torch.Generator().manual_seed(rank)
for _ in range(50):
    inputs = torch.randn(32, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    optimizer.scale_loss(loss).backward()  # <- instead of scaler.scale(loss).backward()
    optimizer.step()  # <- instead of scaler.unscale_, clip_grad_norm_, scaler.step, scaler.update
    optimizer.zero_grad()
if rank == 0:
    scale, skipped = optimizer.loss_scale, optimizer.skipped_steps
    print(f"loss {loss.item():.3f}, loss scale {scale}, {skipped} steps skipped on all ranks")

dist.destroy_process_group()
