"""Declarations, readers and checks of options, and the options that are mappings themselves."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:  # what options give to the floors above
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
Range = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is that
ANY: Range = ("", lambda _: True)
ABOVE_0: Range = ("a number above 0", lambda value: value > 0)  # so no NaN
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


# Options that were removed, with the end of the error for each.
GONE = {
    "grads": "every rank keeps its own part of the gradients now; for reductions in no_sync(), as "
    "with grads: sharded before, write accumulate: sharded",
    "reproducible": "it was removed in 0.2.0; leave it out, and compare runs by optimizer.digest()",
}

# Names that other libraries have for an option, or for what it does.
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
    """A field of a :class:`ValidatedOptions` dataclass."""
    return field(default=default, metadata={"help": help, "range": within})


# Methods and properties of the optimizer that extensions have, by the option or module, which is
# imported, and its hook made, with a first call. A hook that needs its option refuses by an
# AttributeError.
CALLS = {
    "attempt": "on_error",
    "failures": "on_error",
    "published": "published",
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
    """The declaration of a module of :mod:`shardcast.extensions`, its ``OPTION``.

    Attributes:
        help: one sentence for docs/options.md and the command line.
        within: what is expected, and whether a value is that.
        read: ``read(name, given)`` gives the value of what the script gave, or raises; by default
            what the type of the field in :class:`.ShardcastConfig` says.
        epilogues: ``epilogues(config)`` gives what is fused behind the rule of an update, see
            :class:`.Epilogue`.
        hook: ``hook(optimizer)`` makes a :class:`.StepHook`.
        signal: ``signal(config, process_groups, device)`` makes a :class:`.Signal`.
        codec: ``codec(config, name)`` gives the :class:`.Codec` of masters, or of the state tensor
            that ``torch.optim`` calls ``name``.
        check: ``check(config)`` raises ValueError for other options that it does not go with.
        fits: ``fits(plan, parallel_dims)`` raises ValueError for ranks, or parameters of a
            :class:`.Plan`, that it does not go with.
        fused: whether it needs an update by a rule of :mod:`.rules`, not by a class itself.
        publishing: ``publishing(config)`` gives :class:`.Publishing`, how masters become what is
            published; that of the first option that has one serves all.
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
    fused: bool = False
    publishing: Callable[[ShardcastConfig], Publishing] | None = None


def load_extension(name: str) -> Any:
    """A module of :mod:`shardcast.extensions`, or of a folder that its ``name`` begins with.

    It is imported where something asks for it.
    """
    return import_module(f"shardcast.{name}" if "." in name else f"shardcast.extensions.{name}")


class Declared(Mapping[str, Any]):
    """The metadata of a field whose option an extension declares; asking for it imports that."""

    KEYS = ("off", "needs", "option", "help", "range")

    def __init__(self, module: str, off: object, needs: Needs | None) -> None:
        self._module, self._known = module, {"off": off, "needs": needs}

    def __getitem__(self, key: str) -> Any:
        if key in self._known:
            return self._known[key]
        option: Option = load_extension(self._module).OPTION
        return {"option": option, "help": option.help, "range": option.within}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.KEYS)

    def __len__(self) -> int:
        return len(self.KEYS)

    def __contains__(self, key: object) -> bool:
        return key in self.KEYS


def extension(off: object, module: str, default: object = None, needs: Needs | None = None) -> Any:
    """A field of :class:`.ShardcastConfig` that ``shardcast.extensions.<module>`` declares.

    Args:
        off: the value that asks for nothing, for which the module is not imported.
        default: another one than that.
        needs: whether the stages of a model have anything for it.
    """
    metadata = Declared(module, off, needs)
    return field(default=off if default is None else default, metadata=metadata)


@dataclass(frozen=True)
class ValidatedOptions:
    """Base of frozen dataclasses whose fields are options.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or an unknown choice.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, read_option(each, getattr(self, each.name)))


def read_option(declared: Field[Any], given: Any) -> Any:
    """The value of a field of a :class:`ValidatedOptions` class, from what was given.

    Raises:
        TypeError, ValueError: as of that class.
    """
    name, annotation, value = declared.name, str(declared.type), given
    kind = annotation.removesuffix(" | None")
    of_extension = "off" in declared.metadata
    if (value is None and kind != annotation) or (of_extension and value is declared.default):
        return value
    if of_extension and declared.metadata["option"].read is not None:
        value = declared.metadata["option"].read(name, value)
    elif kind in PLAIN:
        value = read_plain(name, annotation, value)
    elif kind in READERS:
        value = READERS[kind](name, value)
    expected, holds = declared.metadata["range"]
    if not holds(value):
        more = " or null" * (kind != annotation)
        raise ValueError(f"{name}: expected {expected}{more}, got {value!r}")
    return value


def read_plain(name: str, annotation: str, value: Any) -> Any:
    kinds = PLAIN[annotation.removesuffix(" | None")]
    if isinstance(value, str) and float in kinds:  # YAML takes inf and 1e3 for text
        with suppress(ValueError):  # such as 'dynamic', or what is refused below
            value = float(value)
    # YAML reads `yes` as a boolean, which is an int in Python.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name}: expected {annotation}, got {value!r} ({type(value).__name__})")
    return value


def _dtype(name: str, value: object) -> torch.dtype:
    named = value
    if isinstance(value, str):  # also the name that torch has for it
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
            raise TypeError(f"{name}: expected {expected}, got {got}; () names none")
    return items


def read_patterns(name: str, value: object) -> bool | tuple[str, ...]:
    """Read glob patterns, or a bool."""
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


def read_mapping(kind: type[Options], values: Mapping[str, Any], where: str) -> Options:
    """Options of a ``kind`` from a mapping, which stands in ``where``; errors begin with it."""
    check_names(kind, values, where)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_names(kind: type[ValidatedOptions], values: Iterable[str], where: str) -> None:
    """Raise ValueError for a key that is no option of ``kind``.

    Args:
        where: they stand.
    """
    names = [each.name for each in fields(kind)]
    for key in values:
        if key not in names:
            raise ValueError(f"{where}: {unknown(key, names)}")


def unknown(key: object, names: list[str]) -> str:
    """A message about a key that is no option."""
    gone = GONE.get(str(key))
    end = nearest(str(key), names) if gone is None else f"; {gone}"
    return f"unknown option {key!r}{end}"


def nearest(key: str, names: list[str]) -> str:
    """The end of a message about an unknown key."""
    close = [name for name in (ELSEWHERE.get(key),) if name in names]
    close = close or difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known options: {', '.join(names)}"


def as_yaml(value: Any) -> Any:
    """A value as it would stand in YAML; callables and classes by qualified name."""
    if isinstance(value, torch.dtype):
        return next(name for name, dtype in DTYPES.items() if dtype == value)
    if isinstance(value, ValidatedOptions):
        options = {each.name: getattr(value, each.name) for each in fields(value)}
        return {key: as_yaml(item) for key, item in options.items() if item is not None}
    if isinstance(value, tuple) and any(isinstance(item, ValidatedOptions) for item in value):
        return {item.name: _without_name(as_yaml(item)) for item in value}
    if isinstance(value, tuple):
        return [as_yaml(item) for item in value]
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return value


def _without_name(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "name"}
