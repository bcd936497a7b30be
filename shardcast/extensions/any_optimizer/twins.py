"""Twins of an optimizer: its class, attributes and group options over tiny host parameters.

Stepping a twin shows how the class updates, without any effect that the script can see.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardcast._compat import bare_step

if TYPE_CHECKING:
    from shardcast.plan.originals import ParamGroup

# Attributes that a twin does not copy: torch's own, and a step that wraps the class's step.
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
OWN = ("state", "param_groups", "step", *HOOKS)
# Replace an lr that a schedule may have set to 0, and a decay too weak to measure.
RATES = {"lr": 0.1, "weight_decay": 0.5}
GROUPS = 6  # largest number of groups with different options to try


def bare_twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with equal class and attributes, without groups, state and hooks."""
    twin = object.__new__(type(optimizer))  # copy.copy keeps only three attributes
    # Schedulers mark methods that they wrap, and ``shard`` marks methods that it disables.
    twin.__dict__.update(
        (name, value)
        for name, value in vars(optimizer).items()
        if name not in OWN and not hasattr(value, "_wrapped_by_lr_sched")
    )
    for hooks in HOOKS:
        setattr(twin, hooks, OrderedDict())
    twin.state, twin.param_groups = defaultdict(dict), []
    return twin


@dataclass(frozen=True)
class TwinParam:
    """A parameter of a twin: its initial value, and its gradient in each step."""

    value: Tensor
    grads: tuple[Tensor, ...]

    @classmethod
    def drawn(
        cls, shape: tuple[int, ...], scales: Sequence[float], generator: torch.Generator
    ) -> TwinParam:
        """Return a random one; ``scales`` scale its gradients."""

        def draw() -> Tensor:
            return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

        # half of each gradient is common, because some classes then grow their step size
        direction = draw()
        return cls(draw(), tuple(scale * (direction + draw()) for scale in scales))


Samples = list[list[TwinParam]]  # samples of each group


class Twins:
    """Twins of one optimizer, with one group for each kind of its groups.

    Args:
        changes: options to try instead of the optimizer's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, **changes: Any) -> None:
        self._optimizer, self._changes = optimizer, changes
        self._groups: list[ParamGroup] = []
        dims_of_kinds: dict[tuple[object, ...], set[int]] = {}
        for group in optimizer.param_groups:
            kind = tuple((name, _kind(name, value)) for name, value in group.items())
            dims = {param.dim() for param in group["params"]}
            if dims and kind not in dims_of_kinds and len(dims_of_kinds) < GROUPS:
                dims_of_kinds[kind] = set()
                self._groups.append(group)
            dims_of_kinds.get(kind, set()).update(dims)
        self._dims = [sorted(dims) for dims in dims_of_kinds.values()]

    def samples(
        self, lengths: tuple[int, int, int, int], scales: Sequence[Sequence[float]]
    ) -> Samples:
        """Return a parameter for each of ``scales``, every group and number of dimensions.

        Args:
            lengths: lengths of the first two dimensions, of each further one, and of vectors.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        rows, columns, more, vector = lengths

        def shape(dim: int) -> tuple[int, ...]:
            return (rows, columns, *[more] * (dim - 2)) if dim > 1 else (vector,) * dim

        return [
            [TwinParam.drawn(shape(dim), each, generator) for dim in dims for each in scales]
            for dims in self._dims
        ]

    def stepped(self, samples: Samples) -> torch.optim.Optimizer:
        """Return a twin over ``samples`` after one step with each of their gradients."""
        params = (param for group in self._optimizer.param_groups for param in group["params"])
        # Attributes may hold the model's parameters, which a step must not change.
        stand_ins: dict[int, object] = {id(param): nn.Parameter(torch.empty(0)) for param in params}
        twin = bare_twin(self._optimizer)
        twin.__dict__.update(copy.deepcopy(vars(twin), stand_ins))
        twin.defaults.update(self._changes)
        for group, of_group in zip(self._groups, samples, strict=True):
            own = [nn.Parameter(sample.value.clone()) for sample in of_group]
            twin.param_groups.append({**_options(group), **self._changes, "params": own})
        switch(twin, "train")
        step = bare_step(twin)
        for number in range(len(samples[0][0].grads)):
            for group, of_group in zip(twin.param_groups, samples, strict=True):
                for param, sample in zip(group["params"], of_group, strict=True):
                    param.grad = sample.grads[number].clone()
            with torch.enable_grad():  # some classes compute with autograd
                step()
        switch(twin, "eval")
        return twin


def switch(optimizer: torch.optim.Optimizer, mode: str) -> bool:
    """Call ``train`` or ``eval`` of a schedule-free class; return whether it has it."""
    method = getattr(optimizer, mode, None)
    if not callable(method):
        return False
    method()
    return True


def _kind(name: str, value: object) -> object:
    """Return a key, equal for options with which a class very likely updates alike."""
    if name == "lr" or isinstance(value, (list, tuple, dict)):  # learning rates, names, parameters
        return type(value)
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, float)):
        return value == 0  # for example a decay
    return type(value)


def _options(group: ParamGroup) -> dict[str, object]:
    """Return the options of a group for its twin."""
    options = {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    for name, rate in RATES.items():
        option = options.get(name)
        if option is not None and (option or name == "lr"):
            options[name] = torch.full_like(option, rate) if isinstance(option, Tensor) else rate
    if "capturable" in options:  # needs an accelerator
        options["capturable"] = False
    return options


@contextmanager
def unnoticed() -> Iterator[Callable[[], bool]]:
    """Step twins without side effects: eagerly, on the host, restoring random generators.

    Yields a function that tells whether a generator of the host was used.
    """
    numpy = sys.modules.get("numpy")

    def states() -> list[Any]:
        numpys = numpy.random.get_state(legacy=False) if numpy else None
        return [random.getstate(), numpys, torch.get_rng_state().tolist()]

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    host = torch.get_default_device().type == "cpu"
    with (
        torch.random.fork_rng(devices),
        nullcontext() if host else torch.device("cpu"),
        torch.compiler.set_stance("force_eager"),
    ):
        before = states()
        try:
            yield lambda: repr(states()) != repr(before)
        finally:
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])
