"""Codecs and epilogues that are fused into one pass with the update."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import pytest
import torch
from models import (
    CASES,
    assert_same_bits,
    install,
    own_state,
    parts,
    run_world,
    sharded,
    values,
    whole,
)
from pairwise import thinned
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardcast
from shardcast.extensions.split_masters import Split16
from shardcast.memory.codecs import Codec, moment_codec
from shardcast.step.update import fusion, rules
from shardcast.step.update.fusion import CompiledExecutor, Executor, Fusion, UpdateNumbers
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)
needs_compiler = pytest.mark.needs_compiler
compiled = pytest.param(
    CompiledExecutor() if shutil.which("c++") else None,
    marks=[pytest.mark.slow, needs_compiler, pytest.mark.timeout(240)],
    id="compiled",
)
ON_HOST, ON_DEVICE = Executor(on_host=True), Executor(on_host=False)

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
BF16, FP32 = torch.bfloat16, torch.float32
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (ADAMW, {"weight_decay": 0.1}),
    "sgd_nesterov": (SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
}
MASTERS = {"fp32": Codec(), "split16": Split16()}
MOMENTS = ("fp32", "bf16", "int8")
NUMEL = 64 * 21 + 13


class Range:
    """Masters and state of one range with given codecs, and its update."""

    def __init__(self, optimizer: str, master: str, moments: str, row: int = 64) -> None:
        kind, options = OPTIMIZERS[optimizer]
        self.group = kind([nn.Parameter(torch.zeros(1))], lr=1e-2, **options).param_groups[0]
        rule = rules.rule_of(kind, self.group)
        config = shardcast.ShardcastConfig(moments=moments)
        state = tuple(moment_codec(config, name) for name in rule.state)
        casts = not MASTERS[master].has_published
        self.fusion = Fusion(rule, MASTERS[master], state, casts, row)
        torch.manual_seed(0)
        exact = torch.randn(NUMEL)
        exact[:640] = (exact[:640].view(torch.int32) & -65536 | 0x8000).view(FP32)  # ties
        rows = nn.functional.pad(exact, (0, -NUMEL % row)).view(-1, row)
        pieces = [*self.fusion.master.encode(rows, None)]
        for codec in state:
            pieces += codec.encode(torch.zeros_like(rows), None)
        counts = self.fusion.counts[1 + casts : len(pieces) + 1 + casts]
        flat = zip(pieces, counts, strict=True)
        self.operands = [p.flatten()[:NUMEL].clone() if c == row else p.clone() for p, c in flat]
        if casts:
            self.operands.insert(0, exact.to(BF16))
        if self.fusion.by_chance:
            self.operands.append(torch.randint(-(1 << 31), 1 << 31, (len(rows),)).int())

    def run(
        self, executor: Executor, grad: Tensor, step: int, skip: bool = False, part: Any = None
    ) -> None:
        count, decision = torch.tensor(float(step)), torch.tensor(skip)
        if executor.on_host:
            numbers = self.fusion.rule.numbers(self.group, float(step))
        else:
            numbers = rules.as_tensors(
                self.fusion.rule.numbers(self.group, count.double()), decision
            )
        operands = [grad, *self.operands]
        if part is not None:
            first, last = part.start // self.fusion.row, -(-part.stop // self.fusion.row)
            pairs = zip(operands, self.fusion.counts, strict=True)
            operands = [t[part] if count > 1 else t[first:last] for t, count in pairs]
        decided = None if executor.on_host else decision
        executor(self.fusion, operands, UpdateNumbers(count, numbers), torch.tensor(0.37), decided)

    def bits(self) -> dict[int, Tensor]:
        return {n: operand.clone() for n, operand in enumerate(self.operands)}


def gradients(steps: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(NUMEL).mul(10.0 ** (step % 3 - 1)).to(dtype) for step in range(steps)]


CUTS = [*itertools.product((4, 64), MOMENTS)]


@pytest.mark.parametrize(
    ("executor", "row", "moments"),
    [
        *((executor, *cut) for executor in (ON_HOST, ON_DEVICE) for cut in CUTS),
        *(pytest.param(*compiled.values, *cut, marks=compiled.marks) for cut in thinned(2, CUTS)),
    ],
)
def test_where_an_update_is_cut_does_not_show(
    executor: Executor, row: int, moments: str, monkeypatch: pytest.MonkeyPatch
):
    """Updates in parts or in pieces of two rows give the same ties and random bits."""
    uncut, cut = (Range("adamw", "split16", moments, row) for _ in range(2))
    for step, grad in enumerate(gradients(3), 1):
        uncut.run(executor, grad, step)
        with monkeypatch.context() as patch:
            patch.setattr(fusion, "CACHED", 128)
            for start, stop in ((0, 64), (64, 640), (640, 1216), (1216, NUMEL)):
                cut.run(executor, grad, step, part=slice(start, stop))
        assert_same_bits(uncut.bits(), cut.bits())


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("master", "moments"), thinned(2, MASTERS, ("bf16", "int8")))
def test_compiled_codecs_give_the_eager_values_within_a_step(master: str, moments: str):
    """A last bit of a moment may change the rounded value by a step, and the master slightly."""
    eager, compiled = (Range("adamw", master, moments) for _ in range(2))
    for step, grad in enumerate(gradients(3), 1):
        eager.run(ON_DEVICE, grad, step)
        compiled.run(CompiledExecutor(), grad, step)
        for left, right in zip(eager.operands, compiled.operands, strict=True):
            off = (left.double() - right.double()).abs()
            assert (off > 1e-6 * left.double().abs()).double().mean() < 0.01
        for left, right in zip(eager.operands, compiled.operands, strict=True):
            right.copy_(left)


@pytest.mark.parametrize("executor", [ON_HOST, ON_DEVICE, compiled])
def test_ties_survive_an_update_that_changes_no_weight(executor: Executor):
    found = Range("sgd_nesterov", "split16", "fp32")
    found.group["weight_decay"] = 0.0
    before = found.bits()
    assert found.operands[2].any(), "there are ties"
    found.run(executor, torch.zeros(NUMEL, dtype=BF16), 1, part=slice(0, 1344))
    assert_same_bits(found.bits(), before)


# -- stochastic rounding ------------------------------------------------------------------------


def by_chance(group: Any, **fields: Any) -> tuple[dict[str, Tensor], Any]:
    model = CASES["gpt"].build()
    options = {"param_dtype": BF16, "moments": "bf16", **fields}
    optimizer = sharded(model, group, **options)
    for step in range(4):
        install(model, step)
        optimizer.step()
    return values(model), parts(optimizer)


@pytest.mark.parametrize(
    "fields",
    [{"pack_params": 1, "alignment": 16}, {"pack_mb": 0.001, "partition": "whole"}],
    ids=str,
)
def test_chance_depends_neither_on_packs_nor_on_partition_nor_on_ranks(fields: dict[str, Any]):
    expected, state = by_chance(None)
    for size in (1, 3):
        ranks, _ = run_world(size, lambda group: by_chance(group, **fields))
        for found, _ in ranks:
            assert_same_bits(found, expected)
        assert_same_bits(whole(found for _, found in ranks), whole([state]))


def test_chance_differs_between_parameters_and_between_steps():
    """Two parameters have equal values and gradients, each in its own pack."""
    model = nn.ParameterList(nn.Parameter(torch.ones(4096)) for _ in range(2))
    optimizer = sharded(model, param_dtype=BF16, moments="bf16", pack_params=1)
    seen = []
    for _ in range(3):
        for param in model:
            param.grad = torch.full_like(param, 1 + 2**-7)
        optimizer.step()
        seen += [own_state(optimizer, param)["exp_avg"].clone() for param in model]
    assert all(not torch.equal(a, b) for n, a in enumerate(seen) for b in seen[:n])


def moments_of_parts(mesh: DeviceMesh | None, dim: int) -> dict[Any, Tensor]:
    """Return the state of a vector and of a matrix that a mesh cuts along ``dim``."""
    torch.manual_seed(0)
    matrix, vector, *gradients = torch.randn(5, 64, 256).unbind()

    def part(tensor: Tensor) -> Any:
        if mesh is None:
            return tensor
        return distribute_tensor(tensor, mesh["tp"], [Shard(dim)], src_data_rank=None)

    model = nn.ParameterList([nn.Parameter(part(matrix)), nn.Parameter(vector[0].clone())])
    options = {"param_dtype": "bf16", "moments": "bf16"}
    optimizer = shardcast.shard(model, ADAMW(model.parameters()), options, mesh=mesh)
    for gradient in gradients:
        model[0].grad, model[1].grad = part(gradient.to(BF16)), gradient[0].to(BF16)
        optimizer.step()
    return parts(optimizer)


@pytest.mark.parametrize("dim", [0, 1])
def test_chance_does_not_depend_on_a_mesh(dim: int):
    alone = moments_of_parts(None, dim)
    for rank, found in enumerate(
        threaded_world({"dp": 2, "tp": 2}, lambda mesh: moments_of_parts(mesh, dim))
    ):
        for (name, start, stop, kind), tensor in found.items():
            if kind != "step":
                (expected,) = (t for (n, *_, k), t in alone.items() if (n, k) == (name, kind))
                if name == "0":
                    expected = expected.view(64, 256).chunk(2, dim)[rank % 2].flatten()
                assert torch.equal(tensor, expected[start:stop]), (rank, name, kind)
