"""Experts spread over data-parallel ranks.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=4 examples/experts.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardcast

WIDTH, EXPERTS, CAPACITY = 64, 2, 24  # one expert on each rank of "ep"; tokens per expert
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
torch.manual_seed(0)

shape = (dist.get_world_size() // EXPERTS, EXPERTS)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("edp", "ep"))


class Exchange(torch.autograd.Function):
    """Send tokens to the ranks of their experts, and results and gradients back."""

    @staticmethod
    def forward(_ctx, tokens: Tensor) -> Tensor:
        arrived = tokens.new_empty(tokens.shape)  # contiguous, unlike empty_like's result
        dist.all_to_all_single(arrived, tokens.contiguous(), group=mesh["ep"].get_group())
        return arrived

    @staticmethod
    def backward(_ctx, grad: Tensor) -> Tensor:
        return Exchange.apply(grad)


class Mixture(nn.Module):
    """Each expert takes the tokens of a rank that score it highest."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        weight = torch.randn(EXPERTS, WIDTH, WIDTH, device=device) / WIDTH**0.5
        self.experts = nn.ParameterDict(
            {"weight": distribute_tensor(weight, mesh["ep"], [Shard(0)])}  # <- a DTensor
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """(T, WIDTH) -> (T, WIDTH)."""
        scores, chosen = self.router(tokens).softmax(dim=1).topk(CAPACITY, dim=0)
        arrived = Exchange.apply(tokens[chosen.T])  # (EXPERTS, CAPACITY, WIDTH)
        results = Exchange.apply(arrived @ self.experts["weight"].to_local()[0])
        results = (results * scores.T.unsqueeze(-1)).flatten(0, 1)
        return results.new_zeros(tokens.shape).index_add(0, chosen.T.flatten(), results)


model = Mixture().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = shardcast.shard(
    model,
    optimizer,
    mesh=mesh,
    dp=mesh._flatten("dp"),
    experts={"edp": ["experts.*"]},  # <- summed over the ranks that hold the same expert
)

data = torch.Generator().manual_seed(rank)
for _ in range(50):
    inputs = torch.randn(32, WIDTH, generator=data).to(device)
    loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"loss {loss.item():.3f}")

dist.destroy_process_group()
