"""Averages, metrics, guards and counted tokens together, beside the same by hand in plain torch.

All cases have the same story: a parameter without a gradient, one that rank 0 does not train, a
step that a NaN skips, a checkpoint that another world resumes, and a spike.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bag import Bag
from models import adamw, assert_same_bits, exact_muon, run_world
from oracle import pair
from torch import Tensor, nn, optim

import shardcast
from shardcast import checkpoint

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:step skipped")]

ABSENT, PARTLY, NAN, SAVED, STEPS = 1, 2, 3, 5, 9
SPIKES = 6, 7  # the second one is judged by a window without the first
SHAPES = {"a": (8, 64), "b": (64,), "c": (16, 33), "d": (5,), "e": (3, 512)}
AVERAGES = {"ema": 0.9, "warm": {"half_life": 20, "warmup": True}}
NORM, LOSS = {"norm": 3.0, "window": 4}, {"loss": 3.0, "window": 4}
CLIPPED = {**NORM, "action": "clip"}
LEAN = {"param_dtype": "bf16", "master": "split16", "moments": "bf16"}
LEANEST = {"param_dtype": "bf16", "master": "split16", "moments": "int8"}
FP16 = {"param_dtype": "fp16", "loss_scale": 8.0}


def of(kind: Any, **options: Any) -> Any:
    return lambda model: kind(model.parameters(), lr=1e-2, **options)


def gradient(name: str, step: int, world: int, rank: int, micro: int) -> Tensor | None:
    """Multiples of world / 8, so that sums and means are exact in low precision."""
    if (step == ABSENT and name == "b") or (step == PARTLY and name == "c" and rank == 0):
        return None
    seed = 1000 * step + 100 * [*SHAPES].index(name) + 10 * rank + micro
    grad = torch.randint(-4, 5, SHAPES[name], generator=torch.Generator().manual_seed(seed))
    return grad * (world / 8) * (16 if step in SPIKES and rank == world - 1 else 1)


def tokens(step: int, rank: int, micro: int) -> int:
    return (step + 3 * rank + 5 * micro) % 6 + (rank == 0)


def loss_of(step: int, world: int, rank: int) -> float:
    return 1 + 0.1 * math.sin(3 * step + rank) + 30 * (step in SPIKES and rank == world - 1)


def build() -> Bag:
    model = Bag(**SHAPES)
    for param in model.parameters():
        param.data.normal_(generator=torch.Generator().manual_seed(param.numel()))
    return model


class Twin:
    """One process with plain torch: its gradients, and whether it skipped or guarded a step."""

    def __init__(self, case: SimpleNamespace) -> None:
        self.case, self.model = case, build()
        made = case.kind(self.model)
        self.optimizers = made if isinstance(made, list) else [made]
        self.accepted: list[float] = []

    def step(self, step: int, world: int) -> tuple[dict[str, Tensor], bool, bool]:
        case, grads, count = self.case, dict[str, Tensor](), 0
        for rank, micro in ((r, m) for r in range(world) for m in range(case.micros)):
            count += tokens(step, rank, micro)
            for name in SHAPES:
                if (grad := gradient(name, step, world, rank, micro)) is not None:
                    grads[name] = grads.get(name, 0) + grad.double()
        grads = {name: grad / (count if case.counts else world) for name, grad in grads.items()}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        clips, value, factor = case.guard is CLIPPED, norm, 1.0
        if "loss" in (case.guard or {}):
            value = sum(loss_of(step, world, rank) for rank in range(world)) / world
        window = torch.tensor(self.accepted[-4:], dtype=torch.float64)
        bound = float(window.mean() + 3 * window.std()) if len(window) > 1 else math.inf
        is_spike = bool(case.guard) and step != NAN and value > bound
        if step == NAN or (is_spike and not clips):
            return {}, True, is_spike
        if is_spike:
            value, factor = bound, bound / norm
        self.accepted.append(value)
        if case.max_norm < norm * factor:
            factor = case.max_norm / norm
        grads = {name: grad * factor for name, grad in grads.items()}
        for name, param in self.model.named_parameters():
            param.grad = grads[name].float() if name in grads else None
        for optimizer in self.optimizers:
            optimizer.step()
        return grads, False, is_spike


def train(group: Any, case: Any, twin: Twin, state: Any, steps: range, folder: Path) -> Any:
    """Compares on rank 0, which has the full parameters; metrics and weights of each step."""
    rank, world, model, seen = group.rank(), group.size(), build(), []
    clip = {} if case.max_norm == math.inf else {"max_grad_norm": case.max_norm}
    optimizer = shardcast.shard(
        model,
        case.kind(model),
        process_group=group,
        averages=AVERAGES,
        metrics=True,
        guard=case.guard,
        pack_params=2,
        **{"param_dtype": "fp32", **clip, **case.fields},
    )
    if steps.start:
        checkpoint.load(folder, model, optimizer)
    for step in steps:
        before, guarded = full(optimizer), optimizer.guarded_steps if case.guard else 0
        low = {name: param.detach().clone() for name, param in model.named_parameters()}
        for micro in range(case.micros):
            grads = {name: gradient(name, step, world, rank, micro) for name in SHAPES}
            is_last = micro == case.micros - 1
            with contextlib.nullcontext() if is_last else optimizer.no_sync():
                if case.counts:
                    optimizer.count(tokens(step, rank, micro))
                loss = model({name: grad for name, grad in grads.items() if grad is not None})
                bad = step == NAN and rank == world - 1 and is_last
                optimizer.scale_loss(loss * (math.nan if bad else 1)).backward()
        given = {"loss": loss_of(step, world, rank)} if "loss" in (case.guard or {}) else {}
        optimizer.step(**given)
        optimizer.zero_grad()
        after, averages = full(optimizer), {name: full(optimizer, name) for name in AVERAGES}
        metrics = {n: {k: float(v) for k, v in m.items()} for n, m in optimizer.metrics().items()}
        seen.append((str(metrics), [param.detach().clone() for param in model.parameters()]))
        if rank:
            continue
        grads, skipped, is_spike = twin.step(step, world)
        assert skipped == bool(optimizer.last_step_skipped), step
        assert not case.guard or optimizer.guarded_steps - guarded == is_spike, step
        assert step not in SPIKES or is_spike == bool(case.guard), "the control"
        exact = case.fields.get("moments", "fp32") == "fp32"
        for name, param in twin.model.named_parameters():
            near = {"rtol": 1e-5, "atol": 2e-6} if exact else {"rtol": 0.02, "atol": 0.03}
            torch.testing.assert_close(after[name], param.detach(), **near)
        state.made += not skipped
        warm = min(0.5 ** (1 / 20), (1 + state.made) / (10 + state.made))
        for average, decay in (("ema", 0.9), ("warm", warm)):
            state.averages.setdefault(average, dict(before))
            for name in before if not skipped else ():
                held = state.averages[average][name]
                state.averages[average][name] = held.lerp(after[name], 1 - decay)
            assert_same_bits(averages[average], state.averages[average])
        if not skipped:
            compare(metrics, before, after, grads, low, model)
    if not steps.start:
        checkpoint.save(folder, model, optimizer, step=SAVED)
    return seen


def full(optimizer: Any, average: str | None = None) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in optimizer.full_parameters(average).items()}


def compare(metrics: Any, before: Any, after: Any, grads: Any, low: Any, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        new, moved = after[name].double(), after[name].double() - before[name].double()
        swallowed = ((moved != 0) & (param.detach() == low[name])).double().mean()
        grad = grads.get(name, torch.zeros(1))
        norms = {"grad_norm": grad.norm(), "weight_norm": new.norm(), "update_norm": moved.norm()}
        norms |= {"update_to_weight": moved.norm() / new.norm(), "swallowed": swallowed}
        assert metrics[name] == pytest.approx({k: float(v) for k, v in norms.items()}, rel=2e-6)


# Worlds, micro-batches, class, form, partition, guard, clip and tokens in nearly all pairs.
CASES: list[tuple[Any, tuple[int, int], int, Any, float, bool, dict[str, Any]]] = [
    (adamw, (1, 3), 2, NORM, math.inf, True, {"fuse": "eager", "partition": "whole"}),
    (adamw, (4, 2), 1, CLIPPED, 1.0, False, {**LEAN, "partition": "even"}),
    (of(optim.Adam, weight_decay=0.1), (2, 4), 3, LOSS, 1.0, True, {**LEANEST, "offload": True}),
    (of(optim.AdamW, amsgrad=True), (3, 1), 1, None, math.inf, False, {**FP16, "moments": "int8"}),
    (
        of(optim.SGD, momentum=0.9, nesterov=True),
        (3, 4),
        2,
        CLIPPED,
        1.0,
        True,
        {"param_dtype": "bf16", "moments": "bf16", "accumulate": "sharded", "partition": "whole"},
    ),
    (of(optim.SGD), (2, 1), 3, NORM, 1.0, False, {**FP16, "partition": "even"}),
    (of(optim.RMSprop), (4, 3), 2, LOSS, math.inf, False, {"param_dtype": "bf16"}),
    (of(optim.Adagrad), (1, 4), 3, CLIPPED, math.inf, True, {**FP16, "partition": "whole"}),
    (of(optim.Adafactor), (3, 2), 1, NORM, 1.0, True, {"param_dtype": "bf16"}),
    (pair, (2, 3), 2, LOSS, math.inf, True, {"accumulate": "sharded", "loss_scale": 4.0}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_each_is_that_of_one_process_by_hand_and_goes_on_in_another_world(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    exact_muon(monkeypatch)
    kind, worlds, *rest = CASES[number]
    names = ("micros", "guard", "max_norm", "counts", "fields")
    case = SimpleNamespace(kind=kind, **dict(zip(names, rest, strict=True)))
    twin, state = Twin(case), SimpleNamespace(made=0, averages={})
    for world, steps in zip(worlds, (range(SAVED), range(SAVED, STEPS)), strict=True):
        ranks, _ = run_world(world, train, case, twin, state, steps, tmp_path / "saved")
        for seen in ranks[1:]:
            for (metrics, weights), (same, others) in zip(seen, ranks[0], strict=True):
                assert metrics == same and all(map(torch.equal, weights, others))
