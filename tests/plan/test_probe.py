"""What a class of optimizers needs is measured at shard(): classes that nobody has listed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import foreign
import lion_pytorch
import numpy
import pytest
import schedulefree
import torch
from oracle import mlp, set_grads, steps
from torch import Tensor, nn

import shardcast
from shardcast.testing import SpawnedWorld, ThreadedWorld

Build = Callable[[Any], torch.optim.Optimizer]


class Untouched(torch.optim.AdamW):
    """Adds nothing to its class."""


def partition(build: Build, model: nn.Module | None = None) -> str:
    model = model or mlp()
    return shardcast.shard(model, build(model.parameters())).layout.partition


@pytest.mark.parametrize(
    "build",
    [
        Untouched,
        foreign.Signs,
        foreign.Counts,
        lion_pytorch.Lion,
        schedulefree.AdamWScheduleFree,
        schedulefree.RAdamScheduleFree,
        lambda params: Untouched([{"params": list(params), "lr": 0.0}], foreach=True),
    ],
    ids=lambda build: build.__name__,
)
def test_an_elementwise_class_is_cut_evenly_without_being_declared(build: Build):
    assert partition(build) == "even"


@pytest.mark.parametrize(
    "build",
    [
        foreign.Normalized,
        foreign.RarelyNormalized,
        foreign.Factored,
        foreign.DecaysMatrices,
        foreign.OwnShapes,
    ],
)
def test_a_class_in_which_elements_may_meet_keeps_its_parameters_whole(build: Build):
    assert partition(build) == "whole"


def test_a_group_that_is_added_is_measured_for_itself():
    def run(group: Any) -> tuple[list[Tensor], list[str]]:
        model = mlp()
        vectors = [param for param in model.parameters() if param.dim() == 1]
        matrices = [param for param in model.parameters() if param.dim() == 2]
        optimizer: Any = foreign.DecaysMatrices(vectors)
        if group is not None:
            optimizer = shardcast.shard(
                model, optimizer, process_group=group, param_dtype="fp32", fuse="eager"
            )
        optimizer.add_param_group({"params": matrices})
        steps(3)(model, optimizer, torch.empty(0), False)
        packs = optimizer.layout.packs if group is not None else ()
        values = [param.detach().clone() for param in model.parameters()]
        return values, [pack.partition for pack in packs]

    expected, _ = run(None)
    for values, partitions in ThreadedWorld(2).run(run):
        assert partitions == ["even", "whole"]
        assert all(map(torch.equal, values, expected))


def test_a_declaration_overrides_what_is_measured():
    for declared, expected in ((True, "even"), (False, "whole")):
        model = mlp()
        for build in (foreign.Signs, foreign.Normalized):
            model = mlp()
            inner = build(model.parameters())
            optimizer = shardcast.shard(model, inner, elementwise=declared)
            assert optimizer.layout.partition == expected


def refusal(build: Build, size: int = 2) -> str:
    def run(group: Any) -> str:
        model = mlp()
        before = [(param.dtype, param.data_ptr()) for param in model.parameters()]
        with pytest.raises(TypeError) as caught:
            shardcast.shard(model, build(model.parameters()), process_group=group)
        assert [(param.dtype, param.data_ptr()) for param in model.parameters()] == before
        return str(caught.value)

    return ThreadedWorld(size).run(run)[0]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_class_whose_update_depends_on_all_parameters_is_refused(groups: int):
    def build(kind: Any) -> Build:
        return lambda params: kind(  # a warm-up begins at 0, where no update would differ
            params if groups == 1 else [{"params": p, "lr": 0.0} for p in params]
        )

    assert "ByOwnNorm" in refusal(build(foreign.ByOwnNorm))
    assert "StepSizeOfAll" in refusal(build(foreign.StepSizeOfAll))
    assert "DecayOfAll" in refusal(lambda params: foreign.DecayOfAll(params, weight_decay=1e-4))
    assert partition(lambda params: foreign.DecayOfAll(params, weight_decay=0.0)) == "whole"


def test_the_option_of_a_class_for_its_own_clip_is_named_with_what_replaces_it():
    message = refusal(foreign.ByOwnNorm)
    assert "max_grad_norm=None" in message and "max_grad_norm=1.0 to shard()" in message
    assert partition(lambda params: foreign.ByOwnNorm(params, max_grad_norm=None)) == "even"


def test_one_rank_has_all_parameters_so_that_nothing_is_refused():
    model = mlp()
    optimizer = shardcast.shard(model, foreign.StepSizeOfAll(model.parameters()))
    steps(2)(model, optimizer, torch.empty(0), True)


def test_an_optimizer_around_another_one_is_refused_by_the_name_of_the_inner_one():
    def nested(params: Any) -> torch.optim.Optimizer:
        return foreign.InList([torch.optim.SGD(params, lr=0.1)])

    for build in (lambda params: foreign.Lookahead(torch.optim.SGD(params, lr=0.1)), nested):
        message = refusal(build, size=1)
        assert "SGD" in message and "build it around" in message


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("bf16", 0.02)])
def test_a_wrapper_around_the_sharded_optimizer_works_as_around_the_plain_one(
    dtype: str, tolerance: float
):
    def run(group: Any) -> list[Tensor]:
        model = mlp()
        inner: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        if group is not None:
            inner = shardcast.shard(model, inner, process_group=group, param_dtype=dtype)
        steps(5)(model, foreign.Lookahead(inner), torch.empty(0), False)
        return [param.detach().float() for param in model.parameters()]

    expected = run(None)
    for params in ThreadedWorld(2).run(run):
        for param, value in zip(params, expected, strict=True):
            torch.testing.assert_close(param, value, rtol=0, atol=tolerance)


def test_state_in_subclasses_of_tensors_is_refused_by_name():
    message = refusal(foreign.QuantizedState, size=1)
    assert "QuantizedState" in message and "Wrapped" in message and "exp_avg" in message


def test_a_class_that_steps_over_a_list_of_its_own_is_refused_by_name():
    message = refusal(foreign.OwnList, size=1)
    assert "OwnList" in message and "listed" in message


def test_state_that_belongs_to_no_parameter_is_refused_by_name():
    message = refusal(foreign.CommonState, size=1)
    assert "CommonState" in message and "'k'" in message


def with_collectives(group: Any, real: bool) -> str:
    kind = foreign.UnmeasuredGathersMatrices if real else foreign.GathersMatrices
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    try:
        optimizer = shardcast.shard(model, kind(model.parameters()))
        assert real
        set_grads(model, 0)
        optimizer.step()
    except TypeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("real", [False, True], ids=["at shard", "at the first step"])
def test_a_class_that_calls_collectives_is_refused_on_every_rank(gloo: SpawnedWorld, real: bool):
    for message in gloo.run(with_collectives, real):
        assert "GathersMatrices" in message and "collectives" in message


def test_a_class_that_calls_collectives_is_refused_without_a_group():
    assert "torch.optim.Muon" in refusal(
        type("Muon", (foreign.GathersMatrices,), {}),  # type: ignore[arg-type]
        size=1,
    )


@pytest.mark.parametrize(
    "draw",
    [torch.randn_like, lambda _: random.random(), lambda _: float(numpy.random.rand())],
    ids=["torch", "python", "numpy"],
)
def test_random_numbers_of_the_script_stay_as_they_were(draw: Any):
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())

    model, before = mlp(), states()
    inner = foreign.Noisy(model.parameters(), draw=draw)
    before = states()
    optimizer = shardcast.shard(model, inner)
    assert states() == before
    assert optimizer.layout.partition == "whole"  # by chance it might seem anything


def test_the_probe_leaves_optimizer_and_parameters_alone():
    model = mlp()
    inner = foreign.Signs([{"params": model.parameters(), "note": [1]}], lr=0.0)
    inner.seen = list(model.parameters())  # type: ignore[attr-defined]
    set_grads(model, 0)
    inner.step()
    before = [(p.clone(), p.grad.clone(), inner.state[p]["exp_avg"].clone()) for p in inner.seen]  # type: ignore
    options = dict(inner.param_groups[0])
    shardcast.plan.probe.traits_of(inner)
    after = [(p, p.grad, inner.state[p]["exp_avg"]) for p in inner.seen]  # type: ignore
    assert all(map(torch.equal, sum(before, ()), sum(after, ())))
    assert inner.param_groups[0] == options


def test_a_compiled_step_is_measured_without_being_compiled():
    compiled = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Compiled(foreign.Rule):
        @staticmethod
        @torch.compile(backend=backend)
        def update(grad: Tensor) -> Tensor:
            return grad.sign() * 2

        def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
            return self.update(grad)

    model = mlp()
    optimizer = shardcast.shard(model, Compiled(model.parameters()))
    assert optimizer.layout.partition == "even" and not compiled
    set_grads(model, 0)
    optimizer.step()
    assert compiled
