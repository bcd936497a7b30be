"""The values of the generated kernels, without a GPU, beside the eager update's.

The optimizer takes real steps on the host. What it would compile is recorded with its operands,
run eagerly, and generated for a GPU and interpreted (:mod:`codegen.interpret`); both must leave the
same values behind.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from codegen.interpret import Case
from codegen.lower import Call, lower, stage_of
from codegen.trace import forget_graphs
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.step.update.fusion import Epilogue, Fusion
from shardcast.step.update.numbers_of_rules import numbers_
from shardcast.testing import fake_world

SHAPES = ((250, 70), (70,), (42, 701), (33,))  # 47,045 elements: no multiple of anything
SUMMED = 8  # of 64 summands in another order, and of changes, which are rounded as masters are
ULPS = 4  # products and sums may be fused or not, and roots of the host's libraries miss by one
ROUNDED = 1e-3  # so that so many values of low precision may fall to the next one
LOAD = re.compile(
    r"^(?P<indent> +)(?P<name>tmp\d+) = tl\.load\((?P<pointer>in_ptr\d+) \+ "
    r"\(.*[xr].*\), .*mask.*\)"
    r"(?P<cast>\.to\(tl\.float32\))?\n",
    re.M,
)  # of a value per element
STEP = 2**-7  # of bf16 and of int8 codes, in proportion


@dataclass
class Recorded:
    """A call of a function given to ``torch.compile``.

    Attributes:
        eager: its arguments after the eager function has run on them.
    """

    call: Call
    eager: tuple[Any, ...]


class Recorder:
    """Stands for ``torch.compile``: notes the calls of a stage and runs all eagerly."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.calls: list[Recorded] = []

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if stage_of(function) == self.stage:
                operands = copy.deepcopy(args)
                if self.stage == "reduce":  # mock ranks send what this one has: the mean of equals
                    pieces = {id(it): it for it in operands if it is not None}.values()
                    for number, piece in enumerate(pieces):
                        piece.normal_(generator=torch.Generator().manual_seed(number))
                eager = copy.deepcopy(operands)
                function(*eager)
                self.calls.append(Recorded(Call(function, options, operands), eager))
            return function(*args)

        return call


def record(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], ranks: int, stage: str,
    epilogues: Sequence[Epilogue], nan: bool, shapes: Sequence[tuple[int, ...]] = SHAPES,
    **fields: Any,
) -> list[Recorded]:  # fmt: skip
    """What the third step of an optimizer compiles in ``stage``; with ``nan`` it is skipped."""
    recorder = Recorder(stage)
    forget_graphs()
    torch.manual_seed(0)
    chosen = mock.patch("shardcast.step.update.epilogues_of", lambda _: tuple(epilogues))
    path = mock.patch.object(_compat, "is_host", lambda _device: False)  # that of a GPU
    compiles = mock.patch("torch.compile", recorder)
    with chosen, compiles, path, fake_world(ranks, rank=ranks // 2) as group:
        model = nn.ParameterList(torch.randn(shape) for shape in shapes)
        optimizer = shardcast.shard(
            model, kind(model.parameters(), **options),
            {"param_dtype": "bf16", "fuse": "compile", "max_grad_norm": 1.0, **fields},
            process_group=group,
        )  # fmt: skip
        for number in range(3):
            for param in model.parameters():
                param.grad = torch.randn_like(param)
                if nan and number == 2:
                    param.grad[0] = torch.nan
            recorder.calls.clear()
            optimizer.scale_loss(torch.zeros(()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that the step is skipped
                optimizer.step()
            optimizer.zero_grad()
    forget_graphs()
    return recorder.calls


def interpret(calls: Sequence[Recorded], edit: Callable[[str], str] = str) -> None:
    """Run the generated code of calls on their operands, by Triton's interpreter.

    ``edit`` may break the code, to see that this is noticed.
    """
    cases: list[Case] = []
    operands: list[list[Tensor]] = []

    def note(source: str, args: Sequence[Any]) -> None:
        cases.append(Case(source=edit(source), args=list(args)))
        operands.append([value for value in args if isinstance(value, Tensor)])

    for recorded in calls:
        lower([recorded.call], note)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(cases, Path(folder) / "cases.pt")
        command = [sys.executable, str(Path(__file__).with_name("interpret.py")), folder]
        subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
        results = torch.load(Path(folder) / "results.pt", weights_only=False)
    for tensors, values in zip(operands, results, strict=True):
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def slip(source: str, factor: float = 1.001) -> str:
    """The same kernel with one operand, in low precision if there is one, off by 0.1 %.

    A byte has another last bit.
    """
    loads = list(LOAD.finditer(source))
    load = next((load for load in loads if load["cast"]), loads[0])
    wrong = "^ 1" if f"'{load['pointer']}': '*u8'" in source else f"* {factor}"
    line = f"{load['indent']}{load['name']} = {load['name']} {wrong}\n"
    return source[: load.end()] + line + source[load.end() :]


@dataclass(frozen=True)
class Difference:
    """How far interpreted values are from eager ones.

    Attributes:
        ulps: of exact fp32 values, in units of the last place of a value plus the mean one.
        rounded: share of the elements of low precision that differ.
        far: whether one of these is more than one step of its precision away.
    """

    ulps: float = 0.0
    rounded: float = 0.0
    far: bool = False

    def __or__(self, other: Difference) -> Difference:
        return Difference(
            max(self.ulps, other.ulps), max(self.rounded, other.rounded), self.far or other.far
        )

    @property
    def good(self) -> bool:
        return self.ulps <= ULPS and self.rounded <= ROUNDED and not self.far


def compare(calls: Sequence[Recorded]) -> Difference:
    """The greatest differences over all that ``calls`` have written."""
    total = Difference()
    for recorded in calls:
        function = recorded.call.args[0]
        if recorded.call.function.__name__ == numbers_.__name__:
            total |= exact(recorded.call.args[-1], recorded.eager[-1])
            continue
        if not isinstance(function, Fusion):  # a mean: the divisor is a power of two, or 3, 5, 6, 7
            total |= low(recorded.call.args[0], recorded.eager[0])
            continue
        operands, eager = recorded.call.args[1], recorded.eager[1]
        several = isinstance(operands[0], list)  # ranges in a batch
        for pair in zip(operands, eager, strict=True) if several else [(operands, eager)]:
            total |= compare_range(function, *pair)
    return total


def compare_range(
    fusion: Fusion, operands: Sequence[Tensor], eager_operands: Sequence[Tensor]
) -> Difference:
    """The greatest differences over all that was written of one range."""
    total, ours, eagers = Difference(), fusion.parts(operands), fusion.parts(eager_operands)
    for codec, pieces, eager in zip(
        (fusion.master, *fusion.state), ours.stored, eagers.stored, strict=True
    ):
        measure = low if codec.by_chance else exact
        total |= measure(codec.decode(pieces), codec.decode(eager))
    if ours.published is not None and eagers.published is not None:
        total |= low(ours.published, eagers.published)
    for sums, eager_sums in zip(ours.sums, eagers.sums, strict=True):
        total |= Difference(ulps=exact(sums, eager_sums).ulps / SUMMED)
    return total


def scaled(values: Tensor, eager: Tensor) -> Tensor:
    """Differences in proportion to values plus the mean one; infinite where one alone is NaN."""
    values, eager = values.double(), eager.double()
    size = eager.abs() + eager.abs().nanmean() + 1e-300
    difference = ((values - eager).abs() / size).masked_fill(values.isnan() & eager.isnan(), 0)
    return difference.nan_to_num(nan=torch.inf)


def exact(values: Tensor, eager: Tensor) -> Difference:
    return Difference(ulps=float(scaled(values, eager).max()) / torch.finfo(torch.float32).eps)


def low(values: Tensor, eager: Tensor) -> Difference:
    difference = scaled(values, eager)
    return Difference(
        rounded=float((difference > 0).double().mean()), far=bool((difference > STEP).any())
    )
