"""Claims of ``test_fully_shard_mixed_precision.py``."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close
from torch.testing._internal.common_distributed import SaveForwardInputsModel
from torch.testing._internal.common_fsdp import MLP
from torch.utils.checkpoint import checkpoint

from claims.helpers import Adam, average, ranks, seed
from claims.sides import claim, claims_in

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def weights_of(ref: nn.Module) -> list[Tensor]:
    return [param.detach() for param in ref.parameters()]


def take_gradients(ref: nn.Module, low: nn.Module) -> None:
    """Move the low-precision copy's gradients into the fp32 reference, which adds them up."""
    for param, low_param in zip(ref.parameters(), low.parameters(), strict=True):
        grad = low_param.grad.to(param.dtype)
        param.grad = grad if param.grad is None else param.grad + grad
        low_param.grad = None


def show(ref: nn.Module, low: nn.Module) -> None:
    for param, low_param in zip(ref.parameters(), low.parameters(), strict=True):
        low_param.detach().copy_(param.detach())


def reduced_in_fp32(side: Any) -> tuple[Any, ...]:
    """Return the model, its copies in bf16 and fp32, and both optimizers; seed each rank."""
    torch.manual_seed(42)
    model = nn.Sequential(*[MLP(16) for _ in range(3)])
    ref = copy.deepcopy(model)
    low = copy.deepcopy(ref).to(BF16)
    ref_optimizer = Adam(ref.parameters(), lr=1e-2)
    optimizer = side.shard(model, modules=list(model), low=BF16, reduce=FP32)
    seed()
    return model, low, ref, optimizer, ref_optimizer


@claim(4, without="a bf16 reduction of fp32 gradients, because sums are in fp32")
def test_reduce_dtype(side: Any) -> None:
    model, low, ref, optimizer, ref_optimizer = reduced_in_fp32(side)
    batch = torch.randn(4, 16).to(BF16)
    for index in range(10):
        for one in (optimizer, ref_optimizer):
            one.zero_grad(set_to_none=index % 2 == 0)
        losses = [one(batch).sum() for one in (low, model)]
        for loss in losses:
            loss.backward()
        for param in ref.parameters():
            param.grad = None
        take_gradients(ref, low)
        average(ref)
        ref_optimizer.step()
        optimizer.step()
        show(ref, low)
        assert_close(losses[1], losses[0])
        assert_close(side.weights(model, optimizer), weights_of(ref))


@claim(4, control="fixed in FSDP2 after torch 2.13")
def test_reduce_dtype_after_frozen_first_forward(side: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            self.whole_numbers = nn.Parameter(torch.ones(16, dtype=torch.int64), False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    model = Model()

    def floating(params: Any, lr: float) -> Any:
        return Adam([param for param in params if param.is_floating_point()], lr=lr)

    optimizer = side.shard(model, floating, low=BF16, reduce=FP32)
    model.requires_grad_(False)
    batch = torch.randn(4, 16)
    with torch.no_grad():
        model(batch)
    model.layers.requires_grad_(True)
    model(batch).sum().backward()
    grads = side.grads(model, optimizer)
    optimizer.step()
    assert [grad.dtype for grad in grads if grad is not None] == [FP32] * 4


@claim(4)
def test_grad_acc_with_reduce_dtype(side: Any) -> None:
    model, low, ref, optimizer, ref_optimizer = reduced_in_fp32(side)
    batch = torch.randn(8, 16).to(BF16)
    for index in range(10):
        for number, part in enumerate(batch.chunk(4)):
            losses = [one(part.detach()).sum() for one in (low, model)]
            assert {loss.dtype for loss in losses} == {BF16}
            losses[0].backward()
            with side.micro_batch(model, optimizer, number == 3):
                losses[1].backward()
            assert_close(losses[1], losses[0])
            take_gradients(ref, low)
        average(ref)
        assert_close(side.weights(model, optimizer), weights_of(ref))
        for ours, param in zip(side.grads(model, optimizer), ref.parameters(), strict=True):
            assert_close(ours, param.grad)
        for one in (ref_optimizer, optimizer):
            one.step()
            one.zero_grad(set_to_none=index % 2 == 0)
        show(ref, low)


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Nested:
    inner: Pair
    z: Tensor


class NamedPair(NamedTuple):
    x: Tensor
    y: Tensor


class Structured(nn.Module):
    """Apply a linear layer to each tensor of a container, or create a container, or sum one."""

    def __init__(self, kind: str, part: str) -> None:
        super().__init__()
        self.kind, self.part = kind, part
        if part == "linear":
            self.linear = nn.Linear(16, 16)

    def forward(self, given: Any) -> Any:
        nested = self.kind == "nested"
        if self.part == "sum":
            return given.inner.x + given.inner.y + given.z if nested else given.x + given.y
        if self.part == "make":
            tensors = [given, given.clone(), given.clone()]
        else:
            held = (given.inner.x, given.inner.y, given.z) if nested else (given.x, given.y)
            tensors = [self.linear(tensor) for tensor in held]
        if nested:
            return Nested(Pair(*tensors[:2]), tensors[2])
        return (Pair if self.kind == "dataclass" else NamedPair)(*tensors[:2])


@claim(4)
def test_structured_input_output(side: Any) -> None:
    kinds = ("dataclass", "nested", "namedtuple")
    for kind, (low, reduce) in itertools.product(kinds, ((None, None), (BF16, BF16), (BF16, FP32))):
        torch.manual_seed(42)
        model = nn.Sequential(
            *(Structured(kind, part) for part in ("make", "linear", "linear", "sum"))
        )
        ref = copy.deepcopy(model)
        compute = ref if low is None else copy.deepcopy(ref).to(low)
        ref_optimizer = Adam(ref.parameters(), lr=1e-2)
        optimizer = side.shard(model, modules=list(model), low=low, reduce=reduce)
        torch.manual_seed(1)
        for index in range(10):
            batch = torch.rand(2 * ranks(), 16)
            own = batch.chunk(ranks())[dist.get_rank()].detach()
            optimizer.zero_grad(set_to_none=index % 2 == 0)
            loss = model(own).sum()
            loss.backward()
            optimizer.step()
            for param in ref.parameters():
                param.grad = None
            ref_loss = compute(batch.to(low or FP32)).sum()
            ref_loss.backward()  # on the whole batch: the sum over all ranks
            if low is not None:
                take_gradients(ref, compute)
            for param in ref.parameters():
                param.grad.div_(ranks())
            ref_optimizer.step()
            if low is not None:
                show(ref, compute)
            loss = loss.detach()
            dist.all_reduce(loss)
            assert_close(loss, ref_loss.detach())
            if low is None:
                assert_close(side.weights(model, optimizer), weights_of(ref))


@claim(2, without="weights that start on the meta device")
def test_no_warmup_jvp_reshard_after_forward_false(side: Any) -> None:
    torch.manual_seed(42)
    encoder, decoder = nn.Linear(128, 256, bias=False), nn.Linear(256, 320, bias=False)
    side.shard(encoder, low=BF16, reduce=FP32)
    side.shard(decoder, low=BF16, reduce=FP32)
    encoded = encoder(torch.randn(128).to(BF16))
    primal = torch.randn(320).to(BF16).requires_grad_()
    given = (primal,), (torch.randn(320).to(BF16),)
    out, tangent = torch.func.jvp(lambda unused: decoder(encoded), *given)
    assert out.shape == (320,)
    assert out.dtype == BF16
    assert_close(tangent, torch.zeros_like(out))


@claim(
    2,
    without=(
        "FSDP2's casts and output dtypes of single modules; the compute dtypes of both linears "
        "are compared"
    ),
)
def test_float16_on_one_submodule(side: Any) -> None:
    inputs: dict[Any, Tensor] = {}
    model = SaveForwardInputsModel(inputs, cast_forward_inputs=False)
    side.shard_low(model, [model.c2], FP16)
    made: list[torch.dtype] = []
    for module in (model.c1.l, model.c2.l):
        module.register_forward_hook(lambda *given: made.append(given[2].dtype))
    model(torch.zeros(2, 100)).sum().backward()
    assert inputs[model].dtype == FP32
    assert inputs[model.c1].dtype == FP32
    assert made == [FP32, FP16]


class Recomputed(nn.Module):
    """A layer that is recomputed in the backward and records the dtypes of its outputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.taken = nn.Linear(1, 1), dtype
        self.dtypes: list[torch.dtype] = []

    def run(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.dtypes.append(x.dtype)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.run, x.to(self.taken), use_reentrant=False, early_stop=False)
        return x.float().sum()


@claim(
    2, without="inputs of a custom layer, which are not cast; a layer of torch is tested instead"
)
def test_checkpoint_recompute_casts_forward_inputs(side: Any) -> None:
    torch.manual_seed(42)
    model = Recomputed(FP32)
    side.shard(model, modules=[model.linear], low=BF16, reduce=BF16)
    model(torch.randn(8, 1)).backward()
    assert model.dtypes == [BF16, BF16]


@claim(2)
def test_checkpoint_recompute_casts_outputs(side: Any) -> None:
    torch.manual_seed(42)
    model = Recomputed(BF16)
    side.shard(model, modules=[model.linear], low=BF16, reduce=BF16, fp32_outputs="linear")
    model(torch.randn(8, 1)).backward()
    assert model.dtypes == [FP32, FP32]


def norm_modules(side: Any, low: torch.dtype) -> None:
    def pictures(second: nn.Module) -> list[nn.Module]:
        return [nn.Conv2d(1, 5, 3), second, nn.Conv2d(5, 4, 3)]

    for modules, shape in (
        ([nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)], (4, 32)),
        ([nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)], (4, 32)),
        (pictures(nn.BatchNorm2d(5)), (3, 1, 9, 9)),
    ):
        model = nn.Sequential(*modules)
        side.shard(model, modules=modules, low=low)
        out = model(torch.randn(shape))
        assert out.dtype == low
        out.sum().backward()


OUTPUTS = "manual buffer casts and an output dtype, which FSDP2 needs for batch norm on GPUs"
ON_GPUS = "on CPUs, torch's batch norm needs weights and buffers of one dtype"


@claim(2, without=OUTPUTS, control=ON_GPUS)
def test_norm_modules_bf16(side: Any) -> None:
    norm_modules(side, BF16)


@claim(2, without=OUTPUTS, control=ON_GPUS)
def test_norm_modules_fp16(side: Any) -> None:
    norm_modules(side, FP16)


@claim(2)
def test_clamp_reduce_dtype(side: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 32, dtype=BF16), nn.Linear(32, 32, dtype=BF16))
    optimizer = side.shard(model, modules=list(model), low=BF16, reduce=BF16)
    model.to(FP32)
    model(torch.randn(4, 32)).sum().backward()
    side.grads(model, optimizer)


SUMS = "compares with low-precision sums; shardcast sums in fp32"
PER_MODULE = "sets casts of inputs or outputs for single modules"
TESTS = claims_in(globals()) | {
    "test_compute_dtype": SUMS,
    "test_submodules_with_external_inputs": PER_MODULE,
}
