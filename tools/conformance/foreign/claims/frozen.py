"""Claims of ``test_fully_shard_frozen.py``."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint, replicate
from torch.nn import functional
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLP

from claims.helpers import Adam, seed, train_beside
from claims.sides import claim, claims_in

HOOKS = "checks of FSDP2's backward hooks and of its reduce-scatter sizes"


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


TESTS = claims_in(globals())
