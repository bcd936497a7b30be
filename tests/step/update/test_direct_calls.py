"""Calls that go to a compiled graph without Dynamo: what it would have seen is seen by others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from models import assert_same_bits, run_world
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import shardcast
from shardcast import _compat
from shardcast._compat import inductor
from shardcast.optimizer.stateful import packed_of
from shardcast.step.decide import graphs
from shardcast.step.reduce import compiled_mean
from shardcast.step.update import batches, compiled_update, fusion, numbers_of_rules, rules

pytestmark = pytest.mark.timeout(120)
KERNEL: Any = compiled_update._kernel
NUMBERS: Any = numbers_of_rules._kernel
SIZES = (700, 64, 130, 64, 2000, 129, 513, 320)


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        lambda: [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(())],
        lambda: [torch.ones(3, 2), torch.ones(())],
        lambda: [torch.ones(6), torch.ones(())],
        lambda: [torch.ones(3, 2).t(), torch.ones(())],
        lambda: [torch.ones(2, 3, device="meta"), torch.ones(())],
        lambda: [torch.ones(2, 3, requires_grad=True), torch.ones(())],
        lambda: [torch.ones(2, 3).as_subclass(Subclass), torch.ones(())],
        lambda: [torch.ones(2, 3), torch.ones(()), torch.ones(())],
        lambda: [torch.ones(2, 3)] * 2,
    ],
    ids=["dtype", "shape", "dims", "strides", "device", "gradient", "class", "count", "the same"],
)
def test_tensors_that_a_graph_was_not_made_for_are_of_other_kinds(
    other: Callable[[], list[Tensor]],
):
    first = [torch.ones(2, 3), torch.ones(())]
    assert inductor.kinds(first) == inductor.kinds([torch.zeros(2, 3), torch.zeros(())])
    others = other()
    assert inductor.kinds(others) != inductor.kinds(first)
    if others[0] is others[-1]:  # also where no shape tells
        assert inductor.kinds(others) != inductor.kinds([torch.ones(2, 3), torch.ones(2, 3)])


@contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "state",
    [
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: setting(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
        lambda: setting(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        lambda: FlopCounterMode(display=False),
        Seeing,
        torch._C.DisableTorchFunctionSubclass,
    ],
    ids=[
        "gradients", "autocast", "deterministic", "threads", "dtype", "operations", "functions",
        "no subclasses",
    ],
)  # fmt: skip
def test_a_call_does_not_fit_another_state_of_the_thread(
    state: Callable[[], AbstractContextManager[Any]],
):
    with torch.no_grad():
        call = inductor.Call(lambda *_: None, (), {})
        assert call.fits
        with state():
            assert not call.fits
        assert call.fits


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An accelerator, with graphs that Dynamo makes and torch runs; notes calls without Dynamo.

    Graphs that other tests had compiled have other last bits, and these are not for other tests.
    """
    from torch._inductor import compile_fx

    def graph(module: Any, _inputs: Any, config_patches: Any) -> Any:
        return module.forward

    direct: list[int] = []
    call = inductor.Call.__call__

    def counted(self: inductor.Call, operands: Any) -> Any:
        direct.append(len(operands))
        return call(self, operands)

    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    monkeypatch.setattr(batches, "BATCH", 4)
    monkeypatch.setattr(compile_fx, "compile_fx", graph)
    monkeypatch.setattr(inductor.Call, "__call__", counted)
    monkeypatch.setattr(compiled_update, "_kernel", lambda *_: fusion.in_pieces)
    monkeypatch.setattr(compiled_mean, "_kernel", lambda *_: compiled_mean.mean_)
    monkeypatch.setattr(numbers_of_rules, "_kernel", lambda *_: numbers_of_rules.numbers_)
    monkeypatch.setattr(graphs, "_compiled", lambda function: function)
    batches._kernel.cache_clear()
    yield direct
    batches._kernel.cache_clear()


Change = Callable[[int, nn.ParameterList, Any], None]


def clips_now_and_then(step: int, _model: Any, optimizer: Any) -> None:
    if step in (2, 5):
        optimizer.clip_grad_norm_(0.1)


def has_bounds_of_groups(step: int, _model: Any, optimizer: Any) -> None:
    optimizer.param_groups[1]["max_grad_norm"] = 0.1 if step in (2, 3, 4) else None


def turns_round(step: int, _model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["maximize"] = step in (2, 3)


def decays_no_more(step: int, _model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0 if step > 3 else 0.1


def misses_some(step: int, model: nn.ParameterList, _optimizer: Any) -> None:
    for number in (3, 4, 5) if step in (2, 4) else ():
        model[number].grad = None


def has_more_threads(step: int, _model: Any, _optimizer: Any) -> None:
    torch.set_num_threads(1 + step // 4)


def moves_gradients(step: int, model: nn.ParameterList, optimizer: Any) -> None:
    """Means are written to other memory from now on."""
    if step == 4:
        grads = [param.grad for param in model]
        for bucket in packed_of(optimizer).reduce.buckets.values():
            bucket.grads.free()
        for param, grad in zip(model, grads, strict=True):
            param.grad = grad


def trained(group: Any, change: Change, fields: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(size) for size in SIZES)
    params = [*model.parameters()]
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": 1e-3}]
    fields = {"param_dtype": torch.bfloat16, "pack_params": 1, "fuse": "compile", **fields}
    plain = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
    optimizer = shardcast.shard(model, plain, process_group=group, **fields)
    generator, threads = torch.Generator().manual_seed(1), torch.get_num_threads()
    try:
        for step in range(8):
            for param in model:
                grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                param.grad = grad
            change(step, model, optimizer)
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(threads)
    return {str(number): param.detach().clone() for number, param in enumerate(model)}


@pytest.mark.parametrize(
    ("change", "fields", "ranks"),
    [
        (clips_now_and_then, {}, 1),
        (has_bounds_of_groups, {}, 1),
        (turns_round, {}, 1),
        (has_bounds_of_groups, {"max_grad_norm": 1.0}, 1),
        (misses_some, {"averages": {"ema": 0.9}}, 1),
        (decays_no_more, {}, 1),
        (moves_gradients, {"grads": "sharded"}, 2),
        (moves_gradients, {}, 2),
        (has_more_threads, {}, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_step_without_dynamo_has_the_bits_of_one_with_it(
    change: Change, fields: dict[str, Any], ranks: int, traced: list[int],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    found, _ = run_world(ranks, trained, change, fields)
    assert traced, "most calls went to the graph"
    monkeypatch.setattr(batches, "FEWEST", 1000)
    traced.clear()
    expected, _ = run_world(ranks, trained, change, fields)
    assert not traced
    for weights, others in zip(found, expected, strict=True):
        assert_same_bits(weights, others)


@pytest.mark.parametrize(
    ("change", "fields", "ranks"),
    [
        (clips_now_and_then, {"moments": "bf16"}, 1),
        (turns_round, {"master": "split16"}, 1),
        (misses_some, {"averages": {"ema": 0.9}}, 1),
        (has_bounds_of_groups, {}, 1),
        (moves_gradients, {}, 2),
        (moves_gradients, {"grads": "sharded"}, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_ranges_alone_have_the_same_bits_without_dynamo(
    change: Change, fields: dict[str, Any], ranks: int, traced: list[int],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(batches, "FEWEST", 1000)
    expected, _ = run_world(ranks, trained, change, fields)
    assert not traced
    monkeypatch.setattr(compiled_update, "_kernel", KERNEL)
    KERNEL.cache_clear()
    found, _ = run_world(ranks, trained, change, fields)
    assert bool(traced) == (fields.get("grads") != "sharded")
    for weights, others in zip(found, expected, strict=True):
        assert_same_bits(weights, others)
    KERNEL.cache_clear()


@pytest.mark.parametrize("in_batches", [True, False])
def test_under_a_mode_no_step_goes_to_a_graph(
    in_batches: bool, traced: list[int], monkeypatch: pytest.MonkeyPatch
):
    if not in_batches:
        monkeypatch.setattr(batches, "FEWEST", 1000)
        monkeypatch.setattr(compiled_update, "_kernel", KERNEL)
        KERNEL.cache_clear()

    def watch(step: int, _model: Any, optimizer: Any) -> None:
        counts.append(len(traced))
        if step == 5:
            with FlopCounterMode(display=False):
                optimizer.step()
            assert len(traced) == counts[-1] > counts[-2]

    counts: list[int] = []
    trained(None, watch, {})
    assert counts[-1] > counts[-2]
    KERNEL.cache_clear()


def test_no_graph_is_made_for_what_is_absent_or_of_equal_length(
    traced: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Not in a step that goes by way of Dynamo again either, as the one with a bound does."""
    counts: list[int] = []
    batches._kernel.cache_clear()

    def watch(step: int, model: Any, optimizer: Any) -> None:
        misses_some(step, model, optimizer)
        for number in range(step, 8) if step > 5 else ():
            model[number].grad = None
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    for sizes in ((64 * 9,) * 8, (64 * 5,) * 4 + (64 * 7,) * 4, SIZES):
        monkeypatch.setitem(globals(), "SIZES", sizes)
        trained(None, watch, {"max_grad_norm": 1.0})
    assert traced and counts[-1] == counts[1] > counts[0]
    batches._kernel.cache_clear()


@pytest.mark.parametrize("uniform", [True, False])
def test_numbers_of_a_step_without_dynamo_have_the_same_bits(
    uniform: bool, traced: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Also where the learning rate of one group is another one in each step."""
    monkeypatch.setattr(numbers_of_rules, "_kernel", NUMBERS)
    NUMBERS.cache_clear()
    rule, steps = rules.AdamRule(decays=True), torch.zeros(3)
    places = None if uniform else torch.tensor([0, 2])
    tables = [
        numbers_of_rules.StepNumbers([0, 1], 7, steps, places, compiled)
        for compiled in (True, False)
    ]
    with torch.no_grad():
        for number in range(4):
            steps += torch.tensor([1.0, 1.0, 1.0 if uniform else 2.0])
            group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
            terms = [rule.terms(group), rule.terms({**group, "lr": 0.1 / (1 + number)})]
            for table in tables:
                table(terms)
            assert torch.equal(tables[0].table[:2], tables[1].table)
            table = tables[0].table.clone()
            tables[0](())  # the same again
            assert torch.equal(tables[0].table, table)
    assert len(traced) == 7
    NUMBERS.cache_clear()


class Code:
    """Generated code in what Inductor has around it, which does nothing."""

    def current_callable(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return (inputs[0] + 1,)

    def __call__(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return self.current_callable(inputs)


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_a_call_gives_what_is_made_of_the_results_of_the_code(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """As views, where something around the code makes them."""
    from torch._inductor import output_code

    def graph(operand: Tensor) -> Any:
        results = code([operand])
        return results if shape == (2,) else (results[0].view(shape),)

    monkeypatch.setattr(output_code, "CompiledFxGraph", Code)
    code, operand = Code(), torch.zeros(2)
    results, boxed = inductor._run(graph, (operand,))
    assert results[0].shape == boxed([operand])[0].shape == shape
