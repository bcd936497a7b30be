"""Non-finite gradients, clipping, and the loss scale."""

from __future__ import annotations

import copy
import math
import random
import re
import warnings
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, parts, run_world, sharded, values
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(60)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = math.nan, math.inf


def spoil(model: nn.Module, name: str, element: int, value: float) -> None:
    model.get_parameter(name).grad.view(-1)[element] = value


def skips(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "skipped" in str(w.message)]


def everything(model: nn.Module, optimizer: Any) -> dict[Any, Tensor]:
    """All that a step may change, this rank's."""
    return {**values(model), **parts(optimizer)}


def skipping(group: Any, value: float, bad_rank: int, fields: dict[str, Any], kind: str) -> None:
    """Good step, bad step on one rank, good step; and the same without the bad one."""
    rank = 0 if group is None else group.rank()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        if kind == "rmsprop":
            return torch.optim.RMSprop(model.parameters(), lr=0.01)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    model, other = CASES["mlp"].build(), CASES["mlp"].build()
    optimizer = sharded(model, group, make, **fields)
    spared = sharded(other, group, make, **fields)
    for step in range(4):
        install(model, step)
        if step in (1, 2):
            before = everything(model, optimizer)
            if rank == bad_rank:
                spoil(model, "b.weight", 17, value)
            optimizer.step()
            assert_same_bits(everything(model, optimizer), before)
        else:
            install(other, step)
            optimizer.step()
            spared.step()
            spared.zero_grad()
        optimizer.zero_grad()
    assert_same_bits(everything(model, optimizer), everything(other, spared))
    assert optimizer.skipped_steps == 2 and spared.skipped_steps == 0


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_ranks_bad_gradient_skips_the_step_everywhere_and_changes_nothing(
    size: int, value: float, dtype: torch.dtype
):
    fields = {"param_dtype": dtype, "pack_params": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if size == 1:
            skipping(None, value, 0, fields, "adamw")
        else:
            run_world(size, skipping, value, size - 1, fields, "adamw")
    assert len(skips(caught)) == 2 * size
    assert all("parameter 'b.weight', element 17" in message for message in skips(caught))


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("kind", ["sgd", "rmsprop"])
@pytest.mark.parametrize("fields", [{}, {"partition": "whole"}, {"max_grad_norm": 1.0},
                                    {"norm_type": INF}, {"norm_type": 1.0}], ids=str)  # fmt: skip
def test_a_skip_changes_nothing_whatever_the_options(fields: dict[str, Any], kind: str):
    run_world(2, skipping, NAN, 1, {"param_dtype": BF16, **fields}, kind)


def test_a_skipped_first_step_leaves_no_trace():
    model = CASES["mlp"].build()
    optimizer = sharded(model, param_dtype=BF16)
    before = values(model)
    install(model, 0)
    spoil(model, "a.bias", 0, INF)
    with pytest.warns(UserWarning, match="step skipped"):
        optimizer.step()
    assert_same_bits(values(model), before)
    for state in optimizer.state.values():
        assert state["step"] == 0
        assert not any(bool(tensor.any()) for tensor in state.values())


@pytest.mark.filterwarnings("ignore:step skipped")
def test_without_the_skip_a_nan_would_spread(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the comparison fails when the decision never skips."""
    from shardcast.step.combine.combine import Combine

    decide = Combine.decide

    def never(self: Combine, *args: Any) -> Any:
        decision = decide(self, *args)
        decision.skip.fill_(False)
        return decision

    monkeypatch.setattr(Combine, "decide", never)
    with pytest.raises(AssertionError):
        run_world(2, skipping, NAN, 1, {"param_dtype": BF16}, "adamw")


def bad_on(group: Any, bad_rank: int, name: str, element: int, partition: str) -> None:
    model = CASES["gpt"].build()
    optimizer = sharded(model, group, param_dtype=BF16, pack_params=3, partition=partition)
    install(model, 0)
    if group.rank() == bad_rank:
        spoil(model, name, element, NAN)
    optimizer.step()


def messages_of(*args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(2, bad_on, *args)
    return skips(caught)


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize(
    ("name", "element"), [("wte.weight", 0), ("blocks.1.fc.weight", 647), ("ln.bias", 17)]
)
def test_the_warning_names_parameter_and_element(name: str, element: int, partition: str):
    for bad_rank in (0, 1):
        messages = messages_of(bad_rank, name, element, partition)
        assert len(messages) == 2 and messages[0] == messages[1]
        assert f"parameter {name!r}, element {element}" in messages[0]


def test_the_warning_names_the_rank_whose_gradient_was_bad():
    for bad_rank in (0, 1):
        # Element 0 of the first parameter belongs to rank 0 under the even partition.
        messages = messages_of(bad_rank, "wte.weight", 0, "even")
        assert re.search(rf"rank {bad_rank}\b", messages[0]), messages[0]
        assert not re.search(rf"rank {1 - bad_rank}\b", messages[0]), messages[0]


def test_on_an_accelerator_the_report_claims_no_more_than_the_span():
    optimizer = sharded(CASES["mlp"].build(), None)
    skips = optimizer.engine.combine.skips
    skips._device = torch.device("cuda")  # of which only the kind is asked here
    first = optimizer.layout.packs[0].slots[0].name
    assert skips._locate([0]) == f"in the span of rank 0 that begins in parameter {first!r}"


def always_bad(group: Any) -> list[str]:
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, param_dtype=BF16, max_skipped_steps=3)
    outcomes = []
    for step in range(7):
        install(model, step)
        if step != 2 and group.rank() == 1:
            spoil(model, "c.bias", 1, INF)
        try:
            optimizer.step()
            outcomes.append("ok")
        except RuntimeError as error:
            outcomes.append(str(error))
        optimizer.zero_grad()
    return outcomes


@pytest.mark.filterwarnings("ignore:step skipped")
def test_too_many_skips_in_a_row_raise_on_every_rank_and_say_where():
    ranks, _ = run_world(2, always_bad)
    for outcomes in ranks:
        assert outcomes[:5] == ["ok"] * 5, "two in a row, one good, two in a row"
        for message in outcomes[5:]:
            assert "in a row were skipped" in message
            assert "parameter 'c.bias', element 1" in message


# -- clipping -------------------------------------------------------------------------------------


def clip_once(group: Any, norm_type: float, how: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = CASES["mlp"].build()
    make = lambda m: torch.optim.SGD(m.parameters(), lr=1.0)  # noqa: E731
    limit = {"max_grad_norm": 0.05} if how == "option" else {}
    optimizer = sharded(model, group, make, norm_type=norm_type, **limit)
    install(model, 3)
    if how == "call":
        norm = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        assert torch.equal(norm, optimizer.grad_norm)
    else:
        optimizer.step()
    return optimizer.grad_norm, values(model)


@pytest.mark.parametrize("how", ["call", "option"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF])
def test_the_clipped_step_equals_torchs_clip_of_the_whole_gradient(norm_type: float, how: str):
    model = CASES["mlp"].build()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    install(model, 3)
    before = values(model)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
    assert expected > 0.05
    plain.step()
    ranks, _ = run_world(3, clip_once, norm_type, how)
    for norm, after in ranks:
        assert torch.equal(norm, ranks[0][0])
        # torch takes the norm of norms in fp32: a few roundings.
        torch.testing.assert_close(norm, expected, rtol=2**-21, atol=0)
        for name, tensor in after.items():
            change = (values(model)[name] - before[name]).abs().max()
            torch.testing.assert_close(tensor, values(model)[name], rtol=2**-23,
                                       atol=float(change) * 2**-20)  # fmt: skip


def test_padding_and_owners_do_not_enter_the_norm():
    model = CASES["scalars"].build()
    optimizer = sharded(model, param_dtype=BF16, alignment=1024)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    count = sum(param.numel() for param in model.parameters())
    assert optimizer.grad_norm == torch.tensor(float(count)).sqrt()


def test_a_clip_whose_gradients_were_dropped_is_forgotten():
    """After clip, look at the norm, drop the batch: the next step has a decision of its own."""
    model, other = CASES["mlp"].build(), CASES["mlp"].build()
    optimizer, expected = sharded(model), sharded(other)
    install(model, 0)
    optimizer.clip_grad_norm_(1e-3)
    model.zero_grad()
    for m, opt in ((model, optimizer), (other, expected)):
        CASES["mlp"].loss(m, CASES["mlp"].batch(0)).backward()
        opt.step()
    assert_same_bits(values(model), values(other))


# -- loss scale -----------------------------------------------------------------------------------


def scales(group: Any, plan: list[int | None], interval: int) -> list[tuple[float, int]]:
    """Scale and skips after each step; ``plan`` says which rank overflows in it."""
    rank = 0 if group is None else group.rank()
    model = nn.Linear(3, 2)
    optimizer = sharded(
        model, group, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3), param_dtype=FP16,
        loss_scale="dynamic", loss_scale_init=2.0**4, loss_scale_growth_interval=interval,
    )  # fmt: skip
    seen = []
    for bad in plan:
        # Small enough for fp16 at the largest scale that sixty steps can reach.
        loss = model(torch.ones(1, 3)).float().sum() * 2.0**-14
        if bad == rank:
            loss = loss * INF
        before = everything(model, optimizer)
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        if bad is not None:
            assert_same_bits(everything(model, optimizer), before)
        optimizer.zero_grad()
        seen.append((float(optimizer.loss_scale), optimizer.skipped_steps))
    return seen


def torch_scales(plan: list[int | None], interval: int) -> list[tuple[float, int]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=interval)
    weight = nn.Parameter(torch.zeros(()))
    plain = torch.optim.SGD([weight], lr=1e-3)
    seen, skips = [], 0
    for bad in plan:
        scaler.scale(weight * (1.0 if bad is None else INF)).backward()
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
        skips += bad is not None
        seen.append((scaler.get_scale(), skips))
    return seen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1, 2])
def test_the_dynamic_scale_backs_off_and_grows_as_torchs_grad_scaler(size: int, seed: int):
    choose = random.Random(seed)
    rate = 0.15 + 0.2 * seed
    plan = [choose.randrange(size) if choose.random() < rate else None for _ in range(60)]
    expected = torch_scales(plan, interval=3)
    assert len({scale for scale, _ in expected}) > 3, "the scale moves both ways"
    if size == 1:
        ranks = [scales(None, plan, 3)]
    else:
        ranks, _ = run_world(size, scales, plan, 3)
    for seen in ranks:
        assert seen == expected


def test_the_scale_leaves_no_trace_in_what_is_learned():
    """A power of two is exact both ways, so fp32 training with it equals training without."""
    model, twin = CASES["mlp"].build(), CASES["mlp"].build()
    with_scale, without = sharded(model, loss_scale=1024.0), sharded(twin)
    for step in range(5):
        for m, optimizer in ((model, with_scale), (twin, without)):
            optimizer.scale_loss(CASES["mlp"].loss(m, CASES["mlp"].batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(with_scale.grad_norm, without.grad_norm)
    assert_same_bits(values(model), values(twin))


def test_fp16_has_a_dynamic_scale_and_bf16_none():
    dynamic = sharded(nn.Linear(2, 2), param_dtype=FP16, loss_scale=None)
    assert dynamic.loss_scale == 2.0**16
    assert sharded(nn.Linear(2, 2), param_dtype=BF16).loss_scale is None
    loss = torch.ones((), requires_grad=True)
    assert sharded(nn.Linear(2, 2), param_dtype=BF16).scale_loss(loss) is loss


@pytest.mark.parametrize("order", ["zero, scale", "scale, zero"])
def test_the_loss_may_be_scaled_before_or_after_gradients_are_cleared(order: str):
    model = nn.Linear(2, 2)
    optimizer = sharded(model, param_dtype=FP16, loss_scale=8.0)
    for _ in range(2):
        loss = model(torch.ones(1, 2)).float().sum()
        if order == "zero, scale":
            optimizer.zero_grad()
        loss = optimizer.scale_loss(loss)
        if order == "scale, zero":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_an_unscaled_loss_is_refused_in_every_step_that_needs_a_scale():
    model = copy.deepcopy(nn.Linear(2, 2))
    optimizer = sharded(model, param_dtype=FP16, loss_scale="dynamic")
    for _ in range(2):
        model(torch.ones(1, 2)).float().sum().backward()
        with pytest.raises(RuntimeError, match=r"optimizer\.scale_loss\(loss\)\.backward\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.scale_loss(model(torch.ones(1, 2)).float().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
