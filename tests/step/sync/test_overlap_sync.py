"""Sync beside the next forward: the bits of the plain run, and who waits for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, Tensors, assert_same_bits, parts, run_world, sharded, values
from torch import Tensor, nn

import shardcast
from shardcast.step.sync.sync import Sync
from shardcast.testing import BufferHazardError, SpawnedWorld

pytestmark = pytest.mark.timeout(60)

BF16, FP32 = torch.bfloat16, torch.float32
SMALL = {"pack_params": 2, "alignment": 16}
STEPS = 6


def pending(optimizer: shardcast.ShardedOptimizer) -> list[int]:
    """Indices of the packs that are on their way."""
    packs = optimizer.sync.packs
    return [pack.layout.index for pack in packs if pack.pending]


def run_steps(
    group: Any, case: str, fields: dict[str, Any], steps: int = STEPS
) -> tuple[Tensors, int, Any]:
    """Steps on batches that differ between ranks, with evaluations; losses, outputs, parameters.

    Also the number of steps after which something was on its way. Nothing in here but forwards
    would wait for it, until the end.
    """
    model = CASES[case].build()
    optimizer = sharded(model, group, **fields)
    found, overlapped = {}, 0
    for step in range(steps):
        for micro in range(2):
            batch = CASES[case].batch(100 * step + 10 * micro + optimizer.comm.rank)
            loss = CASES[case].loss(model, batch)
            loss.backward()
            found[f"loss {step} {micro}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        overlapped += bool(pending(optimizer))
        if step % 4 == 1:
            model.eval()
            with torch.no_grad():
                found[f"output {step}"] = model(CASES[case].batch(7)[0])
            model.train()
    found.update(values(model))
    return found, overlapped, parts(optimizer)


def compare(plain: list[Any], overlapped: list[Any], steps: int = STEPS) -> None:
    for (mine, never, own), (theirs, often, their_own) in zip(plain, overlapped, strict=True):
        assert never == 0 and often == steps, "from the second step on, and after the last one"
        assert_same_bits(mine, theirs)
        assert_same_bits(own, their_own)


@pytest.mark.parametrize(
    ("size", "partition", "dtype"),
    [(2, "even", BF16), (2, "whole", FP32), (3, "even", FP32), (3, "whole", BF16)],
    ids=str,
)
def test_an_overlapped_run_has_the_bits_of_the_plain_one(
    size: int, partition: str, dtype: torch.dtype
):
    fields = {"param_dtype": dtype, "partition": partition, "max_grad_norm": 1.0, **SMALL}
    plain, _ = run_world(size, run_steps, "gpt", fields)
    compare(plain, run_world(size, run_steps, "gpt", {**fields, "overlap_sync": True})[0])


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_gather": ("gpt", {"sync": "all_gather"}),
    "sharded gradients": ("gpt", {"grads": "sharded"}),
    "norms in fp32": ("gpt", {"keep_fp32": "norms"}),
    "split masters": ("gpt", {"master": "split16", "partition": "whole"}),
    "split masters, all_gather": ("gpt", {"master": "split16", "sync": "all_gather"}),
    "offloaded": ("gpt", {"offload": True, "moments": "bf16"}),
    "checkpointed": ("gpt_nonreentrant", {}),
    "checkpointed re-entrantly": ("gpt_reentrant", {}),
    "tied, checkpointed": ("tied_reentrant", {}),
    "scalars of the root": ("scalars", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_and_checkpointing_do_not_change_the_bits(variant: str):
    case, fields = VARIANTS[variant]
    fields = {"param_dtype": BF16, **SMALL, **fields}
    plain, _ = run_world(2, run_steps, case, fields)
    compare(plain, run_world(2, run_steps, case, {**fields, "overlap_sync": True})[0])


def over_gloo(group: Any, fields: dict[str, Any]) -> tuple[Tensors, int, Any]:
    torch.set_num_threads(1)
    return run_steps(group, "gpt", {"param_dtype": BF16, **SMALL, **fields})


@pytest.mark.parametrize("sync", ["broadcast", "all_gather"])
def test_real_processes_give_the_same_bits(gloo: SpawnedWorld, sync: str):
    plain = gloo.run(over_gloo, {"sync": sync})
    overlapped = gloo.run(over_gloo, {"sync": sync, "overlap_sync": True})
    for (mine, _, own), (theirs, often, their_own) in zip(plain, overlapped, strict=True):
        assert often == STEPS
        assert_same_bits(mine, theirs)
        assert_same_bits(own, their_own)


def steps_without_a_batch(group: Any, fields: dict[str, Any]) -> Tensors:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sharded(model, group, **SMALL, **fields)
    for step in range(4):
        if step != 2 or optimizer.comm.rank == 0:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_sync()
    return values(model)


def test_a_rank_without_a_batch_launches_what_the_others_launch(gloo: SpawnedWorld):
    """It cannot overlap, for it has shown no forward; on gloo a plain sync is other calls."""
    plain = gloo.run(steps_without_a_batch, {"param_dtype": FP32})
    overlapped = gloo.run(steps_without_a_batch, {"param_dtype": FP32, "overlap_sync": True})
    for mine, theirs in zip(plain, overlapped, strict=True):
        assert_same_bits(mine, theirs)


# -- that it overlaps, and who waits ------------------------------------------------------------


class Layers(nn.Module):
    """Linear layers in turn; notes before each which packs are on their way."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))
        self.note: Callable[[], Any] = list
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.notes.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.notes.append(self.note())
        return x


def started(
    group: Any, model: nn.Module, x: Tensor, steps: int = 1, **fields: Any
) -> shardcast.ShardedOptimizer:
    """An optimizer of ``model`` after ``steps`` steps, the last sync on its way."""
    fields = {"pack_params": 2, "overlap_sync": True, **fields}
    optimizer = sharded(model, group, **fields)
    for _ in range(steps):
        train(model, optimizer, x)
    return optimizer


def train(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


X = torch.linspace(-1, 1, 6).view(2, 3)


def test_a_module_begins_while_the_packs_of_later_ones_are_on_their_way():
    def run(group: Any) -> None:
        model = Layers()
        optimizer = started(group, model, X, steps=3)
        model.note = lambda: pending(optimizer)
        assert pending(optimizer) == [0, 1, 2, 3], "step() has returned before any was waited for"
        model(X)
        assert model.notes == [[1, 2, 3], [2, 3], [3], []]

    _, world = run_world(2, run)
    syncs = world.logs[0][-4:]
    assert [call.op for call in syncs] == ["all_gather_single"] * 4
    assert all(call.async_op for call in syncs)


def test_an_update_waits_for_the_broadcasts_that_read_what_it_writes(
    monkeypatch: pytest.MonkeyPatch,
):
    def run(group: Any, careless: bool) -> None:
        model = Layers()
        optimizer = started(group, model, X, sync="broadcast")
        assert pending(optimizer)
        with monkeypatch.context() as patch:
            if careless:
                patch.setattr(Sync, "wait", lambda self: None)
            for param in model.parameters():  # no forward: nothing else waits
                param.grad = torch.ones_like(param)
            optimizer.step()
        for pack in optimizer.sync.packs:
            pack.wait()

    run_world(2, run, False)
    with pytest.raises(BufferHazardError, match="was written between its launch and wait"):
        run_world(2, run, True)


class Branches(nn.Module):
    """What no call of the owner announces: a tied weight and a weight of a layer never called."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3)
        self.attention = nn.MultiheadAttention(3, 1)
        self.aside = nn.Linear(3, 3)
        self.last = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.aside.weight, self.aside.bias) + self.inner(x)
        x = x + self.attention(x, x, x)[0]
        return self.last(F.linear(F.linear(x, self.words.weight), self.words.weight.t()))


def test_parameters_that_another_module_reads_are_here_before_it_begins():
    """Before the first module: words, attention's output projection, and aside."""

    def run(group: Any) -> Any:
        model = Branches()
        optimizer = started(group, model, X, steps=3, pack_params=1)
        before = pending(optimizer)
        seen: list[Any] = []
        model.inner.register_forward_pre_hook(lambda *_: seen.append(pending(optimizer)))
        out = model(X)
        names = {p.index: p.slots[0].name for p in optimizer.layout.packs}
        optimizer.close()
        with torch.no_grad():
            assert torch.equal(model(X), out)
        return [names[index] for index in before], [names[index] for index in seen[0]]

    for before, seen in run_world(2, run)[0]:
        assert len(before) == len(list(Branches().parameters()))
        assert seen == [
            "attention.in_proj_weight",
            "attention.in_proj_bias",
            "last.weight",
            "last.bias",
        ]


def test_a_forward_that_reads_past_a_call_it_always_made_is_an_error_in_backward():
    def run(group: Any) -> None:
        model = Layers(2)
        optimizer = started(group, model, X)
        with pytest.raises(RuntimeError, match=r"layers.1.weight.*module being called"):
            F.linear(model.layers[0](X), model.layers[1].weight).sum().backward()
        optimizer.wait_sync()

    run_world(2, run)


def test_an_evaluation_may_read_what_no_training_forward_has_shown():
    """As nn.TransformerEncoderLayer does, whose fused path reads the weights of its layers."""

    class Fused(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled():
                return super().forward(x)
            return F.linear(x, self.layers[-1].weight)

    def run(group: Any, overlap: bool) -> list[Tensor]:
        model = Fused()
        optimizer = started(group, model, X, steps=2, overlap_sync=overlap)
        with torch.no_grad():
            found = [model(X)]
        train(model, optimizer, X)
        found.append(model.eval()(X).detach())
        optimizer.close()
        return found

    plain, _ = run_world(2, run, False)
    assert str(plain) == str(run_world(2, run, True)[0])
    assert all(out.isfinite().all() for rank in plain for out in rank)


def test_only_forwards_of_the_root_make_the_next_sync_overlap():
    """Parts that a script strings together may read anything before they call a module."""

    def run(group: Any) -> list[bool]:
        model = Layers(2)
        optimizer = started(group, model, X)
        found = [bool(pending(optimizer))]
        for forward in (model, lambda x: model.layers[1](model.layers[0](x)), model):
            train(forward, optimizer, X)  # type: ignore[arg-type]
            found.append(bool(pending(optimizer)))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return [*found, bool(pending(optimizer))]

    assert run_world(2, run)[0] == [[True, True, False, True, False]] * 2


def test_hooks_that_compute_a_weight_find_its_parts():
    """weight_norm's hook runs before every forward, and was there before ours."""

    def run(group: Any, overlap: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Layers(3)
        for layer in model.layers:
            torch.nn.utils.weight_norm(layer)
        optimizer = started(group, model, X, steps=3, overlap_sync=overlap)
        optimizer.close()
        return [param.detach() for param in model.parameters()]

    plain, _ = run_world(2, run, False)
    overlapped, _ = run_world(2, run, True)
    assert str(plain) == str(overlapped) and "nan" not in str(plain)


@pytest.mark.parametrize("size", [1, 2])
def test_without_the_option_or_a_second_rank_nothing_is_hooked_or_started(size: int):
    def run(group: Any) -> None:
        fields = {"overlap_sync": group.size() == 1}
        model = Layers()
        hooks = len(model.layers[0]._forward_pre_hooks)
        optimizer = started(group, model, X, **fields)
        assert not pending(optimizer) and len(model.layers[0]._forward_pre_hooks) == hooks
        assert not optimizer.sync.started
        optimizer.wait_sync()

    run_world(size, run)


def test_close_removes_the_hooks_and_waits():
    def run(group: Any) -> None:
        model = Layers()
        optimizer = started(group, model, X)
        optimizer.close()
        for module in model.modules():
            assert not module._forward_pre_hooks and not module._state_dict_pre_hooks
        assert not pending(optimizer)

    run_world(2, run)
