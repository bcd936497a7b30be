"""Packing: which parameters share a pack, and in which order."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.algorithms import Algorithms, Topology, choose
from shardcast.plan.layout import GroupId, Layout, PackKey, PackLayout, ParamInfo
from shardcast.plan.parallel_dims import PackGroups, ParallelDims
from shardcast.plan.partition import assign_owners, plan_even, plan_whole, round_up
from shardcast.plan.publishing import publishing_of

MIB = 1024 * 1024
# Without pack_mb a pack has at least PACK bytes, and MESSAGE bytes per rank. So messages between
# ranks do not shrink as the world grows. (Megatron-LM's buckets also grow, by a million parameters
# per rank.) MOST is the upper limit, because two packs are in flight at a time, with receive
# buffers of their size. At 4,096 ranks a message still has MESSAGE bytes.
PACK, MESSAGE, MOST = 16 * MIB, MIB // 4, 1024 * MIB


def describe(
    named: Mapping[str, nn.Parameter],
    config: ShardcastConfig,
    groups: Mapping[str, GroupId],
    storage_dtype: Callable[[nn.Parameter], torch.dtype],
    costs: Mapping[str, float],
    pack_groups_by_name: Mapping[str, PackGroups],
    flags: Mapping[GroupId, str],
) -> list[ParamInfo]:
    """Return the planner's view of parameters, in the order of ``named`` (model order).

    Args:
        groups: each parameter's optimizer group.
        storage_dtype: returns the storage dtype of a parameter.
        costs: costs of updates, to balance whole parameters, if not their elements.
        pack_groups_by_name: process groups of each parameter.
        flags: flags of each group, see :class:`.ParamInfo`.
    """
    # Numbered in order of appearance, because cuda:0 on one rank is cuda:1 on another.
    devices: dict[torch.device, str] = {}
    infos, publishing = [], publishing_of(config)
    for name, param in named.items():
        device = devices.get(param.device)
        if device is None:
            kind = param.device.type
            count = sum(device.type == kind for device in devices)
            device = devices[param.device] = f"{kind} {count + 1}" if count else kind
        shape = tuple(_compat.local_tensor(param).shape)
        dtype = storage_dtype(param)
        cast, unit = publishing.cast(name, shape, dtype) if publishing else ("", 1)
        infos.append(
            ParamInfo(
                name,
                shape,
                dtype,
                device,
                param.requires_grad,
                groups[name],
                "" if config.group_fn is None else repr(config.group_fn(name, param)),
                pack_groups_by_name[name],
                costs.get(name),
                cast,
                unit,
                flags[groups[name]],
            )
        )
    return infos


def with_algorithms(
    layout: Layout,
    config: ShardcastConfig,
    topology: Topology,
    experts: Mapping[str, Topology] | None = None,
) -> Layout:
    """Return ``layout`` with algorithms on ``topology`` for each pack without them.

    Args:
        experts: topology of the groups that own packs of experts, by name.

    Raises:
        ValueError: these ranks do not allow an option.
    """
    packs = []
    for pack in layout.packs:
        if pack.algorithms == Algorithms() and len(pack.spans) > 1:
            lengths = [span.numel for span in pack.spans]
            joined_by = (experts or {}).get(pack.pack_groups.shard, topology)
            chosen = choose(config, joined_by, lengths, pack.dtype)
            pack = dataclasses.replace(pack, algorithms=chosen)
        packs.append(pack)
    return dataclasses.replace(layout, packs=tuple(packs))


def plan_packs(
    params: Sequence[ParamInfo],
    parallel_dims: ParallelDims,
    partitions: Mapping[GroupId, str],
    config: ShardcastConfig,
    first: int = 0,
) -> Layout:
    """Plan the packs of ``params`` (in model order), without algorithms.

    Args:
        partitions: ``even`` or ``whole``, by group.
        config: its pack options are used; without ``pack_mb`` packs grow with the world.
        first: index of the first pack.
    """
    pack_mb, pack_params, alone = config.pack_mb, config.pack_params, config.unpacked_first
    bins: list[list[ParamInfo]] = [[param] for param in params[:alone]]
    grown = min(max(PACK, MESSAGE * parallel_dims.world_size), MOST)
    most = grown if pack_mb is None else int(pack_mb * MIB)
    open_bins: dict[PackKey, list[ParamInfo]] = {}  # the open pack of each kind
    filled: dict[PackKey, int] = {}  # bytes in the open pack
    remaining: dict[PackKey, int] = defaultdict(int)  # bytes of parameters that are in no pack yet

    def aligned(param: ParamInfo) -> int:
        itemsize = param.dtype.itemsize
        return itemsize * round_up(param.numel, max(1, config.alignment // itemsize))

    keyed = [(param, param.pack_key) for param in params[alone:]]
    for param, key in keyed:
        remaining[key] += aligned(param)
    for param, key in keyed:
        full = key not in open_bins or len(open_bins[key]) == pack_params
        if not full and pack_mb is not None:
            full = filled[key] + param.numel * param.dtype.itemsize > most
        elif not full:  # a remainder smaller than a pack joins this one
            full = filled[key] >= most and (pack_params is not None or remaining[key] >= most)
        if full:
            open_bins[key], filled[key] = [], 0
            bins.append(open_bins[key])
        open_bins[key].append(param)
        filled[key] += aligned(param)
        remaining[key] -= aligned(param)
    bins.sort(key=lambda members: parallel_dims.set_up_order(members[0].pack_groups))
    owners: dict[str, int] = {}
    undivided = [param for param in params if partitions[param.group] == "whole"]
    for cut in dict.fromkeys(param.pack_groups.shard for param in undivided):
        alike = [param for param in undivided if param.pack_groups.shard == cut]
        owners |= assign_owners(alike, parallel_dims.ranks(alike[0].pack_groups))
    packs = []
    for index, members in enumerate(bins, first):
        key, mode = members[0].pack_key, partitions[members[0].group]
        members.sort(key=lambda param: param.group)  # keeps model order within a group
        size = parallel_dims.ranks(key.pack_groups)
        align = max(1, config.alignment // key.dtype.itemsize)
        if mode == "whole":
            slots, spans = plan_whole(members, size, align, owners)
        else:
            slots, spans = plan_even(members, size, align)
        packs.append(
            PackLayout(
                index,
                key.device,
                key.dtype,
                key.requires_grad,
                key.key,
                spans[-1].stop,
                slots,
                spans,
                partition=mode,
                pack_groups=key.pack_groups,
                cast=key.cast,
            )
        )
    return Layout(parallel_dims.world_size, tuple(packs))
