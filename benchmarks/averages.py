"""An average of bf16 weights: by ``averages=`` at the owners, and as scripts usually make it.

Usual ones are made in three ways: torch's ``AveragedModel`` (a copy, ``lerp`` tensor by tensor),
timm's ``ModelEmaV3`` (a copy, ``torch._foreach_lerp_``) and diffusers' ``EMAModel`` (a list of
shadows, ``sub_`` of the scaled difference); the last two by the lines of timm 1.0.31 and diffusers
0.42. All of them average what every rank has, the published bf16 weights.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import shardcast

DECAY = 0.999
WIDTH, LAYERS = 512, 12
COLUMNS = ("average", "bytes per parameter and rank", "ms", "x", "movement lost")
Average = tuple[Callable[[], Any], Callable[[], Iterable[Tensor]]]  # the update, the values


def averaged_model(model: nn.Module) -> Average:
    """torch."""
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))
    average.update_parameters(model)
    return lambda: average.update_parameters(model), average.module.parameters


def model_ema(model: nn.Module) -> Average:
    """timm."""
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update() -> None:
        weights = [param.float() for param in model.parameters()]  # of one dtype, as foreach wants
        torch._foreach_lerp_(list(average.parameters()), weights, 1 - DECAY)

    return update, average.parameters


def ema_model(model: nn.Module) -> Average:
    """diffusers."""
    shadows = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def update() -> None:
        for shadow, param in zip(shadows, model.parameters(), strict=True):
            shadow.sub_((1 - DECAY) * (shadow - param))

    return update, lambda: shadows


OURS: dict[str, Any] = {
    "no average": {},
    "averages, fp32": {"ema": DECAY},
    "averages, bf16 by chance": {"ema": {"decay": DECAY, "stored": "bf16"}},
}
USUAL = {"AveragedModel": averaged_model, "ModelEmaV3": model_ema, "EMAModel": ema_model}


class Run:
    """A model, its optimizer and an average of its weights."""

    def __init__(self, averages: Any, usual: Callable[..., Average] | None, after: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        made = usual(self.model) if usual is not None and not after else None
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.optimizer = shardcast.shard(self.model, inner, averages=averages)
        made = usual(self.model) if usual is not None and after else made
        self._update, values = made or ((lambda: None), tuple)
        self.values = lambda: [value.detach().float() for value in values()]
        if averages:
            self.values = lambda: list(self.optimizer.full_parameters("ema").values())
        parameters = sum(param.numel() for param in self.model.parameters())
        self._parameters = parameters
        self._copies = sum(value.nbytes for value in values())

    @property
    def bytes(self) -> float:
        """Of the average, per parameter of the model, on this rank."""
        held = self.optimizer.memory_report().get("averages", 0)
        return (held + self._copies) / self._parameters

    def step(self, grads: list[Tensor]) -> float:
        """Seconds of processor time of the optimizer's step and the average's."""
        for param, grad in zip(self.model.parameters(), grads, strict=True):
            param.grad = grad.clone()
        start = time.process_time()
        self.optimizer.step()
        self._update()
        return time.process_time() - start


def measure(group: Any, rounds: int) -> list[tuple[str, ...]]:
    """The table; every rank must call it."""
    torch.set_num_threads(1)
    runs = {name: Run(averages, None, False) for name, averages in OURS.items()}
    runs |= {f"{name} of the fp32 model": Run({}, usual, False) for name, usual in USUAL.items()}
    runs["AveragedModel after shard()"] = Run({}, averaged_model, after=True)
    start = list(runs["no average"].optimizer.full_parameters().values())  # rank 0 has them
    shapes = [param.shape for param in runs["no average"].model.parameters()]
    times: dict[str, list[float]] = {name: [] for name in runs}
    generator = torch.Generator().manual_seed(1)
    for number in range(rounds + 1):
        grads = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        grads = [grad + 1 for grad in grads]  # a direction that all steps have
        for name, run in runs.items():
            seconds = run.step(grads)
            if number:
                times[name].append(seconds)
    exact = runs["averages, fp32"].values()
    return [
        (
            name,
            f"{run.bytes:.2f}",
            f"{1e3 * statistics.median(times[name]):.1f}",
            f"{_ratio(times[name], times['no average']):.2f}",
            _lost(run.values(), exact, start),
        )
        for name, run in runs.items()
    ]


def _ratio(times: list[float], base: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def _lost(values: list[Tensor], exact: list[Tensor], start: list[Tensor]) -> str:
    """The share of the movement of the masters' average that another average does not make."""
    if not (values and exact and start):
        return ""
    triples = list(zip(values, exact, start, strict=True))
    along = sum(float(((value - s) * (e - s)).sum()) for value, e, s in triples)
    return f"{1 - along / sum(float((e - s).square().sum()) for _, e, s in triples):.1%}"
