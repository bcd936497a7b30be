"""Fine-tuning on text with published forms: values that change per step, and the losses.

A byte-level GPT is first trained in bf16 on Python's standard library. From that checkpoint it is
then trained on the pages of this documentation, at several learning rates and with its matrices in
each form. A value has changed if the bits of its published value differ from the step before.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from corpus import Corpus
from gpt import GPT, GPTConfig
from torch import Tensor

import shardcast

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tools" / "recorded" / "fine-tuning.csv"
FORMS = ("bf16", "mxfp8", "fp8_block128", "mxfp4")
RATES = (1e-5, 3e-6, 1e-6)
MATRICES = ["*.qkv", "*.out", "*.mlp.?"]
CONFIG = GPTConfig(context=128, width=256, depth=2)
BATCH, SETTLED = 4, 20  # sequences; steps until Adam's second moments are useful
COLUMNS = ("form", "learning rate", "values that change in a step", "loss before", "after", "x")


class Run(NamedTuple):
    """One fine-tuning.

    Attributes:
        share: mean share of matrix values whose bits change in a step, without the first steps.
        losses: loss on held-out text by step, in nats per byte.
    """

    form: str
    rate: float
    share: float
    losses: Mapping[int, float]


def measure(_group: Any, pretraining: int, steps: int, interval: int) -> list[Run]:
    """Train the checkpoint, and fine-tune it with each form and learning rate."""
    state = pretrained(pretraining)
    text = Corpus.load(sorted((ROOT / "docs").glob("*.md")), CONFIG.context)
    return [tuned(state, text, form, rate, steps, interval) for rate in RATES for form in FORMS]


def pretrained(steps: int) -> dict[str, Tensor]:
    """Return fp32 masters of a model trained on Python."""
    torch.manual_seed(0)
    model, text = GPT(CONFIG), Corpus.load([], CONFIG.context)
    optimizer = sharded(model, 1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 20, 2 * (1 - step / steps))
        learn(model, optimizer, text, step)
    print(f"pretrained: {held_out_loss(model, text):.3f} nats per byte of held-out Python")
    return {name: values.clone() for name, values in optimizer.full_parameters().items()}


def tuned(
    state: Mapping[str, Tensor], text: Corpus, form: str, rate: float, steps: int, interval: int
) -> Run:
    model = GPT(CONFIG)
    model.load_state_dict(state)
    fields = {} if form == "bf16" else {"published": {form: MATRICES}}
    optimizer = sharded(model, rate, **fields)
    began, shares = time.perf_counter(), []
    losses = {0: held_out_loss(model, text)}
    watched = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blocks")]
    last = [param.detach().clone() for param in watched]
    numel = sum(param.numel() for param in watched)
    for step in range(steps):
        learn(model, optimizer, text, step)
        if step >= SETTLED:
            pairs = zip(watched, last, strict=True)
            shares.append(sum(changes(param, before) for param, before in pairs) / numel)
        torch._foreach_copy_(last, [param.detach() for param in watched])
        if (step + 1) % interval == 0:
            losses[step + 1] = held_out_loss(model, text)
    took = time.perf_counter() - began
    print(f"{form:>12} {rate:.0e}: {losses[max(losses)]:.4f} after {took:.0f} s", flush=True)
    return Run(form, rate, sum(shares) / len(shares), losses)


def changes(param: Tensor, before: Tensor) -> int:
    return int((param.detach().view(torch.int16) != before.view(torch.int16)).sum())


def sharded(model: GPT, rate: float, **fields: Any) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    return shardcast.shard(model, inner, max_grad_norm=1.0, **fields)


def learn(model: GPT, optimizer: Any, text: Corpus, step: int) -> None:
    model(*text.train_batch(0, step, 0, BATCH)).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def held_out_loss(model: GPT, text: Corpus) -> float:
    losses = [float(model(*batch)) for batch in text.held_out_batches(64, BATCH)]
    return sum(losses) / len(losses)


def rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Return the table's rows; ``x``: decrease of the loss relative to bf16 at the same rate."""
    gains = {(run.form, run.rate): run.losses[0] - run.losses[max(run.losses)] for run in runs}
    for run in runs:
        yield (
            run.form,
            f"{run.rate:.0e}",
            f"{100 * run.share:.2f} %",
            f"{run.losses[0]:.4f}",
            f"{run.losses[max(run.losses)]:.4f}",
            f"{gains[run.form, run.rate] / gains['bf16', run.rate]:.2f}",
        )


def record(runs: Sequence[Run], path: Path = RECORDED) -> None:
    """Write the file that tools/picture.py draws."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["form", "rate", "share", "step", "loss"])
        for run in runs:
            for step, loss in run.losses.items():
                writer.writerow([run.form, run.rate, f"{run.share:.6f}", step, f"{loss:.5f}"])
