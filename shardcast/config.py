"""Every option of shardcast: its name, documentation and checks.

An option is taken from the first of these that sets it::

    keyword  >  SHARDCAST_<OPTION>  >  file named by SHARDCAST_CONFIG  >  default

In all of these places an unknown key is an error that names the nearest field. A
:class:`ShardcastConfig` knows which options were given and which are defaults.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from shardcast.launched import is_first_process
from shardcast.messages import warn
from shardcast.option_files import CONFIG_VARIABLE, ENV_PREFIX, read_config, read_environment
from shardcast.option_values import (
    ABOVE_0,
    COUNT,
    CostFn,
    GroupFn,
    KeepRule,
    Option,
    ValidatedOptions,
    as_yaml,
    check_names,
    extension,
    load_extension,
    one_of,
    option,
)


@dataclass(frozen=True)
class ShardcastConfig(ValidatedOptions):
    """Options of :func:`shardcast.shard`. Every field has a default that suits bf16 training.

    All ranks must use equal options; if they differ, all ranks raise.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or an unknown choice.
    """

    param_dtype: torch.dtype = option(torch.bfloat16, "storage dtype of the model parameters")
    keep_fp32: tuple[KeepRule, ...] = option(
        (),
        "modules kept in fp32: 'norms', glob patterns of parameter names, module classes or "
        "predicates (name, parameter) -> bool; a module keeps all of its own parameters in fp32, "
        "or none",
    )
    cast_forward_inputs: bool = option(
        True,
        "cast activations to param_dtype at the inputs of modules with low-precision weights; with "
        "autocast: false, also use autocast in modules that themselves hold a weight matrix",
    )
    autocast: bool = option(
        True,
        "compute as under torch.autocast: normalization layers, learned scales and outputs of "
        "embeddings stay fp32; false: compute in param_dtype throughout, which is faster",
    )
    convert_rest: bool = option(
        False,
        "also cast untrained parameters to param_dtype; false: they keep their dtype, and autocast "
        "casts them in each forward. With autocast: false they are always cast",
    )
    fp32_outputs: tuple[str, ...] = option(
        (),
        "modules that return fp32, such as the head ('lm_head', 'classifier') of a model that "
        "computes its own loss; glob patterns of module names, '' is the model itself",
    )
    cast_buffers: bool = option(
        False, "cast floating-point buffers to param_dtype, except in keep_fp32 modules"
    )
    broadcast_buffers: bool | tuple[str, ...] = extension(
        False, "buffers", default=True, needs=lambda stages: any([*m.buffers()] for m in stages)
    )
    grad_dtype: torch.dtype | None = option(
        None,
        "dtype in which gradients accumulate locally; null: the parameter's dtype, and fp32 from "
        "the ninth backward of a step on",
    )
    reduce_dtype: torch.dtype | None = option(
        None,
        "dtype in which gradients are sent, and in which reduce_scatter sums; null: their own. "
        "Other sums are in fp32",
    )
    partition: str = option(
        "auto",
        "how a pack is divided among ranks. even: equal spans, for elementwise optimizers; whole: "
        "one owner per parameter, for any optimizer; auto: even if the optimizer is elementwise",
        one_of("auto", "even", "whole"),
    )
    elementwise: bool | None = option(
        None,
        "whether the optimizer updates each element by itself; null: true for torch's elementwise "
        "classes, false for all others",
    )
    shard_ranks: str | int = option(
        "all",
        "shard masters and state over groups of this many neighboring ranks; each group holds a "
        "copy, which takes more memory, and the sync stays within the group",
        (
            "all or a number of ranks >= 1",
            lambda value: value == "all" if isinstance(value, str) else value >= 1,
        ),
    )
    pack_mb: float | None = option(
        None,
        "upper bound of a pack's size in MiB (a larger parameter has its own pack); null: packs of "
        "at least 16 MiB and at least 256 KiB per rank",
        ("a finite number of MiB above 0", lambda mb: 0 < mb * 2**20 < float("inf")),
    )
    pack_params: int | None = option(
        None, "upper bound of the number of parameters per pack", COUNT
    )
    unpacked_first: int = option(
        0,
        "number of leading parameters that stay out of shared packs",
        ("a count >= 0", lambda count: count >= 0),
    )
    alignment: int = option(
        128,
        "alignment of slots and spans, in bytes",
        ("a power of two >= 8 (bytes)", lambda size: size >= 8 and size & (size - 1) == 0),
    )
    group_fn: GroupFn | None = option(
        None, "function (name, parameter) -> key; parameters with different keys never share a pack"
    )
    cost_fn: CostFn | None = option(
        None,
        "function (name, parameter) -> cost of its update, which balances parameters with one "
        "owner; null: Newton-Schulz operations for Muon, number of elements for others",
    )
    max_grad_norm: float | None = option(
        None, "clip the global gradient norm to this value in every step; null: no clip", ABOVE_0
    )
    norm_type: float = option(
        2.0, "order of the norm used for clipping and grad_norm; inf: largest element", ABOVE_0
    )
    loss_scale: str | float | None = option(
        None,
        "loss scale: 'dynamic', or a fixed number; null: dynamic for fp16, none otherwise",
        (
            "'dynamic', a number above 0",
            lambda it: it == "dynamic" if isinstance(it, str) else it > 0,
        ),
    )
    loss_scale_init: float = option(2.0**16, "first value of the dynamic loss scale", ABOVE_0)
    loss_scale_growth_interval: int = option(
        2000, "steps without overflow after which the dynamic loss scale doubles", COUNT
    )
    max_skipped_steps: int = option(50, "raise after this many skipped steps in a row", COUNT)
    guard: Any | None = extension(None, "guard")
    on_error: Any = extension("raise", "on_error")
    accumulate: str = option(
        "local",
        "what no_sync() does. local: gradients accumulate on each rank, 2 bytes per parameter in "
        "bf16; sharded: every backward is reduced, and each rank keeps only its own part, in fp32 "
        "from the second backward on",
        one_of("local", "sharded"),
    )
    master: str = extension("fp32", "split_masters")
    moments: str = extension("fp32", "low_moments")
    replica_check: int = extension(0, "replica_check")
    offload: bool = extension(False, "offload")
    metrics: bool | int = extension(False, "metrics")
    averages: Any = extension((), "averages")
    published: Any = extension(None, "serving.published")
    changes: bool = extension(False, "serving.changes")
    reduce: str = option(
        "auto",
        "how gradients reach their owners; two_level: sum within each node first; auto: "
        "for equal spans, reduce_scatter on NCCL if gradients are sent in fp32, or two_level on "
        "several nodes with equally many ranks, at least three each; else all_to_all",
        one_of("auto", "all_to_all", "reduce_scatter", "two_level"),
    )
    sync: str = option(
        "auto",
        "how updated parameters reach all ranks; all_gather needs the even partition; auto: "
        "all_gather if all spans are equal, else broadcast; for CPU tensors on gloo, "
        "point-to-point messages instead, except for equal spans on several nodes with "
        "equally many ranks, at least two each",
        one_of("auto", "broadcast", "all_gather"),
    )
    overlap_sync: bool = extension(False, "overlap_sync")
    fuse: str = option(
        "auto",
        "how updates are fused. eager: cache-sized chunks, bitwise identical to torch.optim "
        "without fused=True; compile: one kernel; auto: compile on a GPU with Triton, torch's "
        "fused kernel on a CPU",
        one_of("auto", "eager", "compile"),
    )

    named: ClassVar[frozenset[str]] = frozenset()
    """Names of the options that were given explicitly; each object has its own set."""

    def __new__(cls, *args: object, **named: object) -> ShardcastConfig:
        self = super().__new__(cls)
        first = (each.name for each in fields(cls)[: len(args)])
        object.__setattr__(self, "named", frozenset((*first, *named)))
        return self

    def __post_init__(self) -> None:
        super().__post_init__()
        for asked in self.extensions().values():
            if asked.check is not None:
                asked.check(self)
        if self.sync == "all_gather" and self.partition == "whole":
            raise ValueError(
                "sync: all_gather needs equal spans, got partition 'whole'; use sync 'broadcast'"
            )

    @classmethod
    def load(
        cls,
        source: ConfigSource = None,
        **keywords: Any,
    ) -> ShardcastConfig:
        """Return the configuration of this process. Local.

        Args:
            source: path of a YAML file, name of a preset (:data:`.PRESETS`), or a mapping. ``None``
                reads the file that ``SHARDCAST_CONFIG`` names, if it is set. A
                :class:`ShardcastConfig` ignores the environment.
            keywords: options given in code; they take precedence over everything else.

        Raises:
            TypeError: ``source`` is something else.
            ValueError: a field is unknown (the error names the nearest one), a value is invalid, or
                something is not YAML (the error names the line of the file, or the variable).
            FileNotFoundError: the file does not exist.
        """
        if isinstance(source, ShardcastConfig):
            return source.replace(**keywords) if keywords else source
        named = os.environ.get(CONFIG_VARIABLE)
        if source is not None and named not in (None, "", str(source)) and is_first_process():
            warn(f"SHARDCAST_CONFIG={named} has no effect: the script sets its own config")
        values = (named or {}) if source is None else source
        if isinstance(values, (str, os.PathLike)):
            values = read_config(cls, values)
        if not isinstance(values, Mapping):
            raise TypeError(
                "config: expected a ShardcastConfig, a mapping, a path or None, got "
                f"{type(source).__name__}; pass options by keyword otherwise"
            )
        check_names(cls, values, "config")
        check_names(cls, keywords, "keyword")
        in_environment = {
            name: text
            for name, text in os.environ.items()
            if name.startswith(ENV_PREFIX) and name != CONFIG_VARIABLE
        }
        if in_environment:
            values = {**values, **read_environment(cls, in_environment)}
        return cls(**{**values, **keywords})

    def replace(self, **changes: Any) -> ShardcastConfig:
        """Return a copy with some fields changed. It is checked like a new one. Local."""
        check_names(type(self), changes, "keyword")
        copy = dataclasses.replace(self, **changes)
        object.__setattr__(copy, "named", self.named.union(changes))
        return copy

    @property
    def scales_loss(self) -> bool:
        """Whether the options ask for a loss scale."""
        if self.loss_scale is None:
            return self.param_dtype == torch.float16
        return self.loss_scale != 1

    def extensions(self, stages: Iterable[torch.nn.Module] = ()) -> dict[str, Option]:
        """Return the declarations of the requested :mod:`shardcast.extensions`, by name.

        Args:
            stages: stages of the model. Without them, extensions that depend on the model are left
                out.
        """
        asked = {}
        for each in fields(self):
            declared = each.metadata
            if "off" not in declared or getattr(self, each.name) == declared["off"]:
                continue
            if declared["needs"] is None or declared["needs"](stages):
                asked[each.name] = declared["option"]
        return asked

    def declared(self, name: str) -> Option:
        """Import and return the declaration of an option, or of the extension of that name."""
        for each in fields(self):
            if each.name == name:
                declared: Option = each.metadata["option"]
                return declared
        undeclared: Option = load_extension(name).OPTION
        return undeclared

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in YAML; callables and classes by qualified name. Local."""
        return {each.name: as_yaml(getattr(self, each.name)) for each in fields(self)}


ConfigSource = ShardcastConfig | Mapping[str, object] | str | os.PathLike[str] | None
"""Source of a configuration: an object, a mapping, a YAML file, or ``None`` (environment)."""
