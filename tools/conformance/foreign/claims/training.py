"""Claims of ``test_fully_shard_training.py``; each function is named after its test."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLP

from claims import accumulation, composition
from claims.helpers import (
    Adam,
    average,
    multi_group,
    seed,
    single_group,
    train_beside,
)
from claims.sides import claim, claims_in


@claim(2)
def test_root_no_forward_inputs(side: Any) -> None:
    class OnlyAParameter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self) -> Tensor:
            return self.weight @ self.weight

    model = OnlyAParameter()
    side.shard(model)
    out = model()
    assert out.shape == (4, 4)
    out.sum().backward()


@claim(2)
def test_to_float64_after_init(side: Any) -> None:
    torch.manual_seed(42)
    model = MLP(4)
    ref = replicate(copy.deepcopy(model).double())
    optimizer = side.shard(model, modules=[model.in_proj, model.out_proj])
    model.double()
    assert all(param.dtype == torch.float64 for param in model.parameters())
    if type(side).__name__ == "FSDP2":  # the original casts before it creates the optimizer
        optimizer = Adam(model.parameters(), lr=1e-2)
    seed()
    batch = torch.randn(2, 4).double()
    train_beside(ref, model, Adam(ref.parameters(), lr=1e-2), optimizer, lambda: batch)


@claim(8)
def test_train_parity_single_group_shard_dim0(side: Any) -> None:
    single_group(side, [(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)])


@claim(8, without="the dimension that FSDP2 shards, because spans ignore dimensions")
def test_train_parity_single_group_shard_largest_dim(side: Any) -> None:
    single_group(side, [(32, 16), (16, 8)])


@claim(8)
def test_train_parity_multi_group(side: Any) -> None:
    multi_group(side)


@claim(8)
def test_train_parity_multi_group_cpu_offload_eager(side: Any) -> None:
    multi_group(side, offload=True)


@claim(8)
def test_non_root_forward_backward(side: Any) -> None:
    torch.manual_seed(42)
    model = nn.Sequential(*[MLP(32) for _ in range(3)])
    ref = copy.deepcopy(model)
    ref_optimizer = Adam(ref.parameters(), lr=1e-2)
    optimizer = side.shard(model, modules=list(model))
    seed(0)
    batch = torch.randn(8, 32)
    for ref_part, part in ((ref, model), (ref[0], model[0])):
        ref_loss, loss = ref_part(batch).sum(), part(batch).sum()
        ref_loss.backward()
        average(ref)
        ref_optimizer.step()
        ref_optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_close(loss, ref_loss)
    assert_close(model(batch).sum(), ref(batch).sum())


@claim(8)
def test_multi_forward_module(side: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(x) + self.inner(x))

    torch.manual_seed(42)
    model = Twice()
    ref = replicate(copy.deepcopy(model))
    optimizer = side.shard(model, modules=[model.inner])
    seed(0)
    batch = torch.randn(32, 4)
    train_beside(ref, model, Adam(ref.parameters(), lr=1e-2), optimizer, lambda: batch)


GATHERED = "tests the timing of gathers; here parameters are whole"
CUDA = "tests CUDA streams, events and graphs"
TESTS = claims_in(vars(composition), vars(accumulation), globals()) | {
    "test_root_move_forward_input_to_device": (
        "tests that FSDP2 moves inputs to a GPU; here the script does"
    ),
    "test_param_registration_after_forward": GATHERED,
    "test_param_registration_after_backward": GATHERED,
    "test_modules_to_run_forward_empty_for_single_module": GATHERED,
    "test_train_parity_multi_group_unshard_async_op": GATHERED,
    "test_explicit_prefetching": GATHERED,
    "test_post_optim_event": CUDA,
    "test_partial_group_reshard_toggle": GATHERED,
    "test_shared_params_separate_fsdp_groups_error": "ties weights across two FSDP2 groups",
    "test_layer_by_layer_shard_no_false_positive": "shards single modules instead of a model",
    "test_shard_placement_fn_tp_ep": "skips itself with fewer than eight GPUs",
    "test_share_comm_context": CUDA,
    "test_two_layer_fully_shard_cudagraph": CUDA,
}
