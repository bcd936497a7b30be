"""Train a small GPT on bytes of real text, with shardcast or with the DDP baseline.

    python launch/train.py --steps 200
    torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 \\
        launch/train.py --config configs/bf16.yaml
    python launch/train.py --compare runs/ddp runs/shardcast

`--baseline ddp` trains the baseline. `--checkpoint-dir runs/checkpoints` saves and resumes.
`--help` lists all flags.
"""

from __future__ import annotations

import argparse
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import metrics
import torch
from baseline import Baseline
from checkpoints import Checkpoints
from comparison import compare
from corpus import Corpus
from gpt import GPT, GPTConfig
from plot import loss_curves
from processes import Processes
from products import by_way_of_fp32
from progress import Progress
from torch import nn

import shardcast

PROMPT = b"def "


def train(args: argparse.Namespace, processes: Processes) -> None:
    with by_way_of_fp32(processes.device) as reason:
        if reason and processes.main:
            print(reason)
        run(args, processes)


def run(args: argparse.Namespace, processes: Processes) -> None:
    device, world = processes.device, processes.world
    corpus = Corpus.load(args.data, args.context, args.corpus_mb << 20)
    given = {} if args.max_grad_norm is None else {"max_grad_norm": args.max_grad_norm}
    config = shardcast.ShardcastConfig.load(args.config, **given)

    torch.manual_seed(args.seed)
    network = GPT(GPTConfig.of(args)).to(device)
    if args.baseline == "bf16":
        network.bfloat16()  # the optimizer's state is then bf16, too
    adamw = torch.optim.AdamW(
        network.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    if args.baseline:
        optimizer = Baseline(network, adamw, config.max_grad_norm)
        model, autocast = optimizer.model, nullcontext()
        if args.baseline == "ddp":
            autocast = torch.autocast(device.type, torch.bfloat16)
    else:
        optimizer = shardcast.shard(network, adamw, config)
        model, autocast = network, nullcontext()

    first, checkpoints = 1, None
    if args.checkpoint_dir is not None:
        checkpoints = Checkpoints(
            args.checkpoint_dir,
            network,
            optimizer,
            processes,
            interval=args.checkpoint_interval,
            keep=args.keep_checkpoints,
            facts={"corpus": corpus.digest, "seed": args.seed, "steps": args.steps},
        )
        first += checkpoints.resume()
    log = metrics.Metrics(args.output, enabled=processes.main, append=first > 1)
    tokens_per_step = world * args.accumulation * args.batch_size * args.context
    log.write(
        "run",
        corpus=corpus.digest,
        world=world,
        tokens_per_step=tokens_per_step,
        arguments=vars(args),
        config=config.to_dict(),
    )
    progress = Progress(log, processes, args.steps, tokens_per_step)
    layers = {f"blocks.{n}": f"blocks.{n}.*" for n in range(args.depth)}
    patterns = {"tokens": "tokens.*", **layers, "head": "tokens.*" if args.tie_head else "head.*"}
    progress.say(
        f"{sum(p.numel() for p in network.parameters()):,} parameters, "
        f"{corpus.train.numel():,} bytes of text, {world} process(es) on {device.type}"
    )

    if first > 1:
        progress.resumed(first - 1)
    for step in range(first, args.steps + 1):
        lr = args.learning_rate * schedule(step, args.warmup_steps, args.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for micro_batch in range(args.accumulation):
            index = micro_batch * world + processes.rank
            tokens, targets = corpus.train_batch(args.seed, step, index, args.batch_size)
            last = micro_batch == args.accumulation - 1
            with nullcontext() if last else optimizer.no_sync():
                with autocast:
                    loss = model(tokens.to(device), targets.to(device))
                share = loss / args.accumulation
                optimizer.scale_loss(share).backward()
            progress.add(share)
        optimizer.step()
        optimizer.zero_grad()
        if not args.baseline and config.metrics and (step - 1) % int(config.metrics) == 0:
            values = optimizer.metrics(patterns)
            ratios = {label: float(of["update_to_weight"]) for label, of in values.items()}
            log.write("update_to_weight", step=step, **ratios)

        validate = step % args.validation_interval == 0 or step == args.steps
        if validate or step % args.log_interval == 0:
            progress.train(step, lr, optimizer.grad_norm, optimizer.skipped_steps)
        if validate:
            progress.validation(step, validation_loss(network, corpus, args, processes, autocast))
        progress.after(step)
        if checkpoints is not None and checkpoints.after(step, args.steps):
            progress.say(f"told to stop; saved step {step}")
            break
    progress.close()
    report = optimizer.memory_report()
    log.write("memory", **report)
    progress.say("memory per rank: " + ", ".join(f"{k} {v:,} bytes" for k, v in report.items()))

    if processes.main:
        text = sample(network, args, device, autocast)
        log.write("sample", text=text)
        print(f"--- sample ---\n{shown(text)}\n--------------")
        name = args.baseline or "shardcast"
        print(loss_curves({name: metrics.read(args.output)}, args.output / "loss.png"))


def schedule(step: int, warmup: int, steps: int) -> float:
    """Return the learning-rate factor of `step` (from 1): linear warm-up, then cosine to 0.1."""
    if step <= warmup:
        return step / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


@torch.no_grad()
def validation_loss(
    network: nn.Module,
    corpus: Corpus,
    args: argparse.Namespace,
    processes: Processes,
    autocast: AbstractContextManager[None],
) -> float:
    """Return the mean over the held-out sequences of all ranks, in nats per byte."""
    device = processes.device
    total = torch.zeros(2, device=device)  # sum of losses, number of sequences
    for tokens, targets in corpus.held_out_batches(
        args.validation_sequences, args.batch_size, processes.rank, processes.world
    ):
        with autocast:
            loss = network(tokens.to(device), targets.to(device))
        total += torch.stack([loss * len(tokens), loss.new_tensor(len(tokens))])
    loss_sum, sequences = processes.sum(total).tolist()
    return loss_sum / sequences


def sample(
    network: GPT,
    args: argparse.Namespace,
    device: torch.device,
    autocast: AbstractContextManager[None],
) -> str:
    """Return text that the model generates after the prompt."""
    prompt = torch.tensor([list(PROMPT)], device=device)
    with autocast:
        generator = torch.Generator().manual_seed(args.seed)
        tokens = network.generate(prompt, args.sample_bytes, generator)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")


def shown(text: str) -> str:
    """Escape control characters, which could change a terminal's state."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on bytes of real text.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--config", type=Path, metavar="YAML", help="shardcast configuration")
    run.add_argument(
        "--baseline",
        choices=["ddp", "bf16"],
        help="train instead with DDP: bf16 autocast, or a bf16 model without fp32 masters",
    )
    run.add_argument("--output", type=Path, help="directory of metrics and pictures (runs/NAME)")
    run.add_argument(
        "--compare", nargs=2, type=Path, metavar="DIR", help="compare two finished runs"
    )
    run.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--log-interval", type=positive, default=10, metavar="STEPS")
    run.add_argument("--validation-interval", type=positive, default=50, metavar="STEPS")
    run.add_argument("--validation-sequences", type=positive, default=256)
    run.add_argument("--sample-bytes", type=positive, default=200)

    checkpoint_flags(parser)
    text_flags(parser)

    model_flags(parser, context=128, width=128)

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=300)
    training.add_argument(
        "--batch-size", type=positive, default=8, help="sequences per process and micro-batch"
    )
    training.add_argument("--accumulation", type=positive, default=1, help="micro-batches per step")
    training.add_argument("--learning-rate", type=float, default=3e-3)
    training.add_argument("--warmup-steps", type=int, default=30)
    training.add_argument(
        "--max-grad-norm", type=float, help="clip to this norm; default: the configuration's"
    )
    args = parser.parse_args(arguments)
    if args.baseline and args.checkpoint_dir is not None:
        parser.error("--checkpoint-dir: the baseline saves no checkpoints")
    if args.output is None:
        args.output = Path("runs", args.baseline or "shardcast")
    return args


def checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    kept = parser.add_argument_group("checkpoints")
    kept.add_argument(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="save checkpoints here, and resume from the newest",
    )
    kept.add_argument("--checkpoint-interval", type=positive, default=100, metavar="STEPS")
    kept.add_argument("--keep-checkpoints", type=positive, default=2, metavar="COUNT")


def model_flags(parser: argparse.ArgumentParser, context: int, width: int) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--context", type=positive, default=context, help="tokens of one sequence")
    model.add_argument("--width", type=positive, default=width)
    model.add_argument("--depth", type=positive, default=4)
    model.add_argument("--heads", type=positive, default=4)
    model.add_argument("--tie-head", action="store_true", help="head shares the embedding's weight")
    model.add_argument(
        "--checkpoint-activations", action="store_true", help="recompute blocks in backward"
    )


def text_flags(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("text")
    data.add_argument(
        "--data",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="files or directories (default: the Python standard library)",
    )
    data.add_argument("--corpus-mb", type=positive, default=20, help="read at most so many MiB")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.compare:
        compare(args.compare, args.output)
        return
    processes = Processes.start(args.device)
    train(args, processes)
    processes.stop()


if __name__ == "__main__":
    main()
