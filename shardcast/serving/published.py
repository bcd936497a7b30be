"""``published``: parameters whose values lie on the grid of a quantized form.

The owner of a block rounds its new fp32 masters once per step. Every forward, recomputation and
reader then sees the same bf16 numbers, which are codes times powers of two (:mod:`.forms`). The
gradient at these values goes to the master.
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
from shardcast.serving.forms import FORMS
from shardcast.serving.shards import Serving
from shardcast.step.step_hook import StepHook

SCALE = "_scale_inv"  # suffix of a parameter's name, as transformers and vLLM read it
BLOCK = (128, 128)


@dataclass(frozen=True)
class PublishedForms(ValidatedOptions):
    """Patterns of parameter names, by form.

    Attributes:
        mxfp8, mxfp4, fp8_block128, mxfp8_rceil, mxfp4_rceil: glob patterns of parameter names, or
            of module names for the matrices that these modules hold directly.
        wire: what owners send: ``codes`` with scales, or ``bf16`` values.
    """

    mxfp8: tuple[str, ...] = option(())
    mxfp4: tuple[str, ...] = option(())
    fp8_block128: tuple[str, ...] = option(())
    mxfp8_rceil: tuple[str, ...] = option(())
    mxfp4_rceil: tuple[str, ...] = option(())
    wire: str = option("codes", within=one_of("codes", "bf16"))

    def patterns(self) -> Mapping[str, tuple[str, ...]]:
        """Return the given patterns by the name of their form."""
        return {name: patterns for name in FORMS if (patterns := getattr(self, name))}


def _read(name: str, value: object) -> PublishedForms:
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
            f"published: expected master 'fp32', got {config.master!r}, which keeps half of each "
            "master in its published bf16 value; leave one of the two options out"
        )
    if config.param_dtype != torch.bfloat16:
        raise ValueError(
            f"published: expected param_dtype bf16, which has every value of a form, got "
            f"{config.param_dtype}"
        )


class Published(NamedTuple):
    """The published form of one parameter.

    Attributes:
        codes: float8_e4m3fn; for ``mxfp4`` uint8 with two codes per byte.
        scales: float8_e8m0fnu, one power of two per block.
        form: name of the form.
        shape: shape of the parameter; for a DTensor, of its local tensor.
    """

    codes: Tensor
    scales: Tensor
    form: str
    shape: tuple[int, ...]

    def dequantize(self) -> Tensor:
        """Return the bf16 values."""
        return FORMS[self.form].dequantize(self.codes, self.scales.view(torch.uint8))


class PublishedReader(StepHook):
    """Codes and scales of the parameters of one optimizer."""

    name = "published"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        if optimizer.config.published is None:
            raise AttributeError(
                "published: no parameter has a form; pass published={'mxfp8': [...]} to shard()"
            )
        self._optimizer = optimizer

    def published(self, name: str) -> Published:
        """Return codes and scales of a parameter with a published form. Local.

        It reads the parameter in this rank's model. Values that a script has written since the last
        step are rounded.

        Args:
            name: name of the parameter in ``model.named_parameters()``.

        Returns:
            An object with ``.codes``, ``.scales`` (powers of two, float8_e8m0fnu), ``.form``,
            ``.shape`` and ``.dequantize()``, which returns bf16 values.

        Raises:
            ValueError: the parameter has no form.
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
            f"published: expected the name of a parameter that has a form, got {name!r}; these "
            f"have one: {', '.join(map(repr, formed))}"
        )


class Exported:
    """Converts exact tensors to the codes and scales of an exported folder.

    Args:
        options: value of the option, from :meth:`.ShardcastConfig.to_dict`.
        trained: names of the optimizer's parameters.

    Raises:
        ValueError: there are no published forms.
    """

    def __init__(self, options: Any, trained: Iterable[str]) -> None:
        if not options:
            raise ValueError(
                "weights: expected the name of an average, got 'published', and the checkpoint is "
                "of a run without published forms"
            )
        self._serving, self._trained = Serving(ShardcastConfig(published=options)), {*trained}
        self._bare: set[str] = set()  # modules whose matrices have no form

    def __call__(self, key: str, name: str, values: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors that replace one, by key.

        Args:
            key: key in ``model.state_dict()``.
            name: name of the parameter.
        """
        shape = tuple(values.shape)
        cast = ""
        if name in self._trained:
            cast, _ = self._serving.cast(name, shape, torch.bfloat16)
        if not cast:
            if values.dim() > 1:
                self._bare.add(key.rpartition(".")[0])
            return {key: values}
        codes, scales = FORMS[cast].quantize(values)
        if cast == "fp8_block128":
            scales = scales.view(torch.float8_e8m0fnu).float()  # exact
        codes = codes if FORMS[cast].bits == 8 else codes.view(torch.int8)
        return {key: codes, key + SCALE: scales}

    def config(self) -> dict[str, Any]:
        """Return the entries for the model's ``config.json``; call it after all tensors."""
        return {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": BLOCK,
                "modules_to_not_convert": sorted(self._bare),
            }
        }


OPTION = Option(
    help="train parameters in a quantized form: a mapping from mxfp8, mxfp4, fp8_block128, "
    "mxfp8_rceil or mxfp4_rceil to patterns of names, {mxfp8: ['*.mlp.*.weight']}; the rest is "
    "bf16; add wire: bf16 to send values instead of codes and scales",
    within=("forms with patterns of names", lambda _: True),
    read=_read,
    publishing=Serving,
    hook=PublishedReader,
    check=_check,
)
