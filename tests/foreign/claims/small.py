"""Claims of ``test_fully_shard_frozen.py`` and ``test_fully_shard_clip_grad_norm_.py``."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLP, MLPStack

from claims.sides import Claim, claim
from claims.training import Adam, blocks_of, same_parity, seed, train_beside, transformer

HOOKS = "which of FSDP2's hooks run in the backward, and sizes of its reduce-scatters"


@claim(4, without=HOOKS)
def test_train_mixed_requires_grad_per_group(side: Any) -> None:
    for checkpointing, freeze_after in itertools.product((False, True), repeat=2):
        torch.manual_seed(42)
        model = nn.Sequential(*[MLP(32) for _ in range(3)])

        def freeze(one: nn.Module) -> None:
            for name, param in one.named_parameters():
                param.requires_grad_("bias" in name)

        if not freeze_after:
            freeze(model)
        ref = replicate(copy.deepcopy(model), find_unused_parameters=freeze_after)
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        if checkpointing:
            for module in model:
                checkpoint(module)
        optimizer = side.shard(model, modules=list(model))
        if freeze_after:
            freeze(model)
            freeze(ref)
        seed()
        for index in range(10):
            batch, losses = torch.randn(8, 32), []
            for one, steps in ((ref, ref_optimizer), (model, optimizer)):
                steps.zero_grad(set_to_none=index % 2 == 0)
                losses.append(one(batch).sum())
                losses[-1].backward()
                if one is model:
                    grads = side.grads(model, optimizer)
                steps.step()
            assert_close(losses[1], losses[0])
            expected = [param.grad for param in ref.parameters()]
            assert_close([*filter(torch.is_tensor, grads)], [*filter(torch.is_tensor, expected)])
            assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])


@claim(4, without=HOOKS)
def test_train_mixed_requires_grad_across_groups(side: Any) -> None:
    for unfreeze in (False, True):
        torch.manual_seed(42)
        model = nn.Sequential(
            *itertools.chain.from_iterable((nn.Linear(32, 32), nn.ReLU()) for _ in range(6))
        )
        ref = replicate(copy.deepcopy(model), find_unused_parameters=True)
        linears = [module for module in model if isinstance(module, nn.Linear)]
        optimizer = side.shard(model, modules=linears)
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        for one in (model, ref):
            one[0].requires_grad_(False)
        seed(0)
        batch = torch.randn(8, 32)
        for index in range(3):
            losses = []
            for one, steps in ((ref, ref_optimizer), (model, optimizer)):
                if unfreeze and index == 2:
                    model[0].requires_grad_(True)
                if index == 1:
                    with torch.no_grad():
                        losses.append(one(batch).sum())
                    continue
                losses.append(one(batch).sum())
                losses[-1].backward()
                steps.step()
                steps.zero_grad(set_to_none=index % 2 == 0)
        assert_close(losses[1], losses[0])


@claim(4)
def test_multi_forward_mixed_requires_grad(side: Any) -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.frozen(functional.relu(self.trained(x)))
                with torch.no_grad():
                    x += functional.relu(self.trained(x))
            return x

    torch.manual_seed(42)
    model = Repeats()
    ref = replicate(copy.deepcopy(model))
    optimizer = side.shard(model, modules=[model.first, model.frozen, model.trained])
    train_beside(ref, model, Adam(ref.parameters(), lr=1e-2), optimizer, lambda: torch.randn(8, 5))


def clip_beside(
    side: Any, ref: nn.Module, model: nn.Module, ref_optimizer: Any, optimizer: Any,
    batch: Tensor, max_norm: float, norm_type: float,
) -> None:  # fmt: skip
    """Compare norms ten times, and what the step of the clipped gradients comes to."""
    norm_of = functools.partial(torch.linalg.vector_norm, ord=norm_type)
    for _ in range(10):
        for one, steps in ((ref, ref_optimizer), (model, optimizer)):
            steps.zero_grad()
            one(batch).sum().backward()
        same_parity(side, ref, model, optimizer)
        assert any(norm_of(param.grad) > max_norm for param in ref.parameters())
        expected = nn.utils.clip_grad_norm_(ref.parameters(), max_norm, norm_type)
        with CommDebugMode() as seen:
            norm = side.clip(model, optimizer, max_norm, norm_type)
        assert_close(side.whole(norm), expected.to(norm.dtype))
        reductions = {key: n for key, n in seen.get_comm_counts().items() if "reduce" in str(key)}
        assert 1 <= sum(reductions.values()) <= side.norm_reductions, reductions
    for steps in (ref_optimizer, optimizer):
        steps.step()
    assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])


NORMS = "that `.grad` is multiplied: the factor is part of the update, whose weights are compared"


@claim(2, without=NORMS)
def test_clip_grad_norm_1d(side: Any) -> None:
    for norm_type in (2, 1, float("inf")):
        model = transformer()
        ref = replicate(copy.deepcopy(model))
        ref_optimizer = torch.optim.SGD(ref.parameters(), lr=1e-2)
        sgd = torch.optim.SGD  # Adam's steps hardly depend on a factor
        optimizer = side.shard(model, sgd, blocks_of(model), norm_type=norm_type)
        seed()
        batch = torch.randint(0, 8, (3, 16))
        clip_beside(side, ref, model, ref_optimizer, optimizer, batch, 1.0, norm_type)


@claim(4, without=NORMS)
def test_clip_grad_norm_2d(side: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()
    plan: dict[str, Any] = {}
    for index in range(3):
        plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
        plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=False)
    plan["2.out_proj"] = RowwiseParallel(output_layouts=torch.distributed.tensor.Shard(1))
    plan["3"] = SequenceParallel(sequence_dim=1)
    for norm_type in (2, 1, 3, float("inf")):
        torch.manual_seed(42)
        model = MLPStack(16, with_seq_parallel=True)
        ref = replicate(copy.deepcopy(model), process_group=group)
        ref_optimizer = torch.optim.SGD(ref.parameters(), lr=1e-2)
        parallelize_module(model, mesh["tp"], plan)
        optimizer = side.shard(
            model, torch.optim.SGD, list(model)[:3], mesh=mesh, dp="dp", norm_type=norm_type
        )
        torch.manual_seed(42 + dist.get_rank(group) + 1)
        batch = torch.randn(2, 16)
        for _ in range(10):
            for one, steps in ((ref, ref_optimizer), (model, optimizer)):
                steps.zero_grad()
                one(batch).sum().backward()
            expected = nn.utils.clip_grad_norm_(ref.parameters(), 0.5, norm_type)
            norm = side.clip(model, optimizer, 0.5, norm_type)
            assert_close(side.whole(norm), expected.to(norm.dtype))
        for steps in (ref_optimizer, optimizer):
            steps.step()
        shown = [side.whole(param.detach()) for param in model.parameters()]
        assert_close(shown, [param.detach() for param in ref.parameters()])


FROZEN: dict[str, Claim | str] = {
    "test_train_mixed_requires_grad_per_group": test_train_mixed_requires_grad_per_group,
    "test_train_mixed_requires_grad_across_groups": test_train_mixed_requires_grad_across_groups,
    "test_multi_forward_mixed_requires_grad": test_multi_forward_mixed_requires_grad,
}
CLIP: dict[str, Claim | str] = {
    "test_clip_grad_norm_1d": test_clip_grad_norm_1d,
    "test_clip_grad_norm_2d": test_clip_grad_norm_2d,
}
TESTS = FROZEN | CLIP
