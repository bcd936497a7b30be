"""Train the GPT of train.py on a grid of tensor, pipeline and data-parallel ranks.

    torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=8 \\
        launch/train_hybrid.py --tp 2 --pp 2 --dp 2
    python launch/train_hybrid.py --baseline      # one process, torch's own optimizer
    python launch/train_hybrid.py --compare runs/baseline runs/hybrid

With --checkpoint-dir a run continues from a checkpoint of any other grid. Parallelism is torch's
own: DeviceMesh, parallelize_module, torch.distributed.pipelining. A step sees the same text on any
grid, so losses can be compared. `--help` lists every flag.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import metrics
import torch
import torch.nn.functional as F
from baseline import Baseline
from checkpoints import Checkpoints
from corpus import Corpus
from gpt import GPT, GPTConfig
from plot import agreement
from processes import Processes
from progress import Progress
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from train import checkpoint_flags, model_flags, positive, schedule, text_flags

import shardcast

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
Batch = tuple[Tensor, Tensor]  # tokens and targets, each (sequences, context) int64


def train(args: argparse.Namespace, processes: Processes) -> None:
    corpus = Corpus.load(args.data, args.context, args.corpus_mb << 20)
    given = {} if args.max_grad_norm is None else {"max_grad_norm": args.max_grad_norm}
    config = shardcast.ShardcastConfig.load(args.config, **given)

    mesh = None
    if processes.world > 1:
        shape, names = (args.pp, args.dp, args.tp), ("pp", "dp", "tp")
        mesh = init_device_mesh(processes.device.type, shape, mesh_dim_names=names)
    stages = build(args, mesh, processes.device)
    adamw = torch.optim.AdamW(
        [param for stage in stages for param in stage.parameters()],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    model = stages if args.pp > 1 else stages[0]
    if args.baseline:
        optimizer = Baseline(model, adamw, config.max_grad_norm)
    elif mesh is None:
        optimizer = shardcast.shard(model, adamw, config)
    else:
        tied = [("tokens.weight", "head.weight")] if args.tie_head and args.pp > 1 else []
        optimizer = shardcast.shard(model, adamw, config, mesh=mesh, dp="dp", tied=tied)
    if args.pp > 1:
        backward = pipelined(stages, mesh, optimizer, args)
    else:
        backward = accumulated(model, optimizer)

    first, checkpoints = 1, None
    if args.checkpoint_dir is not None:
        checkpoints = Checkpoints(
            args.checkpoint_dir,
            model,
            optimizer,
            processes,
            interval=args.checkpoint_interval,
            keep=args.keep_checkpoints,
            facts={"corpus": corpus.digest, "seed": args.seed, "steps": args.steps},
        )
        first += checkpoints.resume()
    log = metrics.Metrics(args.output, enabled=processes.main, append=first > 1)
    log.write("run", corpus=corpus.digest, world=processes.world, arguments=vars(args))
    tokens_per_step = args.micro_batches * args.batch_size * args.context
    progress = Progress(log, processes, args.steps, tokens_per_step)
    progress.say(f"tp {args.tp} x pp {args.pp} x dp {args.dp}, {corpus.train.numel():,} bytes")

    dp_rank = 0 if mesh is None else mesh.get_local_rank("dp")
    share = args.micro_batches // args.dp
    if first > 1:
        progress.resumed(first - 1)
    for step in range(first, args.steps + 1):
        lr = args.learning_rate * schedule(step, args.warmup_steps, args.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batches = [
            [
                t.to(processes.device)
                for t in corpus.train_batch(args.seed, step, index, args.batch_size)
            ]
            for index in range(dp_rank * share, (dp_rank + 1) * share)
        ]
        # Only the ranks of the last stage have a loss, one of each `pp`.
        progress.add(backward(batches) * args.pp)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_interval == 0 or step == args.steps:
            progress.train(step, lr, optimizer.grad_norm, optimizer.skipped_steps)
        if checkpoints is not None and checkpoints.after(step, args.steps):
            progress.say(f"told to stop; saved step {step}")
            break
    progress.close()


def build(args: argparse.Namespace, mesh: DeviceMesh | None, device: torch.device) -> list[GPT]:
    """Return this rank's pipeline stages, cut over tensor-parallel ranks; equal on all `dp`."""
    looped = issubclass(get_schedule_class(args.schedule), PipelineScheduleMulti)
    count = args.pp * 2 if looped and args.pp > 1 else args.pp
    rank = 0 if mesh is None else mesh.get_local_rank("pp")
    torch.manual_seed(args.seed)
    network = GPT(GPTConfig.of(args))
    stages = []
    for number in range(rank, count, args.pp):
        stage = copy.deepcopy(network).keep(number, count).to(device)
        if mesh is not None and args.tp > 1:
            cut_tensors(stage, mesh["tp"])
        stages.append(stage)
    return stages


def cut_tensors(stage: GPT, mesh: DeviceMesh) -> None:
    """Cut tensors as in Megatron-LM, vocabulary included; norms and positions stay whole."""
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
    }
    if stage.tokens is not None:
        plan["tokens"] = RowwiseParallel(input_layouts=Replicate())
    if stage.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    both = stage.tokens is not None and stage.head is not None
    tied = both and stage.head.weight is stage.tokens.weight
    parallelize_module(stage, mesh, plan)
    if tied:  # parallelize_module made them two parameters
        stage.head.weight = stage.tokens.weight


def accumulated(
    model: GPT, optimizer: Baseline | shardcast.ShardedOptimizer
) -> Callable[[list[Batch]], Tensor]:
    """Return a function that runs forward and backward of one whole model; it returns the loss."""

    def backward(batches: list[Batch]) -> Tensor:
        losses = []
        for number, (tokens, targets) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else optimizer.no_sync():
                loss = model(tokens, targets) / len(batches)
                optimizer.scale_loss(loss).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return backward


def pipelined(
    stages: list[GPT],
    mesh: DeviceMesh,
    optimizer: shardcast.ShardedOptimizer,
    args: argparse.Namespace,
) -> Callable[[list[Batch]], Tensor]:
    """Return the same for the pipeline; the loss is 0 on ranks without the last stage."""
    device = next(stages[0].parameters()).device
    rank, size = mesh.get_local_rank("pp"), args.pp
    count = args.micro_batches // args.dp
    parts = [
        PipelineStage(
            stage, rank + size * number, size * len(stages), device, group=mesh["pp"].get_group()
        )
        for number, stage in enumerate(stages)
    ]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return optimizer.scale_loss(loss / count)

    kind = get_schedule_class(args.schedule)
    single = not issubclass(kind, PipelineScheduleMulti)
    pipeline = kind(parts[0] if single else parts, count, loss_fn=loss_of, scale_grads=False)

    def backward(batches: list[Batch]) -> Tensor:
        tokens, targets = map(torch.cat, zip(*batches, strict=True))
        losses: list[Tensor] = []
        pipeline.step(
            *([tokens] if parts[0].is_first else []),
            target=targets if parts[-1].is_last else None,
            losses=losses,
            return_outputs=False,
        )
        total = sum((loss.detach() for loss in losses), torch.zeros((), device=device))
        return total if optimizer.loss_scale is None else total / optimizer.loss_scale

    return backward


def compare(directories: list[Path], output: Path) -> None:
    """Draw runs in one picture; print how their losses differ from those of the first run."""
    runs = {str(directory): metrics.read(directory) for directory in directories}
    named = {directory.name: runs[str(directory)] for directory in directories}
    print(agreement(named, output / "comparison.png", output / "comparison.svg"))
    (name, first), *others = runs.items()
    for other, records in others:
        step, difference = metrics.largest_difference(first, records)
        print(f"{other}: losses differ from {name} by at most {difference:.1e} (step {step})")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on a grid of tensor, pipeline and data-parallel ranks.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    grid = parser.add_argument_group("grid")
    grid.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks")
    grid.add_argument("--pp", type=positive, default=1, help="pipeline-parallel ranks")
    grid.add_argument("--dp", type=positive, default=1, help="data-parallel ranks")
    grid.add_argument("--schedule", choices=SCHEDULES, default="1F1B", help="pipeline schedule")

    run = parser.add_argument_group("run")
    run.add_argument("--config", type=Path, metavar="YAML", help="shardcast configuration")
    run.add_argument(
        "--baseline", action="store_true", help="train in one process with torch's own optimizer"
    )
    run.add_argument(
        "--output", type=Path, default=Path("runs/hybrid"), help="directory of metrics and picture"
    )
    run.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="compare finished runs with the first",
    )
    run.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--log-interval", type=positive, default=1, metavar="STEPS")

    checkpoint_flags(parser)
    text_flags(parser)

    model_flags(parser, context=64, width=64)

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=100)
    training.add_argument(
        "--batch-size", type=positive, default=4, help="sequences per micro-batch"
    )
    training.add_argument(
        "--micro-batches",
        type=positive,
        default=8,
        help="micro-batches per step, on all dp ranks together",
    )
    training.add_argument("--learning-rate", type=float, default=3e-3)
    training.add_argument("--warmup-steps", type=int, default=10)
    training.add_argument(
        "--max-grad-norm", type=float, help="clip to this norm; default: the configuration's"
    )
    args = parser.parse_args(arguments)
    if args.baseline and args.tp * args.pp * args.dp > 1:
        parser.error("--baseline: it runs in one process")
    if args.baseline and args.checkpoint_dir is not None:
        parser.error("--checkpoint-dir: the baseline saves no checkpoints")
    if args.micro_batches % args.dp:
        parser.error(f"--micro-batches {args.micro_batches} is not a multiple of --dp {args.dp}")
    if args.heads % args.tp:
        parser.error(f"--heads {args.heads} is not a multiple of --tp {args.tp}")
    return args


def main() -> None:
    args = parse_arguments()
    if args.compare:
        compare(args.compare, args.output)
        return
    processes = Processes.start(args.device)
    if processes.world != args.tp * args.pp * args.dp:
        raise SystemExit(
            f"error: tp {args.tp} x pp {args.pp} x dp {args.dp} needs as many processes, "
            f"{processes.world} were started"
        )
    train(args, processes)
    processes.stop()


if __name__ == "__main__":
    main()
