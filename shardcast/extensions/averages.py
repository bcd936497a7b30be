"""``averages``: moving averages of weights, and blocks that put one into the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.extensions.low_moments import Bf16
from shardcast.memory.codecs import Codec
from shardcast.memory.shard import Shard, take_moved
from shardcast.messages import by_rank
from shardcast.optimizer.groups import activate_together
from shardcast.optimizer.model import saved_buffers
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import (
    FINITE,
    Option,
    ValidatedOptions,
    one_of,
    option,
    read_mapping,
    read_plain,
)
from shardcast.plan.layout import Fragment
from shardcast.step.step_hook import StepHook
from shardcast.step.update.epilogues import AVERAGE, Epilogue
from shardcast.step.update.state import Update

if TYPE_CHECKING:
    from shardcast.step.update.rules import Numbers


@dataclass(frozen=True)
class AverageOptions(ValidatedOptions):
    """One exponential moving average of the weights.

    In every step ``average += (1 - decay) * (weight - average)``.

    Attributes:
        name: name that the script chose.
        decay: in [0, 1).
        warmup: the decay is at most ``(1 + t) / (10 + t)`` in the average's step ``t = 1, 2, ...``
        stored: ``fp32``, or ``bf16`` with stochastic rounding.
    """

    name: str = option("", within=("a name of letters, digits and _", str.isidentifier))
    decay: float = option(None, within=("a number in [0, 1)", lambda decay: 0 <= decay < 1))
    warmup: bool = option(False)
    stored: str = option("fp32", within=one_of("fp32", "bf16"))


@dataclass(frozen=True)
class Average(Epilogue):
    """An exponential moving average of the masters."""

    options: AverageOptions

    @property
    def state(self) -> tuple[str, ...]:
        return (AVERAGE + self.options.name,)

    @property
    def codec(self) -> Codec:
        return Bf16() if self.options.stored == "bf16" else Codec()

    def numbers(self, step: Any) -> Numbers:
        decay: Any = self.options.decay
        # as in TensorFlow's ExponentialMovingAverage and diffusers' EMAModel
        if self.options.warmup:
            warm = (1 + step) / (10 + step)
            decay = warm.clamp(max=decay) if isinstance(warm, Tensor) else min(warm, decay)
        return (1 - decay,)

    def apply_(self, master: Tensor, state: tuple[Tensor, ...], numbers: Numbers) -> None:
        state[0].lerp_(master, numbers[0])


class Averages(StepHook):
    """The averages of one optimizer.

    Attributes:
        in_model: name of the average that is in the model, inside :meth:`averaged`.
        buffers: values of the model's buffers before that, by name.
    """

    name = "averages"
    in_model: str | None = None

    def __init__(self, optimizer: PackedOptimizer) -> None:
        if not optimizer.config.averages:
            raise ValueError(
                "averages: expected at least one average, got none; pass averages={'ema': "
                "0.999} to shard()"
            )
        self._optimizer = optimizer
        self.buffers: dict[str, Tensor] = {}

    def check(self, call: str, name: str) -> None:
        """Raise ValueError for an unknown name of an average."""
        names = [options.name for options in self._optimizer.config.averages]
        if name not in names:
            raise ValueError(
                f"{call}: expected the name of an average, {', '.join(map(repr, names))}, got "
                f"{name!r}; pass averages={{'ema': 0.999}} to shard() for one"
            )

    def nbytes(self) -> int:
        """Return the bytes of all averages."""
        return sum(update.averages_nbytes() for update in self._optimizer.updates)

    def state_dict(self) -> dict[str, object]:
        """Return the steps of each average, including averages without a trained parameter yet."""
        steps: dict[str, float] = {}
        for update in self._optimizer.updates:
            counts = update.epilogue_steps
            for name, place in _places(update).items():
                steps[name] = max(counts[place], steps.get(name, 0.0))
        return {"steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for update in self._optimizer.updates:
            counts = update.epilogue_steps
            for name, place in _places(update).items():
                counts[place] = max(counts[place], state["steps"].get(name, 0.0))
            update.epilogue_steps = counts

    def values(self, shard: Shard, number: int, name: str) -> Tensor:
        """Return one fragment of an average, 1-d fp32; it may be the memory itself."""
        return self._optimizer.update_of(shard).average(shard, number, name)

    @contextmanager
    def averaged(self, name: str) -> Iterator[None]:
        """Put an average into the model: ``with optimizer.averaged("ema"): evaluate(model)``.

        One sync publishes the average, cast like parameters; another one restores the weights bit
        for bit. Inside, :meth:`step`, and every call that loads or changes weights, raises. State
        dicts and checkpoints still hold the trained weights. It needs memory for this rank's span.

        Collective: every rank must enter and leave it.

        Args:
            name: an average of the option ``averages``.

        Raises:
            ValueError: on every rank, if there is no average of this name.
            RuntimeError: on every rank, if an average is already in the model.
        """
        optimizer = self._optimizer

        def ready() -> None:
            self.check("averaged", name)
            optimizer.refuse_inside("averaged")
            optimizer.ready_to_read()

        optimizer.together(ready, "averaged")
        buffers = {
            key: _compat.local_tensor(buffer)
            for key, buffer in saved_buffers(optimizer.stages).items()
        }
        with torch.no_grad():
            self.buffers = {key: buffer.clone() for key, buffer in buffers.items()}
            shards = [shard for shard in optimizer.shards if shard.grads is not None]
            for shard in shards:
                shard.lend()
                for own, cast in self._casts(shard, name):
                    own.copy_(cast)
            optimizer.sync()
            self._note(shards, name)
        try:
            yield
        finally:
            with torch.no_grad():
                for key, buffer in buffers.items():
                    # ``.data``, so that a graph that saved the buffer stays usable.
                    buffer.data.copy_(self.buffers.pop(key))
                optimizer.sync.wait()
                take_moved(optimizer.shards)
                if any(self._is_edited(shard, name) for shard in shards):
                    warn_first(
                        f"averaged({name!r}): weights that were written while the average was in "
                        "the model are lost, because the trained weights are restored"
                    )
                for shard in shards:
                    shard.take_back()
                # Not encoded, which sends codes of masters: values that a script wrote come back
                # unchanged.
                optimizer.sync(encodes=False)
                self._note(shards, None)

    def _note(self, shards: list[Shard], name: str | None) -> None:
        """Note which average is in the model, or that its own weights are back."""
        optimizer = self._optimizer
        # Makes autograd refuse a backward through a forward with other weights.
        torch.autograd.graph.increment_version(
            [param for shard in shards for param in shard.pack.in_model]
        )
        self.in_model, leave = name, f"leave `with optimizer.averaged({name!r}):` first"
        optimizer.block = f"the average {name!r} is in the model; {leave}" if name else ""

    def _is_edited(self, shard: Shard, name: str) -> bool:
        """Return whether a script changed the average in the model. Waits for the device."""
        casts = self._casts(shard, name)
        return any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in casts)

    def _casts(self, shard: Shard, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each parameter in the model, and that of the average, cast."""
        for number, fragment in enumerate(shard.fragments):
            own = shard.pack.own_data[shard.local(fragment.start, fragment.stop)]
            yield own, shard.rounded(fragment.slot, self.values(shard, number, name))

    def load_average(self, name: str, weights: Mapping[str, Tensor], steps: int = 0) -> None:
        """Continue an existing average.

        Collective: every rank, with equal arguments.

        Args:
            name: an average of the option ``averages``.
            weights: full tensors by parameter name, such as ``AveragedModel.module.state_dict()``.
                Names that are not trained parameters are ignored.
            steps: number of steps that it has averaged, for its warm-up.

        Raises:
            ValueError: on every rank: the name is unknown, ``steps`` is invalid, or a parameter is
                missing or has another shape. Nothing changes.
        """
        optimizer = self._optimizer
        by_key: dict[str, Tensor] = {}

        def weight(parameter: str) -> Any:
            value = by_key.get(_compat.state_key(parameter))
            return None if value is None else _compat.local_tensor(value).detach()

        def checked() -> float:
            self.check("load_average", name)
            by_key.update((_compat.state_key(key), value) for key, value in weights.items())
            if isinstance(steps, (str, bool)) or not 0 <= float(steps) < math.inf:
                raise ValueError(f"load_average: steps: expected a number >= 0, got {steps!r}")
            optimizer.refuse_inside("load_average")
            shapes = {slot.name: slot.shape for _, slot in optimizer.layout.slots()}
            for parameter, expected in shapes.items():
                value = weight(parameter)
                shape = None if value is None else tuple(value.shape)
                if shape != expected:
                    raise ValueError(
                        f"load_average: {parameter!r} has shape {shape}, expected {expected}; give "
                        "all parameters by the names of model.named_parameters or state_dict"
                    )
            return float(steps)

        optimizer.decider.meet("load_average")
        everyone = optimizer.process_groups.everyone
        taken = everyone.collect(checked, optimizer.device, "load_average")
        if len({*taken}) > 1:
            raise ValueError(
                "load_average: steps: expected one number on all ranks, got "
                + by_rank(enumerate(taken))
            )

        def parts(shard: Shard) -> Iterator[tuple[Fragment, Tensor]]:
            for fragment in shard.fragments:
                start, stop = fragment.param_range
                yield fragment, weight(fragment.slot.name).reshape(-1)[start:stop]

        # A frozen parameter needs no average of its own, unless another value is loaded for it.
        frozen = [shard for shard in optimizer.shards if shard.grads is None]
        moved = [any(_differs(shard, *part) for part in parts(shard)) for shard in frozen]
        if frozen:
            activate_together(optimizer, frozen, moved)
        for shard in optimizer.shards:
            for number, (_, values) in enumerate(parts(shard)):
                optimizer.update_of(shard).load_average(shard, number, name, values)
        # On all ranks, including those that own nothing of an optimizer.
        for update in optimizer.updates:
            counts = update.epilogue_steps
            counts[_places(update)[name]] = taken[0]
            update.epilogue_steps = counts


def _places(update: Update) -> dict[str, int]:
    """Return each average's position among the epilogues, by name."""
    epilogues = enumerate(update.epilogues)
    return {each.options.name: n for n, each in epilogues if isinstance(each, Average)}


def _differs(shard: Shard, fragment: Fragment, values: Tensor) -> bool:
    own = shard.exact(fragment)
    return not torch.equal(values.to(own), own)


def _read(name: str, value: object) -> tuple[AverageOptions, ...]:
    if isinstance(value, tuple) and all(isinstance(item, AverageOptions) for item in value):
        return value
    if not isinstance(value, Mapping) and value != []:  # to_dict() writes [] for no averages
        raise TypeError(
            f"{name}: expected a mapping from names to decays, such as {{'ema': 0.999}}, got "
            f"{value!r} ({type(value).__name__})"
        )
    return tuple(_average(f"{name}: {key!r}", key, options) for key, options in dict(value).items())


def _average(where: str, key: object, options: object) -> AverageOptions:
    """Read one average from a decay or a mapping."""
    values = dict(options) if isinstance(options, Mapping) else {"decay": options}
    if ("decay" in values) == ("half_life" in values):
        raise ValueError(f"{where}: expected decay or half_life (in steps), got {values!r}")
    if "half_life" in values:
        half_life = read_plain(f"{where}: half_life", "float", values.pop("half_life"))
        if not FINITE[1](half_life):
            raise ValueError(f"{where}: half_life: expected {FINITE[0]}, got {half_life!r}")
        values["decay"] = 0.5 ** (1 / half_life)
    return read_mapping(AverageOptions, {**values, "name": key}, where)


OPTION = Option(
    help="exponential moving averages of the fp32 masters: a mapping from names to decays, "
    "{ema: 0.9999}, or to settings, {ema: {half_life: 5000, warmup: true, stored: bf16}} "
    "(half_life in steps)",
    within=("names with decays", lambda _: True),
    read=_read,
    epilogues=lambda config: tuple(Average(options) for options in config.averages),
    hook=Averages,
)
