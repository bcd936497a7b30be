"""A test model that can be cut over any grid of tensor, pipeline and data-parallel ranks.

Gradients are the same on every grid, so masters and moments must be the same too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from models import local
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardcast
from shardcast.optimizer.sharded import packed_of

DEPTH = 4
# Uneven rows, columns, and a replicated DTensor; all others are plain replicas.
PLAN = {
    "tokens.weight": Shard(0),
    "head.weight": Shard(0),
    "layers.*.up.*": Shard(0),
    "layers.*.down.weight": Shard(1),
    "layers.*.norm.weight": Replicate(),
    "layers.*.frozen.weight": Shard(1),
    "layers.*.mask": Shard(0),
}
TIE = ("tokens.weight", "head.weight")
Found = dict[str, tuple[Tensor, Tensor]]  # flat indices in the whole tensor, and their values


class Layer(nn.Module):
    """Has trained and frozen parameters, some outside the optimizer, buffers, and extra state."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 5).requires_grad_(False)
        self.register_buffer("mask", torch.rand(5, 2))
        self.register_buffer("mean", torch.rand(3))
        self.count = number

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Stage(nn.Module):
    """The whole model, or some of its layers under their names in it."""

    def __init__(self, numbers: Iterable[int], tie: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        tokens, head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        layers = {str(number): Layer(number) for number in range(DEPTH)}
        if tie:
            head.weight = tokens.weight
        numbers = list(numbers)
        self.tokens = tokens if 0 in numbers else None
        self.layers = nn.ModuleDict({str(n): layers[str(n)] for n in numbers})
        self.head = head if DEPTH - 1 in numbers else None


def stages_of(pp: int, here: int, tie: bool, interleaved: bool) -> list[Stage]:
    if interleaved:
        return [Stage([n], tie) for n in range(here, DEPTH, pp)]
    return [Stage(range(DEPTH * here // pp, DEPTH * (here + 1) // pp), tie)]


def cut(stage: nn.Module, mesh: Any) -> None:
    """Replace the parameters named in the plan by DTensors."""
    for prefix, module in stage.named_modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                full = f"{prefix}.{name}"
                placement = next((p for k, p in PLAN.items() if fnmatch.fnmatch(full, k)), None)
                if tensor is not None and placement is not None:
                    made = distribute_tensor(tensor.detach(), mesh, [placement], src_data_rank=None)
                    if isinstance(tensor, nn.Parameter):
                        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                    kind[name] = made


class Job:
    """One rank's part of the job; without a mesh, all of it."""

    def __init__(self, mesh: Any = None, tie: bool = True, interleaved: bool = False) -> None:
        names = () if mesh is None else mesh.mesh_dim_names
        pp, here = (mesh["pp"].size(), mesh["pp"].get_local_rank()) if "pp" in names else (1, 0)
        self.stages = stages_of(pp, here, tie, interleaved)
        if "tp" in names:
            for stage in self.stages:
                cut(stage, mesh["tp"])
        if tie and self.stages[0].tokens is not None and self.stages[-1].head is not None:
            self.stages[-1].head.weight = self.stages[0].tokens.weight
        self.model: Any = self.stages if interleaved else self.stages[0]
        named = [pair for pair in self.named().items() if pair[1].requires_grad]
        groups = [
            {"params": [p for n, p in named if ("down" in n) == slow], "lr": 3e-3 if slow else 1e-2}
            for slow in (False, True)
        ]
        more: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
        if tie and pp > 1:
            more["tied"] = [TIE]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        fields = {"param_dtype": torch.bfloat16, "autocast": False, "fuse": "eager"}
        self.optimizer = shardcast.shard(self.model, optimizer, **more, **fields)

    def named(self) -> dict[str, nn.Parameter]:
        return {n: p for stage in self.stages for n, p in stage.named_parameters()}

    def step(self, number: int) -> None:
        """Make a step with gradients that depend only on the names and the number."""
        for name, param in self.named().items():
            if param.requires_grad:
                seed = torch.Generator().manual_seed(100 * number + sum(map(ord, name)))
                grad = torch.randn(param.shape, generator=seed).to(torch.bfloat16)
                if name == "head.weight":  # if tied, the token embedding has the whole gradient
                    grad = torch.zeros_like(grad)
                param.grad = like(grad, param)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def found(self) -> Found:
        """Return this rank's state, parameters and buffers, with indices in whole tensors."""
        found: Found = {}
        for shard in packed_of(self.optimizer).shards:
            for number, fragment, param in shard.owned():
                name, here = fragment.slot.name, slice(*fragment.param_range)
                state = packed_of(self.optimizer).update_of(shard).fragment_state(shard, number)
                for key, value in {"master": shard.exact(fragment), **state}.items():
                    index = indices(param)[here] if value.dim() else torch.zeros(1).long()
                    found[f"{name}/{key}"] = index, value.detach().reshape(-1).clone()
        for stage in self.stages:
            for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
                found[f"{name}/here"] = indices(tensor), local(tensor).reshape(-1).clone()
            for number, layer in stage.layers.items():
                found[f"layers.{number}/count"] = torch.zeros(1).long(), torch.tensor([layer.count])
        return found


def like(value: Tensor, param: Tensor) -> Tensor:
    """Return the part of a whole gradient that belongs to a local parameter."""
    if not hasattr(param, "placements"):
        return value
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def indices(tensor: Tensor) -> Tensor:
    return local(like(torch.arange(tensor.numel()).view(tensor.shape), tensor)).flatten()


def joined(ranks: Iterable[Mapping[str, tuple[Tensor, Tensor]]], tie: bool) -> dict[str, Tensor]:
    """Join the flat values of all ranks; assert that none is missing, and that copies are equal."""
    elements: dict[str, dict[int, float]] = {}
    for found in ranks:
        for key, (index, values) in found.items():
            if tie:
                key = key.replace(TIE[1], TIE[0])
            mine = elements.setdefault(key, {})
            for place, value in zip(index.tolist(), values.tolist(), strict=True):
                assert mine.setdefault(place, value) == value, f"{key}: copies differ at {place}"
    for key, values in elements.items():
        assert sorted(values) == list(range(len(values))), key
    return {
        key: torch.tensor([v for _, v in sorted(values.items())], dtype=torch.float64)
        for key, values in elements.items()
    }
