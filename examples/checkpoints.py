"""Save a run, stop it, and resume it.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/checkpoints.py

Run it again to resume. The second run may use a different number of processes.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import shardcast
from shardcast import checkpoint

directory = sys.argv[1] if len(sys.argv) > 1 else "runs/example"
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = shardcast.shard(model, optimizer, param_dtype=torch.bfloat16)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)

resumed = checkpoint.resume(directory, model, optimizer)  # <- None in a new run
start = 0 if resumed is None else resumed.step
if resumed is not None:
    scheduler.load_state_dict(resumed.extra["scheduler"])
for step in range(start, start + 20):
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 9:
        extra = {"scheduler": scheduler.state_dict()}
        checkpoint.save(
            directory, model, optimizer, step=step + 1, extra=extra, keep=2
        )  # <- on all ranks
if rank == 0:
    print(f"from step {start} to {step + 1}, loss {loss.item():.3f}; {directory}")

dist.destroy_process_group()
