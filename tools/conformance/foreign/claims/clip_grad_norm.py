"""Claims of ``test_fully_shard_clip_grad_norm_.py``."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLPStack

from claims.helpers import blocks_of, same_parity, seed, transformer
from claims.sides import claim, claims_in


def clip_beside(
    side: Any,
    ref: nn.Module,
    model: nn.Module,
    ref_optimizer: Any,
    optimizer: Any,
    batch: Tensor,
    max_norm: float,
    norm_type: float,
) -> None:
    """Compare norms ten times, and then the weights after a step with clipped gradients."""
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
        assert sum(reductions.values()) == 1, reductions
    for steps in (ref_optimizer, optimizer):
        steps.step()
    assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])


NORMS = "scaled `.grad`, because the update applies the factor; the new weights are compared"


@claim(2, without=NORMS)
def test_clip_grad_norm_1d(side: Any) -> None:
    for norm_type in (2, 1, float("inf")):
        model = transformer()
        ref = replicate(copy.deepcopy(model))
        ref_optimizer = torch.optim.SGD(ref.parameters(), lr=1e-2)
        sgd = torch.optim.SGD  # Adam's steps hardly depend on the clip
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


TESTS = claims_in(globals())
