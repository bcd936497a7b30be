"""Random stories of runs that are saved and go on otherwise, next to plain torch and its average.

Between two parts of a run the ranks, the partition, the frozen layers and the forms of the state
may change, and layers are frozen and unfrozen within a part. Weights, moments and averages are
those of plain torch to the bit, and no checkpoint is refused by its own digest.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, own_state, run_world, sharded
from pairwise import seeds
from torch import Tensor, nn

from shardcast import checkpoint

pytestmark = pytest.mark.timeout(120)
LAYERS, WARM, DECAY = 4, {"decay": 0.9, "warmup": True}, 0.9


def build(frozen: frozenset[int], seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(5, 5, bias=number != 1) for number in range(LAYERS)))
    freeze(model, frozen)
    return model


def freeze(model: nn.Sequential, frozen: frozenset[int]) -> None:
    """Freeze these layers, and no others."""
    for number, layer in enumerate(model):
        layer.requires_grad_(number not in frozen)


def some_layers(dice: random.Random) -> frozenset[int]:
    return frozenset(n for n in range(LAYERS) if dice.random() < 0.3)


def groups_of(model: nn.Sequential, layers: int) -> list[dict[str, Any]]:
    """The first group has one layer, of which some ranks own nothing; others are added."""
    return [{"params": list(layer.parameters())} for layer in model[:layers]]


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        param.grad = grad.to(param.dtype) if param.requires_grad else None


def average_of(seed: int) -> dict[str, Tensor]:
    """An average from elsewhere, of all parameters."""
    return {name: param.detach() for name, param in build(frozenset(), seed).named_parameters()}


class Plain:
    """The oracle: torch's AdamW, and an average of all weights with a warm-up."""

    def __init__(self) -> None:
        self.model, self.layers = build(frozenset()), 1
        self.optimizer = torch.optim.AdamW(groups_of(self.model, 1), lr=1e-2)
        self.averages: dict[str, Tensor] = {}
        self.forget()

    def forget(self) -> None:
        self.steps = 0
        self.averages = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def step(self, seed: int) -> None:
        gradients(self.model, seed)
        self.optimizer.step()
        self.steps += 1
        decay = min((1 + self.steps) / (10 + self.steps), DECAY)
        for name, param in self.model.named_parameters():
            self.averages[name].lerp_(param.detach(), 1 - decay)

    def extend(self) -> None:
        for group in groups_of(self.model, self.layers + 1)[self.layers :]:
            self.optimizer.add_param_group(group)
            self.layers += 1

    def load_average(self, seed: int) -> None:
        """Of what is trained, frozen or not; all else is its own average."""
        given, self.steps = average_of(seed), seed
        self.averages |= {name: given[name] for name in self.trained()}

    def trained(self) -> list[str]:
        return [name for name, _ in self.model[: self.layers].named_parameters()]

    def moments(self) -> dict[str, Tensor]:
        names = {param: name for name, param in self.model.named_parameters()}
        return {
            f"{names[param]}/{key}": value
            for param in self.model.parameters()
            for key, value in own_state(self.optimizer, param).items()
        }


def tell(seed: int) -> list[dict[str, Any]]:
    """A story: parts of a run, each with what holds in it and what is done."""
    dice = random.Random(seed)
    inexact = seed % 3 == 2  # moments of int8: of these the digest alone is looked at
    story, layers = [], 1
    for _ in range(4):
        frozen = some_layers(dice)
        averaged = dice.random() < 0.8
        acts: list[tuple[str, int]] = []
        for _ in range(dice.randint(1, 5)):
            kind = dice.choice(["step", "step", "step", "extend", "average", "freeze"])
            if (kind == "extend" and layers == LAYERS) or (kind == "average" and not averaged):
                kind = "step"
            layers += kind == "extend"
            acts.append((kind, dice.randrange(1000)))
        fields: dict[str, Any] = {
            "partition": dice.choice(["even", "whole"]),
            "pack_params": dice.choice([1, 2, None]),
            "averages": {"ema": WARM} if averaged else {},
        }
        if inexact:
            fields |= {
                "moments": "int8",
                "alignment": dice.choice([16, 64, 128, 256]),
                "param_dtype": dice.choice([torch.float32, torch.bfloat16]),
            }
        story.append({"size": dice.choice([1, 2, 3, 4]), "frozen": frozen, "acts": acts, **fields})
    return story


def play(group: Any, folder: Path, part: dict[str, Any], layers: int, number: int) -> Any:
    """One part of a story on one rank: what plain torch would have, on rank 0."""
    fields = {k: v for k, v in part.items() if k not in ("size", "frozen", "acts")}
    model = build(part["frozen"], seed=0 if number == 0 else 77)
    make = lambda model: torch.optim.AdamW(groups_of(model, 1), lr=1e-2)  # noqa: E731
    optimizer = sharded(model, group, make, **fields)

    def extend(to: int) -> None:
        for added in groups_of(model, to)[len(optimizer.param_groups) :]:
            optimizer.add_param_group(added)

    extend(layers)
    if number:
        assert checkpoint.load(folder, model, optimizer).step == number
    for kind, seed in part["acts"]:
        if kind == "step":
            gradients(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        elif kind == "extend":
            extend(len(optimizer.param_groups) + 1)
        elif kind == "freeze":
            freeze(model, some_layers(random.Random(seed)))
        else:
            optimizer.load_average("ema", average_of(seed), steps=seed)
    checkpoint.save(folder, model, optimizer, step=number + 1, digest=True)
    averages = optimizer.full_parameters("ema") if part["averages"] else {}
    return optimizer.full_parameters(), averages, optimizer.full_state_dict()


@pytest.mark.parametrize("seed", seeds(12))
def test_a_run_that_goes_on_otherwise_is_that_of_plain_torch(tmp_path: Path, seed: int):
    live(tmp_path, tell(seed))


def test_a_warm_up_goes_on_that_began_while_all_was_frozen(tmp_path: Path):
    """No parameter has a state then, which would say how many steps an average has had."""
    every = frozenset(range(LAYERS))
    steps, more = [("step", 120), ("step", 121)], [("step", 122), ("step", 123)]
    fields = {"partition": "even", "pack_params": 1, "averages": {"ema": WARM}}
    parts = [(1, every, steps), (2, every, steps), (2, frozenset(), more), (1, frozenset(), more)]
    live(tmp_path, [{"size": n, "frozen": f, "acts": acts, **fields} for n, f, acts in parts])


def live(tmp_path: Path, story: list[dict[str, Any]]) -> None:
    """Play a story on all ranks and in plain torch, and compare them after each part."""
    plain = Plain()
    for number, part in enumerate(story):
        if not part["averages"]:
            plain.forget()
        ranks, _ = run_world(part["size"], play, tmp_path, part, plain.layers, number)
        weights, averages, state = ranks[0]
        freeze(plain.model, part["frozen"])
        for kind, of in part["acts"]:
            if kind == "step":
                plain.step(of)
            elif kind == "extend":
                plain.extend()
            elif kind == "freeze":
                freeze(plain.model, some_layers(random.Random(of)))
            else:
                plain.load_average(of)
        if not part["averages"]:
            plain.forget()  # a later part begins it anew
        if "moments" in part:
            continue
        named = dict(plain.model.named_parameters())
        trained = plain.trained()
        assert_same_bits({n: weights[n] for n in trained}, {n: named[n].detach() for n in trained})
        if averages:
            held = {n: plain.averages[n] for n in trained}
            assert_same_bits({n: averages[n] for n in trained}, held)
        found = {
            f"{name}/{key}": value
            for name, values in zip(trained, by_parameter(state), strict=True)
            for key, value in values.items()
            if not key.startswith("average")
        }
        assert_same_bits(found, plain.moments())


def by_parameter(state: dict[str, Any]) -> list[dict[str, Tensor]]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return [state["state"].get(number, {}) for number in numbers]
