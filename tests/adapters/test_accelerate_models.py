"""Accelerate with several models or optimizers, as in the examples of Accelerate and diffusers."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from test_accelerate_processes import fresh
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim.lr_scheduler import ExponentialLR

from shardcast.accelerate import ShardcastAccelerator
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(90)
STEPS = 6


def accelerator_of(kind: str, config: Any = None, **options: Any) -> Any:
    fresh()
    if kind == "ddp":
        return Accelerator(cpu=True, **options)
    return ShardcastAccelerator(cpu=True, shardcast_config=config or {}, **options)


def net(seed: int, *widths: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(it for layer in layers for it in (layer, nn.LeakyReLU(0.2))))


def batch(accelerator: Any, step: int, width: int) -> torch.Tensor:
    rank = accelerator.process_index
    return torch.randn(6, width, generator=torch.Generator().manual_seed(10 * step + rank))


class Gan:
    """Two models, each with its own optimizer and loss, like the DCGAN of torch's examples."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        models = net(1, 5, 9, 4), net(2, 4, 8, 1)  # generator, critic
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.999)) for m in models]
        self.models = models
        self.generator, self.critic, self.of_generator, self.of_critic = accelerator.prepare(
            *models, *optimizers
        )

    def step(self, step: int) -> list[float]:
        accelerator, generator, critic = self.accelerator, self.generator, self.critic
        real, noise = batch(accelerator, step, 4), batch(accelerator, step + 1000, 5)
        ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
        with accelerator.accumulate(generator, critic):
            self.of_critic.zero_grad()
            on_real = bce(critic(real), ones)
            accelerator.backward(on_real)
            fake = generator(noise)
            on_fake = bce(critic(fake.detach()), zeros)
            accelerator.backward(on_fake)
            self.of_critic.step()
            self.of_generator.zero_grad()
            fooled = bce(critic(fake), ones)
            accelerator.backward(fooled)  # also the critic's, which zero_grad drops
            self.of_generator.step()
        return [float(it.detach()) for it in (on_real, on_fake, fooled)]


class DreamBooth:
    """One optimizer for a UNet and its text encoder, like train_dreambooth.py of diffusers."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.models = net(3, 7, 9, 4), net(4, 5, 7)  # parameters of equal names
        optimizer = torch.optim.AdamW(
            itertools.chain(*(it.parameters() for it in self.models)), lr=1e-2
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.unet, self.text, self.optimizer, self.schedule = accelerator.prepare(
            *self.models, optimizer, schedule
        )

    def step(self, step: int) -> list[float]:
        accelerator = self.accelerator
        with accelerator.accumulate(self.unet, self.text):
            loss = self.unet(self.text(batch(accelerator, step, 5))).square().mean()
            accelerator.backward(loss)
            norm = 0.0
            if accelerator.sync_gradients:
                params = itertools.chain(self.unet.parameters(), self.text.parameters())
                norm = float(accelerator.clip_grad_norm_(params, 0.05))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return [float(loss.detach()), norm]


class Apart:
    """Two optimizers for one model, each with its own schedule."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.models = (net(5 + accelerator.process_index, 5, 9, 4),)  # rank 0's weights must win
        matrices = [p for p in self.models[0].parameters() if p.dim() == 2]
        biases = [p for p in self.models[0].parameters() if p.dim() == 1]
        both = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(biases, lr=1e-2)
        schedules = ExponentialLR(both[0], 0.5), ExponentialLR(both[1], 0.9)
        self.model, *self.parts = accelerator.prepare(*self.models, *both, *schedules)

    def step(self, step: int) -> list[float]:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = self.model(batch(accelerator, step, 5)).square().mean()
            accelerator.backward(loss)
            norm = 0.0
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(self.model.parameters(), 0.05))
            for part in self.parts:
                part.step()
            for optimizer in self.parts[:2]:
                optimizer.zero_grad()
        rates = [it.get_last_lr()[0] for it in self.parts[2:]]
        return [float(loss.detach()), norm, *rates]


SCRIPTS = {"gan": Gan, "dreambooth": DreamBooth, "apart": Apart}


def train(
    group: Any, kind: str, name: str, options: dict[str, Any], config: Any = None
) -> tuple[Any, Any]:
    script: Any = SCRIPTS[name](accelerator_of(kind, config, **options))
    log = [script.step(step) for step in range(STEPS)]
    for prepared in getattr(script.accelerator, "sharded", ()):
        prepared.optimizer.wait_sync()
    weights = [p.detach().float().clone() for model in script.models for p in model.parameters()]
    return torch.tensor(log), weights


@functools.cache
def under_ddp(gloo: SpawnedWorld, name: str, *plain: tuple[str, Any]) -> list[tuple[Any, Any]]:
    return gloo.run(train, "ddp", name, dict(plain))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("options", "config", "tolerance"),
    [
        ({}, {}, 2e-6),
        ({"gradient_accumulation_steps": 2}, {"overlap_sync": True}, 2e-6),
        ({"mixed_precision": "bf16"}, {}, 3e-2),
        ({"mixed_precision": "fp16"}, {"loss_scale": 128.0}, 3e-2),
    ],
)
def test_scripts_train_as_under_ddp(
    gloo: SpawnedWorld, name: str, options: dict[str, Any], config: Any, tolerance: float
) -> None:
    plain = [item for item in options.items() if item[1] != "fp16"]  # not available on CPUs
    expected = under_ddp(gloo, name, *plain)
    for rank, (log, weights) in enumerate(gloo.run(train, "ours", name, options, config)):
        assert (log - expected[rank][0]).abs().max() <= tolerance
        for ours, stock in zip(weights, expected[rank][1], strict=True):
            assert (ours - stock).abs().max() <= tolerance


def resumed(_group: Any, name: str, folder: str, precision: str) -> tuple[Any, Any]:
    options = {"mixed_precision": precision}
    options |= {"config": {"loss_scale_init": 64.0}} if precision == "fp16" else {}
    whole: Any = SCRIPTS[name](accelerator_of("ours", **options))
    log = []
    for step in range(STEPS):
        if step == 3:
            whole.accelerator.save_state(folder)
        log.append(whole.step(step))
    again: Any = SCRIPTS[name](accelerator_of("ours", **options))
    again.accelerator.load_state(folder)
    rest = [again.step(step) for step in range(3, STEPS)]
    weights = [[*map(torch.clone, it.parameters())] for it in (*whole.models, *again.models)]
    half = len(whole.models)
    return (log[3:], weights[:half]), (rest, weights[half:])


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "bf16") for name in SCRIPTS), ("dreambooth", "no"), ("dreambooth", "fp16")],
)
def test_the_state_of_each_script_is_resumed_exactly_and_ranks_are_equal(
    gloo: SpawnedWorld, name: str, precision: str, tmp_path: Path
) -> None:
    ranks = gloo.run(resumed, name, str(tmp_path), precision)
    for (log, weights), (again, loaded) in ranks:
        assert log == again
        first = zip(itertools.chain(*weights), itertools.chain(*ranks[0][0][1]), strict=True)
        assert all(torch.equal(one, other) for one, other in first)
        pairs = zip(itertools.chain(*weights), itertools.chain(*loaded), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def exact_states(_group: Any, name: str) -> list[tuple[Any, Any]]:
    script: Any = SCRIPTS[name](accelerator_of("ours", mixed_precision="bf16"))
    script.step(0)
    script.models[0][0].weight.data[0, 0] = 2.0  # written after the step; saved like this
    found = []
    for model in script.models:
        state = script.accelerator.get_state_dict(model)
        found.append((state, {key: value.clone() for key, value in model.state_dict().items()}))
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_model_has_its_fp32_state_on_rank_0(gloo: SpawnedWorld, name: str) -> None:
    for rank, states in enumerate(gloo.run(exact_states, name)):
        for exact, low in states:
            assert list(exact) == list(low)
            for key, value in low.items():
                assert torch.equal(exact[key].to(value.dtype), value)
            finer = any(exact[key].dtype == torch.float32 for key in exact)
            assert finer == (rank == 0)


def test_weights_that_a_script_saves_in_low_precision_are_named(tmp_path: Path) -> None:
    accelerator = accelerator_of("sharded", {"param_dtype": "bf16"})
    model = net(1, 5, 4)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save(accelerator.get_state_dict(model), tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt")["0.weight"].dtype == torch.float32
    low = accelerator.unwrap_model(model).state_dict()
    with pytest.warns(UserWarning, match=r"in bfloat16.*get_state_dict\(model\).*shardcast export"):
        accelerator.save(low, tmp_path / "low.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save({"step": 1, "loss": torch.zeros(3)}, tmp_path / "others.pt")


def test_a_state_of_fewer_models_is_refused(tmp_path: Path) -> None:
    gan = Gan(accelerator_of("ours"))
    gan.accelerator.save_state(str(tmp_path))
    one = accelerator_of("ours")
    model = net(1, 5, 9, 4)
    one.prepare(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="load_state: expected the states of 1"):
        one.load_state(str(tmp_path))


@pytest.mark.filterwarnings("ignore:step skipped")
def test_a_skipped_step_of_one_model_does_not_hold_back_the_schedule_of_another() -> None:
    gan = Gan(accelerator_of("ours"))
    optimizers = gan.of_generator, gan.of_critic
    plain = [one for it in optimizers for one in packed_of(it.optimizer).originals.optimizers]
    schedules = gan.accelerator.prepare(*(ExponentialLR(one, 0.5) for one in plain))
    for optimizer, schedule, factor in zip(optimizers, schedules, (math.nan, 1.0), strict=True):
        gan.accelerator.backward(gan.critic(gan.generator(torch.ones(6, 5))).sum() * factor)
        optimizer.step()
        schedule.step()
        for one in optimizers:
            one.zero_grad()
    assert [it.get_last_lr() for it in schedules] == [[1e-2], [5e-3]]


def test_several_loss_scales_that_change_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_scale: expected one fixed number"):
        Gan(accelerator_of("ours", mixed_precision="fp16"))


def test_one_norm_over_models_that_are_sharded_apart_is_refused() -> None:
    gan = Gan(accelerator_of("ours"))
    params = [*gan.generator.parameters(), *gan.critic.parameters()]
    with pytest.raises(ValueError, match=r"clip_grad_norm_: .*once for each"):
        gan.accelerator.clip_grad_norm_(params, 1.0)
    with pytest.raises(RuntimeError, match="expected one sharded optimizer, got 2"):
        _ = gan.accelerator.sharded_optimizer


def test_a_model_is_not_sharded_with_two_optimizers_from_two_calls() -> None:
    booth = DreamBooth(accelerator_of("ours"))
    again = torch.optim.SGD(booth.text.parameters())
    with pytest.raises(RuntimeError, match="a list that holds all parameters"):
        booth.accelerator.prepare(again)
    booth.accelerator.free_memory()
    with pytest.raises(RuntimeError, match=r"free_memory\(model\)"):  # the optimizer still exists
        accelerator_of("ours").prepare(booth.models[1], again)
