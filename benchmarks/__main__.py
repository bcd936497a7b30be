"""Measure shardcast: its update, its collectives, and whole steps next to other systems.

    python -m benchmarks update                      # next to a copy of the same bytes
    python -m benchmarks host                        # host time of an accelerator's step, by packs
    python -m benchmarks groups                      # collectives and launches, by parameter groups
    python -m benchmarks peers --model gpt --markdown
    python -m benchmarks phases --model gpt          # where the time of a step goes
    python -m benchmarks replicas --ranks 2          # replica_check, amortized over 100 steps
    python -m benchmarks checkpoint --elements 100000000  # next to torch.save and dcp.save
    python -m benchmarks fine-tuning --record        # published forms: what changes in a step
    python -m benchmarks digests --against ../other-tree  # whether two trees have the same bits
    python -m benchmarks all --idle --minutes 15     # the tables of BENCHMARKS.md

A command runs all systems in the same processes, one per rank. Each round runs every system once,
in rotated order. A time is the median over rounds of the slowest rank's time. A ratio (`x`) is the
median of the ratios within a round, so a slow round cancels out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from products import multiplied

from benchmarks import (
    checkpoint,
    digests,
    document,
    fine_tuning,
    groups,
    host,
    phases,
    replicas,
    report,
    step,
    update,
)
from benchmarks.models import WORKLOADS
from benchmarks.systems import LOCAL, SYSTEMS
from shardcast.testing import spawn

TIMEOUT = 3600.0
ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["checkpoint"]:
        checkpoint.main(arguments[1:])
        return
    if arguments[:1] == ["digests"]:
        sys.exit(digests.main(arguments[1:]))
    args = parse(arguments)
    if args.command == "all":
        document.measure(args.document, args.minutes, args.only, args.idle)
        return
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    if args.command == "update":
        title = f"update of {args.elements:,} elements, {args.threads} thread(s), AdamW, bf16"
        lines = update.rows(update.measure(args.elements, args.threads, args.rounds))
        columns: tuple[str, ...] = ("form", "ms", "x")
    elif args.command == "fine-tuning":
        title = f"GPT of {fine_tuning.CONFIG.depth} blocks, {args.steps} steps on text, 1 rank"
        runs = on_ranks(fine_tuning.measure, 1, args.pretraining, args.steps, args.interval)
        if args.record:
            fine_tuning.record(runs)
        lines, columns = [*fine_tuning.rows(runs)], fine_tuning.COLUMNS
    elif args.command == "host":
        title = "processor time of a step on an accelerator, compiled, nothing is sent, bf16"
        costs = host.measure(args.packs, args.ranks, args.rounds)
        lines, columns = host.rows(costs), host.COLUMNS
    elif args.command == "groups":
        title = f"a step of {groups.TENSORS} tensors of {groups.WIDTH}x{groups.WIDTH}, AdamW, "
        title += f"{groups.RANKS} ranks, bf16, by parameter groups; processor time"
        lines, columns = groups.rows(groups.measure(args.groups, args.rounds)), groups.COLUMNS
    elif args.command == "phases":
        title = f"{WORKLOADS[args.model].title}, {args.ranks} ranks, phases of a step, ms"
        lines = phases.rows(on_ranks(phases.measure, args.ranks, args.model, args.rounds))
        columns = phases.COLUMNS
    elif args.command == "replicas":
        plan = step.Plan(args.model, (), args.rounds, args.micros, args.clock)
        title = (
            f"{WORKLOADS[args.model].title}, {args.ranks} ranks, medians of {args.rounds} rounds"
        )
        title += "" if args.clock == "wall" else f" of {args.clock} time"
        lines = replicas.rows(on_ranks(replicas.measure, args.ranks, plan))
        columns = replicas.COLUMNS
    else:
        plan = step.Plan(args.model, names(args), args.rounds, args.micros, args.clock)
        title = report.title(plan, args.ranks)
        result = on_ranks(step.measure, args.ranks, plan)
        lines, columns = report.rows(result), report.COLUMNS
        if args.plot:
            report.plot(result, title, args.plot)
    print("\n".join([title, "", *report.head(command), ""]))
    print(report.table(columns, lines, args.markdown))


def on_ranks(measure: Callable[..., Any], ranks: int, *given: Any) -> Any:
    """Return rank 0's measurements, with one process per rank; see launch/products.py."""
    return spawn(multiplied, ranks, measure, *given, timeout=TIMEOUT)[0]


def names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the systems to measure. shardcast is always one, because ratios refer to it."""
    parts = args.systems or [""]
    return tuple(
        name
        for name in SYSTEMS
        if name not in LOCAL and (name == "shardcast" or any(part in name for part in parts))
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    rounds_of = {
        "update": 9,
        "host": 40,
        "groups": 40,
        "phases": 15,
        "replicas": 60,
        "peers": 15,
    }
    every = commands.add_parser("all", allow_abbrev=False)
    every.add_argument("--minutes", type=float, default=60.0, help="time after which none starts")
    every.add_argument("--idle", action="store_true", help="use the wall clock everywhere")
    every.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="only commands with a PART in them"
    )
    every.add_argument("--document", type=Path, default=ROOT / "BENCHMARKS.md")
    tuning = commands.add_parser("fine-tuning", allow_abbrev=False)
    tuning.add_argument("--pretraining", type=int, default=500, help="steps on Python's library")
    tuning.add_argument("--steps", type=int, default=60)
    tuning.add_argument("--interval", type=int, default=20, help="steps between held-out losses")
    tuning.add_argument("--record", action="store_true", help="for tools/picture.py --fine-tuning")
    tuning.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    for name, rounds in rounds_of.items():
        sub = commands.add_parser(name, allow_abbrev=False)
        sub.add_argument("--rounds", type=int, default=rounds)
        sub.add_argument("--markdown", action="store_true", help="print the table in Markdown")
        if name == "host":
            sub.add_argument("--packs", type=int, nargs="+", default=[16, 40, 131])
            sub.add_argument("--ranks", type=int, default=8)
            continue
        if name == "groups":
            sub.add_argument("--groups", type=int, nargs="+", default=[1, 2, 48, 300])
            continue
        if name == "update":
            sub.add_argument("--threads", type=int, default=1)
            sub.add_argument("--elements", type=int, default=1 << 24)
            continue
        sub.add_argument("--ranks", type=int, default=2)
        sub.add_argument("--model", choices=WORKLOADS, default="gpt")
        if name == "phases":
            continue
        sub.add_argument(
            "--clock",
            choices=step.CLOCKS,
            default="wall",
            help="clock of all times; on a busy machine use processor",
        )
        sub.add_argument("--micros", type=int, default=1, help="micro-batches per step")
        if name == "replicas":
            continue
        sub.add_argument("--plot", type=Path, help="also draw the steps, as a PNG")
        sub.add_argument(
            "--systems", nargs="+", metavar="PART", help="only systems with a PART in their name"
        )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
