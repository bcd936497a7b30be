"""Does the update of a parameter depend on all parameters? Measured by steps of a twin.

A twin has the class, attributes and group options of the optimizer, and tiny parameters on the host
instead of the model's. If the update stays the same without every second parameter,
:func:`shardcast.shard` gives each parameter one owner. Otherwise no partition can be right. Some
classes are refused by name: those with an optimizer inside, with collectives in the step, or with
state that checkpoints would lose.

torch's classes are known and not measured. If a twin cannot run here (it needs a closure or an
accelerator, or draws random numbers), the class is assumed to treat each parameter by itself; its
first steps are watched, see :mod:`.update`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardcast._compat import observer
from shardcast.extensions.any_optimizer.muon import update_cost
from shardcast.extensions.any_optimizer.twins import Samples, TwinParam, Twins, unnoticed
from shardcast.plan.originals import ELEMENTWISE, OptimizerTraits, ParamGroup, is_known

# Scales of two parameters' gradients, step by step. A norm over both is about the norm of the
# larger one, which exceeds any bound in one step and not in another. RAdam starts in its sixth
# step.
SCALES = ((1.0, 1e-3, 1.0, 30.0) * 2, (1e4, 1.0, 1e-4, 1.0) * 2)
# Rows, columns and other lengths of parameters, and of vectors. Some classes quantize state of
# large ones. Shampoo makes a square matrix of each vector, so vectors beside matrices are short.
SMALL, LARGE = (6, 4, 3, 24), (160, 128, 1, 128)
LARGE_VECTORS = (*LARGE[:3], 160 * 128)
# Tolerance for the update of a parameter alone, and for bf16 products that may be batched.
ALONE, PRODUCTS = 1e-6, 0.05
ROUNDED = 4 * torch.finfo(torch.float32).eps  # of a parameter, because the order of sums may differ
ATTRIBUTES = 10_000  # objects, and bytes, that a twin may copy
REACH = 4  # depth to which attributes of attributes are searched


class _RefusedError(TypeError):
    """The class cannot be sharded, as a twin showed."""


def traits_of(optimizer: torch.optim.Optimizer) -> OptimizerTraits:
    """Return the traits of ``optimizer``, measured on twins; it stays unchanged.

    torch's classes are not measured. Local; equal on ranks with equal optimizers.

    Raises:
        TypeError: its class cannot be sharded over any number of ranks; the error has a remedy.
    """
    if is_known(optimizer):
        is_muon = isinstance(optimizer, torch.optim.Muon)
        return OptimizerTraits(elementwise=False, cost=update_cost if is_muon else None)
    _refuse_holder(optimizer)
    _refuse_common_state(optimizer)
    if not _can_be_copied(optimizer):
        return OptimizerTraits(elementwise=False)
    try:
        with unnoticed() as draws:
            entangled = _measured(optimizer)
            is_random = draws()
    except observer.CollectiveError as error:
        raise collective_refusal(optimizer) from error
    except _RefusedError:
        raise
    except Exception as error:  # the class cannot run on tiny host tensors
        # the class used a process group, and there is none yet
        if observer.raised_in_distributed(error):
            raise collective_refusal(optimizer) from error
        _refuse_list(optimizer, error)
        return OptimizerTraits(elementwise=False)
    if is_random:
        return OptimizerTraits(elementwise=False, hazard=_hazard(optimizer))
    return OptimizerTraits(elementwise=False, entangled=entangled)


def _hazard(optimizer: torch.optim.Optimizer) -> str:
    """Return the warning about a class that draws random numbers."""
    return (
        f"optimizer: {type(optimizer).__name__} draws random numbers, and each rank draws them "
        "for the parameters that it updates: with equal seeds, parameters of different ranks get "
        "equal numbers. Seed the ranks differently, torch.manual_seed(seed + rank), and draw what "
        "all ranks need alike, such as a shuffle, from a torch.Generator of its own"
    )


# -- refused without a step ---------------------------------------------------------------------


def _refuse_holder(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer with another one inside, which would not get masters."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    for path, value in _attributes(optimizer):
        if not isinstance(value, torch.optim.Optimizer) or value is optimizer:
            continue
        shared = any(param in params for group in value.param_groups for param in group["params"])
        if shared or path.count(".") == 1:
            outer, inner = type(optimizer).__name__, type(value).__name__
            raise TypeError(
                f"optimizer: {outer} holds another optimizer, {inner}, which would update the "
                f"model's parameters and not their masters; shard that one, "
                f"shardcast.shard(model, {path}), and leave {outer} out or build it around the "
                "result"
            )


def _refuse_common_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise for state that belongs to no parameter, because no rank would save it."""
    # otherwise it is a sharded optimizer
    for key in optimizer.state if isinstance(optimizer.state, dict) else ():
        if not isinstance(key, Tensor):
            raise _RefusedError(
                f"optimizer: {type(optimizer).__name__} cannot be sharded: its state {key!r} "
                "belongs to no parameter, so checkpoints would lose it; use an implementation "
                "that keeps it in the state of each parameter, or in the groups"
            )


def _refuse_list(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """Raise TypeError for a class that has a list of parameters, and whose twin fails."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    for path, value in _attributes(optimizer):
        if isinstance(value, Tensor) and value in params:
            name = type(optimizer).__name__
            raise TypeError(
                f"optimizer: {name} cannot be sharded: it keeps parameters outside of its groups "
                f"({path}), so it would update the model's parameters and not their masters; let "
                "its step use param_groups, or use another class"
            ) from error


def _attributes(root: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
    """Yield each object in attributes and containers, nearest first, with its path."""
    seen = {id(root)}
    level: list[tuple[str, object]] = [("optimizer", root)]
    for _ in range(REACH):
        below: list[tuple[str, object]] = []
        for path, value in level:
            for name, part in _parts(value):
                if id(part) not in seen and len(seen) < ATTRIBUTES:
                    seen.add(id(part))
                    below.append((f"{path}.{name}", part))
        yield from below
        level = below


def _parts(value: object) -> list[tuple[str, object]]:
    if isinstance(value, (Tensor, nn.Module, type, torch.Generator)) or callable(value):
        return []
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in list(value.items())]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(number), part) for number, part in enumerate(value)]
    parts = getattr(value, "__dict__", {})
    return [(name, part) for name, part in parts.items() if name not in ("state", "param_groups")]


def _can_be_copied(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether copies of its attributes are small, and separate from the script's objects."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    size = 0
    for _, value in _attributes(optimizer):
        if isinstance(value, (nn.Module, torch.Generator)):  # a generator makes the class random
            return False
        if not isinstance(value, Tensor) or value not in params:
            size += 1 + getattr(value, "nbytes", 0)  # of a tensor or NumPy array
    return size < ATTRIBUTES


# -- measured -----------------------------------------------------------------------------------


def _measured(optimizer: torch.optim.Optimizer) -> str:
    """Return why ranks cannot share the parameters; empty if they can."""
    twins = Twins(optimizer)
    samples = twins.samples(SMALL, SCALES)
    with observer.StepObserver() as small:
        together = twins.stepped(samples)
    _refuse_common_state(together)
    _refuse_subclasses(together)
    params = [param.detach() for group in together.param_groups for param in group["params"]]
    begun = [sample.value for of_group in samples for sample in of_group]
    if all(map(torch.equal, params, begun)):
        raise RuntimeError("no parameter of the groups has changed")
    if not all(bool(param.isfinite().all()) for param in params):
        return ""
    tolerance = PRODUCTS if small.multiplies else ALONE
    dependence = _dependence(twins, samples, together, tolerance)
    if not dependence:
        large = LARGE if any(param.dim() > 1 for param in params) else LARGE_VECTORS
        _refuse_subclasses(twins.stepped(twins.samples(large, [(1.0, 30.0)])))
    return _entangled(optimizer, dependence, tolerance) if dependence else _stacked(together)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the update of an element needs only that element.

    This is known for torch's classes. For others a twin tells: updates must keep their bits when
    every second element of a parameter changes. A class that draws random numbers, or cannot run
    here, is not elementwise. Local; the optimizer stays unchanged.
    """
    if is_known(optimizer):
        return type(optimizer) in ELEMENTWISE
    try:
        with unnoticed() as draws:
            twins = Twins(optimizer)
            samples = twins.samples(SMALL, SCALES)
            others = [[_with_others(sample) for sample in of_group] for of_group in samples]
            one, other = twins.stepped(samples), twins.stepped(others)
            is_random = draws()
    except Exception:  # for example, the class needs a closure
        return False
    pairs = [
        (param.detach().reshape(-1)[::2], same.detach().reshape(-1)[::2])
        for group, again in zip(one.param_groups, other.param_groups, strict=True)
        for param, same in zip(group["params"], again["params"], strict=True)
    ]
    return not is_random and all(torch.equal(a, b) for a, b in pairs)


def _with_others(sample: TwinParam) -> TwinParam:
    """Return a parameter with other values in every second element."""

    def changed(values: Tensor) -> Tensor:
        other = values.clone()
        other.view(-1)[1::2].mul_(-3.0).add_(1.0)
        return other

    return TwinParam(changed(sample.value), tuple(map(changed, sample.grads)))


def _dependence(
    twins: Twins,
    samples: Samples,
    together: torch.optim.Optimizer,
    tolerance: float,
) -> str:
    """Return what differs without every second parameter; empty if nothing differs."""
    for turn in (0, 1):
        alone = twins.stepped([of_group[turn::2] for of_group in samples])
        triples = zip(together.param_groups, alone.param_groups, samples, strict=True)
        for group, lonely, of_group in triples:
            for name, value in numbers(group).items():
                if not math.isclose(value, numbers(lonely).get(name, value), rel_tol=1e-3):
                    return f"{name!r}, which it keeps in its groups,"
            pairs = zip(group["params"][turn::2], lonely["params"], of_group[turn::2], strict=True)
            for param, same, sample in pairs:
                update = float((param.detach() - sample.value).abs().max())
                rounded = min(ROUNDED * float(sample.value.abs().max()), PRODUCTS * update)
                difference = float((param.detach() - same.detach()).abs().max())
                # `not <=`, because the difference may be NaN
                if not difference <= max(tolerance * update, rounded):
                    return "its update of a parameter"
    return ""


def _stacked(twin: torch.optim.Optimizer) -> str:
    """Return why state of several parameters under one of them cannot be sharded; empty if none is.

    Parameters of one shape then have different state.
    """
    for group in twin.param_groups:
        known: dict[torch.Size, set[tuple[str, torch.Size]]] = {}
        for param in group["params"]:
            state = twin.state.get(param, {}).items()
            own = {(n, v.shape) for n, v in state if isinstance(v, Tensor) and v.dim()}
            if differing := own ^ known.setdefault(param.shape, own):
                name, names = type(twin).__name__, ", ".join(sorted({n for n, _ in differing}))
                return (
                    f"optimizer: {name} cannot be sharded: it keeps state of several parameters "
                    f"({names}) under one of them, so another number of ranks could not load it; "
                    f"use {_instead_of(name, 'a class that keeps the state of each parameter')}"
                )
    return ""


def _instead_of(name: str, other: str) -> str:
    return "torch.optim.Muon" if "muon" in name.lower() else other


def numbers(group: ParamGroup) -> dict[str, float]:
    """Return numbers that a class computes and keeps in a group; integers are counts."""
    return {
        name: float(value)
        for name, value in group.items()
        if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _entangled(optimizer: torch.optim.Optimizer, dependence: str, tolerance: float) -> str:
    name = type(optimizer).__name__
    clips = {
        option: value
        for option, value in {**optimizer.defaults, **optimizer.param_groups[0]}.items()
        if ("norm" in option or "clip" in option) and isinstance(value, (int, float)) and value
    }
    remedy = "use it with DDP, or use another optimizer"
    for option, bound in clips.items():
        offs = (o for o in (None, 0.0, False) if _is_separable(optimizer, {option: o}, tolerance))
        off = next(offs, ...)
        if off is not ...:
            remedy = f"build it with {option}={off} and pass max_grad_norm={bound} to shard()"
            break
    return (
        f"optimizer: {name} cannot be sharded: {dependence} depends on all parameters, and each "
        f"rank has only some of them; {remedy}"
    )


def _is_separable(
    optimizer: torch.optim.Optimizer, changes: Mapping[str, Any], tolerance: float
) -> bool:
    twins = Twins(optimizer, **changes)
    samples = twins.samples(SMALL, SCALES)
    try:
        return not _dependence(twins, samples, twins.stepped(samples), tolerance)
    except Exception:  # the option has no such value
        return False


def _refuse_subclasses(twin: torch.optim.Optimizer) -> None:
    """Raise for state in a tensor subclass, which cannot be cast or copied in general."""
    for param in (param for group in twin.param_groups for param in group["params"]):
        for name, value in twin.state[param].items():
            if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                raise _RefusedError(
                    f"optimizer: {type(twin).__name__} cannot be sharded: its state {name!r} is of "
                    f"type {type(value).__name__}, a subclass of Tensor, which checkpoints cannot "
                    "hold; use torch.optim.AdamW, with moments='int8' for state of one byte each"
                )


def collective_refusal(optimizer: torch.optim.Optimizer) -> TypeError:
    """Return the error for a class that calls collectives in its step."""
    name = type(optimizer).__name__
    remedy = _instead_of(name, "a class for one process")
    return TypeError(
        f"optimizer: {name} cannot be sharded: its step calls collectives, as if every rank had "
        f"all parameters; use {remedy}, whose parameters shardcast distributes"
    )
