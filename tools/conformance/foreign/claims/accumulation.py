"""Claims of ``test_fully_shard_training.py`` about micro-batches and meshes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLP, MLPStack

from claims.helpers import (
    REDUCTIONS,
    Adam,
    AdamW,
    average,
    blocks_of,
    same_parity,
    seed,
    train_beside,
    transformer,
)
from claims.sides import claim, whole


@claim(
    4,
    without=(
        "reducing some modules alone, and counts of FSDP2's collectives; the test checks that "
        "nothing is reduced before the last micro-batch"
    ),
)
def test_gradient_accumulation(side: Any) -> None:
    for replicas in (1, 2):
        for offload in (False, True):
            torch.manual_seed(42)
            model = nn.Sequential(nn.Linear(32, 32), *(MLP(32) for _ in range(3)))
            ref = copy.deepcopy(model)
            options = {"replicas": replicas, "offload": offload}
            optimizer = side.shard(model, modules=list(model[1:]), **options)
            ref_optimizer = Adam(ref.parameters(), lr=1e-2)
            seed()
            for index in range(5):
                for micro in range(3):
                    batch = torch.randn(2, 32)
                    losses = [ref(batch).sum(), model(batch).sum()]
                    losses[0].backward()
                    with CommDebugMode() as seen, side.micro_batch(model, optimizer, micro == 2):
                        losses[1].backward()
                    if micro < 2:
                        names = [str(name) for name in seen.get_comm_counts()]
                        assert not [n for n in names if any(word in n for word in REDUCTIONS)]
                    assert_close(losses[1], losses[0])
                average(ref)
                same_parity(side, ref, model, optimizer)
                for one in (optimizer, ref_optimizer):
                    one.step()
                    one.zero_grad(set_to_none=bool(index % 2))


@claim(4, without="the timing of gathers")
def test_1f1b_microbatching(side: Any) -> None:
    model = transformer()
    ref = copy.deepcopy(model)
    ref_optimizer = AdamW(ref.parameters(), lr=1e-2)
    optimizer = side.shard(model, AdamW, modules=blocks_of(model))
    seed()
    for index, batch in enumerate([torch.randint(0, 8, (2, 16)) for _ in range(3)]):
        losses = []
        with side.micro_batch(model, optimizer, index == 2):
            losses.append(model(batch).sum())
            losses[-1].backward()
        losses.append(ref(batch).sum())
        losses[-1].backward()
        assert_close(losses[0], losses[1])
    average(ref)
    same_parity(side, ref, model, optimizer)
    optimizer.step()
    ref_optimizer.step()
    assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])


def with_tensor_parallelism(side: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dp = names[:-1] if len(names) > 2 else names[0]
    dp_group = (mesh[dp]._flatten() if len(names) > 2 else mesh[dp]).get_group()
    plan = {}
    for index in range(3):
        plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
        plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=index == 2)
    for dim, checkpointing in ((3, False), (5, True), (16, True), (17, False)):
        torch.manual_seed(42)
        model = MLPStack(dim)
        ref = replicate(copy.deepcopy(model), process_group=dp_group)
        parallelize_module(model, mesh["tp"], plan)
        if checkpointing:
            for module in model:
                checkpoint(module)
        optimizer = side.shard(model, modules=list(model), mesh=mesh, dp=dp)
        for ours, param in zip(model.parameters(), ref.parameters(), strict=True):
            assert_close(whole(ours.detach()), param.detach())
        torch.manual_seed(42 + dist.get_rank(dp_group) + 1)
        train_beside(
            ref,
            model,
            Adam(ref.parameters(), lr=1e-2, foreach=False),
            optimizer,
            lambda dim=dim: torch.randn(8, dim),
        )


@claim(4, without="the check that a parameter's mesh includes the data-parallel dimension")
def test_2d_mlp_with_nd_mesh(side: Any) -> None:
    with_tensor_parallelism(side, (2, 2), ("dp", "tp"))


@claim(8, without="the check that a parameter's mesh includes the data-parallel dimensions")
def test_3d_mlp_with_nd_mesh(side: Any) -> None:
    with_tensor_parallelism(side, (2, 2, 2), ("dp_replicate", "dp_shard", "tp"))


@claim(4)
def test_train_parity_hsdp(side: Any) -> None:
    covers = ((3, False, True), (3, True, False), (16, True, True), (17, False, False))
    for dim, checkpointing, at_last in covers:
        torch.manual_seed(42)
        model = nn.Sequential(
            nn.LayerNorm(dim, bias=False),
            MLP(dim, dim_multiplier=3),
            MLP(dim),
            MLP(dim, dim_multiplier=3),
        )
        ref = replicate(copy.deepcopy(model))
        if checkpointing:
            for module in model:
                checkpoint(module)
        optimizer = side.shard(model, modules=list(model), replicas=2, offload=True)
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        seed()
        for index in range(5):
            for micro in range(3):
                batch = torch.randn(8, dim)
                losses = [ref(batch).sum(), model(batch).sum()]
                losses[0].backward()
                with side.micro_batch(model, optimizer, micro == 2 or not at_last):
                    losses[1].backward()
                assert_close(losses[1], losses[0])
            same_parity(side, ref, model, optimizer)
            for one in (ref_optimizer, optimizer):
                one.step()
                one.zero_grad(set_to_none=index % 2 == 0)
            assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])


@claim(2)
def test_register_fsdp_forward_method(side: Any) -> None:
    class VisionTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 1024, kernel_size=14, stride=14)

        def forward_features(self, images: Tensor) -> Tensor:
            return self.patches(images).flatten(2).transpose(1, 2)

        def forward(self, images: Tensor) -> Tensor:
            return self.forward_features(images).sum(dim=1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit, self.projector = VisionTransformer(), nn.Linear(1024, 256)

        def forward(self, images: Tensor) -> Tensor:
            return self.projector(self.vit.forward_features(images))

    torch.manual_seed(42)
    model = Model()
    ref = copy.deepcopy(model)
    optimizer = side.shard(model, modules=[model.vit, model.projector])
    side.announce(model.vit, "forward_features")
    seed()
    images = torch.randn(4, 3, 224, 224)
    losses = [one(images).sum() for one in (ref, model)]
    assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    average(ref)
    same_parity(side, ref, model, optimizer)


@claim(1)
def test_train_parity_single_worldsize1(side: Any) -> None:
    for first, second in ([(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)]):
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))
        ref = copy.deepcopy(model)
        ref_optimizer, optimizer = Adam(ref.parameters(), lr=1e-2), side.shard(model)
        batch = torch.randn(4, first[0])
        for index in range(10):
            for one in (ref_optimizer, optimizer):
                one.zero_grad(set_to_none=index % 2 == 0)
            ref_loss = ref(batch).sum()
            ref_loss.backward()
            with CommDebugMode() as seen:
                loss = model(batch).sum()
                loss.backward()
            assert seen.get_total_counts() == 0
            ref_optimizer.step()
            optimizer.step()
            assert_close(loss, ref_loss)
