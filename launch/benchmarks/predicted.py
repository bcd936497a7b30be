"""The predicted step beside the best of other systems, from 8 to 1,024 ranks; nothing is run.

By `shardcast.estimate`: as shardcast comes, and with the options that `shardcast estimate --advise`
would name. Ratios are steps over that of the fastest of DDP, FSDP2 and Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpt import GPT, GPTConfig, gpt_7b

from shardcast.config import ShardcastConfig
from shardcast.estimate import PRESETS, TrainingJob, advise, figures
from shardcast.plan.originals import OptimizerList

COLUMNS = ("machine, model, ranks", "ms", "best of others", "x", "x advised", "advice")
SIZES = (8, 64, 512, 1024)
MODELS = {
    "GPT 125M": lambda: GPT(GPTConfig(50304, 1024, 768, 12, 12, tie_head=True)),
    "GPT 1.2B": lambda: GPT(GPTConfig(50304, 1024, 2048, 22, 16, tie_head=True)),
    "GPT 7B": gpt_7b,
}


def rows(machines: Sequence[str], sizes: Sequence[int], tokens: int) -> list[tuple[str, ...]]:
    """A line for each machine, model and number of ranks, and the worst ratios last."""
    lines, worst, worst_advised = [], 0.0, 0.0
    for machine in machines:
        for name, make in MODELS.items():
            with torch.device("meta"):
                model = make()
            originals = OptimizerList([torch.optim.AdamW(model.parameters())])
            job = TrainingJob([(model, originals)], PRESETS[machine], tokens)
            for size in sizes:
                config = ShardcastConfig()
                plain, changes = figures(job, size, config), advise(job, size, config)
                advised = figures(job, size, config.replace(**changes))
                best = min(plain.peer_times, key=lambda name: plain.peer_times[name].step)
                worst, worst_advised = max(worst, plain.ratio), max(worst_advised, advised.ratio)
                lines.append((
                    f"{machine}, {name}, {size}", f"{1e3 * plain.time.step:.1f}", best,
                    f"{plain.ratio:.3f}", f"{advised.ratio:.3f}",
                    ", ".join(f"{option}: {value}" for option, value in changes.items()) or "-",
                ))  # fmt: skip
    return [*lines, ("worst", "", "", f"{worst:.3f}", f"{worst_advised:.3f}", "")]
