"""``averages=``: moving averages of the masters, compared with averages by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, adamw, advance, assert_same_bits, install, run_world, sharded, values
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardcast
from shardcast import checkpoint
from shardcast.optimizer.sharded import packed_of

BF16, FP32 = torch.bfloat16, torch.float32


def small(group: Any = None, **fields: Any) -> tuple[nn.Module, Any]:
    model = CASES["mlp"].build()
    fields = {"param_dtype": BF16, "averages": {"ema": 0.5}, **fields}
    return model, sharded(model, group, **fields)


@pytest.mark.parametrize(
    "fields", [{}, {"param_dtype": FP32}, {"master": "split16"}, {"overlap_sync": True}], ids=str
)
def test_an_average_is_in_the_model_inside_averaged_and_the_same_bits_are_back_after_it(
    fields: dict[str, Any],
):
    def run(group: Any) -> None:
        model, optimizer = small(group, **fields)
        advance(model, optimizer, 0, 3)
        optimizer.wait_sync()
        weights, masters = values(model), optimizer.full_parameters()
        other = {name: weight + 1 for name, weight in weights.items()}
        state = optimizer.state_dict()["state"]
        average = optimizer.full_parameters("ema")
        with optimizer.averaged("ema"):
            for name, value in average.items():
                assert torch.equal(value.to(weights[name].dtype), values(model)[name])
                assert not torch.equal(weights[name], values(model)[name])
            assert_same_bits(optimizer.full_parameters(), masters)
            inside = optimizer.state_dict()["state"]
            for number, values_of_param in state.items():
                assert_same_bits(values_of_param, inside[number])
            for call in (
                optimizer.step,
                optimizer.close,
                packed_of(optimizer).publish,
                lambda: optimizer.averaged("ema").__enter__(),
                lambda: checkpoint.load_plain(model, optimizer, other),
                lambda: optimizer.load_state_dict({}),
            ):
                with pytest.raises(RuntimeError, match="'ema'"):
                    call()
        assert_same_bits(values(model), weights)
        assert_same_bits(optimizer.full_parameters(), masters)
        twin, plain = small(group, **{**fields, "averages": {}})
        advance(twin, plain, 0, 3)
        advance(model, optimizer, 0, 1)
        advance(twin, plain, 0, 1)
        for one in (optimizer, plain):
            one.wait_sync()
        assert_same_bits(values(model), values(twin))  # training is not affected

    run_world(2, run)


def test_an_unknown_average_is_refused_on_every_rank_though_only_one_asks_for_it():
    def run(group: Any) -> str:
        _, optimizer = small(group)
        with pytest.raises(Exception, match="expected the name of an average, 'ema'") as caught:
            optimizer.averaged("emu" if group.rank() else "ema").__enter__()
        with pytest.raises(ValueError, match="ema"):
            optimizer.full_parameters("emu")
        return type(caught.value).__name__

    assert run_world(2, run)[0] == ["ValueError", "ValueError"]


def test_inside_averaged_written_weights_are_dropped_with_a_warning_and_a_backward_is_refused():
    """The weights are not those of the forward."""
    model, optimizer = small()
    advance(model, optimizer, 0, 3)
    weights = values(model)
    inputs, targets = CASES["mlp"].batch(0)
    loss = nn.functional.mse_loss(model(inputs), targets.to(BF16))
    with pytest.warns(UserWarning, match="averaged"), optimizer.averaged("ema"):
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()
        with torch.no_grad():
            model.a.weight.zero_()
    assert_same_bits(values(model), weights)


def test_an_average_in_bf16_moves_as_one_in_fp32_and_rounded_to_nearest_it_stands_still():
    averages = {"exact": 0.9995, "low": {"decay": 0.9995, "stored": "bf16"}}
    model = CASES["gpt"].build()
    optimizer = sharded(
        model, None, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), averages=averages
    )
    start = {name: value.clone() for name, value in optimizer.full_parameters().items()}
    nearest = {name: value.to(BF16) for name, value in start.items()}
    for _ in range(60):
        install(model, 0)
        optimizer.step()
        for name, master in optimizer.full_parameters().items():
            nearest[name] = nearest[name].float().lerp_(master, 0.0005).to(BF16)
    exact, low = (optimizer.full_parameters(name) for name in averages)

    def lost(average: dict[str, Tensor]) -> float:
        """Return the share of the exact average's movement that another one misses."""
        along = sum(((average[n].float() - s) * (exact[n] - s)).sum() for n, s in start.items())
        return 1 - float(along / sum((exact[n] - s).square().sum() for n, s in start.items()))

    assert lost(low) < 0.05 and lost(nearest) > 0.5
    report = optimizer.memory_report()
    assert report["averages"] < report["parameters"] * 1.6  # 4 + 2 bytes, and a key per row


def test_averages_are_exported_and_added_dropped_and_replaced_at_a_resume(tmp_path: Path):
    model, optimizer = small()
    advance(model, optimizer, 0, 3)
    checkpoint.save(tmp_path / "one", model, optimizer, step=3)
    checkpoint.export(tmp_path / "one", tmp_path / "out", weights="ema")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert_same_bits(exported, optimizer.full_parameters("ema"))
    with pytest.raises(ValueError, match=r"\['ema'\]"):
        checkpoint.export(tmp_path / "one", tmp_path / "other", weights="emu")
    state = optimizer.state_dict()
    for load in ("checkpoint", "state_dict"):
        twin, other = small(averages={"new": 0.5})
        if load == "checkpoint":
            checkpoint.load(tmp_path / "one", twin, other)
        else:
            other.load_state_dict(state)
        assert_same_bits(other.full_parameters("new"), optimizer.full_parameters())
        assert not any(
            "ema" in key for held in other.state_dict()["state"].values() for key in held
        )
        before = other.full_parameters()
        advance(twin, other, 0, 1)
        for name, master in other.full_parameters().items():
            expected = before[name].lerp(master, 0.5)
            assert torch.equal(other.full_parameters("new")[name], expected), (load, name)
    given = {name: torch.randn_like(value) for name, value in before.items()}
    other.load_average("new", given, steps=7)
    assert_same_bits(other.full_parameters("new"), given)
    for wrong in (given | {"a.weight": torch.zeros(3)}, {}):
        with pytest.raises(ValueError, match=r"a\.weight"):
            other.load_average("new", wrong)
    assert_same_bits(other.full_parameters("new"), given)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_loaded_average_counts_its_steps_on_ranks_that_own_nothing(ranks: int, tmp_path: Path):
    """The ranks own nothing of one of two optimizers, or of a matrix with only two blocks."""

    def two(model: Any) -> Any:
        others = [model[0].bias, *model[1].parameters()]
        return [torch.optim.AdamW([model[0].weight]), torch.optim.RMSprop(others)]

    def begun(group: Any) -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 3))
        published = {"fp8_block128": ["0"]}
        averages = {"ema": {"decay": 0.9, "warmup": True}}
        return model, shardcast.shard(
            model, two(model), process_group=group, published=published, averages=averages
        )

    def run(group: Any) -> list[str]:
        model, optimizer = begun(group)
        for _ in range(2):
            install(model, 0)
            optimizer.step()
        given = {name: torch.ones_like(value) for name, value in model.named_parameters()}
        with pytest.raises((ValueError, RuntimeError), match="steps: expected"):
            optimizer.load_average("ema", given, steps=-1 if group.rank() else 0)
        with pytest.raises(ValueError, match="steps: expected one number"):
            optimizer.load_average("ema", given, steps=group.rank())
        optimizer.load_average("ema", given, steps=0)
        digests = [optimizer.digest()]
        checkpoint.save(tmp_path, model, optimizer, step=1, digest=True)
        for load in ("checkpoint", "state_dict"):
            state = optimizer.state_dict()
            optimizer.close()
            model, optimizer = begun(group)
            if load == "checkpoint":
                checkpoint.load(tmp_path, model, optimizer)
            else:
                optimizer.load_state_dict(state)
            digests.append(optimizer.digest())
        return digests

    for digests in run_world(ranks, run)[0]:
        assert len({*digests}) == 1


def test_half_lives_are_decays_and_a_frozen_parameter_gets_the_average_that_is_loaded_for_it():
    def run(group: Any, frozen: bool, ema: Any) -> dict[str, Tensor]:
        model, optimizer = small(group, averages={"ema": ema}, pack_params=1)
        if frozen:
            model.a.weight.requires_grad_(False)
        before = values(model)
        optimizer.load_average("ema", {name: value + 1 for name, value in before.items()}, 2)
        assert_same_bits(values(model), before)
        advance(model, optimizer, 0, 3)
        return optimizer.full_parameters("ema")

    for frozen in (False, True):
        of_decay, of_half_life = (
            run_world(2, lambda group, ema=ema, frozen=frozen: run(group, frozen, ema))[0][0]
            for ema in (0.5**0.5, {"half_life": 2})
        )
        assert_same_bits(of_decay, of_half_life)
    kept = small()[0].a.weight.detach().float()
    assert float((of_decay["a.weight"] - kept).min()) > 0.3  # the added 1, times the decay cubed


@pytest.mark.parametrize("kind", [adamw, lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2)])
def test_metrics_change_no_bit_of_an_average_that_is_rounded_by_chance(kind: Any):
    """NAdam writes the masters itself, so a step with metrics treats them as state."""

    def average(metrics: Any) -> Any:
        model = CASES["mlp"].build()
        averages = {"ema": {"decay": 0.9, "stored": "bf16"}}
        optimizer = sharded(model, None, kind, averages=averages, metrics=metrics)
        advance(model, optimizer, 0, 3)
        return optimizer.full_parameters("ema")

    plain = average(False)
    for metrics in (True, 2):
        assert_same_bits(average(metrics), plain)


def test_what_is_written_to_buffers_inside_averaged_is_undone_and_a_checkpoint_has_the_trainings(
    tmp_path: Path,
):
    """``update_bn`` writes buffers like this."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = sharded(model, averages={"ema": 0.5}, param_dtype=FP32)
    batch = torch.randn(8, 4)
    model(batch).square().mean().backward()
    optimizer.step()
    training = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with optimizer.averaged("ema"):
        model(batch + 1)
        assert not torch.equal(model[1].running_mean, training["1.running_mean"])
        checkpoint.save(tmp_path, model, optimizer, step=1)
    assert_same_bits(dict(model.named_buffers()), training)
    model(batch + 2)
    checkpoint.load(tmp_path, model, optimizer)
    assert_same_bits(dict(model.named_buffers()), training)


def test_an_average_is_loaded_by_the_keys_of_a_state_dict_too():
    """torch's checkpoint wrapper uses other names in ``named_parameters`` than in state dicts."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), nn.Linear(3, 2))
    optimizer: Any = sharded(model, averages={"ema": 0.5})
    named = dict(model.named_parameters())
    for factor, given in ((2, model.state_dict()), (3, named)):
        optimizer.load_average("ema", {name: factor * value for name, value in given.items()})
        expected = {name: factor * value.detach() for name, value in named.items()}
        assert_same_bits(optimizer.full_parameters("ema"), expected)
