"""Claims of ``test_fully_shard_grad_dtype.py``."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from claims.sides import claim, claims_in

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONLY_NEWER = "it has no grad_dtype in torch 2.13"


class FP32Gradient(torch.autograd.Function):
    """Matmul with an fp32 gradient of the weight; ``torch.mm`` supports that only on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().T @ x.float()


class Projection(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((32, 32), 0.125, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return FP32Gradient.apply(x, self.weight)


def values(rows: int) -> Tensor:
    return torch.full((rows, 32), 1.0078125, dtype=BF16)


@claim(2, control=ONLY_NEWER)
def test_invalid_dtype(side: Any) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64, "float128"):
        try:
            side.shard(nn.Linear(4, 4), low=BF16, grad_dtype=dtype)
        except ValueError as error:
            assert "grad_dtype" in str(error), error
        else:
            raise AssertionError(f"{dtype} was taken")


@claim(4, without="compiled products", control=ONLY_NEWER)
def test_fp32_gradient(side: Any) -> None:
    for storage, schedule, replicas in itertools.product(
        (BF16, FP32), ("sync", "no_sync", "checkpoint"), (1, 2)
    ):
        projection = Projection(storage)
        model = nn.Sequential(projection)
        optimizer = side.shard(
            model, torch.optim.SGD, lr=1e-3, low=BF16, grad_dtype=FP32, replicas=replicas
        )
        optimizer.divisor = 1
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            expected = torch.zeros(32, 32)
            for micro in range(2):
                x = values(2 + micro).requires_grad_()
                out = (
                    checkpoint(model, x, use_reentrant=False)
                    if schedule == "checkpoint"
                    else model(x)
                )
                assert projection.weight.dtype == BF16
                given = torch.full_like(out, 1.0078125 * (dist.get_rank() + 1))
                local = given.float().T @ x.detach().float()
                assert not torch.equal(local, local.bfloat16().float())
                received: list[Tensor] = []
                handle = projection.weight.register_hook(
                    lambda grad, received=received: received.append(grad.detach().clone())
                )
                with side.micro_batch(model, optimizer, schedule != "no_sync" or micro == 1):
                    out.backward(given)
                handle.remove()
                assert [grad.dtype for grad in received] == [FP32]
                assert torch.equal(received[0], local)
                dist.all_reduce(local)
                expected += local
            (grad,) = side.grads(model, optimizer)
            assert grad.dtype == FP32
            assert torch.equal(grad, expected)
            optimizer.step()


@claim(
    2,
    without=(
        "`.grad` in fp32 for weights that started in fp32, and an fp32 reduction of bf16 "
        "gradients; here both use the parameter's dtype"
    ),
)
def test_default_gradient_dtype(side: Any) -> None:
    for storage in (BF16, FP32):
        projection = Projection(storage)
        side.shard(projection, low=BF16)
        out = projection(values(2))
        received: list[torch.dtype] = []
        used = side.used(projection, "weight")
        handle = used.register_hook(lambda grad, received=received: received.append(grad.dtype))
        out.backward(torch.full_like(out, 1.0078125))
        handle.remove()
        assert received == [BF16]


@claim(
    4,
    without="zero gradients for parameters that no rank used; here `.grad` stays None, as in torch",
    control=ONLY_NEWER,
)
def test_explicit_reduction_dtype_and_unused_parameter(side: Any) -> None:
    for reduce in (BF16, FP32):
        projection = Projection(BF16)
        projection.unused = nn.Parameter(torch.zeros_like(projection.weight))
        optimizer = side.shard(projection, low=BF16, grad_dtype=FP32, reduce_dtype=reduce)
        optimizer.divisor = 1
        out = projection(values(2))
        given = torch.full_like(out, 1.0078125)
        expected = (given.float().T @ values(2).float()).to(reduce)
        dist.all_reduce(expected)
        out.backward(given)
        grad, unused = side.grads(projection, optimizer)
        assert grad.dtype == FP32
        assert torch.equal(grad, expected.float())
        assert unused is None


@claim(2, control=ONLY_NEWER)
def test_parameter_dtype_conversion_preserves_gradient(side: Any) -> None:
    model = Projection(BF16)
    optimizer = side.shard(model, low=BF16, grad_dtype=FP32)
    model(values(3)).backward(torch.full((3, 32), 1.0078125, dtype=BF16))
    side.grads(model, optimizer)
    model.half()
    model(values(3))


MOVES = "moves a sharded model between devices, or makes a conversion fail midway"
TESTS = claims_in(globals()) | {
    "test_positional_compatibility": "tests the order of a policy's arguments",
    "test_parameter_conversion_with_gradient": MOVES,
    "test_partial_parameter_conversion_failure": MOVES,
}
