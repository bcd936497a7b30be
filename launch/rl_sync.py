"""Two processes train a policy; a third one samples with their newest weights.

    torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=3 launch/rl_sync.py

The last process acts as an inference engine: it has no optimizer and joins none of the trainers'
collectives. After each step the trainers write the changed weights into a folder (`FolderSender`).
The sampler applies them (`FolderReader`), samples, and writes texts with their log-probabilities.
The trainers recompute them. The weights are bitwise equal, so the log-probabilities are, too.
REINFORCE rewards the share of vowels.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor

import shardcast
from shardcast import publish

VOWELS = torch.tensor([*b"aeiouAEIOU"])
PATIENCE = 120.0  # seconds that one side waits for the other


def log_probabilities(model: GPT, texts: Tensor) -> Tensor:
    """Return log-probabilities of all bytes but the first: (B, T + 1) bytes -> (B, T) fp32."""
    logits = model(texts[:, :-1]).float().log_softmax(-1)
    return logits.gather(-1, texts[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(model: GPT, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return (count, length + 1) bytes; the first byte of each text is a space."""
    texts = torch.full((count, 1), ord(" "), device=model.head.weight.device)
    for _ in range(length):
        odds = model(texts)[:, -1].float().softmax(-1).cpu()
        chosen = odds.multinomial(1, generator=generator)
        texts = torch.cat([texts, chosen.to(texts.device)], dim=1)
    return texts


def wait_for(path: Path) -> None:
    """Wait until another process has written the file."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE:.0f} s for {path}")
        time.sleep(0.005)


def read_and_sample(args: argparse.Namespace, folder: Path, model: GPT, trainers: int) -> None:
    """Follow the folder to the last step, and sample with each version."""
    reader, generator = publish.FolderReader(folder), torch.Generator().manual_seed(0)
    deadline, step = time.monotonic() + PATIENCE, -1
    while step < args.steps:
        version = reader.update(model)
        if version is None or publish.step_of(version) == step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{folder} has had no new version for {PATIENCE:.0f} s")
            time.sleep(0.005)
            continue
        deadline, step = time.monotonic() + PATIENCE, publish.step_of(version)
        for rank in range(trainers):
            texts = sample(model, args.batch_size, args.context, generator)
            with torch.no_grad():
                told = log_probabilities(model, texts)
            writing = folder / f"writing-{rank}.pt"
            torch.save({"texts": texts.cpu(), "log_probabilities": told.cpu()}, writing)
            os.replace(writing, folder / f"texts-{step}-{rank}.pt")


def train(args: argparse.Namespace, folder: Path, model: GPT, group: dist.ProcessGroup) -> None:
    """Train on texts that were sampled with the current weights."""
    rank, device = group.rank(), model.head.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    sharded = shardcast.shard(
        model, optimizer, process_group=group, changes=True, autocast=False, max_grad_norm=1.0
    )
    sender = publish.FolderSender(folder, sharded, full_every=args.full_every)
    elements = sum(param.numel() for param in model.parameters())
    for step in range(args.steps + 1):
        version = sender.send()
        path = folder / f"texts-{step}-{rank}.pt"
        wait_for(path)
        told = torch.load(path, map_location=device)
        path.unlink()
        texts = told["texts"]
        with torch.no_grad():  # as the reader computed them, without an autograd graph
            gap = (log_probabilities(model, texts) - told["log_probabilities"]).abs().max()
        rewards = torch.isin(texts[:, 1:], VOWELS.to(device)).float().mean(1)
        facts = torch.stack([rewards.mean(), torch.tensor(float(sender.values), device=device)])
        dist.all_reduce(facts, group=group)
        dist.all_reduce(gap, dist.ReduceOp.MAX, group=group)
        if rank == 0 and (step % args.log_interval == 0 or step == args.steps):
            print(
                f"step {step:3d}  version {version}  vowels {facts[0] / group.size():.3f}  "
                f"changed {facts[1] / elements:6.2%}  largest gap {gap:.1g}",
                flush=True,
            )
        advantage = rewards - facts[0] / group.size()
        loss = -(advantage[:, None] * log_probabilities(model, texts)).sum(1).mean()
        loss.backward()
        sharded.step()
        sharded.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, help="folder of versions (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32, help="texts per trainer and step")
    parser.add_argument("--context", type=int, default=24, help="bytes per text")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--full-every", type=int, default=20, help="versions between two full ones")
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, trainers = dist.get_rank(), dist.get_world_size() - 1
    device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu")
    group = dist.new_group([*range(trainers)])
    folder = [str(args.folder or tempfile.mkdtemp(prefix="rl-sync-")) if rank == 0 else ""]
    dist.broadcast_object_list(folder, device=device)
    torch.manual_seed(rank)
    model = GPT(GPTConfig(context=args.context, width=64, depth=2, heads=2)).to(device)
    if rank < trainers:
        train(args, Path(folder[0]), model, group)
    else:
        read_and_sample(args, Path(folder[0]), model.to(torch.bfloat16), trainers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
