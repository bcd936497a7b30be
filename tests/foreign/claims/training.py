"""Claims of ``test_fully_shard_training.py``; a function has the name of its test."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLP, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import (
    ModelArgs,
    Transformer,
    TransformerBlock,
)

from claims.sides import Claim, claim, whole

Adam, AdamW = torch.optim.Adam, torch.optim.AdamW
REDUCTIONS = ("reduce", "alltoall")


def ranks() -> int:
    return dist.get_world_size()


def seed(local: int = 1) -> None:
    torch.manual_seed(42 + dist.get_rank() + local)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, TransformerBlock)]


def same_parity(side: Any, ref: nn.Module, model: nn.Module, optimizer: Any) -> None:
    """Compare weights and gradients, as ``check_sharded_parity`` does."""
    assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])
    grads = side.grads(model, optimizer)
    for ours, param in zip(grads, ref.parameters(), strict=True):
        assert (ours is None) == (param.grad is None)
        if ours is not None:
            assert_close(ours, param.grad)


def train_beside(
    ref: nn.Module, model: nn.Module, ref_optimizer: Any, optimizer: Any,
    draw: Callable[[], Tensor], steps: int = 10, delays: tuple[float, float] = (0, 0),
) -> None:  # fmt: skip
    """Train both on the same batches; their losses are equal in every step."""
    for index in range(steps):
        batch, losses = draw(), []
        for one, steps_by in ((ref, ref_optimizer), (model, optimizer)):
            steps_by.zero_grad(set_to_none=index % 2 == 0)
            losses.append(one(batch).sum())
            if one is model:
                time.sleep(delays[0])
            losses[-1].backward()
            if one is model:
                time.sleep(delays[1])
            steps_by.step()
        assert_close(losses[1], losses[0])


def average(ref: nn.Module) -> None:
    for param in ref.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(ranks())


def transformer(**options: Any) -> Transformer:
    torch.manual_seed(42)
    return Transformer(ModelArgs(dropout_p=0.0, **options))


def single_group(side: Any, *shapes: list[tuple[int, int]]) -> None:
    for first, second in shapes:
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))
        ref = replicate(copy.deepcopy(model))
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        optimizer = side.shard(model)
        seed()
        batch = torch.randn(4, first[0])
        train_beside(ref, model, ref_optimizer, optimizer, lambda batch=batch: batch)


def multi_group(side: Any, **options: Any) -> None:
    for delays in ((0, 0), (0.02, 0), (0, 0.02), (0.02, 0.02)):
        model = transformer(n_layers=3, n_heads=4, vocab_size=1024, max_seq_len=64)
        ref = replicate(copy.deepcopy(model))
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        optimizer = side.shard(model, modules=blocks_of(model), **options)
        seed()

        def draw() -> Tensor:
            return torch.randint(0, 1024, (3, 64))

        late = delays if dist.get_rank() == 1 else (0, 0)
        train_beside(ref, model, ref_optimizer, optimizer, draw, delays=late)


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
    if type(side).__name__ == "FSDP2":  # it casts before it makes the optimizer
        optimizer = Adam(model.parameters(), lr=1e-2)
    seed()
    batch = torch.randn(2, 4).double()
    train_beside(ref, model, Adam(ref.parameters(), lr=1e-2), optimizer, lambda: batch)


@claim(8)
def test_train_parity_single_group_shard_dim0(side: Any) -> None:
    single_group(side, [(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)])


@claim(8, without="the dimension over which FSDP2 shards; spans have none")
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


@claim(2)
def test_train_parity_with_activation_checkpointing(side: Any) -> None:
    for impl in ("composable", "utils", "wrapper"):
        for tied in (False, True):
            model = transformer(
                n_layers=3, n_heads=4, vocab_size=1024, max_seq_len=64, weight_tying=tied,
                checkpoint_activations=impl == "utils",
            )  # fmt: skip
            ref = replicate(copy.deepcopy(model))
            if impl == "wrapper":
                apply_activation_checkpointing(
                    model, check_fn=lambda module: isinstance(module, TransformerBlock)
                )
            if impl == "composable":
                for block in blocks_of(model):
                    checkpoint(block)
            optimizer = side.shard(model, modules=list(model.layers))
            ref_optimizer = Adam(ref.parameters(), lr=1e-2)
            seed(0)
            batch = torch.randint(0, 1024, (3, 64))
            for index in range(10):
                losses = [one(batch).sum() for one in (ref, model)]
                for loss in losses:
                    loss.backward()
                same_parity(side, ref, model, optimizer)
                assert_close(losses[1], losses[0])
                for one in (ref_optimizer, optimizer):
                    one.step()
                    one.zero_grad(set_to_none=index % 2 == 0)


class ChunkedHead(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(128, 32), nn.Linear(32, 32, bias=False)
        self.norm, self.head = nn.RMSNorm(32), nn.Linear(32, 128, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, skip_head: bool = False) -> Tensor:
        hidden = self.norm(self.body(self.embed(tokens)))
        return hidden if skip_head else self.head(hidden)


def parts_of(model: ChunkedHead) -> list[Any]:
    """Modules for FSDP2: two that share a weight are one group."""
    if model.head.weight is model.embed.weight:
        return [model.body, [model.embed, model.norm, model.head]]
    return [model.embed, model.body, model.norm, model.head]


def train_in_chunks(model: Any, tokens: Tensor, chunks: int) -> Tensor:
    """The head's loss piece by piece, each with a backward, and then that of the body."""
    hidden = model(tokens, skip_head=True)
    grads, total = [], torch.tensor(0.0)
    for chunk in hidden.detach().float().chunk(chunks, dim=1):
        chunk = chunk.contiguous().detach().requires_grad_()
        loss = model.head(chunk).sum()
        total += loss.detach()
        loss.backward()
        grads.append(chunk.grad)
    hidden.backward(torch.cat(grads, dim=1).to(hidden.dtype))
    return total


@claim(
    2,
    without="output dtypes and groups of modules, and what `.grad` is between two backwards",
)
def test_partial_group_forward_then_standalone(side: Any) -> None:
    for tie in (False, True):
        torch.manual_seed(42)
        model = ChunkedHead(tie)
        ref = copy.deepcopy(model)
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        if not tie:
            checkpoint(model.body)
        optimizer = side.shard(model, modules=parts_of(model))
        torch.manual_seed(42)
        tokens = torch.randint(0, 128, (2, 16))
        for index in range(10):
            losses = [train_in_chunks(one, tokens, 4) for one in (ref, model)]
            assert_close(losses[1], losses[0])
            average(ref)
            same_parity(side, ref, model, optimizer)
            for one in (ref_optimizer, optimizer):
                one.step()
                one.zero_grad(set_to_none=index % 2 == 0)


@claim(2)
def test_grouped_module_cast_forward_inputs(side: Any) -> None:
    class FloatBetween(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).float())

    torch.manual_seed(42)
    model = FloatBetween()
    optimizer = side.shard(model, modules=[model.a, model.b], low=torch.bfloat16)
    out = model(torch.randn(2, 32))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(grad is not None for grad in side.grads(model, optimizer))


@claim(2, without="groups of modules next to single ones; gradients are compared with plain torch")
def test_partial_group_forward_grad_accum_chunked(side: Any) -> None:
    torch.manual_seed(42)
    model = ChunkedHead(tie=False)
    ref = copy.deepcopy(model)
    optimizer = side.shard(model, modules=parts_of(model))
    torch.manual_seed(42)
    batches = [torch.randint(0, 128, (2, 16)) for _ in range(3)]
    for index, tokens in enumerate(batches):
        train_in_chunks(ref, tokens, 2)
        with side.micro_batch(model, optimizer, index == 2):
            train_in_chunks(model, tokens, 2)
    average(ref)
    same_parity(side, ref, model, optimizer)


@claim(2)
def test_reset_iter_state_after_exception(side: Any) -> None:
    class Raiser(nn.Module):
        def __init__(self, wrapped: nn.Module) -> None:
            super().__init__()
            self.wrapped, self.armed = wrapped, True

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise RuntimeError("boom")
            return self.wrapped(x)

    torch.manual_seed(42)
    model = ChunkedHead(tie=False)
    model.body = Raiser(model.body)
    optimizer = side.shard(model)
    tokens = torch.randint(0, 128, (2, 16))
    try:
        model(tokens, skip_head=True)
        raise AssertionError("boom did not come")
    except RuntimeError as error:
        assert "boom" in str(error)
    model.body.armed = False
    side.reset(model)
    model(tokens).sum().backward()
    assert all(grad is not None for grad in side.grads(model, optimizer))


@claim(2)
def test_double_forward_with_nested_fsdp_and_checkpoint(side: Any) -> None:
    for impl in ("composable", "utils"):
        model = transformer(
            n_layers=3, n_heads=4, vocab_size=1024, max_seq_len=64,
            checkpoint_activations=impl == "utils",
        )  # fmt: skip
        if impl == "composable":
            for block in blocks_of(model):
                checkpoint(block)
        optimizer = side.shard(model, modules=list(model.layers))
        seed(0)
        first, second = (model(torch.randint(0, 1024, (2, 32))) for _ in range(2))
        (first.sum() - second.sum()).pow(2).backward()
        assert all(grad is not None for grad in side.grads(model, optimizer))


@claim(2)
def test_double_partial_forward_then_backward(side: Any) -> None:
    torch.manual_seed(42)
    model = ChunkedHead(tie=False)
    optimizer = side.shard(model)
    first, second = (model(torch.randint(0, 128, (2, 16)), skip_head=True) for _ in range(2))
    (first.sum() + second.sum()).backward()
    names = [name for name, _ in model.named_parameters()]
    grads = dict(zip(names, side.grads(model, optimizer), strict=True))
    assert all(grads[name].isfinite().all() for name in ("embed.weight", "norm.weight"))
    assert grads["head.weight"] is None


@claim(8, without="the dimension over which FSDP2 shards; spans have none")
def test_train_parity_shard_placement_fn_shard_largest_dim(side: Any) -> None:
    model = transformer(n_layers=3)
    ref = copy.deepcopy(model)
    ref_optimizer = AdamW(ref.parameters(), lr=1e-2)
    optimizer = side.shard(model, AdamW, modules=list(model.layers))
    assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])
    seed(0)
    batch = torch.randint(0, 8, (2, 16))
    for _ in range(5):
        losses = [one(batch).sum() for one in (ref, model)]
        assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        average(ref)
        for one in (ref_optimizer, optimizer):
            one.step()
            one.zero_grad()
    assert_close(side.weights(model, optimizer), [p.detach() for p in ref.parameters()])


@claim(4, without="the dimension over which FSDP2 shards; spans have none")
def test_shard_placement_fn_contiguous_params_grads(side: Any) -> None:
    model = MLP(4)
    optimizer = side.shard(model, modules=[model.in_proj, model.out_proj])

    def contiguous(module: nn.Module, _: Any) -> None:
        assert all(param.is_contiguous() for param in module.parameters())

    model.in_proj.register_forward_pre_hook(contiguous)
    model.out_proj.register_forward_pre_hook(contiguous)
    contiguous(model, None)
    model(torch.randn(2, 4)).sum().backward()
    contiguous(model, None)
    assert all(grad.is_contiguous() for grad in side.grads(model, optimizer))


@claim(4)
def test_train_parity_with_shared_params(side: Any) -> None:
    for checkpointing in (False, True):
        model = transformer(n_layers=3, weight_tying=True)
        ref = replicate(copy.deepcopy(model))
        if checkpointing:
            for block in blocks_of(model):
                checkpoint(block)
        optimizer = side.shard(model, modules=blocks_of(model))
        seed()
        train_beside(
            ref, model, Adam(ref.parameters(), lr=1e-2), optimizer,
            lambda: torch.randint(0, 8, (2, 16)),
        )  # fmt: skip


@claim(4)
def test_train_shared_params_uneven_shard(side: Any) -> None:
    vocabulary = ranks() * 4 + 1

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, 16)
            self.output = nn.Linear(16, vocabulary, bias=False)
            self.output.weight = self.tokens.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.output(self.tokens(ids))

    torch.manual_seed(42)
    model = Tied()
    optimizer = side.shard(model, AdamW)
    begun = side.weights(model, optimizer)[0].clone()
    seed(0)
    for _ in range(10):
        ids = torch.randint(0, vocabulary, (2, 8))
        logits = model(ids).view(-1, vocabulary).float()
        nn.functional.cross_entropy(logits, ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (side.weights(model, optimizer)[0] != begun).any(dim=1).all()


@claim(
    4,
    without=(
        "reduction of some modules alone, and the numbers of collectives of FSDP2's groups; "
        "that there is no reduction before the last micro-batch is compared"
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


@claim(4, without="when parameters are gathered")
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
    for dim in (3, 5, 16, 17):
        for checkpointing in (False, True):
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
                ref, model, Adam(ref.parameters(), lr=1e-2, foreach=False), optimizer,
                lambda dim=dim: torch.randn(8, dim),
            )  # fmt: skip


@claim(4, without="that the mesh of a parameter has the data-parallel dimension, too")
def test_2d_mlp_with_nd_mesh(side: Any) -> None:
    with_tensor_parallelism(side, (2, 2), ("dp", "tp"))


@claim(8, without="that the mesh of a parameter has the data-parallel dimensions, too")
def test_3d_mlp_with_nd_mesh(side: Any) -> None:
    with_tensor_parallelism(side, (2, 2, 2), ("dp_replicate", "dp_shard", "tp"))


@claim(4)
def test_train_parity_hsdp(side: Any) -> None:
    for dim in (3, 16, 17):
        for checkpointing in (False, True):
            for at_last in (True, False):
                torch.manual_seed(42)
                model = nn.Sequential(
                    nn.LayerNorm(dim, bias=False), MLP(dim, dim_multiplier=3), MLP(dim),
                    MLP(dim, dim_multiplier=3),
                )  # fmt: skip
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
                    assert_close(
                        side.weights(model, optimizer), [p.detach() for p in ref.parameters()]
                    )


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


GATHERED = "is about when sharded parameters are gathered; parameters are whole here"
CUDA = "is about streams, events and graphs of CUDA"
TESTS: dict[str, Claim | str] = {
    "test_root_move_forward_input_to_device": "moves inputs to a GPU, which the script does here",
    "test_root_no_forward_inputs": test_root_no_forward_inputs,
    "test_param_registration_after_forward": GATHERED,
    "test_param_registration_after_backward": GATHERED,
    "test_modules_to_run_forward_empty_for_single_module": GATHERED,
    "test_to_float64_after_init": test_to_float64_after_init,
    "test_train_parity_single_group_shard_dim0": test_train_parity_single_group_shard_dim0,
    "test_train_parity_single_group_shard_largest_dim": (
        test_train_parity_single_group_shard_largest_dim
    ),
    "test_train_parity_multi_group": test_train_parity_multi_group,
    "test_train_parity_multi_group_cpu_offload_eager": (
        test_train_parity_multi_group_cpu_offload_eager
    ),
    "test_train_parity_multi_group_unshard_async_op": GATHERED,
    "test_non_root_forward_backward": test_non_root_forward_backward,
    "test_multi_forward_module": test_multi_forward_module,
    "test_explicit_prefetching": GATHERED,
    "test_post_optim_event": CUDA,
    "test_train_parity_with_activation_checkpointing": (
        test_train_parity_with_activation_checkpointing
    ),
    "test_partial_group_forward_then_standalone": test_partial_group_forward_then_standalone,
    "test_grouped_module_cast_forward_inputs": test_grouped_module_cast_forward_inputs,
    "test_partial_group_forward_grad_accum_chunked": test_partial_group_forward_grad_accum_chunked,
    "test_partial_group_reshard_toggle": GATHERED,
    "test_reset_iter_state_after_exception": test_reset_iter_state_after_exception,
    "test_double_forward_with_nested_fsdp_and_checkpoint": (
        test_double_forward_with_nested_fsdp_and_checkpoint
    ),
    "test_double_partial_forward_then_backward": test_double_partial_forward_then_backward,
    "test_train_parity_shard_placement_fn_shard_largest_dim": (
        test_train_parity_shard_placement_fn_shard_largest_dim
    ),
    "test_shard_placement_fn_contiguous_params_grads": (
        test_shard_placement_fn_contiguous_params_grads
    ),
    "test_train_parity_with_shared_params": test_train_parity_with_shared_params,
    "test_train_shared_params_uneven_shard": test_train_shared_params_uneven_shard,
    "test_shared_params_separate_fsdp_groups_error": "ties weights of two groups of FSDP2",
    "test_layer_by_layer_shard_no_false_positive": "shards modules one by one, and not a model",
    "test_gradient_accumulation": test_gradient_accumulation,
    "test_1f1b_microbatching": test_1f1b_microbatching,
    "test_2d_mlp_with_nd_mesh": test_2d_mlp_with_nd_mesh,
    "test_shard_placement_fn_tp_ep": "skips itself on fewer than eight GPUs",
    "test_3d_mlp_with_nd_mesh": test_3d_mlp_with_nd_mesh,
    "test_train_parity_hsdp": test_train_parity_hsdp,
    "test_register_fsdp_forward_method": test_register_fsdp_forward_method,
    "test_share_comm_context": CUDA,
    "test_train_parity_single_worldsize1": test_train_parity_single_worldsize1,
    "test_two_layer_fully_shard_cudagraph": CUDA,
}
