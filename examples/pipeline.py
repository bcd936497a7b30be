"""A pipeline of two stages.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=4 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shardcast

MICRO_BATCHES = 4
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")

shape = (dist.get_world_size() // 2, 2)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "pp"))
number = mesh.get_local_rank("pp")
layers = {"0": nn.Linear(64, 256), "1": nn.GELU()} if number == 0 else {"2": nn.Linear(256, 64)}
model = nn.Sequential()
for name, layer in layers.items():
    model.add_module(name, layer)  # <- under the names that they have in the whole model
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = shardcast.shard([model], optimizer, mesh=mesh, dp="dp", pp="pp")  # <- a list of stages


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


stage = PipelineStage(model, number, 2, device, group=mesh["pp"].get_group())
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)

data = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
for _ in range(50):
    inputs = torch.randn(32, 64, generator=data).to(device)
    if stage.is_first:
        schedule.step(inputs)
    else:
        losses: list[Tensor] = []
        schedule.step(target=inputs.roll(1, dims=1), losses=losses)
    optimizer.step()
    optimizer.zero_grad()
if mesh.get_local_rank("dp") == 0 and stage.is_last:
    print(f"loss {torch.stack(losses).mean().item():.3f}")

dist.destroy_process_group()
