"""Counted, not believed: casts of parameters, bytes, collectives."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from models import CASES, ranks_of, run_world, sharded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardcast.memory.codecs import ROW
from shardcast.optimizer.sharded import packed_of

CASTS = 2  # eagerly: one to compare with what the model shows, one into the pack

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class CastCounter(TorchDispatchMode):
    """Counts, per element of ``watched`` memory, conversions to another floating dtype.

    A cast is a ``_to_copy`` or ``copy_`` between dtypes whose source lies in watched memory.
    """

    def __init__(self, watched: list[Tensor]) -> None:
        super().__init__()
        self.watched = watched
        self.counts = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in watched]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("_to_copy", "copy_"):
            source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
            if result.dtype != source.dtype and source.is_floating_point():
                self.note(source)
        return result

    def note(self, source: Tensor) -> None:
        for tensor, counts in zip(self.watched, self.counts, strict=True):
            offset = source.data_ptr() - tensor.data_ptr()
            if source.numel() and 0 <= offset < tensor.nbytes and source.dtype == tensor.dtype:
                first = offset // tensor.element_size()
                counts[first : first + source.numel()] += 1

    @property
    def total(self) -> int:
        return int(sum(counts.sum() for counts in self.counts))


def count_step(
    group: Any, case: str, dtype: torch.dtype, fields: dict[str, Any], micros: int = 3
) -> dict[str, Any]:
    """Casts in the micro-batches under ``no_sync``, in the last one, and in the step."""
    model = CASES[case].build()
    optimizer = sharded(model, group, param_dtype=dtype, **fields)
    packs = [master.pack.data for master in packed_of(optimizer).shards]
    masters = [m.data for m in packed_of(optimizer).shards if not m.in_place]
    found: dict[str, Any] = {}
    for step in range(2):  # the second one has its buffers
        for micro in range(micros):
            last = micro + 1 == micros
            quiet = contextlib.nullcontext() if last else optimizer.no_sync()
            with quiet, CastCounter(packs + masters) as counter:
                batch = CASES[case].batch(step * 10 + micro)
                optimizer.scale_loss(CASES[case].loss(model, batch)).backward()
            name = "last backward" if last else "no_sync"
            found[name] = found.get(name, 0) + counter.total
        with CastCounter(packs + masters) as counter:
            optimizer.step()
        optimizer.zero_grad()
    rank = 0 if group is None else group.rank()
    found["of packs"] = int(sum(c.sum() for c in counter.counts[: len(packs)]))
    wrong = []  # elements of parameters, not padding, that were not cast as often as is said
    low = [master for master in packed_of(optimizer).shards if not master.in_place]
    for master, counts in zip(low, counter.counts[len(packs) :], strict=True):
        if group is None:  # its pack ends within a row, which is cast in a padded copy
            counts[len(counts) // ROW * ROW :] = CASTS
        for fragment in master.pack.layout.fragments(rank):
            part = counts[master.local(fragment.start, fragment.stop)]
            if not bool((part == CASTS).all()):
                wrong.append(fragment.slot.name)
    found["wrong"] = wrong
    found["masters"] = sum(master.pack.own.numel for master in low)
    found["casts"] = int(sum(c.sum() for c in counter.counts[len(packs) :]))
    return found


EVEN: dict[str, Any] = {}
WHOLE, NORMS, PURE = {"partition": "whole"}, {"keep_fp32": "norms"}, {"autocast": False}


FP16_SCALED = {"loss_scale": 64.0}


@pytest.mark.parametrize(
    ("size", "case", "dtype", "fields"),
    [
        (1, "gpt", BF16, EVEN),
        (1, "gpt", FP16, FP16_SCALED),
        (1, "gpt", FP32, EVEN),
        (2, "tiny", BF16, {**WHOLE, **PURE}),
        (2, "gpt", BF16, NORMS),
        (2, "gpt_nonreentrant", BF16, EVEN),
    ],
)
def test_parameters_are_cast_in_the_update_and_never_in_forward_or_backward(
    size: int, case: str, dtype: torch.dtype, fields: dict[str, Any]
):
    ranks = ranks_of(size, count_step, case, dtype, fields)
    for rank in ranks:
        assert rank["no_sync"] == rank["last backward"] == rank["of packs"] == 0
        assert rank["wrong"] == []
        assert rank["casts"] <= CASTS * rank["masters"], "padding not more often"
    assert (sum(rank["casts"] for rank in ranks) > 0) == (dtype != FP32)


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_parameters_in_the_optimizer_cost_two_all_reduces_per_step_on_a_cpu(frozen: bool):
    """One compares the ranks' calls, so that the next may have another length."""

    def run(group: Any) -> int:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(not frozen)
        optimizer = sharded(model, group)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            begun = len(group.log)
            optimizer.step()
            optimizer.zero_grad()
        return sum(call.op == "all_reduce" for call in group.log[begun:])

    assert run_world(2, run)[0] == [3 if frozen else 1] * 2
