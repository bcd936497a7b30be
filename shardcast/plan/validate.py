"""Checks that raise for models that cannot be sharded, and facts that ranks compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast._compat import dtensor
from shardcast.plan.layout import GroupId
from shardcast.plan.originals import OptimizerList, ParamGroup
from shardcast.plan.precision import PACKABLE

ON_DEVICE = "a tensor on the device"  # stands for a value that the host cannot read without waiting
OURS = ("max_grad_norm", "row_splits")  # group options that torch's classes do not have


def check_kinds(named: Mapping[str, nn.Parameter]) -> None:
    """Raise TypeError for a parameter that is not fp32, bf16 or fp16."""
    for name, param in named.items():
        if param.dtype not in PACKABLE:
            kind, remedy = str(param.dtype).removeprefix("torch."), ""
            if param.is_complex():
                kind, remedy = "complex", "train a real view of it (torch.view_as_real), or "
            elif param.is_floating_point():
                remedy = "call model.float() before shard(), or "
            raise TypeError(
                f"optimizer: parameter {name!r} is {kind}; expected float32, bfloat16 or float16; "
                f"{remedy}leave it out of this optimizer's groups"
            )


def check_memory(
    named: Mapping[str, nn.Parameter], outside: Iterable[tuple[str, Tensor]] = ()
) -> None:
    """Raise ValueError for a tensor without memory, or parameters that share memory.

    Sparse parameters have no memory of their own; their indices and values do.

    Args:
        named: parameters that are packed.
        outside: tensors that are not.
    """
    for name, tensor in (*named.items(), *outside):
        if tensor.is_meta:
            raise ValueError(
                f"model: {name!r} is on the meta device and was never materialized; call "
                "model.to_empty(device=...) and initialize it first, or let materialize= give "
                "every parameter and buffer its storage, frozen ones too"
            )
    owners: dict[int, str] = {}
    for name, param in named.items():
        if param.layout is not torch.strided:
            raise ValueError(
                f"model: parameter {name!r} is {str(param.layout).removeprefix('torch.')}; "
                "expected a dense one; leave it out of this optimizer's groups"
            )
        pointer = _compat.local_tensor(param).data_ptr()
        owner = owners.setdefault(pointer, name)
        # Packs would give each its own memory. Empty ones have none, and devices may share
        # addresses.
        if pointer and owner != name and named[owner].device == param.device:
            raise ValueError(
                f"model: parameters {owner!r} and {name!r} are two objects on the same memory, "
                "which packing would untie; tie the Parameter itself, as in b.weight = a.weight "
                "rather than b.weight.data = a.weight.data, before the optimizer is built"
            )


def check_whole(name: str, param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for a part of a parameter if the optimizer is not elementwise."""
    cut = [dim for dim, p in dtensor.placements(param).items() if not p.is_replicate()]
    if cut:
        raise TypeError(
            f"optimizer: parameter {name!r} is sharded over mesh dimension {cut[0]!r}, and "
            f"{type(optimizer).__name__} needs whole parameters; give it to an elementwise "
            "optimizer, such as AdamW, or leave its module out of the parallel plan"
        )


def check_limit(group: ParamGroup, defaults: ParamGroup, number: GroupId) -> None:
    """Raise for a group whose own ``max_grad_norm`` is not a number above 0.

    Args:
        defaults: defaults of the optimizer; an option there belongs to its class, not to shardcast.
    """
    limit = group.get("max_grad_norm")
    if limit is not None and "max_grad_norm" not in defaults:
        bound_of(f"max_grad_norm of parameter group {number}", limit)


def check_groups(
    names: Mapping[nn.Parameter, str], originals: OptimizerList, added: GroupId | None = None
) -> dict[str, GroupId]:
    """Return the group number of each of the optimizers' parameters, by name.

    Args:
        added: group whose parameters are returned; the others are sharded already.

    Raises:
        TypeError, ValueError: a parameter is not among ``names``, or in two groups; a bound of the
            gradient norm is invalid; the groups hold no parameter; or several optimizers do not
            hold every trained one.
    """
    groups: dict[str, GroupId] = {}
    for number, optimizer, group in originals.numbered():
        check_limit(group, optimizer.defaults, number)
        for param in group["params"]:
            name = names.get(param)
            if name is None and added not in (None, number):
                continue  # the model no longer has it
            if name is None:
                raise ValueError(
                    f"optimizer: it holds a parameter of shape {tuple(param.shape)} that is not "
                    "one of the model's; build the optimizer from model.parameters() of this very "
                    "model, and add a new module to the model before you add its group"
                )
            if name in groups:
                owner = originals.owner(groups[name])
                if owner is optimizer:
                    raise ValueError(
                        f"optimizer: parameter {name!r} is in its groups twice; list it once"
                    )
                raise ValueError(
                    f"optimizer: parameter {name!r} is in two optimizers, {type(owner).__name__} "
                    f"and {type(optimizer).__name__}; a sharded parameter has one state: list it "
                    "in one of them, and step() that for every loss"
                )
            groups[name] = number
    if added is not None:
        return {name: number for name, number in groups.items() if number == added}
    if not groups:
        raise ValueError("optimizer: its groups hold no parameter; add the model's parameters")
    unheld = [n for param, n in names.items() if n not in groups and param.requires_grad]
    if len(originals.optimizers) > 1 and unheld:
        raise ValueError(
            f"optimizer: parameter {unheld[0]!r} is in none of {originals.name}; add it to one, or "
            "freeze it with requires_grad_(False)"
        )
    return groups


def check_bare(model: nn.Module) -> None:
    """Raise ValueError for a model in DDP or with DDP in it, which would also reduce gradients."""
    if _compat.is_ddp(model):
        raise ValueError(
            "model: expected the bare model, got one in DistributedDataParallel; pass "
            "model.module: shardcast averages gradients itself"
        )
    for name, module in model.named_modules():
        if _compat.is_ddp(module):
            raise ValueError(
                f"model: expected bare modules, got DistributedDataParallel in {name!r}; put its "
                ".module in its place: shardcast averages gradients itself"
            )


def check_matched(unmatched: Sequence[str]) -> None:
    """Raise ValueError with the first of these messages, if any."""
    if unmatched:
        raise ValueError(unmatched[0])


def describe_groups(originals: OptimizerList, added: GroupId | None) -> list[str]:
    """Return what must be equal on all ranks of the groups, or of an added one, as text."""
    lines = []
    for number, optimizer, group in originals.numbered():
        if added not in (None, number):
            continue
        lines.append(f"optimizer = {type(optimizer).__qualname__}")
        for key in sorted(group):
            # a script's own entries are left out
            if key != "params" and (key in optimizer.defaults or key in OURS):
                lines.append(f"group {number}: {key} = {plain(group[key])!r}")
    return lines


def plain(value: object) -> object:
    """Return a value that ranks can compare without waiting for a device; host tensors as values.

    Other objects may differ between ranks, so they become ``None``.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return None
        return value.item() if _compat.is_host(value.device) else ON_DEVICE
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None


def bound_of(name: str, value: object) -> float:
    """Return a bound of norms or values as a float; inf means no bound.

    A negative bound would reverse gradients, and NaN would reach the weights.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not above 0.
    """
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(
            f"{name}: expected a number above 0, got {value!r} ({type(value).__name__})"
        )
    if not float(number) > 0:
        raise ValueError(
            f"{name}: expected a number above 0, got {value!r}; use inf, or do not clip, for no "
            "bound"
        )
    return float(number)
