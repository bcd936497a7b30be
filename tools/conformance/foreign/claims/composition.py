"""Claims of ``test_fully_shard_training.py`` about checkpoints, chunks and ties."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLP
from torch.testing._internal.distributed._tensor.common_dtensor import (
    TransformerBlock,
)

from claims.helpers import (
    Adam,
    AdamW,
    average,
    blocks_of,
    ranks,
    same_parity,
    seed,
    train_beside,
    transformer,
)
from claims.sides import claim


@claim(2)
def test_train_parity_with_activation_checkpointing(side: Any) -> None:
    for impl, tied in (("composable", True), ("utils", False), ("wrapper", True)):
        model = transformer(
            n_layers=3,
            n_heads=4,
            vocab_size=1024,
            max_seq_len=64,
            weight_tying=tied,
            checkpoint_activations=impl == "utils",
        )
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
    """Return the modules for FSDP2; modules that share a weight are in one group."""
    if model.head.weight is model.embed.weight:
        return [model.body, [model.embed, model.norm, model.head]]
    return [model.embed, model.body, model.norm, model.head]


def train_in_chunks(model: Any, tokens: Tensor, chunks: int) -> Tensor:
    """Run head and backward chunk by chunk, then the body's backward; return the total loss."""
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
    without="output dtypes, module groups, and `.grad` between two backwards",
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


@claim(2, without="FSDP2's module groups; gradients are compared with plain torch")
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
            n_layers=3,
            n_heads=4,
            vocab_size=1024,
            max_seq_len=64,
            checkpoint_activations=impl == "utils",
        )
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


@claim(8, without="the dimension that FSDP2 shards, because spans ignore dimensions")
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


@claim(4, without="the dimension that FSDP2 shards, because spans ignore dimensions")
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
            ref,
            model,
            Adam(ref.parameters(), lr=1e-2),
            optimizer,
            lambda: torch.randint(0, 8, (2, 16)),
        )


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
