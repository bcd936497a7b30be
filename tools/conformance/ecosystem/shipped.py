"""Helpers for loops that packages ship: they run as installed, with the README's diff applied.

A loop that takes model and optimizer gets them from :func:`harness.Variant.shard`. If a loop
creates its optimizer, clips, or calls other methods of the model than ``forward``, :func:`edited`
changes its source as a user would; the table shows that. No code of the packages is copied.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import Variant
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def edited(function: Callable[..., Any], *changes: tuple[str, str], **names: Any) -> Any:
    """Return the function with lines of its source replaced, and with names for new lines."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert old in source, f"{function.__qualname__} has no line {old!r}"
        source = source.replace(old, new)
    scope = {**function.__globals__, **names}
    exec(compile(source, inspect.getfile(function), "exec"), scope)
    return scope[function.__name__]


def averaged(variant: Variant, model: nn.Module, optimizer: Any, **options: Any) -> Any:
    """Return the optimizer, sharded; under plain torch, hooks average gradients as DDP would.

    This is for loops that call methods other than ``forward``, which DDP does not support.
    """
    if not variant.stock:
        return variant.shard(model, optimizer, **options)[1]

    def average(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
    return optimizer


def absent(*names: str) -> None:
    """Mock modules that a package imports but does not call here."""
    for name in names:
        spec = ModuleSpec(name, None)
        sys.modules.setdefault(name, mock.MagicMock(__version__="2.11.0", __spec__=spec))


@contextlib.contextmanager
def surrounded(variant: Variant) -> Iterator[None]:
    """Run a whole loop under an autocast of the script, in both low-precision variants.

    Autocast's cache is off: it would keep the weights of the first step.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=variant.low, cache_enabled=False):
        yield


def seeded(variant: Variant) -> torch.Generator:
    """Seed this rank's random numbers, including the package's, and return a generator."""
    import random

    import numpy

    random.seed(variant.rank)
    numpy.random.seed(variant.rank)
    torch.manual_seed(variant.rank)
    return torch.Generator().manual_seed(variant.rank)


def loader(variant: Variant, *tensors: Tensor, batch: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=batch)


def pictures(variant: Variant, count: int = 32, size: int = 8, classes: int = 4) -> list[Tensor]:
    rng = torch.Generator().manual_seed(variant.rank)
    x = torch.randn(count, 3, size, size, generator=rng)
    return [x, torch.randint(0, classes, (count,), generator=rng)]


def rows_of(variant: Variant, count: int = 32, width: int = 6) -> list[Tensor]:
    rng = torch.Generator().manual_seed(variant.rank)
    x = torch.randn(count, width, generator=rng)
    return [x, x.sin().sum(1, keepdim=True)]
