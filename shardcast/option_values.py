"""Values of options: their types, their ranges, and how each type is read and checked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

KeepRule = str | type[torch.nn.Module] | Callable[[str, torch.nn.Parameter], bool]
GroupFn = Callable[[str, torch.nn.Parameter], Hashable]
CostFn = Callable[[str, torch.nn.Parameter], float]
Range = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is that
ABOVE_0: Range = ("a number above 0", lambda value: value > 0)  # so no NaN
COUNT: Range = ("a count >= 1", lambda value: value >= 1)


def one_of(*choices: str) -> Range:
    return f"one of {', '.join(choices)}", choices.__contains__


PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,),
    "str | float": (str, int, float),
}  # fmt: skip


def plain(name: str, annotation: str, value: Any) -> Any:
    kinds = PLAIN[annotation.removesuffix(" | None")]
    # YAML reads `yes` as a boolean, which is an int in Python.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name}: expected {annotation}, got {value!r} ({type(value).__name__})")
    return value


def _dtype(name: str, _annotation: str, value: Any) -> torch.dtype:
    dtype: Any = value
    if isinstance(value, str):  # also the name that torch has for it
        dtype = DTYPES.get(value, getattr(torch, value, None))
    if dtype not in DTYPES.values():
        raise ValueError(f"{name}: expected bf16, fp16 or fp32, got {value!r}")
    return dtype  # type: ignore[no-any-return]


def _function(name: str, annotation: str, value: Any) -> Any:
    if not callable(value):
        result = "key" if annotation.startswith("GroupFn") else "number"
        raise TypeError(f"{name}: expected a callable (name, parameter) -> {result}, got {value!r}")
    return value


def _several(name: str, annotation: str, value: Any) -> tuple[Any, ...]:
    expected, functions = "glob patterns of module names", "KeepRule" in annotation
    if functions:
        expected = "patterns, module classes or predicates (name, parameter) -> bool"
    single = isinstance(value, str) or callable(value) or not isinstance(value, Iterable)
    items = (value,) if single else tuple(value)
    for item in items:
        if not (isinstance(item, str) or (functions and callable(item))):
            got = f"{item!r} ({type(item).__name__})"
            raise TypeError(f"{name}: expected {expected}, got {got}; () names none")
    return items


READERS: dict[str, Callable[[str, str, Any], Any]] = {
    "torch.dtype": _dtype, "GroupFn": _function, "CostFn": _function,
    "tuple[KeepRule, ...]": _several, "tuple[str, ...]": _several,
}  # fmt: skip
