"""Every option of shardcast, named, documented and checked in one place.

A :class:`ShardcastConfig` is frozen and comparable; it reads itself from keywords, a mapping, a
YAML file or ``SHARDCAST_*`` environment variables, in this order of precedence::

    keyword  >  SHARDCAST_<FIELD>  >  file named by SHARDCAST_CONFIG  >  default

A key that is not a field is an error that names the nearest field, in every one of these places.
Wherever it comes from, an object knows which options were named, and which are there by default.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import torch

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
ENV_PREFIX = "SHARDCAST_"
CONFIG_VARIABLE = "SHARDCAST_CONFIG"
read_files: list[str] = []  # the files that it named and that were read, for shardcast.launched

KeepRule = str | type[torch.nn.Module] | Callable[[str, torch.nn.Parameter], bool]
GroupFn = Callable[[str, torch.nn.Parameter], Hashable]
CostFn = Callable[[str, torch.nn.Parameter], float]


def _option(default: Any, help: str, *, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class ShardcastConfig:
    """Options of :func:`shardcast.shard`. Every field has a default that suits bf16 training.

    All ranks must use equal options; a difference is found when the layouts are compared.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or an unknown choice.
    """

    param_dtype: torch.dtype = _option(
        torch.bfloat16, "storage dtype of the model parameters: bf16, fp16 or fp32"
    )
    keep_fp32: tuple[KeepRule, ...] = _option(
        (),
        "modules kept in fp32: 'norms', glob patterns of parameter names, module classes or "
        "predicates (name, parameter) -> bool; a module keeps all of its own parameters, or none",
    )
    cast_forward_inputs: bool = _option(
        True, "cast floating-point inputs of the root module to param_dtype"
    )
    fp32_outputs: tuple[str, ...] = _option(
        (),
        "modules that return fp32, such as the head ('lm_head', 'classifier') from whose outputs "
        "the model computes its loss; glob patterns of module names, '' is the model itself",
    )
    cast_buffers: bool = _option(
        False, "cast floating-point buffers to param_dtype too (those of kept modules stay)"
    )
    broadcast_buffers: bool = _option(
        False, "make buffers equal to rank 0's after every step, as DDP does for batch norm"
    )
    grad_dtype: torch.dtype | None = _option(
        None, "dtype in which gradients accumulate locally; null: the parameter's"
    )
    reduce_dtype: torch.dtype | None = _option(
        None,
        "dtype of gradients on the wire; null: the gradient's. Sums are always in fp32",
    )
    partition: str = _option(
        "auto",
        "even: equal spans (elementwise optimizers); whole: one owner per parameter (any "
        "optimizer); auto: even where the optimizer is known to be elementwise",
        choices=("auto", "even", "whole"),
    )
    elementwise: bool | None = _option(
        None,
        "declare whether the optimizer's update is elementwise; null: known classes only",
    )
    pack_mb: float | None = _option(
        None,
        "upper bound of a pack's storage, in MiB (a single bigger parameter has a pack of its "
        "own); null: packs of at least 16 MiB, and 256 KiB for each rank",
    )
    pack_params: int | None = _option(None, "upper bound of the number of parameters per pack")
    unpacked_first: int = _option(0, "number of first parameters that stay out of shared packs")
    alignment: int = _option(128, "alignment of slots and spans, in bytes; a power of two >= 8")
    group_fn: GroupFn | None = _option(
        None,
        "(name, parameter) -> key; parameters with different keys never share a pack",
    )
    cost_fn: CostFn | None = _option(
        None,
        "(name, parameter) -> what its update costs, for the balance of parameters that have one "
        "owner; null: Newton-Schulz operations for Muon, elements for others",
    )
    max_grad_norm: float | None = _option(
        None,
        "clip the global gradient norm to this value in every step; null: no clipping",
    )
    norm_type: float = _option(2.0, "p of the p-norm used for clipping and grad_norm; inf: max")
    loss_scale: str | float | None = _option(
        None, "'dynamic', a fixed number, or null: dynamic for fp16, none otherwise"
    )
    loss_scale_init: float = _option(2.0**16, "first value of the dynamic loss scale")
    loss_scale_growth_interval: int = _option(
        2000, "steps without overflow after which the dynamic loss scale doubles"
    )
    max_skipped_steps: int = _option(
        50, "raise after this many steps in a row were skipped because of non-finite gradients"
    )
    grads: str = _option(
        "full",
        "full: every rank keeps storage for all gradients; sharded: every backward is reduced, "
        "also under no_sync(), and a rank keeps its own part (.grad then reads NaN)",
        choices=("full", "sharded"),
    )
    master: str = _option(
        "fp32",
        "how masters are kept: fp32, or split16: only the 16 bits that the published bf16 lacks, "
        "exact too",
        choices=("fp32", "split16"),
    )
    moments: str = _option(
        "fp32",
        "how Adam's moments and SGD's momentum are kept: fp32, bf16 (rounded stochastically) or "
        "int8 (with a scale per block)",
        choices=("fp32", "bf16", "int8"),
    )
    offload: bool = _option(
        False, "keep masters and moments in host memory; the update fetches windows of them"
    )
    reduce: str = _option(
        "auto",
        "how gradients reach their owner; two_level: summed within each node first; auto: what "
        "is fastest and rounds once",
        choices=("auto", "all_to_all", "reduce_scatter", "two_level"),
    )
    sync: str = _option(
        "auto",
        "how updated parameters reach everybody; all_gather needs the even partition; auto: what "
        "is fastest, as print(optimizer.layout) shows",
        choices=("auto", "broadcast", "all_gather"),
    )
    overlap_sync: bool = _option(
        False,
        "sync beside the next forward, where each module waits for its own parameters; call "
        "wait_sync() before you read parameters outside of a forward",
    )
    fuse: str = _option(
        "auto",
        "fused update: eager (cache-sized chunks with the bits of torch.optim), compile (one "
        "kernel), or auto: compile on a GPU with Triton, torch's fused kernel on CPU",
        choices=("auto", "eager", "compile"),
    )

    named: ClassVar[frozenset[str]] = frozenset()  # options that are no defaults; of each object

    def __new__(cls, *args: Any, **named: Any) -> ShardcastConfig:
        self = super().__new__(cls)
        first = (option.name for option in fields(cls)[: len(args)])
        object.__setattr__(self, "named", frozenset((*first, *named)))
        return self

    def __post_init__(self) -> None:
        for name in ("param_dtype", "grad_dtype", "reduce_dtype"):
            object.__setattr__(self, name, _as_dtype(name, getattr(self, name)))
        keep = self.keep_fp32
        if isinstance(keep, (str, type)) or callable(keep):
            keep = (keep,)
        if not isinstance(keep, Iterable):
            raise TypeError(
                "keep_fp32: expected patterns, module classes or predicates "
                f"(name, parameter) -> bool, got {keep!r} ({type(keep).__name__}); () keeps none"
            )
        object.__setattr__(self, "keep_fp32", tuple(keep))
        names = [self.fp32_outputs] if isinstance(self.fp32_outputs, str) else self.fp32_outputs
        if isinstance(names, list):
            object.__setattr__(self, "fp32_outputs", tuple(names))
        for option in fields(self):
            _check_type(option.name, str(option.type), getattr(self, option.name))
            choices = option.metadata["choices"]
            if choices and getattr(self, option.name) not in choices:
                raise ValueError(
                    f"{option.name}: expected one of {', '.join(choices)}, "
                    f"got {getattr(self, option.name)!r}"
                )
        self._check_ranges()

    def _check_ranges(self) -> None:
        def require(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

        require(self.param_dtype is not None, "param_dtype", "bf16, fp16 or fp32")
        bytes_fit = self.pack_mb is None or 0 < self.pack_mb * 2**20 < float("inf")
        require(bytes_fit, "pack_mb", "a number of MiB above 0, and not inf")
        require(self.pack_params is None or self.pack_params > 0, "pack_params", "null or >= 1")
        require(self.unpacked_first >= 0, "unpacked_first", "a count >= 0")
        power_of_two = self.alignment >= 8 and self.alignment & (self.alignment - 1) == 0
        require(power_of_two, "alignment", "a power of two >= 8 (bytes)")
        require(self.max_grad_norm is None or self.max_grad_norm > 0, "max_grad_norm",
                "null or a number above 0")  # fmt: skip
        require(self.norm_type > 0, "norm_type", "a number above 0, or inf")
        if isinstance(self.loss_scale, str):
            require(self.loss_scale == "dynamic", "loss_scale", "'dynamic', a number or null")
        elif self.loss_scale is not None:
            require(self.loss_scale > 0, "loss_scale", "'dynamic', a number above 0 or null")
        require(self.loss_scale_init > 0, "loss_scale_init", "a number above 0")
        growth = self.loss_scale_growth_interval
        require(growth > 0, "loss_scale_growth_interval", "a count >= 1")
        require(self.max_skipped_steps > 0, "max_skipped_steps", "a count >= 1")
        if self.master == "split16" and self.param_dtype != torch.bfloat16:
            raise ValueError(
                f"master: split16 needs param_dtype bf16, whose 16 bits are half of fp32, got "
                f"{self.param_dtype}; use master 'fp32'"
            )
        if self.sync == "all_gather" and self.partition == "whole":
            raise ValueError(
                "sync: all_gather needs equal spans, got partition 'whole'; use sync 'broadcast'"
            )

    @classmethod
    def load(
        cls,
        source: ShardcastConfig | str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> ShardcastConfig:
        """Resolve the configuration of this process.

        Args:
            source: path of a YAML file, or a mapping; ``None`` takes the file that the variable
                ``SHARDCAST_CONFIG`` names, if any. A config is taken without the environment.
            keywords: fields given in code; they win over everything else.

        Raises:
            TypeError: ``source`` is something else.
            ValueError: an unknown field, naming the nearest known one, an invalid value, or
                something that is not YAML, naming the file or the variable.
            FileNotFoundError: the file does not exist.
        """
        if isinstance(source, ShardcastConfig):
            return source.replace(**keywords) if keywords else source
        named = os.environ.get(CONFIG_VARIABLE)
        if source is None and named:
            source = named
            read_files.append(named)
        values: dict[str, Any] = {}
        if isinstance(source, Mapping):
            values.update(_with_numbers(_known(source, "config")))
        elif source is not None:
            if not isinstance(source, (str, os.PathLike)):
                raise TypeError(
                    "config: expected a ShardcastConfig, a mapping, a path or None, got "
                    f"{type(source).__name__}; pass options by keyword otherwise"
                )
            values.update(_with_numbers(_known(_read_yaml(Path(source)), str(source))))
        values.update(_with_numbers(_from_environment(os.environ)))
        values.update(_known(keywords, "keyword"))
        return cls(**values)

    def replace(self, **changes: Any) -> ShardcastConfig:
        """A copy with some fields changed, checked as a new one is."""
        copy = dataclasses.replace(self, **_known(changes, "keyword"))
        object.__setattr__(copy, "named", self.named.union(changes))
        return copy

    def following(self, option: str, value: str, dtype: torch.dtype) -> ShardcastConfig:
        """The configuration beside a framework whose own ``option`` asks for ``dtype``.

        A ``param_dtype`` that was not named is ``dtype``. One that was named wins over fp32, which
        is the default of every framework, and must equal any other.

        Raises:
            ValueError: they contradict each other.
        """
        if "param_dtype" not in self.named:
            return self.replace(param_dtype=dtype)
        if dtype not in (torch.float32, self.param_dtype):
            raise ValueError(
                f"{option} is {value!r} but the shardcast configuration has param_dtype "
                f"{self.to_dict()['param_dtype']!r}; give one of them, or equal ones"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they would stand in YAML; callables and classes by qualified name."""
        names = {dtype: name for name, dtype in reversed(DTYPES.items())}

        def plain(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return names[value]
            if isinstance(value, tuple):
                return [plain(item) for item in value]
            if callable(value):
                named = value if hasattr(value, "__qualname__") else type(value)
                return f"{named.__module__}.{named.__qualname__}"
            return value

        return {option.name: plain(getattr(self, option.name)) for option in fields(self)}


def check_bound(name: str, value: Any) -> float:
    """A bound of norms or values, as a float; inf bounds nothing.

    A negative one would turn gradients around, and NaN would reach the weights.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not above 0.
    """
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(
            f"{name}: expected a number above 0, got {value!r} ({type(value).__name__})"
        )
    bound = float(number)
    if not bound > 0:
        raise ValueError(
            f"{name}: expected a number above 0, got {value!r}; use inf, or do not clip, for no "
            "bound"
        )
    return bound


def _known(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    names = [option.name for option in fields(ShardcastConfig)]
    for key in values:
        if key not in names:
            raise ValueError(f"{where}: unknown option {key!r}{_nearest(str(key), names)}")
    return values


def _nearest(key: str, names: list[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known options: {', '.join(names)}"


def _read_yaml(path: Path) -> Mapping[str, Any]:
    content = _parse(path.read_text(), str(path)) or {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: expected a mapping of options, got {type(content).__name__}")
    return content


def _parse(text: str, where: str) -> Any:
    import yaml  # comes with accelerate; not needed to import shardcast

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: expected YAML, got {text[:80]!r}; {error}") from error


def _with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, with text that YAML did not take for a number, ``inf`` or ``1e3``, as one."""
    types = {option.name: str(option.type) for option in fields(ShardcastConfig)}
    found = dict(values)
    for name, value in found.items():
        if isinstance(value, str) and "float" in types[name]:
            with suppress(ValueError):  # such as 'dynamic', or what the check will refuse
                found[name] = float(value)
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = [option.name for option in fields(ShardcastConfig)]
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        key = variable[len(ENV_PREFIX) :].lower()
        if key not in names:
            known = [ENV_PREFIX + name.upper() for name in names]
            raise ValueError(f"environment: unknown variable {variable}{_nearest(variable, known)}")
        # As YAML a pattern that begins with * would be an alias.
        values[key] = text if text.startswith("*") else _parse(text, variable)
    return values


def _as_dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        if value is None or value in DTYPES.values():
            return value
    elif isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    raise ValueError(f"{name}: expected bf16, fp16 or fp32, got {value!r}")


def _check_type(name: str, annotation: str, value: Any) -> None:
    """Check plain types; YAML reads ``yes`` as a boolean."""
    if value is None and "None" in annotation:
        return
    expected: tuple[type, ...]
    if annotation.startswith("bool"):
        expected = (bool,)
    elif annotation.startswith("int"):
        expected = (int,)
    elif annotation.startswith("float"):
        expected = (int, float)
    elif annotation.startswith("str | float"):
        expected = (str, int, float)
    elif annotation.startswith("str"):
        expected = (str,)
    else:
        _check_callables(name, value)
        return
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        raise TypeError(f"{name}: expected {annotation}, got {value!r} ({type(value).__name__})")


def _check_callables(name: str, value: Any) -> None:
    if name in ("group_fn", "cost_fn") and not callable(value):
        result = "key" if name == "group_fn" else "number"
        raise TypeError(f"{name}: expected a callable (name, parameter) -> {result}, got {value!r}")
    if name == "fp32_outputs" and not (
        isinstance(value, tuple) and all(isinstance(pattern, str) for pattern in value)
    ):
        raise TypeError(
            f"fp32_outputs: expected glob patterns of module names, got {value!r}; () names none"
        )
    if name == "keep_fp32":
        for rule in value:
            if not isinstance(rule, str) and not callable(rule):
                raise TypeError(
                    "keep_fp32: expected patterns, module classes or predicates "
                    f"(name, parameter) -> bool, got {rule!r} ({type(rule).__name__})"
                )
