"""Values of options: their types, their ranges, and how each type is read and checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

KeepRule = str | type[torch.nn.Module] | Callable[[str, torch.nn.Parameter], bool]
GroupFn = Callable[[str, torch.nn.Parameter], Hashable]
CostFn = Callable[[str, torch.nn.Parameter], float]
GuardFn = Callable[[Tensor, Tensor | None], Tensor]
Range = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is that
ABOVE_0: Range = ("a number above 0", lambda value: value > 0)  # so no NaN
COUNT: Range = ("a count >= 1", lambda value: value >= 1)
RANKS: Range = (
    "auto, all or a number of ranks >= 1",
    lambda value: value in ("auto", "all") if isinstance(value, str) else value >= 1,
)


@dataclass(frozen=True)
class AverageOptions:
    """One exponential moving average of the weights: ``average += (1 - decay) * (weight -
    average)`` in every step.

    Attributes:
        name: that the script gives it.
        decay: in [0, 1).
        warmup: the decay is at most ``(1 + t) / (10 + t)`` in the average's step ``t = 1, 2, ...``
        stored: ``fp32``, or ``bf16`` rounded by chance.
    """

    name: str
    decay: float
    warmup: bool = False
    stored: str = "fp32"

    def to_dict(self) -> dict[str, Any]:
        """As it stands in YAML, the name aside."""
        return {"decay": self.decay, "warmup": self.warmup, "stored": self.stored}


Averages = tuple[AverageOptions, ...]


def one_of(*choices: str) -> Range:
    return f"one of {', '.join(choices)}", choices.__contains__


PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,),
    "str | float": (str, int, float), "bool | int": (bool, int), "str | int": (str, int),
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


def _averages(name: str, _annotation: str, value: Any) -> Averages:
    if isinstance(value, tuple) and all(isinstance(item, AverageOptions) for item in value):
        return value
    if value == []:  # as to_dict() has it
        return ()
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected a mapping from names to decays, such as {{'ema': 0.999}}, got "
            f"{value!r} ({type(value).__name__})"
        )
    return tuple(_average(f"{name}: {key!r}", key, options) for key, options in value.items())


def _average(where: str, key: Any, options: Any) -> AverageOptions:
    """One average, from its decay or from a mapping."""
    if not isinstance(key, str) or not key.isidentifier():
        raise ValueError(f"{where}: expected a name of letters, digits and _")
    known = {"decay", "half_life", "warmup", "stored"}
    values = dict(options) if isinstance(options, Mapping) else {"decay": options}
    if unknown := values.keys() - known:
        raise ValueError(f"{where}: unknown {sorted(unknown)}, expected {sorted(known)}")
    if ("decay" in values) == ("half_life" in values):
        raise ValueError(f"{where}: expected decay or half_life (in steps), got {values!r}")
    option = "decay" if "decay" in values else "half_life"
    number = values[option]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{where}: expected {option} to be a number, got {number!r}")
    within = "[0, 1)" if option == "decay" else "(0, inf)"
    if not (0 <= number < 1 if option == "decay" else 0 < number < float("inf")):
        raise ValueError(f"{where}: expected {option} in {within}, got {number!r}")
    warmup = plain(f"{where}: warmup", "bool", values.get("warmup", False))
    stored = values.get("stored", "fp32")
    if stored not in ("fp32", "bf16"):
        raise ValueError(f"{where}: expected stored to be fp32 or bf16, got {stored!r}")
    decay = float(number) if option == "decay" else 0.5 ** (1 / number)
    return AverageOptions(key, decay, warmup, stored)


@dataclass(frozen=True)
class GuardRule:
    """Steps whose norm or loss lies far above those of the steps before.

    Attributes:
        window: how many accepted steps count.
        norm, loss: standard deviations above their mean beyond which a step is a spike; ``None``:
            not looked at.
        action: ``skip`` the step, or ``clip`` its norm to the bound.
    """

    window: int
    norm: float | None = None
    loss: float | None = None
    action: str = "skip"

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


Guard = GuardRule | GuardFn


def _guard(name: str, _annotation: str, value: Any) -> Any:
    if isinstance(value, GuardRule) or callable(value):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected a mapping such as {{'norm': 6.0, 'window': 128}}, a function (norm, "
            f"loss) -> bool tensor or None, got {value!r} ({type(value).__name__})"
        )
    keys = [field.name for field in fields(GuardRule)]
    for key in value:
        if key not in keys:
            raise ValueError(f"{name}: expected keys among {', '.join(keys)}, got {key!r}")
    if "window" not in value:
        raise ValueError(f"{name}: expected 'window', how many accepted steps count, got {value!r}")
    rule = GuardRule(**value)
    plain(f"{name}['window']", "int", rule.window)
    if rule.window < 2:
        raise ValueError(f"{name}: expected a window of at least 2 steps, got {rule.window}")
    sigmas = {key: sigma for key in ("norm", "loss") if (sigma := value.get(key)) is not None}
    for key, sigma in sigmas.items():
        plain(f"{name}[{key!r}]", "float", sigma)
    if not sigmas or not all(0 < sigma < float("inf") for sigma in sigmas.values()):
        raise ValueError(
            f"{name}: expected 'norm' or 'loss', standard deviations above 0, got {value!r}"
        )
    if rule.action not in ("skip", "clip") or (rule.action == "clip" and "loss" in sigmas):
        raise ValueError(
            f"{name}: expected the action skip, or beside 'norm' alone clip, got {rule.action!r}"
        )
    return rule


READERS: dict[str, Callable[[str, str, Any], Any]] = {
    "torch.dtype": _dtype, "GroupFn": _function, "CostFn": _function,
    "tuple[KeepRule, ...]": _several, "tuple[str, ...]": _several,
    "Averages": _averages, "Guard": _guard,
}  # fmt: skip


def nearest(key: str, names: list[str]) -> str:
    """The end of a message about an unknown key."""
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known options: {', '.join(names)}"


def parse_yaml(text: str, where: str) -> Any:
    """The value of YAML that stands in ``where``; ValueError if it is none."""
    import yaml  # not needed to import shardcast

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: expected YAML, got {text[:80]!r}; {error}") from error


def as_yaml(value: Any) -> Any:
    """A value as it would stand in YAML; callables and classes by qualified name."""
    if isinstance(value, torch.dtype):
        return next(name for name, dtype in DTYPES.items() if dtype == value)
    if isinstance(value, tuple) and any(isinstance(v, AverageOptions) for v in value):
        return {average.name: average.to_dict() for average in value}
    if isinstance(value, tuple):
        return [as_yaml(item) for item in value]
    if isinstance(value, GuardRule):
        return value.to_dict()
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return value
