"""A rank raises in the middle of a step, and the others continue without it.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/failing_rank.py
"""

import torch
import torch.distributed as dist
from torch import nn

import shardcast

BROKEN = 60  # the step whose batch one rank cannot read
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# "skip" would skip the whole step. This many failed steps in a row raise an error.
optimizer = shardcast.shard(
    model,
    optimizer,
    param_dtype=torch.bfloat16,
    on_error={"action": "drop", "max_failed_steps": 3},
)

data = torch.Generator().manual_seed(rank)
for step in range(100):
    with optimizer.attempt():  # <- an error inside it costs at most this step
        if step == BROKEN and rank == dist.get_world_size() - 1:
            raise ValueError("a sample that cannot be read")
        inputs = torch.randn(32, 16, generator=data).to(device)
        targets = inputs.sum(dim=1, keepdim=True) / 4
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss.backward()
    optimizer.step()  # <- uses the mean of the ranks that took part
    optimizer.zero_grad()
if rank == 0:
    for failure in optimizer.failures():
        print(f"step {failure.step} without rank {failure.rank}: {failure.error}")
    print(f"loss {loss.item():.3f}")

dist.destroy_process_group()
