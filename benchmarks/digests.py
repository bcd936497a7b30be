"""Hashes of short training runs, to check that a refactoring changes no bit.

Each run trains on two or more ranks, with a skipped step, accumulation and missing gradients. Its
hash covers each rank's parameters, norm and contents of ``.grad`` after each step, and masters,
state and options at the end. The bits depend on torch's version and on the processor, so hashes
are not stored: two trees are compared on one machine.

    python -m benchmarks digests                           # of this tree
    python -m benchmarks digests --against ../other-tree   # of both, and whether they are equal
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.testing import threaded_world

STEPS, MICROS = 6, 2
SPOILED = 3  # the step whose loss is infinite on one rank
TIMEOUT = 600.0
RUNS: dict[str, Callable[[], list[Any]]] = {}


class Net(nn.Module):
    """Model with odd sizes, a norm with buffers, a tie, and a branch that some batches skip."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 24)
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 24)
        self.norm, self.branch = nn.BatchNorm1d(24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, takes_branch: bool) -> Tensor:
        x = self.norm(self.second(torch.tanh(self.first(self.embedding(tokens)))))
        return self.head(self.branch(x) if takes_branch else x)


def add(found: Any, value: Any) -> None:
    """Add a value to a hash: tensors by their bits, mappings by their keys in order."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            found.update(str(key).encode())
            add(found, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            add(found, item)
    else:
        found.update(repr(value).encode())


def hashed(values: Any) -> str:
    found = hashlib.sha256()
    add(found, values)
    return found.hexdigest()[:16]


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(19, (8,), generator=generator)


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    tokens = batch(step, micro, rank)
    takes_branch = step % 3 != 1 and (step + rank) % 2 == 0
    logits = model(tokens, takes_branch).float()
    loss = nn.functional.cross_entropy(logits, tokens.roll(1), reduction="sum") / 8
    return loss * (math.inf if step == SPOILED and rank == 1 and micro == 1 else 1.0)


def seen(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return a rank's values after a step."""
    params = [_compat.local_tensor(param) for param in model.parameters()]
    return [hashed([params, [*model.buffers()], optimizer.grad_norm])]


def train(
    rank: int,
    model: nn.Module,
    optimizer: Any,
    steps: Sequence[int] = range(STEPS),
    micros: int = MICROS,
    after: Callable[[int], Any] = lambda _step: None,
    **options: Any,
) -> Iterator[Any]:
    """Train, and return the values to hash of each step and of the end.

    Args:
        options: ``counts``, ``gives_loss`` and ``clips`` select the calls that the script makes.
    """
    for step in steps:
        losses = []
        for micro in range(micros):
            last = micro == micros - 1
            if options.get("counts"):
                optimizer.count(3 + rank + micro)
            with torch.enable_grad():
                loss = loss_of(model, step, micro, rank)
            losses.append(loss.detach())
            if last:
                optimizer.scale_loss(loss).backward()
            else:
                with optimizer.no_sync():
                    optimizer.scale_loss(loss).backward()
        if options.get("clips") and step % 2:
            optimizer.clip_grad_value_(0.2)
            optimizer.clip_grad_norm_(0.7)
            optimizer.clip_grad_norm_(0.6)
        given = {"loss": torch.stack(losses).mean()} if options.get("gives_loss") else {}
        optimizer.step(**given)
        yield seen(model, optimizer), after(step)
        optimizer.zero_grad()
    optimizer.wait_sync()
    yield state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: Any) -> list[Any]:
    state = optimizer.state_dict()
    report = dict(optimizer.memory_report())
    del report["gradients"]  # their memory varies between steps
    return [
        hashed(state),
        report,
        optimizer.skipped_steps,
        optimizer.guarded_steps,
        seen(model, optimizer),
        optimizer.digest(),
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [first], "max_grad_norm": 0.5}, {"params": others, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=1e-2)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [model.first.weight, model.second.weight, model.branch.weight]  # type: ignore[union-attr]
    ids = {id(matrix) for matrix in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def on_ranks(
    world: int | dict[str, int],
    config: dict[str, Any],
    make: Any = adamw,
    after: Any = None,
    **options: Any,
) -> list[Any]:
    def one(group: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Net()
        fields = {"pack_params": 3, "max_grad_norm": 1.0, **config}
        in_mesh = isinstance(world, dict)  # the default group for one dimension
        optimizer = shardcast.shard(
            model, make(model), process_group=None if in_mesh else group, **fields
        )
        more = {} if after is None else {"after": lambda step: after(model, optimizer, step)}
        rank = group.get_rank() if in_mesh else group.rank()
        return [*train(rank, model, optimizer, **options, **more)]

    return threaded_world(world, one, timeout=TIMEOUT)


def run(function: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    RUNS[function.__name__.replace("_", " ")] = function
    return function


@run
def adamw_in_bf16() -> list[Any]:
    return [on_ranks(2, {}, clips=True), on_ranks(3, {"norm_type": math.inf}, clips=True)]


@run
def as_on_an_accelerator() -> list[Any]:
    is_host, _compat.is_host = _compat.is_host, lambda _device: False  # type: ignore[assignment]
    try:
        plain = on_ranks(2, {"fuse": "eager"}, clips=True)
        half = on_ranks(2, {"fuse": "eager", "param_dtype": "fp16", "loss_scale_init": 64.0})
        guard = {"norm": 1.0, "loss": 1.0, "window": 4}
        several = on_ranks(
            2,
            {"fuse": "eager", "averages": {"ema": 0.9}, "metrics": 2, "guard": guard},
            gives_loss=True,
            counts=True,
        )
    finally:
        _compat.is_host = is_host
    return [plain, half, several]


@run
def fp16_with_a_loss_scale() -> list[Any]:
    fields = {"param_dtype": "fp16", "loss_scale_init": 2.0**18, "loss_scale_growth_interval": 2}
    return [on_ranks(2, fields), on_ranks(2, {"loss_scale": 64.0}, clips=True)]


@run
def muon_with_adamw() -> list[Any]:
    return on_ranks(2, {"averages": {"ema": 0.9}, "metrics": True}, muon_and_adamw)


@run
def mesh() -> list[Any]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def one(mesh: Any, **fields: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.LayerNorm(24))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = shardcast.shard(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            mesh=mesh,
            pack_params=2,
            max_grad_norm=0.1,
            metrics=True,
            **fields,
        )
        rank, result = mesh["dp"].get_local_rank(), []
        for step in range(STEPS):
            if fields.get("guard") is None:
                optimizer.count(2 + rank)
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 24, generator=generator).to(fields["param_dtype"])
            with torch.enable_grad():
                loss = model(x).float().square().sum()
            optimizer.scale_loss(loss).backward()
            optimizer.step()
            result.append(seen(model, optimizer))
            optimizer.zero_grad()
        return [result, hashed(optimizer.state_dict()), optimizer.digest()]

    shape = {"dp": 2, "tp": 2}
    guard = {"norm": 0.5, "window": 4}
    return [
        threaded_world(shape, lambda m: one(m, param_dtype=torch.float32), timeout=TIMEOUT),
        threaded_world(shape, lambda m: one(m, param_dtype=torch.float16), timeout=TIMEOUT),
        threaded_world(
            shape, lambda m: one(m, param_dtype=torch.bfloat16, guard=guard), timeout=TIMEOUT
        ),
        on_ranks({"dp": 4}, {"shard_ranks": 2}),
    ]


@run
def lean() -> list[Any]:
    int8 = {"master": "split16", "moments": "int8"}
    return [on_ranks(2, {"config": "lean"}), on_ranks(2, int8)]


@run
def averages_guard_tokens_and_metrics() -> list[Any]:
    def after(model: Net, optimizer: Any, step: int) -> Any:
        if step not in (2, 5):
            return None
        with optimizer.averaged("slow"):
            inside = seen(model, optimizer)
        measured = optimizer.metrics({"linear": "*.weight"})
        return [inside, hashed(measured), hashed(optimizer.full_parameters("ema"))]

    slow = {"half_life": 3, "warmup": True, "stored": "bf16"}
    fields = {"averages": {"ema": 0.9, "slow": slow}, "metrics": 2}
    return [
        on_ranks(2, {**fields, "guard": {"norm": 0.5, "window": 4}}, counts=True, after=after),
        on_ranks(2, {**fields, "guard": {"norm": 0.5, "window": 2, "action": "clip"}}, after=after),
        on_ranks(2, {"guard": lambda norm, _loss: norm > 3.0}, gives_loss=True),
        on_ranks(
            2,
            {"guard": {"norm": 1.0, "loss": 1.0, "window": 4}, "param_dtype": "fp16"},
            gives_loss=True,
        ),
        on_ranks(2, {}, counts=True, clips=True),
    ]


@run
def on_one_two_and_four_ranks() -> list[Any]:
    return [on_ranks(ranks, {}, micros=4 // ranks, counts=True) for ranks in (1, 2, 4)]


@run
def offloaded() -> list[Any]:
    return [on_ranks(2, {"offload": True}), on_ranks(2, {"offload": True, "config": "lean"})]


@run
def overlapped_with_buffers() -> list[Any]:
    return [
        on_ranks(2, {"overlap_sync": True, "partition": "whole"}),
        on_ranks(2, {"broadcast_buffers": ("norm.running_mean",)}),
        on_ranks(1, {}, clips=True),
    ]


@run
def resumed() -> list[Any]:
    from shardcast import checkpoint

    fields = {
        "averages": {"ema": 0.9},
        "guard": {"norm": 1.0, "window": 4},
        "param_dtype": "fp16",
        "loss_scale_init": 64.0,
        "pack_params": 3,
    }

    def one(group: Any, folder: str, steps: range, save: bool) -> list[Any]:
        torch.manual_seed(0)
        model = Net()
        optimizer = shardcast.shard(model, adamw(model), process_group=group, **fields)
        result: list[Any] = []
        if not save:
            checkpoint.load(folder, model, optimizer)
            result.append(state_of(model, optimizer))
        result += train(group.rank(), model, optimizer, steps)
        if save:
            checkpoint.save(folder, model, optimizer, step=steps.stop)
        return result

    with tempfile.TemporaryDirectory() as folder:
        first = threaded_world(2, one, folder, range(5), True, timeout=TIMEOUT)
        return [first, threaded_world(3, one, folder, range(5, 8), False, timeout=TIMEOUT)]


@run
def with_accelerate() -> list[Any]:
    from shardcast.accelerate import ShardcastAccelerator

    torch.manual_seed(0)
    config = {"param_dtype": "bf16", "averages": {"ema": 0.9}}
    accelerator = ShardcastAccelerator(
        cpu=True, gradient_accumulation_steps=2, shardcast_config=config
    )
    model = Net()
    data = torch.utils.data.DataLoader(torch.arange(96) % 19, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), data)
    result = []
    for tokens in loader:
        with accelerator.accumulate(model):
            logits = model(tokens, True).float()
            accelerator.backward(nn.functional.cross_entropy(logits, tokens.roll(1)))
            if accelerator.sync_gradients:
                result.append(hashed(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return [result, hashed(dict(model.named_parameters())), hashed(optimizer.state_dict())]


def main(arguments: Sequence[str]) -> int:
    """Print the digests, of both trees with ``--against``; return 1 if they differ."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--against", type=Path, help="another tree of the repository")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="only runs with a PART in their name"
    )
    args = parser.parse_args(arguments)
    wanted = [name for name in RUNS if not args.only or any(part in name for part in args.only)]
    if args.against is None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        for name in wanted:
            print(f"{hashed(RUNS[name]())}  {name}", flush=True)
        return 0
    trees = Path(__file__).parents[1], args.against
    ours, theirs = (_of_tree(tree.resolve(), args.only) for tree in trees)
    for name in wanted:
        same = "" if ours[name] == theirs[name] else f"  DIFFERS, there {theirs[name]}"
        print(f"{ours[name]}  {name}{same}")
    return int(ours != theirs)


def _of_tree(tree: Path, only: Sequence[str]) -> dict[str, str]:
    """Return the digests that this script computes with the package of ``tree``."""
    command = [sys.executable, __file__, *(["--only", *only] if only else [])]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    lines = (line.split("  ") for line in done.stdout.splitlines())
    return {name: digest for digest, name in lines}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
