"""Storage of masters and moments: split, in bf16, in 8 bits, on the host."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    CASES,
    adamw,
    assert_same_bits,
    install,
    job,
    parts,
    run_world,
    sgd,
    sharded,
    values,
    whole,
)
from pairwise import thinned
from torch import Tensor, nn

from shardcast import checkpoint
from shardcast.extensions.chance import INDEX, name_hash, random_bits
from shardcast.extensions.low_moments import Bf16, Int8
from shardcast.extensions.split_masters import Split16
from shardcast.memory import codecs
from shardcast.memory.codecs import Codec, Encoded, in_rows
from shardcast.memory.hashing import bits_of
from shardcast.memory.shard import FILL
from shardcast.step.update import fused as update
from shardcast.step.update.fusion import Executor

pytestmark = pytest.mark.timeout(90)

BF16, FP32 = torch.bfloat16, torch.float32
ALL = slice(None)
KINDS: dict[str, dict[str, Any]] = {
    "split16": {"master": "split16"},
    "bf16": {"moments": "bf16"},
    "int8": {"moments": "int8"},
    "offload": {"offload": True},
    "split16 bf16 offload": {"master": "split16", "moments": "bf16", "offload": True},
    "split16 int8 offload": {"master": "split16", "moments": "int8", "offload": True},
}


def zeros(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def encoded(codec: Codec, numel: int, row: int = 64, first: Tensor | None = None) -> Encoded:
    return Encoded(codec, numel, row, zeros, first=first)


def draws(numel: int, step: int, name: int = 0, number: int = 0) -> Tensor:
    """Return the random bits of a parameter's elements in rows of 8, as a 1-d tensor."""
    keys = name + torch.arange(0, numel, 8) * INDEX
    keys = ((keys + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)
    like = torch.empty(len(keys), 8)
    return random_bits(keys, like, torch.tensor(float(step)), number).view(-1)[:numel]


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


# -- split16 ------------------------------------------------------------------------------------


def awkward() -> Tensor:
    """Return each upper half with eight lower ones: ties, their neighbors, extremes, others."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xC0DE])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower) - (1 << 31)
    return bits.flatten().to(torch.int32).view(FP32)


def split(numel: int, row: int = 64) -> tuple[Encoded, Tensor]:
    published = torch.zeros(numel, dtype=BF16)
    return encoded(Split16(), numel, row, published), published


@pytest.mark.parametrize("row", [4, 64])
def test_split_masters_are_exact_for_every_pattern_that_matters(row: int):
    """Subnormals, zeros of both signs, ties, infinities, and values that round to infinity."""
    exact = awkward()
    store, published = split(exact.numel(), row)
    store.write(ALL, exact)
    number = ~exact.isnan()
    assert number.sum() > 500_000
    assert same_bits(store.read(ALL)[number], exact[number])
    cast = exact.to(BF16)  # nearest, ties to even
    assert torch.equal(published.view(torch.int16)[number], cast.view(torch.int16)[number])
    assert store.read(ALL)[~number].isnan().all() and published[~number].isnan().all()


@pytest.mark.parametrize("codec", [Codec(), Split16(), Bf16(), Int8(), Int8(signed=False)], ids=str)
@pytest.mark.parametrize("row", [16, 64])
def test_an_edit_of_some_values_keeps_the_bits_of_all_others(codec: Codec, row: int):
    """This includes the published half, which a script may have written in the meantime."""
    generator = torch.Generator().manual_seed(0)
    exact = awkward()
    exact = exact[exact.isfinite()][:-5]
    exact = exact if codec.signed else exact.abs()
    published = torch.zeros(exact.numel(), dtype=BF16) if codec.has_published else None
    store = encoded(codec, exact.numel(), row, published)
    store.write(ALL, exact)
    if published is not None:
        written = torch.randint(-1, 2, published.shape, generator=generator, dtype=torch.int16)
        published.view(torch.int16).add_(written)
    changed = torch.rand(exact.shape, generator=generator) < 0.01
    wanted = torch.where(changed, exact.flip(0), store.read(ALL))
    before, pieces = store.read(ALL), [piece.clone() for piece in store.pieces]
    store.edit(ALL, changed, wanted)
    after = store.read(ALL)
    rows = codecs.in_rows(changed, row)
    with_others = isinstance(codec, Int8)  # encodes whole rows again
    same = ~(rows.any(1)[:, None].expand_as(rows).flatten()[: exact.numel()])
    same = same if with_others else ~changed
    number = ~before.isnan()
    assert same_bits(after[same & number], before[same & number])
    for piece, old in zip(store.pieces, pieces, strict=True):
        if piece.numel() == exact.numel():
            assert torch.equal(bits_of(piece)[same], bits_of(old)[same])
    if isinstance(codec, (Codec, Split16)) and not isinstance(codec, (Bf16, Int8)):
        assert same_bits(after[changed], wanted[changed])
    else:
        assert not torch.equal(after[changed], before[changed])


def test_ties_come_and_go_with_the_windows_that_are_written():
    generator = torch.Generator().manual_seed(0)
    upper = torch.randint(-(1 << 15), 1 << 15, (4096,), generator=generator) << 16
    tie = (upper | 0x8000).to(torch.int32).view(FP32)
    plain = upper.to(torch.int32).view(FP32)
    finite = torch.where(tie.isfinite() & plain.isfinite(), 1.0, 0.0) > 0
    tie, plain = tie[finite], plain[finite]
    store, _ = split(tie.numel())
    expected = torch.zeros_like(tie)
    for turn in range(200):
        start, stop = sorted(torch.randint(tie.numel(), (2,), generator=generator).tolist())
        start, stop = start - start % 64, stop - stop % 64  # whole rows
        expected[start:stop] = (tie if turn % 2 else plain)[start:stop]
        store.write(slice(start, stop), expected[start:stop])
        assert same_bits(store.read(ALL), expected), turn
    half = slice(128, 300)
    assert same_bits(store.read(half), expected[half])
    store.write(ALL, plain)
    assert not store.parts(ALL)[2].any()


def test_masters_that_are_split_in_pieces_at_set_up_are_the_models_weights():
    model = nn.Linear(1000, 600)
    assert model.weight.numel() > 2 * FILL
    exact = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = sharded(model, param_dtype=BF16, master="split16")
    assert_same_bits(optimizer.full_parameters(), exact)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_weights_set_to_zero_by_hand_have_masters_near_zero(zero: float):
    """The old lower half would make a NaN with a zero as its upper half."""
    exact = torch.cat([torch.randn(4096), torch.tensor([1 + 2**-8, -1 - 2**-8])])
    store, published = split(exact.numel())
    store.write(ALL, exact)
    published.fill_(zero)
    assert store.read(ALL).abs().max() < 1e-40
    assert torch.equal(store.read(ALL).signbit(), torch.full_like(exact, zero).signbit())


def write_by_chance(store: Encoded, exact: Tensor, number: int) -> None:
    bits = in_rows(draws(exact.numel(), number), store.row)
    (rounded,) = store.codec.encode(in_rows(exact, store.row), bits)
    store.first.copy_(rounded.view(-1)[: exact.numel()])


# -- fewer bits -----------------------------------------------------------------------------


def test_rounding_by_chance_is_right_in_the_mean_and_nearest_is_not():
    exact = torch.full((256,), 1 + 2**-9)  # a quarter of the way to the next bf16 value
    store = encoded(Bf16(), 256)
    total = torch.zeros(256, dtype=torch.float64)
    for number in range(400):
        write_by_chance(store, exact, number)
        total += store.read(ALL)
    assert set(store.read(ALL).tolist()) <= {1.0, 1 + 2**-7}
    # 256 x 400 draws with a standard deviation of 2**-7 * 0.43: that of the mean is 1.1e-5.
    assert abs((total / 400).mean() - exact[0]) < 5e-5
    assert (total / 400 - exact[0]).abs().max() < 5 * 2**-7 * 0.44 / 20  # five deviations each
    store.write(ALL, exact.clone())
    assert (store.read(ALL) == 1.0).all(), "negative control: nearest loses the difference"


def test_what_bf16_holds_is_not_changed_by_chance():
    exact = torch.randn(1000).to(BF16).float()
    exact[:4] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    store = encoded(Bf16(), 1000)
    for number in range(50):
        write_by_chance(store, exact, number)
        assert same_bits(store.read(ALL), exact)


def test_chances_are_independent_of_each_other_of_neighbours_and_of_the_next_step():
    numel = 100_000
    first, second = (draws(numel, 5, number=number).double() for number in (0, 1))
    for draw in (first, second):
        assert abs(draw.mean() - (1 << 15)) < 5 * (1 << 16) / 12**0.5 / numel**0.5
        counts = torch.histc(draw, 64, 0, 1 << 16) / (numel / 64)
        assert (counts - 1).abs().max() < 5 * (64 / numel) ** 0.5
    later, third = draws(numel, 6).double(), draws(numel, 5, number=2).double()
    named = draws(numel, 5, name=name_hash("0.weight")).double()
    for other in (second, third, later, named, first.roll(1), first.roll(64)):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 5 / numel**0.5
    # One element over many steps: correlated rounding errors would add up.
    steps = torch.stack([draws(8, n) for n in range(4000)]).double()
    assert (steps.mean(0) / (1 << 15) - 1).abs().max() < 5 * 2 / 12**0.5 / 4000**0.5
    lagged = torch.corrcoef(torch.cat([steps[1:], steps[:-1]], 1).T)[:8, 8:]
    assert lagged.abs().max() < 5 / 4000**0.5


@pytest.mark.parametrize("signed", [True, False])
def test_a_byte_holds_a_moment_to_a_step_of_its_root(signed: bool):
    exact = torch.randn(1000) * torch.rand(1000) ** 4
    exact = exact if signed else exact.square()
    exact[64:128] = 0
    store = encoded(Int8(signed), 1000)
    store.write(ALL, exact)
    kept = store.read(ALL)
    scale = torch.nn.functional.pad(exact, (0, 24)).view(-1, 64).abs().amax(1)
    scale = scale.repeat_interleave(64)[:1000]
    power, steps = (2, 126) if signed else (4, 254)
    root, kept_root = ((x.abs() / scale.clamp_min(1e-38)) ** (1 / power) for x in (exact, kept))
    off = (root - kept_root).abs()
    if signed:
        assert torch.equal(kept.sign(), torch.where(kept == 0, 0.0, exact.sign()))
    else:
        assert ((kept > 0) == (exact > 0)).all(), "no second moment becomes zero"
        off = off[root > 1 / steps]
    assert off.max() < 0.51 / steps
    assert (kept[64:128] == 0).all()
    store.write(ALL, kept.clone())
    assert same_bits(store.read(ALL), kept), "writing it back changes nothing"


@pytest.mark.parametrize("signed", [True, False])
def test_a_byte_holds_infinity_beside_values_that_stay(signed: bool):
    exact = torch.randn(64).abs()
    infinite = exact.clone()
    infinite[5], infinite[6] = torch.inf, -torch.inf if signed else torch.inf
    exact[5:7] = 0
    plain, store = encoded(Int8(signed), 64), encoded(Int8(signed), 64)
    for _ in range(2):  # the second time with the values read
        plain.write(ALL, exact)
        store.write(ALL, infinite)
        expected = plain.read(ALL).clone()
        expected[5:7] = infinite[5:7]
        assert same_bits(store.read(ALL), expected)
        exact, infinite = plain.read(ALL), store.read(ALL)
    store.write(ALL, torch.full((64,), torch.inf))
    assert (store.read(ALL) == torch.inf).all(), "no finite value: the scale is zero"


@pytest.mark.parametrize("fuse", ["eager", "auto"])
def test_a_second_moment_that_overflows_stops_its_own_element_alone(fuse: str):
    """fp32 moments do the same. A NaN in the scale would spread to all weights of the row."""
    weights = {}
    for moments in ("fp32", "int8"):
        model = nn.Linear(64, 2, bias=False)
        nn.init.ones_(model.weight)
        optimizer = sharded(model, param_dtype=BF16, moments=moments, fuse=fuse)
        for _ in range(3):
            grad = torch.ones_like(model.weight)
            grad[1, 7] = 1e30  # its square is infinite
            model.weight.grad = grad
            optimizer.step()
        weights[moments] = optimizer.full_parameters()["weight"]
    for found in weights.values():
        assert found.isfinite().all()
        assert (found < 0.99).sum() == 127 and found[1, 7] > 0.99
    # Only the other row: beside a first moment of 1e29, small ones are stored as zero.
    torch.testing.assert_close(weights["int8"][0], weights["fp32"][0], rtol=0, atol=1e-3)


def test_parts_of_blocks_that_end_in_padding_are_read_and_written():
    store = encoded(Int8(), 100, 32)
    store.write(slice(64, 100), torch.ones(36))
    store.write(slice(32, 40), torch.full((8,), 2.0))
    assert store.read(slice(32, 40)).tolist() == [2.0] * 8
    assert store.read(ALL).sum() == 36 + 16
    assert store.nbytes == 100 + 4 * 4


# -- in a training run ------------------------------------------------------------------------


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the step's numbers and decision as tensors that no code reads on the host."""
    monkeypatch.setattr(update, "choose_executor", lambda *_: Executor(on_host=False))


@pytest.mark.parametrize(("kind", "device"), zip(KINDS, ["cpu", "accelerator"] * 3, strict=True))
def test_a_skipped_step_and_absent_gradients_change_nothing(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    if device == "accelerator":
        as_on_an_accelerator(monkeypatch)
    model, optimizer = job(steps=3, **KINDS[kind])
    before = parts(optimizer)
    install(model, 3)
    assert model.b.weight.grad is not None
    model.b.weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert_same_bits(parts(optimizer), before)
    install(model, 4)
    model.b.weight.grad = None
    optimizer.step()
    after = parts(optimizer)
    still = {key for key in after if key[0] == "b.weight"}
    assert len(still) == 4
    assert_same_bits({k: after[k] for k in still}, {k: before[k] for k in still})
    assert not torch.equal(after["b.bias", 0, 5, "exp_avg"], before["b.bias", 0, 5, "exp_avg"]), (
        "negative control: other parameters moved"
    )


@pytest.mark.parametrize(
    ("kind", "case", "make"),
    thinned(
        3,
        [
            ("split16", "gpt", adamw),
            ("split16", "tiny", adamw),
            ("bf16", "scalars", adamw),
            ("bf16", "gpt", partial(sgd, momentum=0.9)),
            ("int8", "tiny", adamw),
            ("int8", "gpt", partial(sgd, momentum=0.9)),
            ("offload", "scalars", adamw),
            ("split16 bf16 offload", "gpt", adamw),
            ("split16 int8 offload", "scalars", adamw),
            ("split16 int8 offload", "gpt", adamw),
        ],
    ),
)
def test_worlds_of_one_two_and_three_have_the_same_bits_also_from_a_checkpoint(
    kind: str, case: str, make: Any, tmp_path: Path
):
    def run(group: Any, resume: bool) -> tuple[Any, Any]:
        model = CASES[case].build(seed=int(resume))
        optimizer = sharded(model, group, make, param_dtype=BF16, pack_params=3, **KINDS[kind])
        if resume:
            checkpoint.load(tmp_path, model, optimizer)
        for step in range(4 if resume else 0, 6):
            if step == 4 and not resume:
                checkpoint.save(tmp_path, model, optimizer, step=4)
            install(model, step)
            optimizer.step()
        return values(model), parts(optimizer)

    first, _ = run_world(2, lambda group: run(group, False))
    for size in (1, 3):
        ranks, _ = run_world(size, lambda group: run(group, True))
        assert_same_bits(ranks[0][0], first[0][0])
        assert_same_bits(whole(f for _, f in ranks), whole(f for _, f in first))


@pytest.mark.parametrize("source", ["fp32", "int8"])
def test_a_checkpoint_loads_whatever_way_it_was_kept(source: str, tmp_path: Path):
    model, optimizer = job(steps=3, case="gpt", **KINDS.get(source, {}))
    checkpoint.save(tmp_path, model, optimizer, step=3)
    saved = parts(optimizer)
    for kind in ({}, *KINDS.values()):
        other, loaded = job(steps=0, case="gpt", seed=1, **kind)
        checkpoint.load(tmp_path, other, loaded)
        assert_same_bits(values(other), values(model))
        kept = {key[-1] for key in saved}
        if kind.get("moments", "fp32") != "fp32" and kind.get("moments") != source:
            kept -= {"exp_avg", "exp_avg_sq"}  # rounded again
        mine = parts(loaded)
        assert_same_bits(
            *({k: t for k, t in found.items() if k[-1] in kept} for found in (mine, saved))
        )


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_and_model_state_dict_come_back(kind: str):
    model, optimizer = job(steps=3, **KINDS[kind])
    state, weights, before = optimizer.state_dict(), optimizer.full_parameters(), parts(optimizer)
    install(model, 3)
    optimizer.step()
    optimizer.load_state_dict(state)
    assert_same_bits(parts(optimizer), before)

    other, fresh = job(steps=0, seed=1, **KINDS[kind])
    other.load_state_dict(weights)  # fp32: masters take every bit
    assert_same_bits(fresh.full_parameters(), weights)
    assert_same_bits(values(other), {name: value.to(BF16) for name, value in weights.items()})
