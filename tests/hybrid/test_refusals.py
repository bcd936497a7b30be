"""Mistakes in a hybrid job raise on every rank, by name, whichever rank made them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from bag import Bag
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardcast
from shardcast.testing import threaded_world

GRID = {"pp": 2, "dp": 2, "tp": 2}


def at(mesh: DeviceMesh, dim: str) -> int:
    return mesh.get_local_rank(dim)


def sharded(
    mesh: DeviceMesh, model: Any = None, optimizer: Any = None, stages: Any = None, **options: Any
) -> tuple[nn.Module, Any]:
    """Shard a small model, or ``stages`` of it; return it and the optimizer.

    Also assert that a refused model does not change.
    """
    model = Bag(one=(4, 4), two=(4,)) if model is None else model
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    stages = model if stages is None else stages(model)
    dtypes = [param.dtype for param in model.parameters()]
    try:
        return model, shardcast.shard(stages, optimizer, **{"mesh": mesh, **options})
    except (TypeError, ValueError, RuntimeError):
        assert [param.dtype for param in model.parameters()] == dtypes
        raise


def placed(mesh: DeviceMesh, **placements: Any) -> Bag:
    model = Bag(one=(4, 4), two=(4,))
    model.place(mesh, **placements)
    return model


def pending(mesh: DeviceMesh, name: str, here: bool, trained: bool = True) -> Bag:
    """Return a model which on some ranks has a parameter that is a pending sum."""
    model = Bag(one=(4, 4), two=(4,))
    if here:
        summand = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()], run_check=False)
        model.register_parameter(name, nn.Parameter(summand, requires_grad=trained))
    return model


def in_other_order() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("tp", "dp", "pp"))


def two_meshes(mesh: DeviceMesh) -> None:
    """Use two meshes with the same dimensions and different orders of ranks."""
    other = in_other_order()
    model = placed(mesh["tp"], one=Shard(0))
    model.place(other["tp"], two=Shard(0))
    sharded(mesh, model)


def left_out(mesh: DeviceMesh) -> None:
    model = pending(mesh, "rest", bool(at(mesh, "pp")), trained=False)
    sharded(mesh, model, torch.optim.AdamW([model.one, model.two]))


def without_memory(mesh: DeviceMesh) -> None:
    model = Bag(one=(4, 4))
    if at(mesh, "pp"):
        model.register_buffer("table", torch.empty(3, device="meta"))
    sharded(mesh, model)


def grouped(mesh: DeviceMesh, groups: Callable[[Bag, int], list[list[nn.Parameter]]]) -> None:
    """Shard with groups that depend on the rank along ``pp`` and ``tp``."""
    model = Bag(one=(4, 4), two=(4,))
    made = groups(model, 2 * at(mesh, "pp") + at(mesh, "tp"))
    sharded(mesh, model, torch.optim.AdamW([{"params": group} for group in made]), **LIST)


LIST: dict[str, Any] = {"stages": lambda model: [model]}  # a pipeline's list of stages


def tied(mesh: DeviceMesh, first: Any, last: Any, ties: Any = None, **options: Any) -> None:
    """Shard two stages of these shapes; ``ties`` are by stage if they differ."""
    stage = at(mesh, "pp")
    ties = [("one", "two")] if ties is None else ties(stage)
    sharded(mesh, Bag(**(last if stage else first)), **LIST, tied=ties, **options)


def unlike_ties(mesh: DeviceMesh, how: str, **options: Any) -> None:
    first = at(mesh, "pp") == 0
    model = Bag(one=(4,), two=(2,)) if first else Bag(two=(2,), three=(4,))
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
    if how == "frozen":
        groups = [{"params": params}]
        params[-1].requires_grad_(first)
    if how == "left out":
        groups = [{"params": params[:1]}]
    optimizer = torch.optim.AdamW(groups)
    sharded(mesh, model, optimizer, **LIST, tied=[("one", "three")], **options)


def stepped(
    mesh: DeviceMesh,
    edit: Callable[[Any], Any],
    finish: Callable[[Any], Any] | None = None,
    scaled: Callable[[Any, Tensor], Tensor] = lambda _o, loss: loss,
    **options: Any,
) -> None:
    """Make a step after ``edit`` of the optimizer."""
    model, optimizer = sharded(mesh, **LIST, **options)
    edit(optimizer)
    loss = model({"one": torch.ones(4, 4), "two": torch.ones(4)})
    scaled(optimizer, loss).backward()
    (finish or type(optimizer).step)(optimizer)


def change(name: str, value: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.param_groups[0].update({name: value})


class Refused(NamedTuple):
    """The error of every rank, its text, and the action on every rank."""

    kind: type[Exception]
    told: str
    act: Callable[[DeviceMesh], Any]


VALUE, RANKS = partial(Refused, ValueError), partial(Refused, RuntimeError)
KIND = partial(Refused, TypeError)
REFUSED: dict[str, Refused] = {
    "a partial parameter on one rank": KIND(
        "'one' is Partial along 'tp'", lambda m: sharded(m, pending(m, "one", m.get_rank() == 3))
    ),
    "one that is left out on a stage": KIND("'rest' is Partial along 'tp'", left_out),
    "a buffer without memory": VALUE("'table' is on the meta device", without_memory),
    "no such dimension": VALUE("dp: expected .*pp, dp, tp", lambda m: sharded(m, dp="data")),
    "none on one rank": VALUE(
        "dp: .* got 'data'", lambda m: sharded(m, dp="data" if m.get_rank() == 5 else "dp")
    ),
    "another one on one rank": RANKS(
        "dp='tp'", lambda m: sharded(m, dp="tp" if m.get_rank() == 2 else "dp")
    ),
    "one dimension twice": VALUE("dp: .* different", lambda m: sharded(m, dp=("dp", "dp"))),
    "no data-parallel dimension": VALUE("dp: .*of tp", lambda m: sharded(m["tp"])),
    "a group for a mesh": KIND("mesh: .*DeviceMesh", lambda m: sharded(m.get_group("dp"))),
    "a group and a mesh": VALUE(
        "process_group: .*mesh=", lambda m: sharded(m, process_group=m.get_group("dp"))
    ),
    "cut over data": KIND(
        "'one' is a DTensor over mesh dimension 'dp'",
        lambda m: sharded(m, placed(m["dp"], one=Shard(0))),
    ),
    "two meshes": VALUE("'two' is a DTensor over another mesh, whose 'tp'", two_meshes),
    "another mesh": VALUE(
        "'one' is a DTensor over another mesh, whose 'tp'",
        lambda m: sharded(m, placed(in_other_order()["tp"], one=Shard(0))),
    ),
    "no stages": VALUE(
        "at least one pipeline stage",
        lambda m: sharded(m, stages=lambda model: [] if at(m, "pp") else [model]),
    ),
    "a stage without parameters": VALUE(
        "hold no parameter",
        lambda m: sharded(m, *([Bag(), torch.optim.AdamW([{"params": []}])] * at(m, "pp")), **LIST),
    ),
    "stages with other groups": RANKS(
        "differ",
        lambda m: grouped(
            m,
            lambda model, place: (
                [[model.one], [model.two]] if place > 1 else [[model.one, model.two]]
            ),
        ),
    ),
    "copies in other groups": RANKS(
        "group 0.*held as copies over tp",
        lambda m: grouped(
            m, lambda model, place: [[p] for p in model.parameters()][:: 1 - 2 * (place % 2)]
        ),
    ),
    "stages with other rates": RANKS(
        "lr",
        lambda m: sharded(
            m,
            model := Bag(one=(4,)),
            torch.optim.AdamW(model.parameters(), lr=0.1 + at(m, "pp")),
            **LIST,
        ),
    ),
    "stages with another configuration": RANKS(
        "param_dtype", lambda m: sharded(m, **LIST, param_dtype="fp32" if at(m, "pp") else "bf16")
    ),
    "sharded gradients in a pipeline": VALUE(
        "accumulate: expected 'local'", lambda m: sharded(m, **LIST, accumulate="sharded")
    ),
    "copies of other shapes": RANKS(
        "one .*held as copies over tp", lambda m: sharded(m, Bag(one=(4 + at(m, "tp"),)))
    ),
    "stages with the same names": VALUE(
        "two pipeline stages .* named 'one'.*ModuleDict",
        lambda m: sharded(m, stages=lambda model: [model, Bag(one=(4, 4))]),
    ),
    "fp32 of nothing": VALUE(
        r"keep_fp32: the pattern 'nrm\.\*'", lambda m: sharded(m, **LIST, keep_fp32=["nrm.*"])
    ),
    "a sum of nothing": VALUE(
        r"grad_sum_over: the pattern 'q_norm.\*'",
        lambda m: sharded(m, grad_sum_over={"tp": ["q_norm.*"]}),
    ),
    "a sum over nothing": VALUE(
        "grad_sum_over: .*among pp, tp", lambda m: sharded(m, grad_sum_over={"cp": ["one"]})
    ),
    "sums of some ranks": RANKS(
        "grad_sum_over",
        lambda m: sharded(m, grad_sum_over={"tp": ["one"]} if at(m, "tp") else None),
    ),
    "experts of nothing": VALUE(
        "experts: .*among dp", lambda m: sharded(m, experts={"tp": ["one"]})
    ),
    "a tie within a stage": VALUE(
        r"tied: .* on stages \[0\]", lambda m: tied(m, {"one": (4,), "two": (4,)}, {"three": (2,)})
    ),
    "a tie of other shapes": VALUE(
        "tied: .*'one' and 'two' of one shape", lambda m: tied(m, {"one": (4, 2)}, {"two": (2, 4)})
    ),
    "a tie of three": VALUE(
        "tied: .*one pair, got 'one' in two",
        lambda m: tied(
            m,
            {"one": (4,)},
            {"two": (4,), "three": (4,)},
            lambda _: [("one", "two"), ("one", "three")],
        ),
    ),
    "a tie that is no pair": VALUE(
        r"tied: expected \(name on its first holder",
        lambda m: tied(m, {"one": (4,)}, {"two": (4,)}, lambda _: [("one", "two", "three")]),
    ),
    "ties of one stage alone": VALUE(
        "tied: .* same names on all .* stages",
        lambda m: tied(m, {"one": (4,)}, {"two": (4,)}, lambda stage: [("one", "two")][stage:]),
    ),
    "a tie in other groups": VALUE(
        "tied: .* 'one' and 'three' .* group 0 and .* group 1", lambda m: unlike_ties(m, "groups")
    ),
    "a tie that is frozen on a stage": VALUE(
        "tied: .* trained, .* frozen, ", lambda m: unlike_ties(m, "frozen")
    ),
    "a tie that is left out on a stage": VALUE(
        "tied: .* in group 0 and .*in no group", lambda m: unlike_ties(m, "left out")
    ),
    "a tie in fp32 on a stage": VALUE(
        "tied: .*bfloat16.* and torch.float32",
        lambda m: unlike_ties(m, "fp32", keep_fp32=["three"], autocast=False),
    ),
    "ties without a mesh": VALUE("tied: .* mesh", lambda m: sharded(None, tied=[("one", "two")])),
    "an optimizer of matrices": KIND(
        "'one' is sharded over .* 'tp', and Muon needs whole",
        lambda m: sharded(m, model := placed(m["tp"], one=Shard(0)), torch.optim.Muon([model.one])),
    ),
    "a bad divisor": VALUE(
        "divisor: expected a number above 0",
        lambda m: stepped(m, lambda o: setattr(o, "divisor", 0)),
    ),
    "another rate in a step": RANKS(
        "lr of group 0 .*0.001.*; rank 6: 0.5",
        lambda m: stepped(m, change("lr", 0.5 if m.get_rank() == 6 else 0.001)),
    ),
    "stages that differ in a step": RANKS(
        "betas of group 0",
        lambda m: stepped(m, change("betas", (0.9, 0.9 + 0.01 * at(m, "pp")))),
    ),
    "opposite differences": RANKS(  # with equal sums over each pair of ranks
        "lr of group 0 ",
        lambda m: stepped(m, change("lr", 0.1 + 0.1 * (at(m, "dp") == at(m, "tp")))),
    ),
    "other clips": RANKS(
        "max_norm",
        lambda m: stepped(m, lambda o: None, lambda o: o.clip_grad_norm_(1.0 + at(m, "tp"))),
    ),
    "other tokens on stages": RANKS(
        r"optimizer\.count(?=.*\b0\b)(?=.*\b3\b).*\b5\b",
        lambda m: stepped(m, lambda o: o.count((3, 5)[at(m, "dp")] * (at(m, "pp") == 0))),
    ),
    "other tokens on tensor-parallel ranks": RANKS(
        r"optimizer\.count(?=.*\b0\b)(?=.*\b3\b).*\b5\b",
        lambda m: stepped(m, lambda o: o.count((3, 5)[at(m, "dp")] * (at(m, "tp") == 0))),
    ),
    "a scale that is forgotten": RANKS(
        "not scaled on rank 1; .*scale_loss",
        lambda m: stepped(
            m,
            lambda o: None,
            param_dtype="fp16",
            scaled=lambda o, loss: loss if m.get_rank() % 4 == 3 else o.scale_loss(loss),
        ),
    ),
}


def caught(mesh: DeviceMesh, wrong: Callable[[DeviceMesh], None]) -> tuple[type, str]:
    try:
        wrong(mesh)
    except (ValueError, TypeError, RuntimeError) as error:
        dist.barrier()  # no rank is in another collective
        return type(error), str(error)
    return object, ""


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_on_every_rank(name: str):
    kind, message, wrong = REFUSED[name]
    for rank, (raised, text) in enumerate(threaded_world(GRID, caught, wrong, timeout=20)):
        assert raised is kind, (rank, raised, text)
        assert re.search(message, text, re.DOTALL), (rank, text)


def test_copies_are_not_trained_at_different_rates_where_nothing_is_data_parallel():
    def rates(mesh: DeviceMesh) -> None:
        stepped(mesh, change("lr", 0.5 + at(mesh, "tp")))

    for raised, text in threaded_world({"dp": 1, "tp": 2, "pp": 1}, caught, rates, timeout=20):
        assert raised is RuntimeError and "lr of group 0" in text and "rank 0: 0.5" in text


def right(mesh: DeviceMesh) -> bool:
    model, optimizer = sharded(mesh, placed(mesh["tp"], one=Shard(0), two=Replicate()))
    model({"one": torch.ones(2, 4), "two": torch.ones(4)}).backward()
    optimizer.step()
    # torch 2.13 gathers rows in a wrong order over a flattened mesh.
    uneven = torch.arange(25.0).view(5, 5)
    cut = distribute_tensor(uneven, mesh["dp", "tp"], [Shard(0), Shard(0)])
    return torch.equal(cut.full_tensor(), uneven)


def test_what_is_right_is_not_and_the_mesh_of_the_script_stays_as_it_is():
    assert threaded_world(GRID, right) == [True] * 8
