"""With Ray Train: python examples/with_ray_train.py. Needs pip install 'ray[train]'."""

import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import shardcast


def train() -> None:
    """Train on one worker. Ray has set up the process group."""
    rank, device = dist.get_rank(), get_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = shardcast.shard(  # <- instead of ray.train.torch.prepare_model, which wraps in DDP
        model, optimizer, param_dtype=torch.bfloat16, max_grad_norm=1.0
    )
    data = torch.Generator().manual_seed(rank)
    for _ in range(100):
        inputs = torch.randn(32, 64, generator=data).to(device)
        loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"{dist.get_world_size()} workers, loss {loss.item():.3f}")


workers = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
TorchTrainer(train, scaling_config=workers).fit()
