"""Small models for the tests, and the few helpers that most of the tests share.

Every model in :data:`CASES` has something awkward: sizes that no alignment divides, ties,
scalars, empty parameters, fewer elements than ranks, or activation checkpointing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import ThreadedWorld, assert_same_sequence

Tensors = dict[str, Tensor]


class MLP(nn.Module):
    """Odd sizes: 7 -> 13 -> 5 -> 3."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Block(nn.Module):
    """Pre-norm transformer block with one head."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc, self.proj = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.proj(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    """Tied embedding, LayerNorms, odd sizes.

    Args:
        recompute: ``None``, ``"reentrant"`` or ``"nonreentrant"`` activation checkpointing.
    """

    def __init__(self, recompute: str | None = None, vocab: int = 37, dim: int = 18) -> None:
        super().__init__()
        self.recompute = recompute
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.ln(x))


class TiedReentrant(nn.Module):
    """One layer used in two re-entrant checkpoints and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)
        return self.last(self.shared(x))


class Scalars(nn.Module):
    """0-dim, one-element and empty parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.linear = nn.Linear(3, 3)
        self.no_rows = nn.Parameter(torch.empty(4, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.nothing]) * self.scale + self.shift
        return self.linear(x) + self.no_rows.sum()


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.25, 0.75]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@dataclass(frozen=True)
class Case:
    """A model, its batches and its loss; the loss is a mean over samples."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, Tensor]]

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.make()

    def batch(self, seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(1000 + seed)
            return self.inputs(size)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        out = model(x).float()
        if y.is_floating_point():
            return F.mse_loss(out, y)
        return F.cross_entropy(out.flatten(0, 1), y.flatten())


def _floats(*shape_in_out: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    width_in, width_out = shape_in_out
    return lambda size: (torch.randn(size, width_in), torch.randn(size, width_out))


def _tokens(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(37, (size, 9)), torch.randint(37, (size, 9))


CASES = {
    "mlp": Case(MLP, _floats(7, 3)),
    "gpt": Case(GPT, _tokens),
    "gpt_reentrant": Case(functools.partial(GPT, "reentrant"), _tokens),
    "gpt_nonreentrant": Case(functools.partial(GPT, "nonreentrant"), _tokens),
    "tied_reentrant": Case(TiedReentrant, _floats(6, 5)),
    "scalars": Case(Scalars, _floats(3, 3)),
    "tiny": Case(Tiny, _floats(3, 3)),
}


FORMS: dict[str, dict[str, Any]] = {  # of masters and weights
    "fp32": {"param_dtype": torch.float32},
    "bf16": {},
    "fp16": {"param_dtype": torch.float16, "loss_scale": 1.0},
    "split": {"master": "split16"},
    "offload": {"offload": True},
    "overlap": {"overlap_sync": True, "pack_params": 2},
    "whole": {"partition": "whole"},
}


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def of(kind: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that makes an optimizer of torch for all parameters of a model."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(model.parameters(), **options)

    build.__name__ = kind
    return build


def sharded(
    model: nn.Module,
    group: Any = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    **fields: Any,
) -> shardcast.ShardedOptimizer:
    """Call ``shard``, by default with fp32 parameters and the eager update."""
    fields = {"param_dtype": torch.float32, "fuse": "eager", **fields}
    if fields["param_dtype"] == torch.float16:
        fields.setdefault("loss_scale", 1.0)
    return shardcast.shard(model, optimizer(model), process_group=group, **fields)


def install(model: nn.Module, seed: int, dtype: torch.dtype | None = None) -> None:
    """Set random gradients, the same on every rank, scaled by 1e-4 to 1."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        power = torch.randint(-4, 1, (), generator=generator).item()
        param.grad = (grad * 10.0**power).to(dtype or param.grad_dtype or param.dtype)


def advance(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    """Run steps ``[first, last)``; the number of a step seeds its gradients."""
    for step in range(first, last):
        install(model, step)
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, optimizer: Any, seeds: Iterable[int], case: str = "mlp") -> None:
    """Run a step for each seed of a batch."""
    for seed in seeds:
        loss = CASES[case].loss(model, CASES[case].batch(seed))
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def job(group: Any = None, steps: int = 1, case: str = "mlp", seed: int = 0, **fields: Any) -> Any:
    """A bf16 model of :data:`CASES` and its sharded optimizer after some steps."""
    model = CASES[case].build(seed)
    optimizer = sharded(model, group, **{"param_dtype": torch.bfloat16, **fields})
    advance(model, optimizer, 0, steps)
    return model, optimizer


def values(model: nn.Module) -> Tensors:
    """Copies of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def local(tensor: Tensor) -> Tensor:
    """Return a detached tensor, for a DTensor its local part."""
    data = tensor.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def full(tensor: Tensor) -> Tensor:
    """Return a copy of a whole tensor. Collective for a DTensor."""
    data = tensor.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data.clone()


def own_state(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Mapping[str, Any]:
    """Return the state of this rank's part of a parameter; empty if it owns none."""
    if not isinstance(optimizer, shardcast.ShardedOptimizer):
        return optimizer.state.get(param, {})
    packed = packed_of(optimizer)
    for shard in packed.shards:
        for number, _, owned in shard.owned():
            if owned is param:
                return packed.update_of(shard).fragment_state(shard, number)
    return {}


def parts(optimizer: shardcast.ShardedOptimizer) -> dict[tuple[str, int, int, str], Tensor]:
    """Return copies of this rank's masters, moments and steps by name and element range."""
    found = {}
    for shard in packed_of(optimizer).shards:
        for _, fragment, param in shard.owned():
            key = (fragment.slot.name, *fragment.param_range)
            found[(*key, "master")] = shard.exact(fragment).detach().clone()
            for name, value in own_state(optimizer, param).items():
                found[(*key, name)] = torch.as_tensor(value).detach().clone()
    return found


def everything(model: nn.Module, optimizer: shardcast.ShardedOptimizer) -> dict[Any, Tensor]:
    """Return copies of all that a step may change on this rank."""
    return {**values(model), **parts(optimizer)}


def whole(ranks: Iterable[Mapping[tuple[str, int, int, str], Tensor]]) -> Tensors:
    """Join the :func:`parts` of all ranks: ``"name/exp_avg"`` to the whole tensor, flat."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for found in ranks:
        for (name, start, _stop, kind), tensor in found.items():
            pieces.setdefault(f"{name}/{kind}", []).append((start, tensor))
    joined = {}
    for name, found in pieces.items():
        tensors = [tensor for _, tensor in sorted(found, key=lambda piece: piece[0])]
        if tensors[0].dim() == 0:  # a step count, the same in all pieces
            assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), name
            joined[name] = tensors[0]
        else:
            joined[name] = torch.cat([tensor.flatten() for tensor in tensors])
    return joined


def assert_same_bits(left: Mapping[Any, Tensor], right: Mapping[Any, Tensor]) -> None:
    """Assert equal keys, dtypes, shapes and bits: -0 is not 0, and a NaN equals itself."""
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        other = right[key]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, key
        same = torch.equal(_bits(tensor), _bits(other))
        assert same, f"{key}: {(tensor.double() - other.double()).abs().max()}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def run_world(
    size: int, fn: Callable[..., Any], *args: Any, **options: Any
) -> tuple[list[Any], ThreadedWorld]:
    """Run ``fn(group, *args)`` on each rank of a strict world; assert that the collectives agree.

    The limit is 120 s, since on a busy machine a rank may compile for longer than the usual 30 s.
    """
    world = ThreadedWorld(size, **{"timeout": 120.0, **options})
    results = world.run(fn, *args)
    assert_same_sequence(world.logs)
    return results, world


def on_each_rank(world: int | str | dict[str, int]) -> Callable[[Callable[..., None]], Any]:
    """Run the test on each rank of a strict world, with the rank's group as its first argument.

    Args:
        world: a number of ranks, the name of the test's argument that holds it, or the sizes of a
            mesh, which then replaces the group. Without a mesh, all ranks must make the same calls.
    """

    def decorated(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def on_ranks(**given: Any) -> None:
            size = given[world] if isinstance(world, str) else world
            threads = ThreadedWorld(size, timeout=120.0)
            threads.run(lambda group: test(group, **given))
            if isinstance(size, int):
                assert_same_sequence(threads.logs)

        signature = inspect.signature(test)
        rest = [*signature.parameters.values()][1:]
        on_ranks.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return on_ranks

    return decorated


def ranks_of(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``fn(group, *args)`` on each rank of a strict world; the group of one rank is None."""
    return [fn(None, *args)] if size == 1 else run_world(size, fn, *args)[0]


def exact_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Muon orthogonalize in float64: in bf16 a last bit grows to 1e-2 of an update."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    there = {**vars(torch), "bfloat16": torch.double}  # torch >= 2.15 casts with ``to``
    monkeypatch.setattr("torch.optim._muon.torch", SimpleNamespace(**there))
