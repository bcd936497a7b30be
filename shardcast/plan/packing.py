"""Which parameters share a pack, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shardcast.config import ShardcastConfig
from shardcast.plan.layout import Layout, PackLayout, ParamInfo
from shardcast.plan.partition import plan_even, plan_whole, round_up

MIB = 1024 * 1024


def describe(
    named: Mapping[str, nn.Parameter],
    config: ShardcastConfig,
    groups: Mapping[nn.Parameter, int],
    storage_dtype: Callable[[nn.Parameter], torch.dtype] | None = None,
) -> list[ParamInfo]:
    """The planner's view of parameters, in the order of ``named`` (model order).

    Args:
        groups: index of each parameter's optimizer group.
        storage_dtype: gives that of each parameter; ``None`` keeps the present ones.
    """
    # Numbered as they come: what is cuda:0 on one rank is cuda:1 on the next one.
    devices: dict[torch.device, str] = {}
    for param in named.values():
        if param.device not in devices:
            kind = param.device.type
            count = sum(device.type == kind for device in devices)
            devices[param.device] = f"{kind} {count + 1}" if count else kind
    return [
        ParamInfo(
            name,
            tuple(param.shape),
            param.dtype if storage_dtype is None else storage_dtype(param),
            devices[param.device],
            param.requires_grad,
            groups[param],
            "" if config.group_fn is None else repr(config.group_fn(name, param)),
        )
        for name, param in named.items()
    ]


def plan_packs(
    infos: list[ParamInfo], world_size: int, partition: str, config: ShardcastConfig
) -> Layout:
    """:func:`plan` with the pack options of ``config``."""
    return plan(
        infos,
        world_size,
        partition,
        pack_mb=config.pack_mb,
        pack_params=config.pack_params,
        unpacked_first=config.unpacked_first,
        alignment=config.alignment,
    )


def plan(
    params: Sequence[ParamInfo],
    world_size: int,
    partition: str,
    *,
    pack_mb: float,
    pack_params: int | None,
    unpacked_first: int,
    alignment: int,
) -> Layout:
    """Plan the packs of ``params`` (in model order) for ``world_size`` ranks.

    Args:
        partition: ``even`` or ``whole``.
        pack_mb, pack_params: caps of a pack; a bigger single parameter has its own.
        unpacked_first: this many first parameters have a pack of their own each.
        alignment: of slots and spans, in bytes.
    """
    bins: list[list[ParamInfo]] = []
    current: dict[tuple[object, ...], list[ParamInfo]] = {}  # the open pack of each kind
    filled: dict[tuple[object, ...], int] = {}  # and its elements so far
    for position, param in enumerate(params):
        if position < unpacked_first:
            bins.append([param])
            continue
        kind = (param.device, param.dtype, param.requires_grad, param.group, param.key)
        cap = int(pack_mb * MIB) // param.dtype.itemsize
        align = max(1, alignment // param.dtype.itemsize)
        pack = current.get(kind)
        if (
            pack is None
            or filled[kind] + param.numel > cap
            or (pack_params is not None and len(pack) >= pack_params)
        ):
            pack = current[kind] = []
            filled[kind] = 0
            bins.append(pack)
        pack.append(param)
        filled[kind] += round_up(param.numel, align)
    load = [0] * world_size
    packs = tuple(
        _plan_pack(index, members, world_size, partition, alignment, load)
        for index, members in enumerate(bins)
    )
    return Layout(world_size, partition, packs)


def _plan_pack(
    index: int,
    members: list[ParamInfo],
    world_size: int,
    partition: str,
    alignment: int,
    load: list[int],
) -> PackLayout:
    first = members[0]
    align = max(1, alignment // first.dtype.itemsize)
    if partition == "whole":
        slots, spans = plan_whole(members, world_size, align, load)
    else:
        slots, spans = plan_even(members, world_size, align)
    return PackLayout(
        index, first.device, first.dtype, first.requires_grad, first.group, first.key,
        spans[-1].stop, slots, spans,
    )  # fmt: skip
