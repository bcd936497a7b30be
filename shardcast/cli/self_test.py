"""``shardcast test``: check the installation."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardcast
from shardcast.cli.commands import parser_of
from shardcast.config import ShardcastConfig
from shardcast.testing import spawn

TRIED_STEPS = 5


def test(arguments: list[str]) -> int:
    """Check this installation: one process, two over gloo, and NCCL if there are GPUs."""
    parser = parser_of("test")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time limit of each check (default: 60)",
    )
    timeout = parser.parse_args(arguments).timeout
    worlds = [("one process", 1, "gloo", "cpu"), ("two processes over gloo", 2, "gloo", "cpu")]
    gpus = min(2, torch.cuda.device_count())
    if gpus:
        worlds.append((f"{gpus} GPU(s) over NCCL", gpus, "nccl", "cuda"))
    failed = 0
    for name, size, backend, device in worlds:
        started = time.monotonic()
        try:
            reports = spawn(_try, size, device, timeout=timeout, backend=backend)
        except Exception as error:  # show anything that is wrong with an installation
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"ok     {name}: {reports[0]}, {time.monotonic() - started:.1f} s", flush=True)
    if not gpus:
        print("-      NCCL: no GPU found", flush=True)
    return 1 if failed else 0


def _try(group: dist.ProcessGroup | None, device_type: str) -> str:
    """Train next to plain torch, and raise if results differ. Collective: every rank."""
    rank = dist.get_rank(group)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    difference = float((_trained(device, torch.float32) - _trained(device)).abs().max())
    if not difference < 1e-5:
        raise RuntimeError(
            f"fp32 weights: expected plain torch.optim.AdamW's, off by {difference:.1e}"
        )
    low = _trained(device, torch.bfloat16)
    first = low.clone()  # as on rank 0
    dist.broadcast(first, 0, group=group)
    if not torch.equal(first, low):
        raise RuntimeError("bf16 weights: expected the same on all ranks, got different ones")
    return f"fp32 weights within {difference:.0e} of torch.optim's, bf16 weights equal on all ranks"


def _trained(device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weights after a few steps, 1-d; without ``dtype`` those of plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(15, 33), nn.GELU(), nn.Linear(33, 5)).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if dtype is not None:
        optimizer = shardcast.shard(model, optimizer, ShardcastConfig(param_dtype=dtype))
    for step in range(TRIED_STEPS):
        data = torch.randn(8, 15, generator=torch.Generator().manual_seed(step)).to(device)
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])
