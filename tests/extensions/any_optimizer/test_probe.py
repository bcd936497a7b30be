"""``shard()`` probes what an unlisted class of optimizers needs."""

from __future__ import annotations

import random
import warnings
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
from shardcast._compat import observer
from shardcast.extensions.any_optimizer import traits_of
from shardcast.testing import SpawnedWorld, ThreadedWorld

Build = Callable[[Any], torch.optim.Optimizer]


class Untouched(torch.optim.AdamW):
    """Adds nothing to its class."""


def partition(build: Build, **fields: Any) -> str:
    model = mlp()
    return shardcast.shard(model, build(model.parameters()), **fields).layout.partition


PARTITIONS: dict[str, tuple[Build, ...]] = {
    "even": (torch.optim.RMSprop, torch.optim.AdamW),
    "whole": (
        Untouched,
        foreign.Signs,
        foreign.Counts,
        lion_pytorch.Lion,
        schedulefree.AdamWScheduleFree,
        schedulefree.RAdamScheduleFree,
        lambda params: Untouched([{"params": list(params), "lr": 0.0}], foreach=True),
        lambda params: foreign.ByOwnNorm(params, max_grad_norm=None),
        foreign.Normalized,
        foreign.RarelyNormalized,
        foreign.Factored,
        foreign.DecaysMatrices,
        foreign.OwnShapes,
        foreign.Stacked,  # sums of several parameters at once may round differently
        lambda params: foreign.DecayOfAll(params, weight_decay=0.0),
    ),
}


@pytest.mark.parametrize(
    ("expected", "build"), [(p, build) for p, builds in PARTITIONS.items() for build in builds]
)
def test_a_class_that_torch_does_not_have_is_cut_only_where_it_is_declared_elementwise(
    expected: str, build: Build
):
    assert ThreadedWorld(2).run(lambda _: partition(build)) == [expected] * 2


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
        assert partitions == ["whole", "whole"]
        assert all(map(torch.equal, values, expected))


def test_a_declaration_overrides_what_is_measured():
    for declared, expected in ((True, "even"), (False, "whole")):
        for build in (foreign.Signs, foreign.Normalized):
            assert partition(build, elementwise=declared) == expected


def in_list(params: Any) -> torch.optim.Optimizer:
    return foreign.InList([torch.optim.SGD(params, lr=0.1)])


def in_two_groups(kind: Any) -> Build:
    # A warm-up begins with a rate of 0, with which no updates would differ.
    return lambda params: kind([{"params": p, "lr": 0.0} for p in params])


REFUSED: list[tuple[Build, int, tuple[str, ...]]] = [
    # For a class with its own clip, the error names the option and its replacement.
    (foreign.ByOwnNorm, 2, ("ByOwnNorm", "max_grad_norm=None", "max_grad_norm=1.0 to shard()")),
    (in_two_groups(foreign.ByOwnNorm), 2, ("ByOwnNorm",)),
    (foreign.StepSizeOfAll, 2, ("StepSizeOfAll",)),
    (in_two_groups(foreign.StepSizeOfAll), 2, ("StepSizeOfAll",)),
    (lambda params: foreign.DecayOfAll(params, weight_decay=1e-4), 2, ("DecayOfAll",)),
    (lambda params: foreign.RootedDecayOfAll(params, weight_decay=1.0), 2, ("RootedDecayOfAll",)),
    (foreign.ScaledBySpread, 2, ("ScaledBySpread",)),
    (
        lambda params: foreign.Lookahead(torch.optim.SGD(params, lr=0.1)),
        1,
        ("SGD", "build it around"),
    ),
    (in_list, 1, ("SGD", "build it around")),
    (foreign.QuantizedState, 1, ("QuantizedState", "Wrapped", "exp_avg")),
    (foreign.OwnList, 1, ("OwnList", "listed")),
    (foreign.CommonState, 1, ("CommonState", "'k'")),
    (foreign.StackedState, 2, ("StackedState", "(momentum)", "another number of ranks")),
    (type("MuonAdamW", (foreign.StackedState,), {}), 2, ("use torch.optim.Muon",)),
    (type("Muon", (foreign.GathersMatrices,), {}), 1, ("torch.optim.Muon",)),  # without a group
]


@pytest.mark.parametrize(
    ("build", "size", "names"),
    REFUSED,
    ids=[f"{n}-{names[0]}" for n, (*_, names) in enumerate(REFUSED)],
)
def test_a_class_that_cannot_be_sharded_is_refused_by_name_and_nothing_is_changed(
    build: Build, size: int, names: tuple[str, ...]
):
    def run(group: Any) -> str:
        model = mlp()
        before = [(param.dtype, param.data_ptr()) for param in model.parameters()]
        with pytest.raises(TypeError) as caught:
            shardcast.shard(model, build(model.parameters()), process_group=group)
        assert [(param.dtype, param.data_ptr()) for param in model.parameters()] == before
        return str(caught.value)

    for message in ThreadedWorld(size).run(run):
        assert all(name in message for name in names), message


def test_products_are_told_from_roots_and_other_words_by_the_operators_that_torch_calls():
    """Only matmuls may round differently for several parameters at once."""

    def multiplies(run: Callable[[Tensor], object]) -> bool:
        matrix = torch.eye(3)
        with observer.StepObserver() as seen:
            run(matrix)
        return seen.multiplies

    products: list[Callable[[Tensor], object]] = [
        lambda m: m @ m,
        lambda m: torch.addmm(m, m, m),
        lambda m: torch.addmm(m, m, m, out=m.clone()),
        lambda m: torch.bmm(m[None], m[None]),
        lambda m: torch.baddbmm(m[None], m[None], m[None]),
        lambda m: torch.einsum("ij,jk->ik", m, m),
        torch.linalg.qr,
        torch.linalg.svd,
        torch.linalg.eigh,
        torch.linalg.inv,
        torch.linalg.cholesky,
        lambda m: torch.linalg.solve(m, m),
        torch.cholesky_inverse,
    ]
    others: list[Callable[[Tensor], object]] = [
        torch.sqrt,
        torch.rsqrt,
        lambda m: torch._foreach_sqrt([m]),
        torch.linalg.vector_norm,
        lambda m: m.norm(),
        lambda m: m.lerp(m, 0.5).addcdiv(m, m),
    ]
    assert [multiplies(run) for run in products] == [True] * len(products)
    assert [multiplies(run) for run in others] == [False] * len(others)


def test_a_probe_makes_no_large_square_of_a_vector():
    """Shampoo takes a root of such a square, which took minutes."""
    lengths = []

    class Squares(foreign.Rule):
        def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
            lengths.extend(param.shape)
            return grad

    model = mlp()
    shardcast.shard(model, Squares(model.parameters()))
    assert 0 < max(lengths) < 200


@pytest.mark.parametrize("of", [nn.Linear(3, 3), nn.LayerNorm(3)], ids=["matrices", "vectors"])
def test_state_that_only_large_parameters_have_is_measured(of: nn.Module):
    with pytest.raises(TypeError, match=r"'exp_avg' is of\s+type Wrapped"):
        shardcast.shard(of, foreign.QuantizedState(of.parameters()))


@pytest.mark.parametrize("kind", [foreign.StepSizeOfAll, foreign.StackedState])
def test_one_rank_has_all_parameters_so_that_nothing_is_refused(kind: Any):
    model = mlp()
    optimizer = shardcast.shard(model, kind(model.parameters()))
    steps(2)(model, optimizer, torch.empty(0), True)


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
    assert optimizer.layout.partition == "whole"


@pytest.mark.parametrize("size", [1, 2])
def test_several_ranks_are_told_that_a_class_draws_their_random_numbers_apart(size: int):
    def shard(group: Any) -> None:
        model = mlp()
        inner = foreign.Noisy(model.parameters(), draw=torch.randn_like)
        shardcast.shard(model, inner, process_group=group)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ThreadedWorld(size, timeout=20).run(shard)
    told = [str(each.message) for each in caught if "draws random" in str(each.message)]
    assert len(told) == (size > 1)
    assert all("Noisy" in message and "Seed the ranks" in message for message in told)


def test_the_probe_leaves_optimizer_and_parameters_alone():
    model = mlp()
    inner = foreign.Signs([{"params": model.parameters(), "note": [1]}], lr=0.0)
    inner.seen = list(model.parameters())  # type: ignore[attr-defined]
    set_grads(model, 0)
    inner.step()
    before = [(p.clone(), p.grad.clone(), inner.state[p]["exp_avg"].clone()) for p in inner.seen]  # type: ignore
    options = dict(inner.param_groups[0])
    traits_of(inner)
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
    assert not compiled
    set_grads(model, 0)
    optimizer.step()
    assert compiled


def test_a_class_that_no_trial_could_measure_is_watched_in_its_first_steps():
    def run(group: Any) -> None:
        model = mlp()
        inner = foreign.Unmeasured(model.parameters())
        optimizer = shardcast.shard(model, inner, process_group=group, pack_params=1)
        set_grads(model, 0)
        optimizer.step()

    ThreadedWorld(1).run(run)
    messages = []

    def caught(group: Any) -> None:
        with pytest.raises(
            RuntimeError, match=r"Unmeasured computed 'd' of group 0 as .* with DDP"
        ):
            run(group)
        messages.append(group.rank())

    ThreadedWorld(8).run(caught)  # ranks that own nothing raise too
    assert len(messages) == 8


STACKS = "which owns 1 of 2 parameters, none of group [01] .*stack"
NAMED = r"which owns [1-5] of 6 parameters \(Assertion"


@pytest.mark.parametrize(("kind", "told"), [(foreign.Stacks, STACKS), (foreign.Named, NAMED)])
def test_a_class_that_fails_with_some_parameters_is_named_with_the_reason(kind: Any, told: str):
    """A combined Muon and AdamW stacks each group's matrices; a rank may own none of them."""
    messages = []

    def run(group: Any) -> None:
        model = mlp()
        params: Any = model.parameters()
        if kind is foreign.Stacks:
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(3, 3, bias=False))
            params = [{"params": list(layer.parameters())} for layer in model]
        optimizer = shardcast.shard(model, kind(params), process_group=group)
        set_grads(model, 0)
        where = rf"step\(\) of {kind.__name__} failed on rank \d, "
        with pytest.raises(TypeError, match=where + told):
            optimizer.step()
        messages.append(group.rank())

    ThreadedWorld(2).run(run)
    assert len(messages) == 2


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_a_class_that_runs_out_of_memory_is_no_wrong_class(kind: type[Exception]):
    """Scripts catch the error by its type."""
    full: list[bool] = []

    class Full(foreign.Signs):
        def direction(self, *of: Any) -> Tensor:
            if full:
                raise kind("out of memory")
            return super().direction(*of)

    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(model, Full(model.parameters()), process_group=group)
        set_grads(model, 0)
        optimizer.step()
        full.append(True)
        set_grads(model, 0)
        with pytest.raises(kind, match="out of memory"):
            optimizer.step()

    ThreadedWorld(2).run(run)
