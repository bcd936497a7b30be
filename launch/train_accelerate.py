"""Fine-tune like Accelerate's complete example, sharded with shardcast.

    shardcast launch --config_file configs/accelerate/shardcast_cpu.yaml launch/train_accelerate.py
    python launch/train_accelerate.py --mixed_precision bf16 --checkpointing_steps 20
    python launch/train_accelerate.py --resume_from_checkpoint runs/accelerate/step_20

It has tracking, saves checkpoints every few steps or after each epoch, and can resume in the middle
of an epoch. Only the line that makes the accelerator mentions shardcast.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import DataLoaderConfiguration
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed
from corpus import Corpus
from gpt import GPT, GPTConfig
from metrics import Metrics
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shardcast.accelerate import ShardcastAccelerator

VALIDATION = {"file": {"kind": "validation"}}  # options of `FileTracker.log`


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping (inputs, targets) of `context` bytes from a text, evenly spread."""

    def __init__(self, text: Tensor, context: int, count: int) -> None:
        self.text, self.context = text, context
        available = (text.numel() - 1) // context
        self.starts = torch.arange(min(count, available)) * available // min(count, available)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.starts[index]) * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class FileTracker(GeneralTracker):
    """Writes logged values to `metrics.jsonl` in the output directory."""

    name = "file"
    requires_logging_directory = False

    def __init__(self, directory: Path) -> None:
        # Code here must not ask for the rank: that would initialize Accelerate's state before the
        # accelerator has set whether it runs on the CPU.
        super().__init__()
        self.metrics = Metrics(directory, enabled=False)
        self.directory = directory

    @property
    def tracker(self) -> Metrics:
        return self.metrics

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.metrics = Metrics(self.directory, enabled=True)
        self.metrics.write("run", arguments=values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.metrics.write(kwargs.get("kind", "train"), step=step, **values)


class Position:
    """Position in the data; saved and loaded with the other state."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def train(args: argparse.Namespace) -> None:
    tracker = FileTracker(args.output) if args.with_tracking else None
    accelerator = ShardcastAccelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulation,
        # The order of the data depends on seed and epoch, so it is the same after resuming.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        log_with=tracker,
        project_config=ProjectConfiguration(project_dir=str(args.output)),
    )
    if tracker is not None:
        accelerator.init_trackers("shardcast", {k: str(v) for k, v in vars(args).items()})
    set_seed(args.seed)

    corpus = Corpus.load(args.data, args.context, args.corpus_mb << 20)
    sequences = Sequences(corpus.train, args.context, args.sequences)
    held_out = Sequences(corpus.held_out, args.context, args.validation_sequences)
    loader = DataLoader(sequences, batch_size=args.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out, batch_size=args.batch_size)

    model = GPT(GPTConfig(context=args.context, width=args.width, depth=args.depth, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    steps = args.epochs * math.ceil(len(loader) / (args.accumulation * accelerator.num_processes))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, total_steps=steps * accelerator.num_processes + 1
    )
    model, optimizer, loader, held_out_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out_loader, scheduler
    )
    position = Position()
    accelerator.register_for_checkpointing(position)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        accelerator.print(f"resumed at epoch {position.epoch}, step {position.step}")

    while position.epoch < args.epochs:
        model.train()
        loader.set_epoch(position.epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, position.batch):
            with accelerator.accumulate(model):
                loss = model(inputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            position.batch += 1
            if accelerator.sync_gradients:
                position.step += 1
                if position.step % args.log_interval == 0:
                    values = {"loss": loss.item(), "grad_norm": norm.item()}
                    accelerator.log(values, step=position.step)
                if args.checkpointing_steps and position.step % args.checkpointing_steps == 0:
                    accelerator.save_state(args.output / f"step_{position.step}")
        position.epoch, position.batch = position.epoch + 1, 0

        loss = evaluate(accelerator, model, held_out_loader)
        accelerator.print(f"epoch {position.epoch}: validation loss {loss:.4f} nats per byte")
        accelerator.log({"loss": loss}, step=position.step, log_kwargs=VALIDATION)
        if args.checkpointing_epochs:
            accelerator.save_state(args.output / f"epoch_{position.epoch}")

    accelerator.save_model(model, args.output / "model")
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Any, model: torch.nn.Module, loader: Any) -> float:
    """Return the mean loss of the held-out sequences, each counted once, in nats per byte."""
    model.eval()
    losses = []
    for inputs, targets in loader:
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2).float(), targets, reduction="none"
        )
        losses.append(accelerator.gather_for_metrics(loss.mean(dim=1)))
    return torch.cat(losses).mean().item()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on bytes of real text with Accelerate and shardcast.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mixed_precision", choices=["no", "bf16", "fp16"], help="default: the launcher's")
    add("--cpu", action="store_true", help="train on the CPU")
    add("--output", type=Path, default=Path("runs/accelerate"))
    add("--with_tracking", action="store_true", help="write metrics.jsonl to the output directory")
    add("--checkpointing_steps", type=int, default=0, help="save_state every N steps")
    add("--checkpointing_epochs", action="store_true", help="save_state after every epoch")
    add("--resume_from_checkpoint", help="a folder that save_state wrote")
    add(
        "--data",
        nargs="+",
        type=Path,
        default=[],
        help="files or directories (default: the Python standard library)",
    )
    add("--corpus_mb", type=int, default=20, help="read at most so many MiB")
    add("--sequences", type=int, default=2000, help="training sequences of an epoch")
    add("--validation_sequences", type=int, default=128)
    add("--context", type=int, default=128)
    add("--width", type=int, default=128)
    add("--depth", type=int, default=4)
    add("--epochs", type=int, default=2)
    add("--batch_size", type=int, default=8)
    add("--accumulation", type=int, default=1)
    add("--learning_rate", type=float, default=3e-3)
    add("--max_grad_norm", type=float, default=1.0)
    add("--log_interval", type=int, default=10)
    add("--seed", type=int, default=42)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse_arguments())
