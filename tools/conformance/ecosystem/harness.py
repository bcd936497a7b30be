"""Scripts as users write them, under DDP and with the README's change.

A recipe is a function that trains something tiny and reports it. :func:`compare` runs it on two
gloo processes in four variants and returns one row of ``docs/tested-scripts.md``:

======== ====================================================================
ddp      DDP, fp32
autocast DDP under bf16 autocast
fp32     shardcast, fp32
bf16     shardcast, parameters in bf16
======== ====================================================================
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401 before a script imports torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardcast
from shardcast.testing import spawn_world

VARIANTS = ("ddp", "autocast", "fp32", "bf16")


@dataclass
class Report:
    """Results of one variant on one rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    """The script's result: fp32, after training."""
    start: dict[str, Tensor]
    seen: dict[str, Tensor]
    """The model's ``state_dict`` on this rank; it must be equal on both."""
    warnings: list[str] = field(default_factory=list)


@dataclass
class Variant:
    """One way to run a script, with all differences between DDP and shardcast."""

    name: str
    rank: int
    folder: str
    options: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Any = None

    @property
    def stock(self) -> bool:
        return self.name in ("ddp", "autocast")

    @property
    def low(self) -> bool:
        return self.name in ("autocast", "bf16")

    def shard(self, model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
        """Return ``DDP(model), optimizer``, or the model itself and the sharded optimizer."""
        if self.stock:
            return DistributedDataParallel(model, **options.get("ddp", {})), optimizer
        options.pop("ddp", None)
        dtype = torch.bfloat16 if self.low else torch.float32
        self.optimizer = shardcast.shard(
            model, optimizer, param_dtype=dtype, **{**self.options, **options}
        )
        return model, self.optimizer

    def autocast(self) -> Any:
        """Return a context for forward and loss: bf16 autocast only under DDP."""
        if self.name == "autocast":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def clip(self, model: nn.Module, optimizer: Any, norm: float) -> Tensor:
        if self.stock:
            return nn.utils.clip_grad_norm_(model.parameters(), norm)
        return optimizer.clip_grad_norm_(norm)

    def no_sync(self, model: Any, optimizer: Any) -> Any:
        return model.no_sync() if self.stock else optimizer.no_sync()

    def precision(self) -> dict[str, Any]:
        """Return the precision flag of a Trainer."""
        return {"bf16": self.low}

    def trainer(self, cls: type) -> Any:
        """Return the Trainer class, with shardcast's mixin before it."""
        from shardcast.transformers import ShardcastTrainerMixin

        if self.stock:
            return cls
        return type(f"Shardcast{cls.__name__}", (ShardcastTrainerMixin, cls), {})

    def accelerator(self, **options: Any) -> Any:
        from accelerate import Accelerator

        from shardcast.accelerate import ShardcastAccelerator

        precision = "bf16" if self.low else "no"
        if self.stock:
            return Accelerator(mixed_precision=precision, cpu=True, **options)
        return ShardcastAccelerator(
            mixed_precision=precision, cpu=True, shardcast_config=self.options, **options
        )

    def report(
        self, model: Any, losses: Sequence[Any], optimizer: Any = None, prefix: str = ""
    ) -> Report:
        """Return the results of this rank; weights are masters where shardcast has them.

        ``prefix`` is the model's name if several were sharded as one.
        """
        optimizer = optimizer if optimizer is not None else self.optimizer
        if self.stock or optimizer is None:
            weights = {}
        else:
            if not hasattr(optimizer, "full_parameters"):
                optimizer = optimizer.optimizer  # Accelerate's wrapper
            weights = optimizer.full_parameters()
        model = getattr(model, "module", model) if self.stock else model
        seen = {name: _fp32(value) for name, value in model.state_dict().items()}
        weights = {
            name.removeprefix(prefix): _fp32(value)
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        missing = {name: value for name, value in seen.items() if name not in weights}
        return Report([float(x) for x in losses], {**weights, **missing}, self.start, seen)

    def starts(self, model: nn.Module) -> None:
        """Record the initial weights, from which the distance moved is measured."""
        self.start = {name: _fp32(value) for name, value in model.state_dict().items()}


def _fp32(value: Tensor) -> Tensor:
    value = value.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    return value.to(torch.float32, copy=True) if value.is_floating_point() else value.clone()


Recipe = Callable[[Variant], Report]


@dataclass(frozen=True)
class Figures:
    """One row of the table."""

    fp32: float
    """Largest difference of a weight or buffer from DDP's, in fp32."""
    bf16: float
    """Distance of the bf16 run from DDP's in fp32, as a share of the distance moved."""
    autocast: float
    """The same for DDP under autocast: the noise of bf16 itself."""
    loss_fp32: float
    """Largest relative difference of a loss from DDP's in fp32."""
    ranks: float
    """Largest difference between the two ranks' state dicts in shardcast's variants."""
    warnings: tuple[str, ...]
    """Warnings of shardcast's variants that DDP's do not have."""

    @property
    def ratio(self) -> float:
        """Under Adam, a few changed signs of gradients near zero are a distance of 1 %."""
        return self.bf16 / max(self.autocast, 1e-2)


def _run(_group: Any, folder: str, recipe: Recipe, names: Sequence[str]) -> list[Report]:
    os.environ.update(ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")
    reports = []
    for name in names:
        with _fresh():
            torch.manual_seed(0)
            variant = Variant(name, dist.get_rank(), f"{folder}/{name}")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                reports.append(recipe(variant))
            reports[-1].warnings = [str(each.message) for each in caught]
    return reports


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    """Reset Accelerate's state at the end: it is in class attributes."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run(recipe: Recipe, names: Sequence[str] = VARIANTS) -> list[list[Report]]:
    """Return each rank's reports of the variants."""
    return _on_two_ranks(_run, recipe, tuple(names))


def raised(recipe: Recipe, name: str, error: type[Exception], match: str) -> list[bool]:
    """Return for each rank whether it raised this error; any other one is raised here."""
    return _on_two_ranks(_raises, recipe, (name,), error, match)


def _raises(
    group: Any,
    folder: str,
    recipe: Recipe,
    names: Sequence[str],
    expected: type[Exception],
    match: str,
) -> bool:
    try:
        _run(group, folder, recipe, names)
    except expected as error:
        if re.search(match, str(error)) is None:
            raise
        return True
    return False


def _on_two_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        spawn_world(2, timeout=120.0, start_method="forkserver") as world,
    ):
        return world.run(fn, folder, *args)


def compare(recipe: Recipe) -> Figures:
    first, second = run(recipe)
    ddp, autocast, fp32, bf16 = first
    pairs = list(zip(first[2:], second[2:], strict=True))
    of_ddp, of_ours = (  # only the first rank warns
        {text for report in (*first[part], *second[part]) for text in report.warnings}
        for part in (slice(2), slice(2, None))
    )
    return Figures(
        fp32=_largest(fp32.weights, ddp.weights),
        bf16=_share(bf16, ddp),
        autocast=_share(autocast, ddp),
        loss_fp32=_relative(fp32.losses, ddp.losses),
        ranks=max(_largest(one.seen, other.seen) for one, other in pairs),
        warnings=tuple(sorted(of_ours - of_ddp)),
    )


def difference(recipe: Recipe, name: str) -> float:
    """Return the largest difference of a weight or buffer from DDP's."""
    ddp, other = run(recipe, ["ddp", name])[0]
    return _largest(other.weights, ddp.weights)


def _largest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    differences = [
        (left[name].double() - right[name].double()).abs().max()
        for name in left
        if left[name].numel()
    ]
    return float(torch.stack(differences).max())


def _share(report: Report, exact: Report) -> float:
    """Return the distance from the exact run, relative to the distance that that one moved."""
    names = [name for name, value in exact.start.items() if value.is_floating_point()]
    moved = sum((exact.weights[n] - exact.start[n]).double().square().sum() for n in names)
    apart = sum((report.weights[n] - exact.weights[n]).double().square().sum() for n in names)
    return float((apart / moved).sqrt())


def _relative(left: list[float], right: list[float]) -> float:
    scale = max(abs(x) for x in right) or 1.0
    return max(abs(x - y) for x, y in zip(left, right, strict=True)) / scale
