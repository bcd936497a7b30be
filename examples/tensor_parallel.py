"""Tensor parallelism.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=4 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardcast

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
torch.manual_seed(0)

shape = (dist.get_world_size() // 2, 2)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallelize_module(model, mesh["tp"], plan)  # parameters become DTensors
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = shardcast.shard(  # <- norm, clip and skip cover the whole model
    model, optimizer, mesh=mesh, dp="dp", param_dtype=torch.bfloat16, max_grad_norm=1.0
)

data = torch.Generator().manual_seed(mesh.get_local_rank("dp"))  # <- equal on all ranks of "tp"
for _ in range(50):
    inputs = torch.randn(32, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"loss {loss.item():.3f}, grad norm {optimizer.grad_norm.item():.3f}")

dist.destroy_process_group()
