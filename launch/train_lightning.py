"""Train the small GPT of train.py with Lightning's Trainer and a sharded optimizer.

    python launch/train_lightning.py --devices 2 --accelerator cpu --precision bf16-true
    torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \\
        launch/train_lightning.py --devices 2 --accelerator cpu

Only two lines are shardcast's: the import, and `strategy="shardcast"`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus
from gpt import GPT, GPTConfig
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import shardcast.lightning  # noqa: F401  (registers the strategy)


class LanguageModel(LightningModule):
    """The GPT, its loss and its optimizer."""

    def __init__(self, config: GPTConfig, learning_rate: float) -> None:
        super().__init__()
        self.gpt, self.learning_rate = GPT(config), learning_rate

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = self.gpt(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], _index: int) -> None:
        self.log("validation_loss", self.gpt(*batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
        }


def sequences(text: Tensor, context: int, count: int) -> TensorDataset:
    """Return `count` sequences evenly spread over a text, and the same shifted by one."""
    starts = torch.arange(count) * (text.numel() - context - 1) // count
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return TensorDataset(window[:, :-1], window[:, 1:])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="bf16-true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", help="a Lightning checkpoint")
    args = parser.parse_args(arguments)

    seed_everything(0)
    corpus = Corpus.load([], args.context, 2 << 20)
    shape = GPTConfig(context=args.context, width=args.width, depth=args.depth, heads=4)
    trainer = Trainer(
        strategy="shardcast",
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        default_root_dir=args.output,
        logger=CSVLogger(args.output),
    )
    trainer.fit(
        LanguageModel(shape, 3e-3),
        DataLoader(sequences(corpus.train, args.context, args.sequences), batch_size=8),
        DataLoader(sequences(corpus.held_out, args.context, 64), batch_size=8),
        ckpt_path=args.resume,
    )
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
