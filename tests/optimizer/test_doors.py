"""``owned()`` and ``whole()``: a script's edits take effect, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from bag import Bag
from models import assert_same_bits, everything, on_each_rank, parts, values
from oracle import BATCH, adamw, check, mlp, on_ranks, set_grads, sgd
from pairwise import thinned
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld, threaded_world

pytestmark = pytest.mark.timeout(120)

# -- each edit on one flat piece; plain torch edits whole tensors -------------------------------


@pytest.mark.parametrize("door", ["owned", "whole"])
def test_gradients_are_shown_as_gathered_and_edits_of_them_count(door: str):
    """Edit a rank's parts elementwise, or whole rows of some parameters."""

    def edit(grads: dict[str, Tensor]) -> None:
        if door == "owned":
            for grad in grads.values():
                grad.clamp_(-1e-3, 2e-3).view(-1)[::2] *= 2  # parts start at even offsets here
        else:
            grads["2.weight"] -= grads["2.weight"].mean(1, keepdim=True)
            grads["4.bias"][0] = 0

    def script(model: Any, optimizer: Any, batch: Tensor, sharded: bool) -> None:
        for step in range(4):
            model(batch).square().mean().backward()
            if step == 1 and sharded:
                optimizer.clip_grad_norm_(1e-3)
            elif step == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if not sharded:
                edit({name: param.grad for name, param in model.named_parameters()})
            elif door == "owned":
                with optimizer.owned() as owned:
                    edit({f"{part.name} {part.start}": part.grad for part in owned})
            else:
                with optimizer.whole(model[2].weight, "4.bias") as params:
                    edit({name: one.grad for name, one in params.items()})
            optimizer.step()
            optimizer.zero_grad()

    worlds = (1, 2) if door == "owned" else (1, 2, 3)
    check(lambda model: sgd(model, lr=1.0), script, worlds=worlds, tol=1e-6)


def test_gradients_that_were_gathered_are_shown_anew_after_an_edit():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.gather_gradients()
        before = [param.grad.clone() for param in model.parameters()]
        with optimizer.owned() as owned:
            for part in owned:
                part.grad.mul_(2)
        for param, grad in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.grad, 2 * grad)

    on_ranks(script)


def edits_after_the_first_backward(
    model: Any, optimizer: Any, batch: Tensor, sharded: bool, in_no_sync: bool
) -> None:
    """Make two steps of three backwards; between the first two, edit masters and gradients."""
    for _ in range(2):
        for number in range(3):
            is_local = sharded and in_no_sync and number < 2
            with optimizer.no_sync() if is_local else nullcontext():
                model(batch.roll(number, 1)).square().mean().backward()
            if number == 0 and sharded:
                with optimizer.owned() as owned:
                    for part in owned:
                        part.master.mul_(0.9)
                        part.grad.mul_(0.5)
            elif number == 0:
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.9)
                        param.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "accumulate, in_no_sync", [("local", False), ("sharded", False), ("sharded", True)]
)
def test_a_block_between_two_backwards_edits_as_a_plain_loop_does(accumulate: Any, in_no_sync: Any):
    script = partial(edits_after_the_first_backward, in_no_sync=in_no_sync)
    check(lambda model: sgd(model, lr=0.1), script, tol=1e-6, accumulate=accumulate)


def test_all_ranks_raise_if_a_block_lies_between_two_backwards_in_no_sync():
    """The block has reduced the gradients, so a rank can no longer add to its own."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        with pytest.raises(RuntimeError, match="after an earlier backward of the same step"):
            edits_after_the_first_backward(model, optimizer, batch, True, in_no_sync=True)

    on_ranks(script)


def test_a_gradient_edited_by_one_rank_alone_after_a_clip_counts_on_all():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> dict[str, Tensor]:
        model(batch).square().mean().backward()
        optimizer.clip_grad_norm_(1e-3)
        with optimizer.owned() as owned:
            for part in owned:
                if part.name == "0.bias":
                    part.grad.zero_()
        before = model[0].bias.detach().clone()
        optimizer.step()
        assert torch.equal(before, model[0].bias)
        return values(model)

    one, two = on_ranks(script)
    assert_same_bits(one, two)


@pytest.mark.parametrize("fields", [{}, {"param_dtype": "bf16"}])
def test_there_is_no_gradient_where_no_rank_has_one_and_none_is_made(fields: Any):
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> Any:
        seen = []
        for clear in (optimizer.zero_grad, model.zero_grad):
            with optimizer.owned() as owned:
                seen += [part.grad for part in owned]
                with pytest.raises(ValueError, match=r"grad of '.*': there is none to replace"):
                    for part in owned:
                        part.grad = torch.zeros_like(part.master)
            assert all(param.grad is None for param in model.parameters())
            model(batch).float().square().mean().backward()
            optimizer.step()
            clear()
        with optimizer.owned() as owned:
            for part in owned:
                part.master.mul_(0.5)
        assert all(param.grad is None for param in model.parameters())
        assert all(grad is None for grad in seen)

    on_ranks(script, **fields)


def test_replicas_and_copies_take_the_edits_of_the_first_holder():
    def run(mesh: Any) -> Any:
        model = mlp()
        optimizer = shardcast.shard(model, adamw(model), shard_ranks=2, fuse="eager")
        set_grads(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(mesh.get_rank())  # differs between ranks
        meant = {}
        with optimizer.owned() as owned:
            for part in owned:
                part.master.normal_(generator=generator)
                part.state["exp_avg"].normal_(generator=generator)
                place = part.name, part.start, part.stop
                meant[*place, "master"] = part.master
                meant[*place, "exp_avg"] = part.state["exp_avg"]
        optimizer.check_copies()
        return parts(optimizer), values(model), meant

    ranks = threaded_world({"runs": 2, "within": 2}, run)
    for first, second in (ranks[::2], ranks[1::2]):
        assert_same_bits(first[0], second[0])
        assert_same_bits(first[1], second[1])
        assert_same_bits({key: first[0][key] for key in first[2]}, first[2])


# -- whole parameters --------------------------------------------------------------------------


@on_each_rank(2)
def test_a_tied_parameter_is_found_by_each_of_its_names(group: Any):
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = shardcast.shard(model, adamw(model), process_group=group)
    for name in ("embed.weight", "head.*"):
        before = model["head"].weight.detach().clone()
        with optimizer.whole(name) as params:
            assert list(params) == ["embed.weight"]
            params["embed.weight"].master.mul_(2)
        assert torch.equal(model["embed"].weight, 2 * before)


@pytest.mark.parametrize("door", ["owned", "whole"])
@on_each_rank({"pp": 2, "dp": 2})
def test_a_weight_that_two_stages_hold_is_edited_on_both(mesh: Any, door: str):
    stage = mesh.get_local_rank("pp")
    name, own = ("embed", "early") if stage == 0 else ("head", "late")
    model = Bag(**{name: (5, 8), own: (7, 3)})
    for param in model.parameters():
        nn.init.normal_(param)
    optimizer = shardcast.shard(
        [model], adamw(model), mesh=mesh, tied=[("embed", "head")], param_dtype="bf16"
    )
    before = values(model)
    if door == "owned":
        with optimizer.owned() as owned:
            for part in owned:
                part.master.fill_(1 + stage if part.name == name else 3)
    else:
        with optimizer.whole("embed", "late") as params:
            assert list(params) == ([name] if stage == 0 else [name, own])
            for one in params.values():
                one.master.fill_(1 if one.name == name else 3)
    assert (getattr(model, name) == 1).all(), "the first holder's value"
    edited = door == "owned" or own == "late"
    assert torch.equal(getattr(model, own), torch.full((7, 3), 3.0) if edited else before[own])
    optimizer.check_copies()


@pytest.mark.parametrize(
    ("how", "fields"),
    thinned(2, ["master", "state", "grad", "more"], [{}, {"shard_ranks": 2}]),
)
@on_each_rank({"runs": 2, "within": 2})
def test_leaving_with_different_values_is_an_error_on_all_ranks(mesh: Any, how: str, fields: Any):
    model = mlp()
    optimizer = shardcast.shard(model, adamw(model), pack_params=2, **fields)
    set_grads(model, 0)
    optimizer.step()
    model(BATCH).float().square().mean().backward()
    optimizer.gather_gradients()
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError) as caught, optimizer.whole("2.*") as params:
        one = params["2.weight"]
        one.master.mul_(2)
        tensor = {"master": one.master, "state": one.state["exp_avg"], "grad": one.grad}
        if how != "more":
            tensor[how][-1, -1] = 1 if mesh.get_rank() == 2 else 2
        elif mesh.get_rank() == 2:
            params["2.bias"].master.mul_(2)
    assert_same_bits(everything(model, optimizer), before)
    told = str(caught.value)
    kind = {"state": "state.exp_avg", "more": "master"}.get(how, how)
    name = "2.bias" if how == "more" else "2.weight"
    assert f"different values of {kind} of '{name}'" in told
    assert "seed random generators alike" in told and "owned()" in told


STRANGER = nn.Parameter(torch.zeros(2))
ASKED: dict[str, tuple[type[Exception], str, Callable[[int], tuple[Any, ...]]]] = {
    "nothing": (TypeError, "expected patterns of names, or parameters, got none", lambda _: ()),
    "a number": (TypeError, "patterns of names, or parameters, got int", lambda _: (1,)),
    "no such name": (ValueError, "pattern 'x.*' matches no parameter", lambda _: ("x.*", "0.*")),
    "another model's": (ValueError, r"not hold .* of shape \(2,\)", lambda _: (STRANGER,)),
    "others on one rank": (
        ValueError,
        "got '2.bias' on some ranks, but not on rank 0",
        lambda rank: ("0.bias", *(["2.bias"] * rank)),
    ),
    "wrong on one rank": (TypeError, "got int", lambda rank: (1 if rank else "0.bias",)),
}


@pytest.mark.parametrize("case", [*ASKED])
def test_parameters_that_are_not_there_are_named_on_all_ranks(case: str):
    kind, message, asked = ASKED[case]

    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(model, adamw(model), process_group=group)
        with pytest.raises(kind, match=message):
            optimizer.whole(*asked(group.rank())).__enter__()
        with optimizer.whole("*"):
            pass

    ThreadedWorld(2).run(run)


@on_each_rank(2)
def test_state_of_another_shape_is_left_out(group: Any):
    model = mlp()
    build = torch.optim.Adafactor(model.parameters())
    optimizer = shardcast.shard(model, build, process_group=group)
    set_grads(model, 0)
    optimizer.step()
    with optimizer.whole("*") as params:
        assert [*params["0.weight"].state] == []  # only moments of rows and columns
        assert [*params["0.bias"].state] == ["variance"]


# -- errors -----------------------------------------------------------------------------------


def seen_by(optimizer: Any, door: str) -> Any:
    return optimizer.owned() if door == "owned" else optimizer.whole("*")


@pytest.mark.parametrize("door", ["owned", "whole"])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_an_exception_inside_writes_nothing_and_is_raised_on_all_ranks(
    ranks: tuple[int, ...], door: str
):
    def run(group: Any) -> str:
        model = mlp()
        optimizer = shardcast.shard(model, adamw(model), process_group=group)
        set_grads(model, 0)
        optimizer.step()
        before = everything(model, optimizer)
        told = ""
        try:
            with seen_by(optimizer, door) as seen:
                for one in seen if door == "owned" else seen.values():
                    one.master.zero_()
                    one.state["exp_avg"].zero_()
                if group.rank() in ranks:
                    raise LookupError("no such layer")
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        assert_same_bits(everything(model, optimizer), before)
        set_grads(model, 1)
        optimizer.step()  # all ranks can continue
        return told

    told = ThreadedWorld(2).run(run)
    for rank, message in enumerate(told):
        assert "no such layer" in message
        assert message.startswith("LookupError" if rank in ranks else "RuntimeError: rank 1")


@on_each_rank({"ep": 2, "edp": 2})
def test_experts_are_edited_where_they_are(mesh: Any):
    """Ranks along ``ep`` have different experts under one name."""
    place = mesh.get_local_rank("ep")
    generator = torch.Generator().manual_seed(place)
    model = nn.ParameterDict(
        {
            "expert": nn.Parameter(torch.randn(8, 8, generator=generator)),
            "shared": nn.Parameter(torch.ones(5)),
        }
    )
    optimizer = shardcast.shard(
        model,
        sgd(model, momentum=0.9),
        mesh=mesh,
        dp=("ep", "edp"),
        experts={"edp": ["expert"]},
        param_dtype="fp32",
    )
    before = values(model)
    with optimizer.owned() as owned:
        for part in owned:
            part.master.mul_(2)
    assert_same_bits(values(model), {name: 2 * value for name, value in before.items()})
    with optimizer.whole("*") as params:
        params["expert"].master[place] = 0  # a different row of each expert
        params["shared"].master[0] = 7
    assert not model["expert"][place].any() and model["shared"].tolist() == [7, 2, 2, 2, 2]
    kept = [row for row in range(8) if row != place]
    assert torch.equal(model["expert"][kept], 2 * before["expert"][kept])
    optimizer.check_copies()


INSIDE: dict[str, Callable[[nn.Module, Any], Any]] = {
    "step": lambda _model, optimizer: optimizer.step(),
    "load_state_dict": lambda _model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "add_param_group": lambda _model, optimizer: optimizer.add_param_group({"params": []}),
    "close": lambda _model, optimizer: optimizer.close(),
    "averaged": lambda _model, optimizer: optimizer.averaged("ema").__enter__(),
    "owned": lambda _model, optimizer: optimizer.owned().__enter__(),
    "sleep": lambda _model, optimizer: optimizer.sleep(),
}


@pytest.mark.parametrize("call", [*INSIDE])
def test_calls_that_would_write_beside_it_are_refused_inside(call: str):
    def script(model: nn.Module, optimizer: Any, _batch: Tensor) -> None:
        before = everything(model, optimizer)
        with (
            pytest.raises(RuntimeError, match=rf"{call}: leave `with optimizer.owned\(") as caught,
            optimizer.owned() as owned,
        ):
            owned[0].master.zero_()
            INSIDE[call](model, optimizer)
        assert "written when the block ends" in str(caught.value)
        assert_same_bits(everything(model, optimizer), before)

    on_ranks(script, averages={"ema": 0.9})


def test_it_is_refused_where_masters_are_elsewhere():
    def script(model: nn.Module, optimizer: Any, _batch: Tensor) -> None:
        with optimizer.averaged("ema"), pytest.raises(RuntimeError, match="owned: the average"):
            optimizer.owned().__enter__()
        with optimizer.as_plain(), pytest.raises(RuntimeError, match=r"owned: leave .*as_plain"):
            optimizer.owned().__enter__()
        optimizer.sleep()
        with pytest.raises(RuntimeError, match=r"owned: .*asleep"):
            optimizer.owned().__enter__()
        optimizer.wake()
        optimizer.close()
        with pytest.raises(RuntimeError, match="owned: the optimizer is closed"):
            optimizer.owned().__enter__()

    on_ranks(script, averages={"ema": 0.9})


def test_wrong_assignments_are_named():
    def script(_model: nn.Module, optimizer: Any, _batch: Tensor) -> None:
        wrong: dict[str, tuple[Any, Any]] = {
            "expected a tensor of shape": (ValueError, torch.zeros(1000)),
            "expected a tensor of floating-point numbers, got int": (TypeError, 1),
            "numbers, got torch.int64": (TypeError, torch.zeros(3, dtype=torch.int64)),
        }
        for message, (kind, given) in wrong.items():
            with (
                pytest.raises(kind, match=f"master of '.*': .*{message}"),
                optimizer.owned() as owned,
            ):
                owned[0].master = given
        with (
            pytest.raises(KeyError, match=r"'exp_avg'.*nothing before a first step"),
            optimizer.owned() as owned,
        ):
            owned[0].state["exp_avg"] = torch.zeros(1)
        with pytest.raises(RuntimeError, match="was resized in place"), optimizer.owned() as owned:
            owned[0].master.resize_(3)
        with optimizer.owned() as owned:
            part = owned[0]
        with pytest.raises(RuntimeError, match="has ended"):
            part.master  # noqa: B018

    on_ranks(script)


def test_a_backward_through_the_old_weights_is_refused():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        loss = model(batch).square().mean()
        with optimizer.owned() as owned:
            for part in owned:
                part.master.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_ranks(script)


def test_gradients_that_change_beside_their_edits_are_an_error():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        with (
            pytest.raises(RuntimeError, match="leave the block before a backward"),
            optimizer.owned() as owned,
        ):
            for part in owned:
                part.grad.mul_(2)
            model[0].weight.grad.mul_(2)

    on_ranks(script)


def test_a_state_dict_warns_that_edits_of_it_are_lost():
    """With torch, ``optimizer.state_dict()["state"][1]["exp_avg"][dead] = 0`` takes effect."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        digest = optimizer.digest()
        for moments in optimizer.state_dict()["state"].values():
            moments["exp_avg"].zero_()
        assert optimizer.digest() == digest

    with pytest.warns(UserWarning, match=r"`with optimizer.whole.*edits of a copy change nothing"):
        on_ranks(script, build=adamw)
