"""Properties of all layouts, and their ``repr``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MLP, sharded
from torch import nn

import shardcast
from shardcast.config import ShardcastConfig
from shardcast.plan.algorithms import Topology, choose
from shardcast.plan.layout import GroupId, Layout, ParamInfo
from shardcast.plan.packing import describe, plan_packs
from shardcast.plan.parallel_dims import PackGroups, ParallelDims

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS: dict[str, Any] = {
    "pack_mb": 1.0,
    "pack_params": None,
    "unpacked_first": 0,
    "alignment": 64,
}


def plan(params: list[ParamInfo], world: int, partition: str, **options: Any) -> Layout:
    partitions = {param.group: partition for param in params}
    config = shardcast.ShardcastConfig(**options)
    return plan_packs(params, ParallelDims(world), partitions, config)


def owned(layout: Layout, rank: int) -> int:
    return sum(pack.spans[rank].numel for pack in layout.packs)


@st.composite
def models(draw: st.DrawFn) -> list[ParamInfo]:
    def shape() -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(0, 40), max_size=3)))

    return [
        ParamInfo(
            f"p{number}",
            shape(),
            draw(st.sampled_from(DTYPES)),
            requires_grad=draw(st.booleans()),
            group=GroupId(draw(st.integers(0, 1)), draw(st.integers(0, 2))),
            flags=draw(st.sampled_from(["", "amsgrad"])),
            key=draw(st.sampled_from(["", "'a'"])),
        )
        for number in range(draw(st.integers(1, 8)))
    ]


options = st.fixed_dictionaries(
    {
        "pack_mb": st.sampled_from([1e-5, 1e-3, 0.01, 16.0]),
        "pack_params": st.sampled_from([None, 1, 2, 5]),
        "unpacked_first": st.integers(0, 3),
        "alignment": st.sampled_from([8, 64, 128, 4096]),
    }
)


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 9), st.sampled_from(["even", "whole"]), options)
def test_every_layout_has_its_promised_properties(
    params: list[ParamInfo], size: int, partition: str, chosen: dict[str, Any]
):
    layout = plan(params, size, partition, **chosen)
    by_name = {param.name: param for param in params}
    names = [slot.name for _, slot in layout.slots()]
    assert sorted(names) == sorted(by_name), "every parameter has one slot"
    for pack in layout.packs:
        align = max(1, chosen["alignment"] // pack.dtype.itemsize)
        members = [by_name[slot.name] for slot in pack.slots]
        kinds = {(p.dtype, p.device, p.requires_grad, p.group.optimizer, p.key) for p in members}
        assert kinds == {(pack.dtype, pack.device, pack.requires_grad, pack.optimizer, pack.key)}
        assert len({p.flags for p in members}) == 1 or not pack.requires_grad
        assert pack.requires_grad or len(pack.groups) == 1, "frozen packs hold one group"
        for span in pack.spans:
            own = [f.slot.group for f in pack.fragments(span.owner)]
            if partition == "whole":
                assert own == sorted(own), "groups of an owner lie next to one another"
            covered = [slice(0, 0)]
            for part, group in pack.ranges(span.start, span.stop):
                assert part.start == covered[-1].stop, "ranges tile the span"
                assert part.start < part.stop or not span.numel, "no range is empty"
                covered.append(part)
                inside = [
                    f.slot.group
                    for f in pack.fragments(span.owner)
                    if part.start <= f.start - span.start < part.stop
                ]
                assert set(inside) <= {group}
            assert covered[-1].stop == span.numel
        if partition == "even":
            assert [s.group for s in pack.slots] == sorted(s.group for s in pack.slots)
        end = 0
        for slot, param in zip(pack.slots, members, strict=True):
            assert slot.offset % align == 0 and slot.offset >= end, "slots do not overlap"
            assert (slot.shape, slot.numel) == (param.shape, param.numel)
            end = slot.end
        assert [span.owner for span in pack.spans] == list(range(size))
        assert pack.spans[0].start == 0 and pack.spans[-1].stop == pack.numel >= end
        for left, right in zip(pack.spans, pack.spans[1:], strict=False):
            assert left.stop == right.start and right.start % align == 0, "spans tile the pack"
        if partition == "even":
            assert len({span.numel for span in pack.spans}) == 1
            assert pack.numel - end < size * align, "no more padding than alignment needs"
        else:
            for slot in pack.slots:
                homes = [s for s in pack.spans if s.start <= slot.offset and slot.end <= s.stop]
                assert homes or slot.numel == 0, "whole: every slot inside one span"
        covered = [f for rank in range(size) for f in pack.fragments(rank)]
        for fragment in covered:
            begin, end = fragment.param_range
            assert (fragment.numel, begin) == (end - begin, fragment.start - fragment.slot.offset)
        assert sum(f.numel for f in covered) == sum(slot.numel for slot in pack.slots)
        small = len(pack.slots) == 1 or pack.slots[-1].offset + pack.slots[-1].numel <= (
            chosen["pack_mb"] * 2**20 / pack.dtype.itemsize
        )
        assert small or partition == "whole", "the cap in bytes holds"
        if chosen["pack_params"] is not None:
            assert len(pack.slots) <= chosen["pack_params"]
    for number in range(min(chosen["unpacked_first"], len(params))):
        assert [s.name for s in layout.packs[number].slots] == [f"p{number}"]


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 9), options)
def test_whole_is_balanced_to_within_the_largest_parameter(
    params: list[ParamInfo], size: int, chosen: dict[str, Any]
):
    layout = plan(params, size, "whole", **chosen)
    loads = [owned(layout, rank) for rank in range(size)]
    align = chosen["alignment"]  # in elements at most
    largest = max(param.numel for param in params) + align
    # Greedy: each parameter goes to the rank with the least, which ends at most one parameter
    # above the new least. Every pack's span is rounded up once more.
    assert max(loads) - min(loads) <= largest + align * len(layout.packs)


def test_whole_parameters_go_to_their_owners_from_the_largest_on():
    sizes = [2, 3, 7, 4, 3, 5]  # 14 on one rank in this order, or if sorted and dealt in turn
    params = [ParamInfo(f"p{i}", (n * 64,), torch.float32) for i, n in enumerate(sizes)]
    layout = plan(params, 2, "whole", **OPTIONS)
    assert [owned(layout, rank) for rank in range(2)] == [12 * 64, 12 * 64]


@pytest.mark.parametrize(
    ("count", "chosen", "packs"),
    [
        (12, {}, [6, 6]),
        (13, {}, [6, 7]),  # a last pack of its own would have 3 MiB
        (5, {}, [5]),
        (13, {"pack_params": 6}, [6, 6, 1]),
        (13, {"pack_mb": 16.0}, [5, 5, 3]),
    ],
    ids=str,
)
def test_without_pack_mb_packs_have_16_mib_at_least_and_no_short_end(
    count: int, chosen: dict[str, Any], packs: list[int]
):
    params = [ParamInfo(f"p{n}", (3 << 19,), torch.bfloat16) for n in range(count)]
    layout = plan(params, 2, "even", **{**OPTIONS, "pack_mb": None, **chosen})
    assert [len(pack.slots) for pack in layout.packs] == packs


def test_short_ends_of_one_kind_join_packs_of_that_kind_alone():
    kinds = (torch.bfloat16, torch.float32)
    params = [ParamInfo(f"p{n}", (3 << 19,), kinds[n % 2]) for n in range(14)]
    layout = plan(params, 2, "even", **{**OPTIONS, "pack_mb": None})
    names = [[slot.name for slot in pack.slots] for pack in layout.packs]
    assert names == [
        ["p0", "p2", "p4", "p6", "p8", "p10", "p12"],
        ["p1", "p3", "p5"],
        ["p7", "p9", "p11", "p13"],
    ]


changes = st.sampled_from(
    [
        lambda p: p._replace(shape=(*p.shape, 2)),
        lambda p: p._replace(shape=(1, *p.shape)),
        lambda p: p._replace(name=p.name + "x"),
        lambda p: p._replace(dtype=torch.float16 if p.dtype != torch.float16 else torch.bfloat16),
        lambda p: p._replace(requires_grad=not p.requires_grad),
        lambda p: p._replace(group=GroupId(2, 0)),
        lambda p: p._replace(key=p.key + "k"),
        lambda p: p._replace(device="meta"),
    ]
)


@settings(max_examples=80, deadline=None)
@given(
    models(),
    st.integers(1, 5),
    st.sampled_from(["even", "whole"]),
    options,
    st.integers(0, 100),
    changes,
)
def test_the_digest_is_equal_for_equal_plans_and_different_after_any_change(
    params: list[ParamInfo],
    size: int,
    partition: str,
    chosen: dict[str, Any],
    which: int,
    change: Any,
):
    layout = plan(params, size, partition, **chosen)
    again = plan([p._replace() for p in params], size, partition, **chosen)
    assert layout == again and hash(layout) == hash(again)
    assert layout.digest() == again.digest()
    changed = list(params)
    changed[which % len(params)] = change(params[which % len(params)])
    assert plan(changed, size, partition, **chosen).digest() != layout.digest()
    assert plan(params, size + 1, partition, **chosen).digest() != layout.digest()
    distinct = len(params) > 1 and len({(p.shape, p.dtype) for p in params}) > 1
    if distinct and partition == "even":  # whole orders the slots of a pack by owner
        assert plan(params[::-1], size, partition, **chosen) != layout


def test_ranks_on_different_gpus_of_one_kind_have_equal_digests():
    """Each rank of a node has its own device: cuda:0, cuda:1 ..."""

    class OnDevice:
        shape, dtype, requires_grad = torch.Size([4]), torch.float32, True

        def __init__(self, index: int) -> None:
            self.device = torch.device("cuda", index)

    digests = set()
    for index in range(2):
        param: Any = OnDevice(index)
        config, group = shardcast.ShardcastConfig(), GroupId()
        facts = {}, {"weight": PackGroups()}, {group: ""}
        infos = describe({"weight": param}, config, {"weight": group}, lambda p: p.dtype, *facts)
        digests.add(plan(infos, 2, "even", **OPTIONS).digest())
    assert len(digests) == 1


NAMES = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"]


def by_kind(name: str, param: nn.Parameter) -> str:
    return "matrix" if param.dim() == 2 else "vector"


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[4:]}, {"params": params[:4]}])


@pytest.mark.parametrize(
    ("fields", "packs", "told"),
    [
        ({}, [NAMES], "group 0"),
        ({"unpacked_first": 2}, [[NAMES[0]], [NAMES[1]], NAMES[2:]], ""),
        ({"pack_params": 4}, [NAMES[:4], NAMES[4:]], ""),
        ({"group_fn": by_kind}, [NAMES[::2], NAMES[1::2]], "key 'matrix'"),
        ({"optimizer": two_groups}, [NAMES[4:] + NAMES[:4]], "2 groups"),
    ],
    ids=["one", "first", "cap", "function", "groups"],
)
def test_repr_shows_packs_and_what_makes_them(
    fields: dict[str, Any], packs: list[list[str]], told: str
):
    layout = sharded(MLP(), param_dtype=torch.bfloat16, **fields).layout
    assert [[slot.name for slot in pack.slots] for pack in layout.packs] == packs
    first, second, *slots = repr(layout).splitlines()
    assert f"{len(packs)} pack{'s' * (len(packs) > 1)}" in first and told in second
    shown = [line.split()[0] for line in slots if not line.startswith("  pack ")]
    assert shown == [name for names in packs for name in names]


# -- the collective for each pack: one row per rule of auto ---------------------------------------

BF16, FP32 = torch.bfloat16, torch.float32
NCCL, GLOO, CARDS = (
    Topology("nccl", 8, on_host=False),
    Topology("gloo", 8),
    Topology("gloo", 8, on_host=False),
)


@pytest.mark.parametrize(
    ("topology", "size", "equal", "dtype", "expected"),
    [
        (NCCL, 8, True, BF16, ("all_to_all", "all_gather")),
        (NCCL, 8, True, FP32, ("reduce_scatter", "all_gather")),
        (NCCL, 64, True, FP32, ("reduce_scatter", "all_gather")),
        (NCCL, 64, True, BF16, ("two_level", "all_gather")),
        (NCCL._replace(node=3), 9, True, BF16, ("two_level", "all_gather")),
        (NCCL._replace(node=2), 64, True, BF16, ("all_to_all", "all_gather")),
        (NCCL._replace(node=1), 64, True, BF16, ("all_to_all", "all_gather")),
        (NCCL, 12, True, BF16, ("all_to_all", "all_gather")),
        (NCCL, 8, False, BF16, ("all_to_all", "broadcast")),
        (NCCL, 64, False, FP32, ("all_to_all", "broadcast")),
        (GLOO, 8, True, FP32, ("all_to_all", "messages")),
        (GLOO, 16, True, BF16, ("two_level", "all_gather")),
        (GLOO._replace(node=2), 4, True, BF16, ("all_to_all", "all_gather")),
        (GLOO._replace(node=1), 4, True, BF16, ("all_to_all", "messages")),
        (GLOO, 16, False, BF16, ("all_to_all", "messages")),
        (CARDS, 8, True, BF16, ("all_to_all", "all_gather")),
        (CARDS, 8, False, BF16, ("all_to_all", "broadcast")),
    ],
)
@pytest.mark.parametrize("length", [128, 1 << 27])
def test_the_rules_of_auto_hold_at_any_length(
    topology: Topology,
    size: int,
    equal: bool,
    dtype: torch.dtype,
    expected: tuple[str, str],
    length: int,
):
    lengths = [length] * (size - 1) + [length - (0 if equal else 64)]
    assert choose(ShardcastConfig(), topology, lengths, dtype)[:2] == expected


def test_what_is_asked_for_is_taken_and_one_rank_needs_no_collective():
    lengths = [128] * 64
    asked = ShardcastConfig(reduce="reduce_scatter", sync="broadcast")
    assert choose(asked, NCCL, lengths, BF16)[:2] == ("reduce_scatter", "broadcast")
    assert choose(ShardcastConfig(), NCCL, [128], BF16)[:2] == ("", ""), "one rank sends nothing"
