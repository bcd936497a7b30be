"""Packing alone: flat parameters for any elementwise optimizer, without sharding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import Gradients
from shardcast.memory.pack import Pack
from shardcast.option_values import GroupFn
from shardcast.plan.layout import Layout
from shardcast.plan.packing import describe, plan_packs
from shardcast.plan.parallel_dims import ParallelDims
from shardcast.plan.precision import is_packable
from shardcast.plan.validate import check_memory


class PackedParameters:
    """The result of :func:`pack_parameters`: one flat parameter per pack, with flat gradients.

    Pass ``parameters()`` to any elementwise optimizer, which then runs once per pack instead of
    once per parameter. Model parameters are views of the packs, and their ``.grad`` are views of
    the flat gradients. Clear them with :meth:`zero_grad` or the optimizer's ``zero_grad``.

    In a flat gradient, a parameter without a gradient has zeros, with which AdamW would decay it
    and move it by its moments. So the optimizer's ``step()`` raises RuntimeError if only some
    parameters of a pack got a gradient since the last clearing. A pack without any gradient is not
    updated.
    """

    def __init__(self, layout: Layout, packs: list[Pack]) -> None:
        self.layout = layout
        """The packs and their slots."""
        self.packs = packs
        self._grads = [Gradients(pack, pack.layout.dtype, pack.layout.dtype) for pack in packs]
        self._flats = [nn.Parameter(pack.data, pack.layout.requires_grad) for pack in packs]
        # positions of parameters with a gradient
        self._present: list[set[int]] = [set() for _ in packs]
        check = weak_hook(PackedParameters._refuse_absent, self)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            # Never removed, but idle after this object is gone: torch may be iterating over hooks
            # when garbage is collected.
            register(lambda optimizer, *_: check(optimizer))  # after the closure
        for flat in self._flats:  # hooks live as long as an optimizer holds a flat parameter
            flat._shardcast_packed = self  # type: ignore[attr-defined]
        for number, pack in enumerate(packs):
            if pack.layout.requires_grad:
                for position, param in enumerate(pack.params):
                    self._watch(number, position, param)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield one 1-d parameter per pack, in pack order, including frozen packs. Local."""
        return iter(self._flats)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the same with names ``pack.0``, ``pack.1`` ... Local."""
        return ((f"pack.{number}", flat) for number, flat in enumerate(self._flats))

    def zero_grad(self) -> None:
        """Clear all gradients of packs and model parameters. Local."""
        for pack, flat in zip(self.packs, self._flats, strict=True):
            flat.grad = None
            for param in pack.params:
                param.grad = None

    def __repr__(self) -> str:
        return repr(self.layout)

    def _refuse_absent(self, optimizer: Any) -> None:
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for flat, grads, present in zip(self._flats, self._grads, self._present, strict=True):
            # no gradient, or the script's own
            if id(flat) not in ids or flat.grad is not grads.own:
                continue
            slots = grads.pack.layout.slots
            absent = [slot.name for n, slot in enumerate(slots) if n not in present]
            if absent:
                raise RuntimeError(
                    f"pack_parameters: {', '.join(map(repr, absent[:8]))} got no gradient in this "
                    "step, and others of the same pack did; the optimizer would take theirs for "
                    "zeros, and decay them. Give what is not used in every step packs of its own "
                    "by group_fn, or freeze it (requires_grad) before pack_parameters"
                )

    def _watch(self, number: int, position: int, param: nn.Parameter) -> None:
        before_hook = partial(PackedParameters._before_accumulate, number=number)
        after_hook = partial(PackedParameters._after_accumulate, number=number, position=position)
        param.register_hook(weak_hook(before_hook, self))
        param.register_post_accumulate_grad_hook(weak_hook(after_hook, self))

    def _before_accumulate(self, _grad: Tensor, number: int) -> None:
        # An optimizer's zero_grad clears only flat.grad. The views still hold old gradients, to
        # which nothing must be added.
        if self._flats[number].grad is None:
            for param in self.packs[number].params:
                param.grad = None

    def _after_accumulate(self, _param: Tensor, number: int, position: int) -> None:
        flat, grads = self._flats[number], self._grads[number]
        if flat.grad is None:
            for place in range(len(grads.pack.params)):
                grads.part(place).zero_()
            flat.grad = grads.own
            self._present[number].clear()
        self._present[number].add(position)
        grads.adopt([position])


def weak_hook(call: Callable[..., None], held: Any) -> Callable[[Tensor], None]:
    """Return a tensor hook that runs ``call(held, tensor)`` without keeping ``held`` alive.

    The garbage collector does not see post-accumulate hooks. A hook that refers back to its own
    parameter would never be freed, nor would the parameter.
    """
    reference = weakref.ref(held)

    def hook(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            call(alive, tensor)

    return hook


def pack_parameters(
    model: nn.Module,
    *,
    pack_mb: float = 16.0,
    pack_params: int | None = None,
    unpacked_first: int = 0,
    alignment: int = 128,
    group_fn: GroupFn | None = None,
) -> PackedParameters:
    """Gather the parameters of ``model`` into packs, without sharding, casts or collectives. Local.

    It corresponds to MegEngine's ParamPack: parameters of equal device, dtype, ``requires_grad``
    and ``group_fn`` key share contiguous storage. The options are those of
    :class:`shardcast.ShardcastConfig`.

    Raises:
        ValueError: an option is out of range, or a parameter is still on the meta device.
    """
    config = ShardcastConfig(
        pack_mb=pack_mb,
        pack_params=pack_params,
        unpacked_first=unpacked_first,
        alignment=alignment,
        group_fn=group_fn,
    )
    named = {name: param for name, param in model.named_parameters() if is_packable(param)}
    ParallelDims(1).pack_groups_by_name(named)  # raises for DTensors
    check_memory(named)
    infos = describe(named, config)
    layout = plan_packs(infos, 1, "even", config)
    packs = []
    for pack_layout in layout.packs:
        params = [named[slot.name] for slot in pack_layout.slots]
        pack = Pack(pack_layout, params, Comm(None))
        with torch.no_grad():
            pack.fill()
        packs.append(pack)
    return PackedParameters(layout, packs)
