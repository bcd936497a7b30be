"""``published``: parameters that lie on the grid of a quantized form, decided once by their owner.

The owner of a block rounds its new fp32 masters in every step, and nobody else has to: forward,
recomputation, every micro-batch and whoever reads the weights see the same bf16 numbers, which are
codes times powers of two (:mod:`.forms`). The gradient at them goes to the master.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option, ValidatedOptions, one_of, option, read_mapping
from shardcast.serving.forms import FORMS, Form
from shardcast.serving.shards import Serving
from shardcast.step.step_hook import StepHook

SCALE = "_scale_inv"  # behind the name of a parameter, as transformers and vLLM read it
BLOCK = (128, 128)


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
            f"published: expected master 'fp32' beside it, got {config.master!r}: values of "
            "blocks are cast behind the update, which does not see them"
        )
    if config.param_dtype != torch.bfloat16:
        raise ValueError(
            f"published: expected param_dtype bf16, which has every value of a form, got "
            f"{config.param_dtype}"
        )


class Published(NamedTuple):
    """The published form of one parameter.

    Attributes:
        codes: float8_e4m3fn, or of ``mxfp4`` uint8 with two codes in a byte.
        scales: float8_e8m0fnu, one for each block: powers of two.
        form: its name.
        shape: of the parameter; of a DTensor that of what lies here.
    """

    codes: Tensor
    scales: Tensor
    form: str
    shape: tuple[int, ...]

    def dequantize(self) -> Tensor:
        """The bf16 values."""
        return FORMS[self.form].dequantize(self.codes, self.scales.view(torch.uint8))


class PublishedReader(StepHook):
    """Reads codes and scales of the parameters of one optimizer."""

    name = "published"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        if optimizer.config.published is None:
            raise AttributeError(
                "published: no parameter has a form; published={'mxfp8': [...]} of shard() gives it"
            )
        self._optimizer = optimizer

    def published(self, name: str) -> Published:
        """Read what is published of a parameter that has a form, as codes and scales. Local.

        Any rank may call it: it reads the parameter that the model has here, whose values are codes
        times powers of two. What a script has written since the last step is rounded.

        Args:
            name: of the parameter, as in ``model.named_parameters()``.

        Returns:
            ``.codes``, ``.scales`` (powers of two, float8_e8m0fnu), ``.form``, ``.shape``, and
            ``.dequantize()``, which gives the bf16 values.

        Raises:
            ValueError: it has no form.
            AttributeError: the option ``published`` was not given.
        """
        self._optimizer.need_masters("published")
        self._optimizer.sync.wait()
        formed = []
        for shard in self._optimizer.shards:
            layout = shard.pack.layout
            for slot in layout.slots if layout.cast else ():
                if slot.name == name:
                    values = shard.pack.data[slot.offset : slot.end].view(slot.shape)
                    codes, scales = FORMS[layout.cast].quantize(values)
                    scales = scales.view(torch.float8_e8m0fnu)
                    return Published(codes, scales, layout.cast, slot.shape)
                formed.append(slot.name)
        raise ValueError(
            f"published: expected the name of a parameter that has a form, got {name!r}; such are "
            f"{', '.join(map(repr, formed))}"
        )


def as_exported(form: Form, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales in the dtypes that files have them in."""
    if form.name == "fp8_block128":
        scales = scales.view(torch.float8_e8m0fnu).float()  # exact
    return codes if form.bits == 8 else codes.view(torch.int8), scales


class Exported:
    """Tensors of a folder that others read, from exact ones.

    Args:
        options: what the option was, as :meth:`.ShardcastConfig.to_dict` has it.
        trained: names of the parameters that the optimizer had.

    Raises:
        ValueError: there are no published forms.
    """

    def __init__(self, options: Any, trained: Iterable[str]) -> None:
        if not options:
            raise ValueError(
                "weights: expected the name of an average, got 'published', and the checkpoint is "
                "of a training without published forms"
            )
        self._serving, self._trained = Serving(ShardcastConfig(published=options)), {*trained}
        self._bare: set[str] = set()  # modules whose matrices have no form

    def __call__(self, key: str, name: str, values: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors in place of one, by their keys.

        Args:
            key: of ``model.state_dict()``.
            name: of the parameter.
        """
        shape = tuple(values.shape)
        cast = ""
        if name in self._trained:
            cast, _ = self._serving.cast(name, shape, torch.bfloat16)
        if not cast:
            if values.dim() > 1:
                self._bare.add(key.rpartition(".")[0])
            return {key: values}
        codes, scales = as_exported(FORMS[cast], *FORMS[cast].quantize(values))
        return {key: codes, key + SCALE: scales}

    def config(self) -> dict[str, Any]:
        """Return what ``config.json`` of the model needs, for transformers; after all tensors."""
        return {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": BLOCK,
                "modules_to_not_convert": sorted(self._bare),
            }
        }


OPTION = Option(
    help="forms of parameters that lie on the grid of quantized values, a mapping from mxfp8, "
    "mxfp4, fp8_block128, mxfp8_rceil or mxfp4_rceil to patterns of names: "
    "{mxfp8: ['*.mlp.*.weight']}; the rest is bf16; "
    "wire: bf16 sends values in place of codes and scales",
    within=("forms with patterns of names", lambda _: True),
    read=_read,
    publishing=Serving,
    hook=PublishedReader,
    check=_check,
)
