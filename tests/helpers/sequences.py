"""Sequences of backwards, clears, clips and steps, on every rank and in plain torch.

The oracle is plain torch in fp32, which sums the gradients of all ranks. Gradients come from real
backward passes, differ between ranks, and are multiples of a quarter of the number of ranks. So
sums and means are exact, also in bf16, and masters are bitwise equal. With int8 moments they are
not, but a lost mean moves a weight by at least a third of a step's rate.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from models import assert_same_bits, local, parts, values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast.testing import SpawnedWorld, ThreadedWorld, assert_same_sequence

RATE, NO_BOUND = 1e-2, 1e30
SHAPES = (3,), (2, 32), (5,), (4, 32), (3, 32)
COUNT = len(SHAPES)
MATRICES = "layers.1.weight", "layers.3.weight", "layers.4.weight"
ELEMENTWISE = "AdamW", "SGD"
STORAGE: dict[str, dict[str, Any]] = {
    "fp32": {"param_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16},
    "split16": {"param_dtype": torch.bfloat16, "master": "split16"},
    "int8": {"param_dtype": torch.bfloat16, "moments": "int8"},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap_sync": {"overlap_sync": True},
    "published": {"published": {"mxfp8": list(MATRICES)}},
    "asleep": {},
}
Use = frozenset[int]  # the parameters that a backward reaches
Uses = tuple[Use, ...]  # by rank; a rank with an empty set runs no backward
Action = tuple[Callable[..., None], tuple[Any, ...]]  # a method of Side, and its arguments
EVERY = frozenset(range(COUNT))
ALL = (EVERY,) * 4


class Cell(NamedTuple):
    """How a sequence is trained.

    Attributes:
        layout: ``even`` or ``whole``; ``shard_ranks`` with half of the ranks, or with one; or a
            mesh with copies along ``tp``.
        pack_params: the largest number of parameters in a pack.
    """

    storage: str = "fp32"
    layout: str = "even"
    kind: str = "SGD"
    way: str = "plain"
    size: int = 2
    pack_params: int | None = 2

    @property
    def copies(self) -> int:
        """Number of ranks whose copies of a gradient are summed."""
        if self.layout != "copy along tp":
            return 1
        return 2 if self.size % 2 == 0 else self.size

    def mesh(self) -> Any:
        sizes = self.size // self.copies, self.copies
        return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))

    def fields(self, accumulate: str) -> dict[str, Any]:
        fields = {**STORAGE[self.storage], **WAYS[self.way], "accumulate": accumulate}
        fields["pack_params"] = self.pack_params
        if self.layout in ("even", "whole"):
            fields["partition"] = self.layout if self.kind in ELEMENTWISE else "auto"
        if self.layout.startswith("shard_ranks"):
            fields["shard_ranks"] = 1 if "one" in self.layout else max(1, self.size // 2)
        return fields


class BoomError(Exception):
    """A backward that fails on every rank."""


class Give(torch.autograd.Function):
    """Returns ``x`` and gives the parameter exactly this gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _param: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], ctx.saved_tensors[0], None


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        raise BoomError


class Layer(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, grad: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=[Partial()])
        return Give.apply(x, weight, grad)


class Chain(nn.Module):
    """Gradients arrive from the last parameter to the first."""

    def __init__(self, seed: int, mesh: Any = None) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        weights = [torch.randn(shape, generator=make) for shape in SHAPES]
        if mesh is not None:
            weights = [distribute_tensor(weight, mesh, [Replicate()]) for weight in weights]
        self.layers = nn.ModuleList(Layer(weight) for weight in weights)

    @property
    def all(self) -> list[Any]:
        return [layer.weight for layer in self.layers]

    def forward(
        self, x: Tensor, grads: dict[int, Tensor], fails_at: int = -1, nests: bool = False
    ) -> Tensor:
        for number, grad in grads.items():
            if number == fails_at:
                x = Fail.apply(x)
            layer = self.layers[number]
            x = checkpoint(layer, x, grad, use_reentrant=True) if nests else layer(x, grad)
        return Fail.apply(x) if fails_at == COUNT else x  # before the first gradient


class Several(list[torch.optim.Optimizer]):
    """Optimizers of plain torch that are stepped together."""

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self:
            optimizer.zero_grad(set_to_none)


def optimizers(kind: str, model: Chain) -> list[torch.optim.Optimizer]:
    if kind == "Muon":
        matrices = [param for param in model.all if param.dim() == 2]
        others = [param for param in model.all if param.dim() != 2]
        adamw = torch.optim.AdamW(others, lr=RATE, betas=(0.5, 0.9))
        return [torch.optim.Muon(matrices, lr=RATE), adamw]
    options: dict[str, dict[str, Any]] = {
        "AdamW": {"betas": (0.5, 0.9)},
        "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    }
    make: Any = getattr(torch.optim, kind)
    return [make(model.all, lr=RATE, **options.get(kind, {}))]


class Side:
    """One rank with two models or, without a group, plain torch with the data of all ranks."""

    def __init__(self, cell: Cell, group: Any = None, accumulate: str = "local") -> None:
        """``group``: a mesh if the layout is one, except in processes, which make it themselves."""
        self.cell, self.ranks, self.group = cell, cell.size, group
        self.mesh, fields = None, cell.fields(accumulate)
        if group is None:
            self.here = list(range(cell.size))
        else:
            has_mesh = hasattr(group, "mesh_dim_names")
            self.here = [group.get_rank() if has_mesh else group.rank()]
            if cell.layout == "copy along tp":
                sizes, dims = (cell.size // cell.copies, cell.copies), ("dp", "tp")
                self.mesh = (
                    group if has_mesh else init_device_mesh("cpu", sizes, mesh_dim_names=dims)
                )
                fields["mesh"] = self.mesh
            elif "shard_ranks" not in fields:
                fields["process_group"] = group
        tp = None if self.mesh is None else self.mesh["tp"]
        self.models = Chain(0, tp), Chain(1, tp)
        self.optimizers: list[Any] = []
        for model in self.models:
            made = optimizers(cell.kind, model)
            is_plain = group is None
            self.optimizers.append(
                Several(made) if is_plain else shardcast.shard(model, made, fuse="eager", **fields)
            )
        self.seen: list[Any] = []

    def backward(self, seed: int, uses: Uses, quiet: bool = False, **how: Any) -> None:
        for rank in self.here:
            with self.optimizers[0].no_sync() if quiet and self.group else contextlib.nullcontext():
                x = torch.zeros((), requires_grad=True)
                loss = self.models[0](x, self.gradients(seed + rank, uses[rank]), **how)
                if loss is not x:
                    with contextlib.suppress(BoomError):
                        loss.backward()

    def gradients(self, seed: int, use: Use) -> dict[int, Tensor]:
        make = torch.Generator().manual_seed(seed)
        grain = (1 if self.group is None else self.ranks // self.cell.copies) / 4
        every = [torch.randint(-4, 5, shape, generator=make) * grain for shape in SHAPES]
        return {number: every[number] for number in sorted(use)}

    def nested(self, seed: int, uses: Uses) -> None:
        self.backward(seed, uses, nests=True)

    def failed(self, seed: int, uses: Uses, fails_at: int) -> None:
        """Fail on all ranks, which must use the same parameters, at the same place."""
        self.backward(seed, uses, fails_at=fails_at)

    def failed_apart(self, seed: int, places: Sequence[int]) -> None:
        """Fail on each rank at its own place; COUNT is before the first gradient, -1 is nowhere."""
        if self.group is not None:
            self.backward(seed, ALL, fails_at=places[self.here[0]])
        else:  # use the gradients that arrive before the failure
            self.backward(seed, tuple(frozenset(range(max(it, 0), COUNT)) for it in places))

    def hook_fails(self, seed: int, uses: Uses, fails_at: int, quiet: bool = False) -> None:
        """Raise on all ranks in a hook of the script, before a gradient is accumulated."""

        def fail(_grad: Tensor) -> None:
            raise BoomError

        handle = self.models[0].all[fails_at].register_hook(fail)
        self.backward(seed, uses, quiet)
        handle.remove()

    def through_both(self, seed: int, uses: Uses) -> None:
        for rank in self.here:
            x = torch.zeros((), requires_grad=True)
            for number, model in enumerate(self.models):
                x = model(x, self.gradients(seed + rank + 10 * number, uses[rank]))
            x.backward()

    def assign(self, seed: int, use: Use) -> None:
        """Replace ``.grad`` by other gradients on all ranks."""
        every = [self.gradients(seed + rank, use) for rank in self.here]
        for number in use:
            param = self.models[0].all[number]
            param.grad = sum(grads[number] for grads in every).to(param.dtype)

    def clear(self, how: str) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if how == "model":
                model.zero_grad()
            elif how != "never":
                optimizer.zero_grad(set_to_none=how == "none")
            if how == "none" and self.cell.way == "asleep" and self.group is not None:
                optimizer.sleep()
                optimizer.wake()

    def add_one(self, *numbers: int) -> None:
        """Add one to means in place, on all ranks."""
        for number in numbers:
            self.models[0].all[number].grad.add_(1.0)

    def clear_some(self, *numbers: int) -> None:
        for number in numbers:
            self.models[0].all[number].grad = None

    def freeze(self, *numbers: int) -> None:
        for number in numbers:
            self.models[0].all[number].requires_grad_(False)

    def clip(self, bound: float = NO_BOUND) -> None:
        params = list(self.models[0].parameters())
        if self.group is None:
            norm = nn.utils.clip_grad_norm_(params, bound)
        else:
            norm = self.optimizers[0].clip_grad_norm_(bound)
        self.seen.append(norm.clone())

    def norm(self, bound: float = NO_BOUND) -> None:
        """Record the norm of the first model's gradients, as torch computes it from ``.grad``.

        With a ``bound``, torch also clips them.
        """
        if bound < NO_BOUND:
            self.seen.append(nn.utils.clip_grad_norm_(self.models[0].parameters(), bound))
            return
        grads = [grad for param in self.models[0].parameters() if (grad := param.grad) is not None]
        norms = [torch.linalg.vector_norm(grad, 2.0, dtype=torch.float32) for grad in grads]
        self.seen.append(torch.linalg.vector_norm(torch.stack(norms)))

    def gather(self) -> None:
        """Record every ``.grad`` of the first model, in fp32."""
        if self.group is not None:
            self.optimizers[0].gather_gradients()
        grads = {f"grad {n}": param.grad for n, param in enumerate(self.models[0].all)}
        self.seen.append({n: local(g).float().clone() for n, g in grads.items() if g is not None})

    def step(self) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.step()
            self.seen.append(self.look(model, optimizer))

    def look(self, model: Chain, optimizer: Any) -> dict[Any, Tensor]:
        """Return a rank's masters by name and range, and its model's values by name."""
        if self.group is None:
            return values(model)
        optimizer.wait_sync()
        masters = {key[:3]: part for key, part in parts(optimizer).items() if key[3] == "master"}
        shown = {name: local(tensor) for name, tensor in values(model).items()}
        return {**masters, **shown}


CLIPS = Side.clip, Side.norm
QUIET = "inside no_sync"  # in the error of a quiet backward onto means


def told(group: Any, cell: Cell, actions: list[Action], accumulate: str) -> list[Any] | int:
    """Return a rank's records, or the number of the action that raised for a quiet backward."""
    torch.set_num_threads(1)
    side = Side(cell, group, accumulate)
    for number, (method, arguments) in enumerate(actions):
        try:
            method(side, *arguments)
        except RuntimeError as error:
            if QUIET not in str(error):
                raise
            return number
    return side.seen


def plain(cell: Cell, actions: list[Action]) -> list[Any]:
    """Return the records of plain torch."""
    side = Side(cell)
    for method, arguments in actions:
        method(side, *arguments)
    return side.seen


def refused(actions: list[Action], size: int, accumulate: str) -> tuple[list[int], int | None]:
    """Return actions that may raise for a quiet backward onto means, and one that then must.

    After a failed backward only some packs have means, and in these some parameters still have
    local gradients, to which a quiet backward may add. The same holds after some were assigned.
    A clip or a gather without a backward leaves means of zeros, unless earlier ones were cleared.
    """
    maybe: list[int] = []
    fresh = quiet = sure = unsure = False  # fresh: means of this step; quiet: added to some
    for number, (method, arguments) in enumerate(actions):
        is_quiet = method is Side.backward and len(arguments) > 2 and arguments[2]
        if method is Side.clear:
            if arguments[0] != "never":  # model.zero_grad() does not cancel an error that is due
                quiet = quiet and arguments[0] == "model"
                fresh = sure = unsure = False
        elif is_quiet and accumulate == "local" and size > 1:
            if any(arguments[1]) and fresh:
                quiet, sure = True, sure or not unsure
        elif method in (Side.step, Side.clip, Side.gather):
            if sure:
                return maybe, number
            maybe += [number] * quiet
            quiet = sure = False
            # A gather shows no mean if no rank had a gradient.
            unsure = not fresh or (unsure and method is not Side.step)
            fresh = method is not Side.step
        elif method is Side.norm:  # local, and so no error, if this rank has all means
            maybe += [number] * quiet
        elif method is Side.assign:
            sure, unsure = False, True
        elif method is not Side.clear_some:
            fresh, unsure = True, method in (Side.failed, Side.hook_fails)
    return maybe, None


def on_ranks(
    cell: Cell, actions: list[Action], accumulate: str, world: SpawnedWorld | None
) -> list[Any]:
    """Run :func:`told` on each rank, in threads or processes."""
    if world is not None:
        return world.run(told, cell, actions, accumulate)
    grid: Any = cell.size
    if cell.layout == "copy along tp":
        grid = {"dp": cell.size // cell.copies, "tp": cell.copies}
    elif cell.layout.startswith("shard_ranks"):
        grid = {"dp": cell.size}
    threads = ThreadedWorld(grid)
    found = threads.run(told, cell, actions, accumulate)
    if cell.copies == 1:  # else ranks of different shards sum different packs
        assert_same_sequence(threads.logs)
    return found


def compare(
    actions: list[Action],
    cell: Cell | None = None,
    world: SpawnedWorld | None = None,
    accumulate: str = "local",
) -> None:
    """Assert that all ranks recorded the same as plain torch: equal masters, close norms.

    Otherwise assert that all ranks refused a quiet backward onto means of the same step.
    """
    cell = Cell() if cell is None else cell
    expected = plain(cell, actions)
    ranks = on_ranks(cell, actions, accumulate, world)
    maybe, surely = refused(actions, cell.size, accumulate)
    if surely is not None or isinstance(ranks[0], int):
        assert ranks == [ranks[0]] * cell.size and ranks[0] in (*maybe, surely)
        return
    clips = any(arguments[:1] < (NO_BOUND,) for method, arguments in actions if method in CLIPS)
    limits = {"int8": 0.1, "Muon": 0.01, True: 0.01}
    limit = RATE * max(limits.get(it, 0) for it in (cell.storage, cell.kind, clips))
    steps = 0.0
    for number, (it, *seen) in enumerate(zip(expected, *ranks, strict=True)):
        if isinstance(it, Tensor):
            for norm in seen:
                torch.testing.assert_close(norm, it, rtol=1e-5 if clips else 1e-6, atol=0)
            continue
        if any(name.startswith("grad") for name in it) or not it:
            for grads in seen:
                same = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
                (same if clips else assert_same_bits)(
                    grads, {name: grad.float() for name, grad in it.items()}
                )
            continue
        steps += 0.5  # each of the two models records every step
        assert_covered(it, seen, limit * (steps + 1), f"{number}, {cell}, {accumulate}")


def assert_covered(
    expected: dict[str, Tensor], ranks: Sequence[dict[Any, Tensor]], limit: float, about: str
) -> None:
    """Assert that ranks own all expected elements, and that all ranks show the same values."""
    covered = {name: torch.zeros(tensor.numel()) for name, tensor in expected.items()}
    for of_rank in ranks:
        for key, tensor in of_rank.items():
            if isinstance(key, str):
                assert torch.equal(tensor, ranks[0][key]), (key, about)
                continue
            name, start, stop = key
            covered[name][start:stop] += 1
            error = (tensor - expected[name].flatten()[start:stop]).abs().max()
            assert error <= limit, (name, float(error), about)
    assert all((count > 0).all() for count in covered.values()), about


def random_sequence(
    draw: random.Random, assigns: bool = True, bounds: Sequence[float] = (NO_BOUND,)
) -> list[Action]:
    """Draw up to fourteen actions, and a step.

    Args:
        assigns: also assign gradients, followed by a synchronized backward that averages them.
            This raises if gradients are summed over model-parallel ranks.
        bounds: bounds of clips; torch also clips if the first one clips anything.
    """
    actions: list[Action] = []
    clipped = False  # since the last clear or step: assigned gradients would then raise
    has_failed = False  # since the last clear: gradients in flight cannot be assigned
    rare = draw.random() < 0.5  # actions that defer all later launches come late or never
    for number in range(draw.randint(4, 14)):
        seed = draw.randrange(1000)
        uses = tuple(
            frozenset(n for n in range(COUNT) if draw.random() < 0.7) | {2} for _ in range(4)
        )
        kinds = "backward quiet step step clear clip gather failed hook_fails".split()
        if not rare or number > 6:
            kinds += ["nested", "through_both"]
        if assigns and not clipped and not has_failed:
            kinds += ["assign"]
        kind = draw.choice(kinds)
        has_failed = has_failed or kind in ("failed", "hook_fails")
        if kind == "quiet":
            actions.append((Side.backward, (seed, uses, True)))
        elif kind == "assign":
            actions += [(Side.assign, (seed, uses[0])), (Side.backward, (seed + 10, uses[1:] * 2))]
        elif kind in ("failed", "hook_fails"):
            actions.append(
                (getattr(Side, kind), (seed, uses[:1] * 4, draw.choice(sorted(uses[0]))))
            )
        elif kind == "clear":
            how = draw.choice(["none", "zeros", "model"])
            has_failed = has_failed and how == "model"  # the optimizer does not see this
            actions.append((Side.clear, (how,)))
        elif kind == "clip":
            actions.append((Side.clip, (draw.choice(bounds),)))
        else:
            arguments = () if kind in ("step", "gather") else (seed, uses)
            actions.append((getattr(Side, kind), arguments))
        clipped = kind == "clip" or (clipped and kind not in ("step", "clear"))
    if assigns:
        actions = [it for action in actions for it in (action, *_norm_after(action, draw, bounds))]
    return [*actions, (Side.step, ())]


def _norm_after(action: Action, draw: random.Random, bounds: Sequence[float]) -> list[Action]:
    """Draw a norm in half of the cases in which all gradients are means."""
    method, arguments = action
    reduces = method in (Side.nested, Side.through_both) or (
        method is Side.backward and len(arguments) == 2
    )
    return [(Side.norm, (bounds[0],))] if reduces and draw.random() < 0.5 else []
