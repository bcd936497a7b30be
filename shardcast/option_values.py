"""Declarations, readers and checks of options, including options that are mappings."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:  # types that options provide to higher tiers
    from shardcast.comm.process_groups import ProcessGroups
    from shardcast.config import ShardcastConfig
    from shardcast.memory.codecs import Codec
    from shardcast.optimizer.packed import PackedOptimizer
    from shardcast.optimizer.setup import Plan
    from shardcast.plan.parallel_dims import ParallelDims
    from shardcast.plan.publishing import Publishing
    from shardcast.step.decide.signal import Signal
    from shardcast.step.step_hook import StepHook
    from shardcast.step.update.epilogues import Epilogue

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

KeepRule = str | type[torch.nn.Module] | Callable[[str, torch.nn.Parameter], bool]
GroupFn = Callable[[str, torch.nn.Parameter], Hashable]
CostFn = Callable[[str, torch.nn.Parameter], float]
Needs = Callable[[Iterable[torch.nn.Module]], bool]
Range = tuple[str, Callable[[Any], bool]]  # expected value in words, and its check
ANY: Range = ("", lambda _: True)
ABOVE_0: Range = ("a number above 0", lambda value: value > 0)  # excludes NaN
FINITE: Range = ("a number above 0, not inf", lambda value: 0 < value < float("inf"))
COUNT: Range = ("a count >= 1", lambda value: value >= 1)
PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "str | float": (str, int, float),
    "bool | int": (bool, int),
    "str | int": (str, int),
}


# Removed options, with the end of the error message for each.
GONE = {
    "grads": "each rank now always keeps only its own part of the gradients; to reduce inside "
    "no_sync(), as grads: sharded did, set accumulate: sharded",
    "reproducible": "it was removed in 0.2.0; leave it out, and compare runs by optimizer.digest()",
}

# Names that other libraries use for an option or its effect.
ELSEWHERE = {
    "dtype": "param_dtype",
    "mixed_precision": "param_dtype",
    "gradient_clipping": "max_grad_norm",
    "stage": "accumulate",
    "cpu_offload": "offload",
    "ema": "averages",
}


def one_of(*choices: str) -> Range:
    return f"one of {', '.join(choices)}", choices.__contains__


def option(default: object, help: str = "", within: Range = ANY) -> Any:
    """Return a field of a :class:`ValidatedOptions` dataclass."""
    return field(default=default, metadata={"help": help, "range": within})


# Methods and properties of the optimizer that extensions provide, with their option or module. The
# first call imports the module and makes its hook. A hook that needs its option raises
# AttributeError without it.
CALLS = {
    "attempt": "on_error",
    "failures": "on_error",
    "published": "published",
    "check_copies": "replica_check",
    "digest": "digest",
    "changes": "changes",
    "sleep": "serving.sleep",
    "wake": "serving.sleep",
    "asleep": "serving.sleep",
    "averaged": "averages",
    "load_average": "averages",
    "metrics": "metrics",
    "guarded_steps": "guard",
}


class Option(NamedTuple):
    """Declaration of a module of :mod:`shardcast.extensions`, its ``OPTION``.

    Attributes:
        help: one sentence for docs/options.md and the command line.
        within: the expected value in words, and a function that checks it.
        read: ``read(name, given)`` converts the given value, or raises. By default the type of the
            field in :class:`.ShardcastConfig` decides.
        epilogues: ``epilogues(config)`` returns code that is fused behind the update's rule, see
            :class:`.Epilogue`.
        hook: ``hook(optimizer)`` makes a :class:`.StepHook`.
        signal: ``signal(config, process_groups, device)`` makes a :class:`.Signal`.
        codec: ``codec(config, name)`` returns the :class:`.Codec` of masters, or of the state
            tensor that ``torch.optim`` calls ``name``. Such an option needs an update by a rule of
            :mod:`.rules`, not by an optimizer class.
        check: ``check(config)`` raises ValueError if another option is incompatible.
        fits: ``fits(plan, parallel_dims)`` raises ValueError if the ranks, or parameters of the
            :class:`.Plan`, are incompatible.
        publishing: ``publishing(config)`` returns :class:`.Publishing`, how masters become
            published values. The first option that has one decides for all.
    """

    help: str
    within: Range = ANY
    read: Callable[[str, Any], object] | None = None
    epilogues: Callable[[ShardcastConfig], tuple[Epilogue, ...]] | None = None
    hook: Callable[[PackedOptimizer], StepHook] | None = None
    signal: Callable[[ShardcastConfig, ProcessGroups, torch.device], Signal] | None = None
    codec: Callable[[ShardcastConfig, str], Codec] | None = None
    check: Callable[[ShardcastConfig], None] | None = None
    fits: Callable[[Plan, ParallelDims], None] | None = None
    publishing: Callable[[ShardcastConfig], Publishing] | None = None


def load_extension(name: str) -> Any:
    """Import and return a module of :mod:`shardcast.extensions`.

    A ``name`` such as ``serving.sleep`` is that of a module in another folder.
    """
    return import_module(f"shardcast.{name}" if "." in name else f"shardcast.extensions.{name}")


class Declared(dict[str, Any]):
    """Metadata of a field that an extension declares; what it lacks is read from the extension."""

    def __init__(self, module: str, **known: object) -> None:
        super().__init__(known)
        self._module = module

    def __missing__(self, key: str) -> Any:
        option: Option = load_extension(self._module).OPTION
        return {"option": option, "help": option.help, "range": option.within}[key]


def extension(off: object, module: str, default: object = None, needs: Needs | None = None) -> Any:
    """Return a field of :class:`.ShardcastConfig` that ``shardcast.extensions.<module>`` declares.

    Args:
        off: value that turns the option off; the module is then not imported.
        default: default value, if not ``off``.
        needs: whether the option applies to these stages of a model.
    """
    metadata = Declared(module, off=off, needs=needs)
    return field(default=off if default is None else default, metadata=metadata)


@dataclass(frozen=True)
class ValidatedOptions:
    """Base of frozen dataclasses whose fields are options.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or an unknown choice.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, read_option(each, getattr(self, each.name)))


def read_option(declared: Field[Any], given: Any) -> Any:
    """Convert a given value to the value of a field of a :class:`ValidatedOptions` class.

    Raises:
        TypeError, ValueError: as in that class.
    """
    name, annotation, value = declared.name, str(declared.type), given
    kind = annotation.removesuffix(" | None")
    of_extension = "off" in declared.metadata
    if (value is None and kind != annotation) or (of_extension and value is declared.default):
        return value
    expected, holds = declared.metadata["range"]
    if value is None and declared.default is None:  # without `| None` above, so it has no default
        raise TypeError(f"{name}: expected {expected}, got none; this option has no default")
    if of_extension and declared.metadata["option"].read is not None:
        value = declared.metadata["option"].read(name, value)
    elif kind in PLAIN:
        value = read_plain(name, annotation, value)
    elif kind in READERS:
        value = READERS[kind](name, value)
    if not holds(value):
        more = " or null" * (kind != annotation)
        raise ValueError(f"{name}: expected {expected}{more}, got {value!r}")
    return value


def read_plain(name: str, annotation: str, value: object) -> Any:
    kinds = PLAIN[annotation.removesuffix(" | None")]
    if isinstance(value, str) and float in kinds:  # YAML reads inf and 1e3 as text
        with suppress(ValueError):  # 'dynamic', or text that is refused below
            value = float(value)
    # YAML reads `yes` as a boolean, which is an int in Python.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name}: expected {annotation}, got {value!r} ({type(value).__name__})")
    return value


def _dtype(name: str, value: object) -> torch.dtype:
    named = value
    if isinstance(value, str):  # torch's own name is accepted, too
        named = DTYPES.get(value, getattr(torch, value, None))
    for dtype in DTYPES.values():
        if dtype == named:
            return dtype
    raise ValueError(f"{name}: expected bf16, fp16 or fp32, got {value!r}")


def _function(result: str, name: str, value: object) -> Callable[..., object]:
    if not callable(value):
        raise TypeError(f"{name}: expected a callable (name, parameter) -> {result}, got {value!r}")
    return value


def _several(
    expected: str, is_one: Callable[[object], bool], name: str, value: Any
) -> tuple[Any, ...]:
    single = isinstance(value, str) or callable(value) or not isinstance(value, Iterable)
    items = (value,) if single else tuple(value)
    for item in items:
        if not is_one(item):
            got = f"{item!r} ({type(item).__name__})"
            raise TypeError(f"{name}: expected {expected}, got {got}; pass () for none")
    return items


def read_patterns(name: str, value: object) -> bool | tuple[str, ...]:
    """Read glob patterns or a bool."""
    if isinstance(value, bool):
        return value
    return _several("true, false or glob patterns", lambda it: isinstance(it, str), name, value)


READERS: dict[str, Callable[[str, object], object]] = {
    "torch.dtype": _dtype,
    "GroupFn": partial(_function, "key"),
    "CostFn": partial(_function, "number"),
    "tuple[KeepRule, ...]": partial(
        _several,
        "patterns, module classes or predicates (name, parameter) -> bool",
        lambda item: isinstance(item, str) or callable(item),
    ),
    "tuple[str, ...]": partial(
        _several, "glob patterns of module names", lambda item: isinstance(item, str)
    ),
}

Options = TypeVar("Options", bound=ValidatedOptions)


def read_mapping(kind: type[Options], values: Mapping[str, object], where: str) -> Options:
    """Read options of a ``kind`` from a mapping; errors begin with ``where``."""
    check_names(kind, values, where)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_names(kind: type[ValidatedOptions], values: Iterable[str], where: str) -> None:
    """Raise ValueError for a key that is not an option of ``kind``.

    Args:
        where: place of the keys, for the error.
    """
    names = [each.name for each in fields(kind)]
    for key in values:
        if key not in names:
            raise ValueError(f"{where}: {unknown(key, names)}")


def unknown(key: object, names: list[str]) -> str:
    """Return an error message about a key that is not an option."""
    gone = GONE.get(str(key))
    end = nearest(str(key), names) if gone is None else f"; {gone}"
    return f"unknown option {key!r}{end}"


def nearest(key: str, names: list[str]) -> str:
    """Return the end of an error message about an unknown key."""
    close = [name for name in (ELSEWHERE.get(key),) if name in names]
    close = close or difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known options: {', '.join(names)}"


def as_yaml(value: object) -> Any:
    """Return a value as YAML would show it; callables and classes by qualified name."""
    if isinstance(value, torch.dtype):
        return next(name for name, dtype in DTYPES.items() if dtype == value)
    if isinstance(value, ValidatedOptions):
        options = {each.name: getattr(value, each.name) for each in fields(value)}
        return {key: as_yaml(item) for key, item in options.items() if item is not None}
    if isinstance(value, tuple) and any(isinstance(item, ValidatedOptions) for item in value):
        by_name = {item.name: as_yaml(item) for item in value}
        for options in by_name.values():
            del options["name"]
        return by_name
    if isinstance(value, tuple):
        return [as_yaml(item) for item in value]
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return value
