"""Two models, each with its own optimizer and loss.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/gan.py
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

generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
generator_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
generator_optimizer = shardcast.shard(
    generator, generator_optimizer
)  # <- each model with its own optimizer
critic_optimizer = shardcast.shard(critic, critic_optimizer)

data = torch.Generator().manual_seed(rank)
for _ in range(50):
    real = (torch.randn(64, 2, generator=data) * 0.1 + 1.0).to(device)
    noise = torch.randn(64, 8, generator=data).to(device)
    critic_optimizer.zero_grad()  # <- also clears the gradients of the generator's backward
    gap = critic(generator(noise).detach()).mean() - critic(real).mean()
    gap.backward()
    critic_optimizer.step()
    with torch.no_grad():
        for param in critic.parameters():
            param.clamp_(-0.1, 0.1)  # <- edited weights become masters
    generator_optimizer.zero_grad()
    (-critic(generator(noise)).mean()).backward()
    generator_optimizer.step()
if rank == 0:
    print(f"mean of generated values: {generator(noise).float().mean().item():.2f} (data: 1.00)")

dist.destroy_process_group()
