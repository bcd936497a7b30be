"""A decision that is made by graphs, called without Dynamo, is the one of the operations alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import assert_same_bits, run_world
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast._compat import inductor
from shardcast.optimizer.stateful import packed_of
from shardcast.step.decide import decider, graphs

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:step skipped"),
    pytest.mark.filterwarnings("ignore:step. no tokens were counted"),
]
SIZES = (70, 64, 130, 65)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An accelerator, with graphs that Dynamo makes and torch runs; notes calls without Dynamo.

    As those of Inductor they know a length by a number that is given with the tensors.
    """
    from torch._inductor import compile_fx

    def graph(module: Any, _inputs: Any, config_patches: Any) -> Any:
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        expected = [node.meta["example_value"] for node in nodes]

        def run(*arguments: Any) -> Any:
            pairs = [*zip(expected, arguments, strict=True)]
            lengths = {like.node.expr: it for like, it in pairs if not isinstance(like, Tensor)}
            for like, it in pairs:
                if isinstance(like, Tensor):
                    known = [
                        size if isinstance(size, int) else size.node.expr.xreplace(lengths)
                        for size in like.shape
                    ]
                    assert known == [*it.shape] and like.dtype == it.dtype
            return module.forward(*arguments)

        return run

    calls: list[int] = []
    call = inductor.Call.__call__

    def counted(self: inductor.Call, operands: Any) -> Any:
        calls.append(len(operands))
        return call(self, operands)

    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    monkeypatch.setattr(decider, "compiles", lambda *_: True)
    monkeypatch.setattr(compile_fx, "compile_fx", graph)
    monkeypatch.setattr(inductor.Call, "__call__", counted)
    yield calls


Change = Callable[[int, Any, Any], None]


def nothing(_step: int, _grads: Any, _optimizer: Any) -> None:
    pass


def has_other_bounds(step: int, _grads: Any, optimizer: Any) -> None:
    optimizer.clip_grad_norm_((1.0, 0.1, 5.0)[step % 3])


def clips_twice(step: int, _grads: Any, optimizer: Any) -> None:
    for bound in (0.3, 0.2) if step in (3, 6) else ():
        optimizer.clip_grad_norm_(bound)


def has_bounds_of_groups(step: int, _grads: Any, optimizer: Any) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group["max_grad_norm"] = 0.1 if step in (3 + number, 6) else None  # one, the other, both


def spoils_some(step: int, params: Any, _optimizer: Any) -> None:
    if step in (3, 6):
        params[step % 4].grad[5] = math.inf


def misses_some(step: int, params: Any, _optimizer: Any) -> None:
    for number in (1, 2) if step in (3, 5) else ():
        params[number].grad = None


def counts_tokens(step: int, _grads: Any, optimizer: Any) -> None:
    if step in (4, 5, 7):
        optimizer.count(step + 1)


def gets_a_group(step: int, _grads: Any, optimizer: Any) -> None:
    if step == 3:
        new = nn.Parameter(torch.full((200,), 0.5))
        optimizer._packed.model.append(new)
        optimizer.add_param_group({"params": [new], "lr": 1e-2})


def trained(group: Any, change: Change, fields: dict[str, Any], groups: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(size) for size in SIZES)
    params = [*model.parameters()]
    several = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}]
    plain = torch.optim.AdamW(several if groups == 2 else params, lr=3e-3)
    fields = {"param_dtype": torch.bfloat16, "pack_params": 1, "fuse": "eager", **fields}
    optimizer = shardcast.shard(model, plain, process_group=group, **fields)
    generator = torch.Generator().manual_seed(1 + (0 if group is None else group.rank()))
    results: list[Tensor] = []  # after each step
    for step in range(8):
        if change is counts_tokens:
            change(step, None, optimizer)
        loss = torch.zeros(())
        for param in model:
            grad = torch.randn(param.shape, generator=generator) * 0.1
            loss = loss + (param.float() * grad).sum()
        optimizer.scale_loss(loss).backward()
        if change is not counts_tokens:
            change(step, [*model], optimizer)
        optimizer.step()
        assert optimizer.grad_norm is not None
        results += [optimizer.grad_norm, packed_of(optimizer).decider.skips._totals.clone()]
        optimizer.zero_grad()
    return [*results, *(param.detach().clone() for param in model)]


@pytest.mark.parametrize(
    ("change", "fields", "groups", "ranks"),
    [
        (nothing, {"max_grad_norm": 0.1, "replica_check": 4}, 2, 2),
        (nothing, {"max_grad_norm": 0.1, "norm_type": 3.0}, 2, 1),
        (spoils_some, {"max_grad_norm": 0.1, "norm_type": math.inf}, 2, 2),
        (spoils_some, {"param_dtype": torch.float16, "loss_scale": "dynamic",
                       "loss_scale_growth_interval": 2}, 2, 1),
        (has_other_bounds, {}, 2, 1),
        (clips_twice, {}, 1, 1),
        (has_bounds_of_groups, {}, 2, 1),
        (misses_some, {"max_grad_norm": 0.1}, 2, 2),
        (counts_tokens, {"max_grad_norm": 0.1}, 1, 1),
        (gets_a_group, {"max_grad_norm": 0.1}, 1, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_a_decision_without_dynamo_has_the_bits_of_one_by_operations(
    change: Change, fields: dict[str, Any], groups: int, ranks: int, direct: list[int],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    results = run_world(ranks, trained, change, fields, groups)[0]
    least = 4 if change is counts_tokens else 9  # of two in a step, and of eight steps
    assert len(direct) >= least * ranks, "most decisions went to the graphs"
    monkeypatch.setattr(graphs, "_compiled", lambda function: function)
    direct.clear()
    expected = run_world(ranks, trained, change, fields, groups)[0]
    assert not direct
    for made, by_operations in zip(results, expected, strict=True):
        assert_same_bits(dict(enumerate(made)), dict(enumerate(by_operations)))


def test_parts_of_other_lengths_are_read_at_their_places(direct: list[int]):
    """Though the vector is as long."""
    model = nn.ParameterList([torch.ones(4), torch.ones(4)])
    optimizer = shardcast.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fuse="eager",
        param_dtype=torch.bfloat16,
    )  # fmt: skip
    arithmetic = packed_of(optimizer).decider._arithmetic
    others = [signal.local().numel() for signal in packed_of(optimizer).decider.signals[2:]]
    with torch.no_grad():
        for of_presence in (3, 3, 2, 2):  # the refusal has the others
            sizes = [1, 1, of_presence, 4 - of_presence, *others]
            vector = torch.zeros(sum(sizes), dtype=torch.float64)
            vector[4] = -7.0
            made = arithmetic.graphs.outcome(vector, sizes, None, [None])
            assert bool(made.skip) == (of_presence == 2)
    assert len(direct) == 2


def test_each_of_many_lengths_has_a_graph_of_its_own(direct: list[int]):
    """More than Dynamo would compile for one function before it gives up."""
    model = nn.ParameterList([torch.ones(4)])
    optimizer = shardcast.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fuse="eager",
        param_dtype=torch.bfloat16,
    )  # fmt: skip
    arithmetic = packed_of(optimizer).decider._arithmetic
    others = [signal.local().numel() for signal in packed_of(optimizer).decider.signals[2:]]
    lengths = range(2, 14)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in lengths:
            sizes = [1, 1, length, 1, *others]
            for _ in range(2):
                vector = torch.zeros(sum(sizes), dtype=torch.float64)
                assert not arithmetic.graphs.outcome(vector, sizes, None, [None]).skip
    assert len(direct) == len(lengths)
