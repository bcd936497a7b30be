"""The option: which parameters have which form, and which cannot have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from shardcast.config import ShardcastConfig
from shardcast.extensions.published_forms.cast import FormCast
from shardcast.extensions.published_forms.forms import FORMS
from shardcast.option_values import Option, ValidatedOptions, one_of, option, read_mapping
from shardcast.plan.casts import Casts, Wire
from shardcast.plan.layout import PackLayout
from shardcast.step.step_hook import StepHook

WHY = "published"  # begins errors


@dataclass(frozen=True)
class PublishedForms(ValidatedOptions):
    """Patterns of names of parameters by the form that they have.

    Attributes:
        mxfp8, mxfp4, fp8_block128, mxfp8_rceil, mxfp4_rceil: glob patterns of names of parameters,
            or of modules for the matrices that these hold themselves.
        wire: what owners send, ``codes`` with their scales, or ``bf16`` values.
    """

    mxfp8: tuple[str, ...] = option(())
    mxfp4: tuple[str, ...] = option(())
    fp8_block128: tuple[str, ...] = option(())
    mxfp8_rceil: tuple[str, ...] = option(())
    mxfp4_rceil: tuple[str, ...] = option(())
    wire: str = option("codes", within=one_of("codes", "bf16"))

    def patterns(self) -> Mapping[str, tuple[str, ...]]:
        """Return the patterns by the name of their form, those that were given."""
        return {name: patterns for name in FORMS if (patterns := getattr(self, name))}


class FormCasts(Casts):
    """The forms of one configuration."""

    def __init__(self, config: ShardcastConfig) -> None:
        self._config = config
        self._patterns = config.published.patterns()

    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> FormCast | None:
        names = [form for form, patterns in self._patterns.items() if _matches(patterns, name)]
        if not names:
            return None
        if len(names) > 1:
            raise ValueError(f"{WHY}: {name!r} matches patterns of {' and '.join(names)}; give one")
        form = FORMS[names[0]]
        if len(shape) not in (2, 3):  # a stack of matrices is one of experts
            if not any(fnmatchcase(name, pattern) for pattern in self._patterns[names[0]]):
                return None  # a vector of a module whose name matches
            raise ValueError(
                f"{WHY}: {name!r} has the shape {shape}, expected a matrix, or a stack of them, "
                f"for {form.name}; let patterns end with .weight"
            )
        if dtype != torch.bfloat16:
            raise ValueError(
                f"{WHY}: {name!r} is kept in {dtype}, expected bf16 for {form.name}; leave it out "
                "of keep_fp32, or of the patterns"
            )
        *_, rows, columns = shape
        if rows % form.block_rows or columns % form.block_columns or not rows or not columns:
            raise ValueError(
                f"{WHY}: {name!r} has {rows} x {columns} elements on a rank, expected multiples of "
                f"{form.block_rows} x {form.block_columns} for {form.name}; choose other "
                "dimensions, or leave it out of the patterns"
            )
        return self.named(form.name)

    def named(self, name: str) -> FormCast:
        return FormCast(FORMS[name], self._config)

    def wire(self, layout: PackLayout) -> Wire | None:
        from shardcast.extensions.published_forms.wire import FormWire

        if self._config.published.wire == "bf16":
            return None
        return FormWire(FORMS[layout.cast], layout, self._config)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        params = [*names]
        return [
            f"{WHY}: the pattern {pattern!r} of {form} matches no parameter of the optimizer; "
            "patterns are matched against names as in model.named_parameters()"
            for form, patterns in self._patterns.items()
            for pattern in patterns
            if not any(_matches((pattern,), name) for name in params)
        ]


def _matches(patterns: Iterable[str], name: str) -> bool:
    module = name.rpartition(".")[0]
    return any(fnmatchcase(name, each) or fnmatchcase(module, each) for each in patterns)


def _read(name: str, value: Any) -> PublishedForms:
    if isinstance(value, PublishedForms):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected a mapping from forms to patterns, such as "
            f"{{'mxfp8': ['*.mlp.*.weight']}}, got {value!r} ({type(value).__name__})"
        )
    return read_mapping(PublishedForms, value, name)


def _check(config: ShardcastConfig) -> None:
    if config.master != "fp32":
        raise ValueError(
            f"{WHY}: expected master 'fp32' beside it, got {config.master!r}: values of blocks are "
            "cast behind the update, which does not see them"
        )
    if config.param_dtype != torch.bfloat16:
        raise ValueError(
            f"{WHY}: expected param_dtype bf16, which has every value of a form, got "
            f"{config.param_dtype}"
        )


def _reader(optimizer: Any) -> StepHook:
    from shardcast.extensions.published_forms.reading import PublishedReader

    return PublishedReader(optimizer)


OPTION = Option(
    help="forms of parameters that lie on the grid of quantized values, a mapping from mxfp8, "
    "mxfp4, fp8_block128, mxfp8_rceil or mxfp4_rceil to patterns of names: "
    "{mxfp8: ['*.mlp.*.weight']}; the rest is bf16; "
    "wire: bf16 sends values in place of codes and scales",
    within=("forms with patterns of names", lambda _: True),
    read=_read,
    casts=FormCasts,
    hook=_reader,
    check=_check,
)
