"""A copy of the model that follows the training through a folder, bit for bit.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/following.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn

import shardcast
from shardcast import publish


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder, device=device)
torch.manual_seed(0)

model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
optimizer = shardcast.shard(model, optimizer, changes=True)  # <- records changes
sender = publish.FolderSender(folder[0], optimizer)

served = build().to(torch.bfloat16)  # usually in another process, which needs no group
reader = publish.FolderReader(folder[0])

data = torch.Generator().manual_seed(rank)
for _ in range(20):
    inputs = torch.randn(32, 32, generator=data).to(device)
    nn.functional.mse_loss(model(inputs).float(), inputs).backward()
    optimizer.step()
    optimizer.zero_grad()
    sender.send()  # <- on every rank: its own changed elements
    dist.barrier()
    if rank == 0:
        reader.update(served)  # <- checks all parts, then writes them

if rank == 0:
    pairs = zip(model.parameters(), served.parameters(), strict=True)
    same = all(torch.equal(mine.cpu(), theirs) for mine, theirs in pairs)
    every = sum(param.numel() for param in served.parameters())
    share = 2 * sender.values / every  # on this rank's half
    print(f"version {reader.version}: equal bits: {same}, {share:.0%} changed in the last step")

dist.destroy_process_group()
