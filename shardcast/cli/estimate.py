"""``shardcast estimate``: what an importable model needs, as a table, JSON or a picture."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from shardcast import estimate as estimates
from shardcast.cli.plot import KINDS, PLOTTED, Row, empty_figure, plot
from shardcast.config import ShardcastConfig
from shardcast.estimate.parallel import plan_of, stages_of
from shardcast.messages import page
from shardcast.plan.layout import PackLayout
from shardcast.plan.originals import OptimizerList
from shardcast.plan.partition import ELEMENTWISE

BYTES = (*KINDS, "total", "host", "setup_peak", "sent")
COUNTS = ("sender", "packs", "collectives", "imbalance", "cost_imbalance")
STAGES = ("compute", "reduce", "decide", "update", "sync", "in_backward", "in_forward", "step")

LEGEND = {
    "world_size": "data-parallel ranks; below GB, counts, ms",
    "outside": "parameters that the optimizer does not hold, and buffers",
    "host": "how much of total is in host memory (offload)",
    "setup_peak": "the worst moment of shard(): the model as built, one pack, the masters so far",
    "sent": "what leaves the rank that sends most, number sender, in a step",
    "collectives": "launches of a step, the small all-reduce by which all ranks decide included",
    "imbalance": "what the fullest rank holds of masters and state, over the mean; 1 at best",
    "cost_imbalance": "the same of what the update computes: whole matrices have one owner",
    "compute": "forward and backward: 6 operations per parameter and token",
    "reduce": "gradients to their owners and the fp32 sum there",
    "decide": "the norm, and the all-reduce of what all ranks must agree on",
    "update": "bytes read and written over the memory's bandwidth, and Muon's matrix products",
    "sync": "updated parameters to everybody",
    "in_backward": "of reduce, what runs beside the backward",
    "in_forward": "of sync, what runs beside the next forward (overlap_sync)",
    "step": "all of them, less what runs beside others",
    "ratio": "the step over that of the fastest of the others; below with other constants",
    "latency": "the share of the step that is neither bytes nor operations",
    "ranking": "whether shardcast stays ahead, or behind, with latencies three times as long, and "
    "with half of the bandwidth between nodes",
}


def estimate(arguments: list[str]) -> int:
    """Print what each rank will hold and send, for a model that is built without memory."""
    parsed = _parse(arguments)
    if parsed.plot is not None:
        empty_figure()  # raises before the work is done
    machine = estimates.Machine.load(parsed.machine).beside(parsed.tp)
    model, originals = _build(parsed.model, parsed.optimizer)
    config = ShardcastConfig.load(parsed.config)
    numel = sum(param.numel() for param in model.parameters())
    title = f"{numel:,} parameters, {originals.name}"
    if parsed.tp > 1 or parsed.pp > 1:
        if config.shard_ranks == "auto":  # it is for jobs without a mesh
            config = config.replace(shard_ranks="all")
        title += f", {parsed.tp} x tensor, {parsed.pp} x pipeline parallel"
    plan = dict(parsed.tp_plan or plan_of(model))
    stages = stages_of(model, originals, parsed.tp, parsed.pp, plan)
    job = estimates.TrainingJob(stages, machine, parsed.tokens)
    rows = rows_of(parsed.world_size, job, config)
    if parsed.plot is not None:
        plot(rows_of(PLOTTED, job, config), title, parsed.plot)
    if parsed.json:
        print(json.dumps(rows, indent=2))
        return 0
    print("\n".join(summary(rows, title)))
    if parsed.details:
        print("\n".join(["", *table(rows)]))
    for row in rows if parsed.advise or parsed.write else ():
        print("\n".join(["", *_advice(row, job, config, parsed.write)]))
    return 0


def _advice(
    row: Row, job: estimates.TrainingJob, config: ShardcastConfig, path: Path | None
) -> list[str]:
    """The better options of one world size as lines, also in the file ``path``."""
    size = row["world_size"]
    changes = estimates.advise(job, size, config)
    better = row_of(estimates.figures(job, size, config.replace(**changes)), job)
    options = yaml.safe_dump(changes, sort_keys=False).splitlines() if changes else []
    ms, better_ms = (1e3 * each["time"]["step"] for each in (row, better))
    gain = f"{better_ms:,.0f} ms in place of {ms:,.0f} ({1 - better_ms / ms:.1%} less)"
    best = f"{better['ratio']:.2f} of the fastest of the others"
    lines = [
        f"{size:,} rank{'s' * (size > 1)}: {', '.join(options) or 'nothing to change'}: predicted "
        f"step {gain}, {gigabytes(better['total'])} GB per rank; {best}"
    ]
    if path is not None:
        named = {name: config.to_dict()[name] for name in sorted(config.named)}
        comment = f"# shardcast estimate for {size} ranks of {row['machine']}: {gain}\n"
        path.write_text(comment + yaml.safe_dump({**named, **changes}, sort_keys=False))
        lines.append(f"written to {path}")
    return lines


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="shardcast estimate", allow_abbrev=False, epilog=f"Columns: {page('estimate')}"
    )
    parser.add_argument(
        "model", metavar="MODULE:FUNCTION",
        help="called without arguments; returns a model, or a model and its optimizer",
    )  # fmt: skip
    names = sorted(kind.__name__ for kind in ELEMENTWISE)
    parser.add_argument("--optimizer", choices=names, help="of torch.optim; AdamW if not given")
    parser.add_argument("--config", type=Path, metavar="YAML", help="shardcast configuration")
    parser.add_argument(
        "--world_size", type=_positive, nargs="+", default=[1, 2, 4, 8, 16, 64, 256],
        help="numbers of data-parallel ranks",
    )  # fmt: skip
    parser.add_argument("--tp", type=_positive, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=_positive, default=1, help="pipeline stages")
    parser.add_argument(
        "--tp_plan", type=_cut_of, nargs="+", metavar="PATTERN=DIM",
        help="names of parameters, and which of their dimensions is cut; by default the plan that "
        "a transformers model has",
    )  # fmt: skip
    parser.add_argument(
        "--machine", default="h100", metavar="NAME|YAML",
        help=f"what times are for: {', '.join(estimates.PRESETS)}, or a file that changes one",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=_positive, default=8192, help="of one rank in a step, for the time that "
        "forward and backward take",
    )  # fmt: skip
    parser.add_argument("--details", action="store_true", help="print all tables too")
    parser.add_argument(
        "--advise", action="store_true", help="try options, and print the best ones for each size"
    )
    parser.add_argument(
        "--write", type=Path, metavar="YAML", help="the same, into a file; for one world size"
    )
    parser.add_argument("--json", action="store_true", help="print it for programs: bytes, seconds")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG|SVG", help="draw it over world sizes 1 to 4096"
    )
    parsed = parser.parse_args(arguments)
    if parsed.write is not None and len(parsed.world_size) > 1:
        parser.error("--write: expected one --world_size beside it, for which the file is")
    return parsed


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def _cut_of(text: str) -> tuple[str, int]:
    pattern, _, dim = text.rpartition("=")
    if not pattern or not dim.isdecimal():
        raise argparse.ArgumentTypeError(f"expected PATTERN=DIMENSION, got {text!r}")
    return pattern, int(dim)


def function_of(parameter: str, name: str) -> Callable[[], Any]:
    """The function ``name``, ``module:function``, that the command's ``parameter`` is given."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")  # as python -m does
    try:
        named: Callable[[], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{parameter}: expected MODULE:FUNCTION that can be imported from here, got {name!r} "
            f"({error})"
        ) from error
    return named


def _build(name: str, kind: str | None) -> tuple[nn.Module, OptimizerList]:
    """What the function ``name`` returns; an optimizer ``kind`` unless it returns some."""
    build = function_of("model", name)
    with torch.device("meta"):
        built = build()
    model, *optimizers = built if isinstance(built, tuple) else (built,)
    if len(optimizers) == 1 and isinstance(optimizers[0], (list, tuple)):
        optimizers = list(optimizers[0])
    unknown = [it for it in optimizers if not isinstance(it, torch.optim.Optimizer)]
    if not isinstance(model, nn.Module) or unknown:
        got = ", ".join(type(it).__name__ for it in (model, *optimizers))
        raise ValueError(
            f"model: expected that {name} returns a torch.nn.Module, or one and its "
            f"torch.optim.Optimizer or a list of them, got {got}"
        )
    if optimizers and kind is not None:
        raise ValueError(
            f"optimizer: {name} returns one ({type(optimizers[0]).__name__}); leave out "
            f"--optimizer {kind}"
        )
    kind = kind or "AdamW"
    return model, OptimizerList(
        optimizers or [getattr(torch.optim, kind)(model.parameters(), lr=0.1)]
    )


def rows_of(sizes: Sequence[int], job: estimates.TrainingJob, config: ShardcastConfig) -> list[Row]:
    """Per world size: :data:`BYTES`, :data:`COUNTS`, what others hold in bytes, and seconds."""
    return [row_of(estimates.figures(job, size, config), job) for size in sizes]


def row_of(figures: estimates.Comparison, job: estimates.TrainingJob) -> Row:
    """One world size, for programs."""
    memory = figures.held
    return {
        "world_size": memory.world_size,
        "shard_ranks": memory.layout.world_size,
        **{name: getattr(memory, name) for name in (*BYTES, *COUNTS)},
        "algorithms": _algorithms(memory),
        "sharding": memory.layout.sharding,
        "others": dict(figures.peers),
        "machine": job.machine.name,
        "tokens": job.tokens,
        "time": _stages(figures.time),
        "other_times": {name: _stages(time) for name, time in figures.peer_times.items()},
        "latency": figures.latency,
        "ratio": figures.ratio,
        "doubts": dict(figures.doubts),
    }


def _algorithms(held: estimates.Estimate) -> list[Row]:
    """Each way in which packs travel, of how many, and why the biggest of them does."""
    ways: dict[tuple[str, str], list[PackLayout]] = {}
    for pack in held.layout.trained if held.world_size > 1 else ():
        ways.setdefault((pack.algorithms.reduce, pack.algorithms.sync), []).append(pack)
    biggest = [(len(packs), max(packs, key=lambda pack: pack.nbytes)) for packs in ways.values()]
    return [{"packs": count, "algorithms": str(pack.algorithms)} for count, pack in biggest]


def _stages(time: estimates.StepTime) -> dict[str, float]:
    return {name: getattr(time, name) for name in STAGES}


def summary(rows: Sequence[Row], title: str) -> list[str]:
    """A sentence per world size: memory and time of a rank, and those of others."""
    lines = [f"{title}; {rows[0]['machine']}, {rows[0]['tokens']:,} tokens of one rank"]
    for row in rows:
        size, times = row["world_size"], row["other_times"]
        memory = ", ".join(f"{name} {gigabytes(n)}" for name, n in row["others"].items())
        steps = ", ".join(f"{name} {1e3 * time['step']:,.0f}" for name, time in times.items())
        lines += [
            f"{size:,} rank{'s' * (size > 1)}: {gigabytes(row['total'])} GB per rank, "
            f"predicted step {1e3 * row['time']['step']:,.0f} ms",
            f"    others hold {memory} GB",
            f"    others take {steps} ms",
        ]
        lines += [f"    {row['sharding']}"] if row["sharding"] else []
    return [
        *lines,
        "Memory and traffic are exact, times are predictions. --details has all figures, --advise "
        "tries options",
    ]


def gigabytes(nbytes: float) -> str:
    """In GB of 10^9 bytes, with digits for small ones."""
    value = nbytes / 1e9
    return f"{value:,.1f}" if value >= 1 else f"{value:.4f}"


def table(rows: Sequence[Row]) -> list[str]:
    """A line per figure, with a column per world size and what it is."""
    cells = [_cells(row) for row in rows]
    return [
        *(
            f"{name:>26}{''.join(f'{of_size[name]:>12}' for of_size in cells)}"
            f"  {LEGEND.get(name, '')}".rstrip()
            for name in cells[0]
        ),
        "how packs travel, and why (rough costs of the biggest one)",
        *(
            f"{row['world_size']:>12,} {way['packs']:>12,}  {way['algorithms']}"
            for row in rows
            for way in row["algorithms"]
        ),
    ]


def _cells(row: Row) -> dict[str, str]:
    """The figures of one world size for people, by name."""
    seconds = row["time"] | {f"{name}, step": it["step"] for name, it in row["other_times"].items()}
    ratios = {"ratio": row["ratio"], **row["doubts"]}
    ranking = "holds" if len({ratio < 1 for ratio in ratios.values()}) == 1 else "open"
    return {
        "world_size": f"{row['world_size']:,}",
        **{name: gigabytes(row[name]) for name in BYTES},
        **{f"{name}, GB": gigabytes(nbytes) for name, nbytes in row["others"].items()},
        **{name: f"{row[name]:,.6g}" for name in COUNTS},
        **{name: f"{1e3 * value:,.2f}" for name, value in seconds.items()},
        "latency": f"{row['latency']:.1%}",
        **{name: f"{ratio:.3f}" for name, ratio in ratios.items()},
        "ranking": ranking,
    }
