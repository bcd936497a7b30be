"""Several optimizers on one model: Muon on matrices, AdamW on the rest, as the two of torch."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from oracle import BATCH, Optimizers, difference, mlp, pair, set_grads
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

import shardcast
from shardcast import checkpoint
from shardcast.step.update import muon
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(60)
TOL = 1e-6
Build = Callable[[nn.Module], Optimizers]


def train(model: nn.Module, optimizers: Any, steps: range | int, per_step: Any = None) -> None:
    """Steps with installed gradients, in the loop that scripts have for several optimizers."""
    for step in steps if isinstance(steps, range) else range(steps):
        set_grads(model, step)
        if per_step is not None:
            per_step(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain(build: Build = pair, steps: int = 10, make: Callable[[], nn.Module] = mlp) -> nn.Module:
    model = make()
    train(model, build(model), steps)
    return model


def shard(model: nn.Module, optimizers: Optimizers, group: Any = None, **fields: Any) -> Any:
    fields = {"param_dtype": "fp32", "fuse": "eager", "pack_params": 2, **fields}
    return shardcast.shard(model, optimizers, process_group=group, **fields)


def differences(
    build: Build = pair, steps: int = 10, make: Callable[[], nn.Module] = mlp, **fields: Any
) -> float:
    """The largest difference to two plain optimizers, over worlds of 1, 2 and 3 ranks."""
    expected = plain(build, steps, make)

    def run(group: Any) -> float:
        model = make()
        optimizer = shard(model, build(model), group, **fields)
        train(model, optimizer.optimizers, steps)
        return difference(model, expected)

    found = []
    for size in (1, 2, 3):
        world = ThreadedWorld(size)
        found += world.run(run)
        assert_same_sequence(world.logs)
    return max(found)


# -- parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"weight_decay": 0.0, "momentum": 0.0},
        {"weight_decay": 0.5, "adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "original", "ns_steps": 3},
    ],
    ids=str,
)
def test_muon_and_adamw_together_equal_the_two_of_plain_torch(options: dict[str, Any]):
    assert differences(lambda model: pair(model, **options)) <= TOL


def test_another_momentum_would_be_noticed():
    expected = plain(lambda model: pair(model, momentum=0.9))
    model = mlp()
    train(model, shard(model, pair(model)).optimizers, 10)
    assert difference(model, expected) > 100 * TOL


def test_three_optimizers_of_which_two_are_of_one_class_keep_their_own_options():
    def build(model: nn.Module) -> Optimizers:
        muon, adamw = pair(model)
        biases = adamw.param_groups[0]["params"]
        return [
            torch.optim.AdamW(biases[:1], lr=1e-3),
            muon,
            torch.optim.AdamW(biases[1:], lr=1e-2, betas=(0.5, 0.9)),
        ]

    assert differences(build) <= TOL


def test_one_step_of_all_is_that_of_a_loop_over_handles():
    looped, together = mlp(), mlp()
    train(looped, shard(looped, pair(looped)).optimizers, 3)
    optimizer = shard(together, pair(together))
    train(together, [optimizer], 3)
    assert difference(looped, together) == 0


class Experts(nn.Module):
    """Matrices in one parameter, or each in its own: stacked, or blocks of rows."""

    def __init__(self, together: str) -> None:
        super().__init__()
        stacks = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
        if together == "stacked":
            self.matrices = nn.ParameterList([nn.Parameter(stacks)])
        elif together == "rows":
            self.matrices = nn.ParameterList([nn.Parameter(stacks.reshape(18, 4))])
        else:
            self.matrices = nn.ParameterList(nn.Parameter(stack) for stack in stacks)
        self.bias = nn.Parameter(torch.zeros(5))


def experts_pair(model: nn.Module) -> Optimizers:
    bias = model.get_parameter("bias")
    muon = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], lr=1e-2)
    muon.param_groups.clear()
    matrices = [p for name, p in model.named_parameters() if name != "bias"]
    splits = {"row_splits": (6, 6, 6)} if matrices[0].shape == (18, 4) else {}
    muon.add_param_group({"params": matrices, **splits})
    return [muon, torch.optim.AdamW([bias], lr=1e-2)]


@pytest.mark.parametrize("together", ["stacked", "rows"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stacked_experts_and_split_rows_are_matrices_of_their_own(together: str, size: int):
    def grads(model: nn.Module, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        values = torch.randn(3, 6, 4, generator=generator)
        params = [p for name, p in model.named_parameters() if name != "bias"]
        for param, value in zip(params, values.chunk(len(params)), strict=True):
            param.grad = value.reshape(param.shape).clone()
        model.get_parameter("bias").grad = torch.ones(5)

    expected = Experts("apart")
    optimizers = experts_pair(expected)
    for step in range(10):
        grads(expected, step)
        for optimizer in optimizers:
            optimizer.step()

    def run(group: Any) -> Tensor:
        model = Experts(together)
        optimizer = shard(model, experts_pair(model), group)
        for step in range(10):
            grads(model, step)
            optimizer.step()
        return model.matrices[0].detach().reshape(3, 6, 4).clone()

    wanted = torch.stack([matrix.detach() for matrix in expected.matrices])
    for found in ThreadedWorld(size).run(run):
        assert (found - wanted).abs().max() <= TOL


# -- one step for all -----------------------------------------------------------------------------


def test_a_step_has_one_small_all_reduce_and_one_reduction_and_sync_of_each_pack():
    def run(group: Any) -> list[str]:
        model = mlp()
        optimizer = shard(model, pair(model), group, pack_params=None)
        assert [pack.partition for pack in optimizer.layout.packs] == ["whole", "even"]
        train(model, optimizer.optimizers, 1)
        del group.log[:]
        train(model, optimizer.optimizers, range(1, 2))
        return [call.op for call in group.log]

    found = ThreadedWorld(2).run(run)[0]
    reductions, norm, syncs = ["all_to_all_single"] * 2, ["all_reduce"], ["all_gather_single"] * 2
    assert found == reductions + norm + syncs


def test_a_clip_is_one_of_the_norm_over_all_parameters():
    expected = mlp()
    optimizers = pair(expected)
    norms = []

    def clip(_step: int) -> None:
        norms.append(nn.utils.clip_grad_norm_(expected.parameters(), 0.5))

    train(expected, optimizers, 10, clip)

    def run(group: Any) -> tuple[float, list[float]]:
        model = mlp()
        optimizer = shard(model, pair(model), group, max_grad_norm=0.5)
        found = []
        for step in range(10):
            train(model, optimizer.optimizers, range(step, step + 1))
            found.append(float(optimizer.grad_norm))
        return difference(model, expected), found

    for size in (1, 2, 3):
        for worst, found in ThreadedWorld(size).run(run):
            assert worst <= 5 * TOL
            assert found == pytest.approx([float(norm) for norm in norms], rel=1e-5)


def clip_in_fp64(model: nn.Module, bound: float) -> None:
    """As torch clips, but for the norm, which it takes in fp32."""
    grads = [param.grad for param in model.parameters()]
    norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    assert norm > bound
    for grad in grads:
        grad.mul_((bound / (norm + 1e-6)).clamp(max=1.0).float())


def micro_batches(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list((BATCH + torch.randn(BATCH.shape, generator=generator)).chunk(2))


def clipped(clip: Callable[[nn.Module], None], steps: int) -> nn.Module:
    """Two plain optimizers with the mean over two micro-batches, as under DDP."""
    model = mlp()
    optimizers = pair(model)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rows in micro_batches(model, step):
            (model(rows).square().mean() / 2).backward()
        clip(model)
        for optimizer in optimizers:
            optimizer.step()
    return model


def test_clipped_muon_differs_from_torchs_by_the_rounding_of_the_norm_alone():
    """The norm is taken in fp64 here and in fp32 there, so that the factor may differ by an ulp.

    Muon rounds the clipped gradient to bf16, so an ulp of fp32 now and then becomes one of bf16,
    which Newton-Schulz amplifies.
    """

    def run(group: Any) -> nn.Module:
        model = mlp()
        optimizer = shard(model, pair(model), group, max_grad_norm=0.01)
        for step in range(20):
            model(micro_batches(model, step)[group.rank()]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    expected = clipped(lambda model: clip_in_fp64(model, 0.01), 20)
    for model in ThreadedWorld(2).run(run):
        assert difference(model, expected) == 0


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(torch.optim.Muon, 1e-5, 1e-2), (torch.optim.AdamW, 0.0, 1e-7)]
)
def test_an_ulp_of_the_clip_factor_moves_torchs_own_muon_far(kind: Any, least: float, most: float):
    """The control of the test above: it is no matter of sharding."""

    def stepped(factor: float) -> Tensor:
        param = nn.Parameter(torch.zeros(512, 512))
        param.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * factor
        kind([param], lr=1e-2).step()
        return param.detach()

    moved = (stepped(0.7) - stepped(0.7 * (1 - 2**-23))).abs().max()
    assert least <= moved <= most


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("name", ["0.weight", "4.bias"], ids=["of Muon", "of AdamW"])
def test_a_non_finite_gradient_of_one_optimizer_skips_the_step_of_all(name: str):
    def run(group: Any) -> tuple[float, int]:
        model, twin = mlp(), mlp()
        optimizer, other = shard(model, pair(model), group), shard(twin, pair(twin), group)
        train(model, optimizer.optimizers, 2)
        train(twin, other.optimizers, 2)

        def spoil(_step: int) -> None:
            if group.rank() == 0:
                model.get_parameter(name).grad.view(-1)[0] = math.nan

        train(model, optimizer.optimizers, range(2, 3), spoil)
        skipped = optimizer.skipped_steps
        train(model, optimizer.optimizers, range(3, 5))  # moments and counters are as before too
        train(twin, other.optimizers, range(3, 5))
        return difference(model, twin), skipped

    assert ThreadedWorld(2).run(run) == [(0.0, 1)] * 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_packs_that_muon_is_done_with_are_synced_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, size: int, overlap: bool
):
    def run(group: Any) -> tuple[list[Tensor], list[bool]]:
        model = mlp()
        optimizer = shard(
            model, pair(model), group, pack_params=1, overlap_sync=overlap, sync="broadcast"
        )
        train(model, optimizer.optimizers, 3)
        model(BATCH).sum().backward()
        del group.log[:]
        optimizer.step()
        beside = [call.async_op for call in group.log if call.op == "broadcast"]
        optimizer.wait_sync()
        return [param.detach().clone() for param in model.parameters()], beside

    together = ThreadedWorld(size).run(run)
    monkeypatch.setattr(muon, "BATCH", 1)  # each of the three packs is a turn of its own
    world = ThreadedWorld(size)
    in_turns = world.run(run)
    assert_same_sequence(world.logs)
    for (mine, beside), (theirs, before) in zip(in_turns, together, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
        assert before == [overlap] * 6
        assert beside == [True, True, *([overlap] * 4)]


def test_a_turn_is_as_large_as_the_batches_of_all_ranks(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    step = muon.step_
    monkeypatch.setattr(muon, "step_", lambda optimizer: (calls.append(1), step(optimizer)))
    for batch, turns in ((1, 3), (64, 2), (1 << 26, 1)):  # of packs of 91, 143 and 33 elements
        monkeypatch.setattr(muon, "BATCH", batch)
        calls.clear()
        ThreadedWorld(2).run(lambda group: one_step(group))
        assert len(calls) == 2 * turns


def one_step(group: Any) -> None:
    model = mlp()
    train(model, [shard(model, pair(model), group, pack_params=1)], 1)


# -- handles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["handles", "originals"])
def test_schedulers_of_each_optimizer_work_on_handles_and_on_originals(on: str):
    def schedule(optimizers: Any) -> list[LambdaLR]:
        first, second = optimizers
        return [LambdaLR(first, lambda n: 0.5**n), LambdaLR(second, lambda n: 1 / (1 + n))]

    def loop(model: nn.Module, optimizers: Any, schedulers: list[LambdaLR]) -> None:
        for step in range(6):
            train(model, optimizers, range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()

    expected = mlp()
    optimizers = pair(expected)
    loop(expected, optimizers, schedule(optimizers))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for whole in (False, True):
            model = mlp()
            originals = pair(model)
            schedulers = schedule(originals) if on == "originals" else None
            optimizer = shard(model, originals)
            schedulers = schedulers or schedule(optimizer.optimizers)
            loop(model, [optimizer] if whole else optimizer.optimizers, schedulers)
            assert difference(model, expected) <= TOL


def test_handles_show_the_groups_of_their_own_optimizer():
    model = mlp()
    originals = pair(model)
    optimizer = shard(model, originals)
    assert [handle.name for handle in optimizer.optimizers] == ["Muon", "AdamW"]
    for handle, original in zip(optimizer.optimizers, originals, strict=True):
        assert handle.param_groups[0] is original.param_groups[0]
    assert optimizer.param_groups == [g for o in originals for g in o.param_groups]


def test_steps_that_would_count_twice_or_half_are_named():
    model = mlp()
    optimizer = shard(model, pair(model))
    muon, adamw = optimizer.optimizers
    before = [param.detach().clone() for param in model.parameters()]
    set_grads(model, 0)
    muon.step()
    with pytest.raises(RuntimeError, match="handle of Muon was called twice before that of AdamW"):
        muon.step()
    with pytest.raises(RuntimeError, match="handle of Muon was stepped, others were not"):
        optimizer.step()
    pairs = zip(before, model.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)
    adamw.step()
    pairs = zip(before, model.parameters(), strict=True)
    assert not any(torch.equal(old, new) for old, new in pairs)


@pytest.mark.parametrize("between", ["a backward", "zero_grad", "an edit", "nothing"])
def test_gradients_that_change_between_the_steps_of_handles_are_named(between: str):
    """With optimizers apart the first one would not have seen the change."""
    model = mlp()
    muon, adamw = shard(model, pair(model)).optimizers
    model(BATCH).sum().backward()
    muon.step()
    if between == "a backward":
        model(BATCH).sum().backward()
    elif between == "zero_grad":
        adamw.zero_grad()
    elif between == "an edit":
        model[0].weight.grad.mul_(0.5)
    if between == "nothing":
        adamw.step()
        return
    with pytest.raises(RuntimeError, match="handle of AdamW came after a backward, a clip or zero"):
        adamw.step()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda h, _: h.step(lambda: 0), TypeError, "handle of Muon takes no closure"),
        (lambda h, _: h.state_dict(), RuntimeError, "have one state; call state_dict"),
        (lambda h, _: h.load_state_dict({}), RuntimeError, "have one state; call load_state_dict"),
        (lambda _, o: o.add_param_group({"params": []}), RuntimeError, "Muon .* sharded together"),
    ],
)
def test_what_a_handle_cannot_do_says_what_can(call: Any, error: Any, message: str):
    model = mlp()
    optimizer = shard(model, pair(model))
    with pytest.raises(error, match=message):
        call(optimizer.optimizers[0], optimizer)


def test_a_group_is_added_through_a_handle():
    def extend(model: nn.Module, optimizers: Any) -> None:
        model.append(nn.Linear(3, 4))
        torch.manual_seed(1)
        with torch.no_grad():
            for param in model[-1].parameters():
                param.copy_(torch.randn(param.shape))
        optimizers[1].add_param_group({"params": [model[-1].bias], "lr": 1e-3})
        optimizers[0].add_param_group({"params": [model[-1].weight], "lr": 3e-3})

    expected = mlp()
    optimizers = pair(expected)
    train(expected, optimizers, 3)
    extend(expected, optimizers)
    train(expected, optimizers, range(3, 8))

    def run(group: Any) -> Any:
        model = mlp()
        optimizer = shard(model, pair(model), group)
        train(model, optimizer.optimizers, 3)
        extend(model, optimizer.optimizers)
        train(model, optimizer.optimizers, range(3, 8))
        states = optimizer.full_state_dicts()
        sizes = [[len(g["params"]) for g in state["param_groups"]] for state in states]
        return difference(model, expected), sizes

    for size in (1, 2, 3):
        results = ThreadedWorld(size).run(run)
        assert max(worst for worst, _ in results) <= TOL
        assert results[0][1] == [[3, 1], [3, 1]]


def sets_a_handles_list(optimizer: Any, group: dict[str, Any]) -> None:
    optimizer.optimizers[1].param_groups = [group]


def sets_a_handles_place(optimizer: Any, group: dict[str, Any]) -> None:
    optimizer.optimizers[1].param_groups[0] = group


@pytest.mark.parametrize("replace", [sets_a_handles_list, sets_a_handles_place])
def test_a_group_that_is_replaced_through_a_handle_is_used(replace: Any):
    expected = mlp()
    optimizers = pair(expected)
    train(expected, optimizers, 2)
    optimizers[1].param_groups[0]["lr"] = 0.3
    train(expected, optimizers, range(2, 5))
    model = mlp()
    optimizer = shard(model, pair(model))
    train(model, optimizer.optimizers, 2)
    replace(optimizer, {**optimizer.param_groups[1], "lr": 0.3})
    train(model, optimizer.optimizers, range(2, 5))
    assert difference(model, expected) <= TOL


def test_state_that_is_forgotten_through_a_handle_is_forgotten():
    expected = mlp()
    optimizers = pair(expected)
    train(expected, optimizers, 2)
    optimizers[1].state.clear()
    train(expected, optimizers, range(2, 5))
    model = mlp()
    optimizer = shard(model, pair(model))
    train(model, optimizer.optimizers, 2)
    optimizer.optimizers[1].state.clear()
    train(model, optimizer.optimizers, range(2, 5))
    assert difference(model, expected) <= TOL


@pytest.mark.parametrize("remove", [True, False], ids=["removed", "overwritten"])
def test_row_splits_that_are_removed_from_a_group_stay_away(remove: bool):
    def run(then: Callable[[dict[str, Any]], Any]) -> nn.Module:
        model = Experts("rows")
        optimizer = shard(model, experts_pair(model))
        for step in range(5):
            set_grads(model, step)
            if step == 1:
                then(optimizer.param_groups[0])
            optimizer.step()
        return model

    one = run(lambda group: group.pop("row_splits") if remove else None)
    other = run(lambda group: group.update(row_splits=None))
    assert (difference(one, other) == 0) is remove


def test_the_joint_list_of_groups_of_several_optimizers_is_not_changed():
    model = mlp()
    groups = shard(model, pair(model)).param_groups
    copied = copy.deepcopy(groups)
    assert type(copied) is list and [g["lr"] for g in copied] == [g["lr"] for g in groups]
    with pytest.raises(RuntimeError, match=r"param_groups: .*add_param_group"):
        del groups[0]
    with pytest.raises(RuntimeError, match=r"param_groups: .*add_param_group"):
        groups[-1] = copied[-1]
    for change in (groups.clear, groups.pop, lambda: groups.append({}), lambda: groups.extend([])):
        with pytest.raises(RuntimeError, match=r"param_groups: .*add_param_group"):
            change()


# -- state ----------------------------------------------------------------------------------------


def test_a_local_state_goes_round():
    def run(group: Any) -> float:
        model, twin = mlp(), mlp()
        optimizer, other = shard(model, pair(model), group), shard(twin, pair(twin), group)
        train(model, optimizer.optimizers, 3)
        other.load_state_dict(optimizer.state_dict())
        train(model, optimizer.optimizers, range(3, 6))
        train(twin, other.optimizers, range(3, 6))
        return difference(model, twin)

    assert ThreadedWorld(3).run(run) == [0.0] * 3


def test_full_states_load_into_the_plain_optimizers_and_back(tmp_path: Path):
    expected = plain(steps=6)

    def run(group: Any) -> Any:
        model = mlp()
        optimizer = shard(model, pair(model), group)
        train(model, optimizer.optimizers, 3)
        return optimizer.full_state_dicts(), optimizer.full_parameters()

    (states, weights), (nothing, _) = ThreadedWorld(2).run(run)
    assert nothing == []
    model = mlp()
    model.load_state_dict(weights)
    optimizers = pair(model)
    for one, state in zip(optimizers, copy.deepcopy(states), strict=True):  # torch shares tensors
        one.load_state_dict(state)
    train(model, optimizers, range(3, 6))
    assert difference(model, expected) <= TOL

    def back(group: Any) -> float:
        model = mlp()
        optimizer = shard(model, pair(model), group)
        with pytest.raises(ValueError, match=r"expected the states of 2 optimizers .* got 1"):
            checkpoint.load_plain(model, optimizer, weights, states[:1])
        checkpoint.load_plain(model, optimizer, weights, states)
        train(model, optimizer.optimizers, range(3, 6))
        return difference(model, expected)

    assert max(ThreadedWorld(3).run(back)) <= TOL


def test_a_list_of_plain_states_is_loaded_by_every_rank_or_by_none():
    expected = plain(steps=6)

    def run(group: Any) -> float:
        model, twin = mlp(), mlp()
        optimizer, other = shard(model, pair(model), group), shard(twin, pair(twin), group)
        optimizer.optimizers[1].param_groups[0]["lr"] = 3e-2  # options are loaded too
        train(twin, other.optimizers, 3)
        states = optimizer.comm.exchange(other.full_state_dicts(), torch.device("cpu"))[0]
        model.load_state_dict(twin.state_dict())
        last = group.rank() == group.size() - 1
        for given in (states[:1], [], [other.state_dict()]):
            with pytest.raises(ValueError, match="state"):
                optimizer.load_state_dict(given if last else states)
        with pytest.raises(ValueError, match=r"'momentum_buffer' of parameter '\d.bias'"):
            optimizer.load_state_dict(states[::-1])
        optimizer.load_state_dict(states)
        train(model, optimizer.optimizers, range(3, 6))
        return difference(model, expected)

    for size in (1, 2, 3):
        assert max(ThreadedWorld(size).run(run)) <= TOL


def test_a_checkpoint_loads_at_another_world_size_and_exports_to_plain_states(tmp_path: Path):
    expected = plain(steps=6)

    def save(group: Any) -> None:
        model = mlp()
        optimizer = shard(model, pair(model), group)
        train(model, optimizer.optimizers, 3)
        checkpoint.save(tmp_path / "run", model, optimizer, step=3)

    ThreadedWorld(2).run(save)

    def load(group: Any) -> float:
        model = mlp()
        optimizer = shard(model, pair(model), group)
        checkpoint.load(tmp_path / "run", model, optimizer)
        train(model, optimizer.optimizers, range(3, 6))
        return difference(model, expected)

    for size in (1, 3):
        assert max(ThreadedWorld(size).run(load)) <= TOL
    files = checkpoint.export(tmp_path / "run", tmp_path / "out")
    names = [file.name for file in files]
    assert names == ["model.safetensors", "optimizer-0.pt", "optimizer-1.pt"]
    from safetensors.torch import load_file

    model = mlp()
    model.load_state_dict(load_file(files[0]))
    optimizers = pair(model)
    for one, file in zip(optimizers, files[1:], strict=True):
        one.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimizers, range(3, 6))
    assert difference(model, expected) <= TOL


def test_groups_added_to_the_first_optimizer_are_numbered_within_it(tmp_path: Path):
    """As the plain optimizers' own states, and as one that had the groups from the start."""

    def apart(model: nn.Module) -> tuple[list[Any], list[Any]]:
        return [
            [{"params": [model[n].weight], "lr": 1e-2 / (n + 1)} for n in (0, 2)],
            [{"params": [model[n].bias], "lr": 1e-3 / (n + 1)} for n in (0, 2)],
        ]

    def build(model: nn.Module, groups: int) -> Optimizers:
        muon, adamw = apart(model)
        return [torch.optim.Muon(muon[:groups]), torch.optim.AdamW(adamw[:groups])]

    def make() -> nn.Module:
        return mlp()[:4]

    def run(group: Any) -> Any:
        model, twin = make(), make()
        for name in ("2.weight", "2.bias"):
            model.get_parameter(name).requires_grad_(False)
        optimizer, other = shard(model, build(model, 1), group), shard(twin, build(twin, 2), group)
        model.requires_grad_(True)
        for place in (1, 0):
            optimizer.optimizers[place].add_param_group(apart(model)[place][1])
        train(model, optimizer.optimizers, 3)
        train(twin, other.optimizers, 3)
        states = optimizer.full_state_dict(), other.full_state_dict()
        checkpoint.save(tmp_path / str(group.size()), model, optimizer, step=3)
        later = make()
        resumed = shard(later, build(later, 2), group)
        checkpoint.load(tmp_path / str(group.size()), later, resumed)
        train(twin, other.optimizers, range(3, 6))
        train(later, resumed.optimizers, range(3, 6))
        return states, difference(later, twin)

    for size in (1, 2):
        results = ThreadedWorld(size).run(run)
        added, built = results[0][0]
        torch.testing.assert_close(added, built, rtol=0, atol=0)
        assert [worst for _, worst in results] == [0.0] * size


# -- bad input ------------------------------------------------------------------------------------


def twice(model: nn.Module) -> Optimizers:
    muon, adamw = pair(model)
    adamw.add_param_group({"params": [muon.param_groups[0]["params"][0]]})
    return [muon, adamw]


def without_one(model: nn.Module) -> Optimizers:
    muon, adamw = pair(model)
    del adamw.param_groups[0]["params"][0]
    return [muon, adamw]


def vector(model: nn.Module) -> Optimizers:
    muon, adamw = pair(model)
    muon.add_param_group({"params": [adamw.param_groups[0]["params"].pop()]})
    return [muon, adamw]


def wrong_rows(model: nn.Module) -> Optimizers:
    muon, adamw = pair(model)
    muon.param_groups[0]["row_splits"] = (7, 6)
    return [muon, adamw]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (twice, ValueError, r"'0.weight' is in two optimizers, Muon and AdamW; list it once"),
        (without_one, ValueError, r"'0.bias' is in none of Muon \+ AdamW; add it to one"),
        (vector, ValueError, r"'4.bias' of shape \(3,\) is no matrix, which Muon needs"),
        (wrong_rows, ValueError, r"row_splits: .* 11 rows of parameter '2.weight' .*got \[7, 6\]"),
        (lambda _: [], ValueError, "expected at least one, got an empty list"),
        (lambda m: [*pair(m)[:1], "adamw"], TypeError, "or a list of them, got str"),
        (lambda m: [torch.optim.LBFGS(m.parameters())], TypeError, "LBFGS cannot be sharded"),
    ],
    ids=["twice", "in none", "a vector", "rows", "empty", "no optimizer", "LBFGS"],
)
def test_what_cannot_be_sharded_together_is_named_on_every_rank_and_nothing_is_changed(
    build: Any, error: Any, message: str
):
    def run(group: Any) -> None:
        model = mlp()
        storages = [param.data_ptr() for param in model.parameters()]
        optimizers = build(model)
        for fields in ({}, {"cost_fn": lambda _name, param: param.numel()}):
            with pytest.raises(error, match=message):
                shard(model, optimizers, group, **fields)
        assert storages == [param.data_ptr() for param in model.parameters()]

    ThreadedWorld(2).run(run)


def test_a_vector_that_is_added_to_muon_later_is_named_and_not_added():
    model = mlp()
    optimizer = shard(model, pair(model))
    model.append(nn.LayerNorm(3))
    with pytest.raises(ValueError, match=r"'5.weight' of shape .* is no matrix"):
        optimizer.optimizers[0].add_param_group({"params": [model[-1].weight]})
    assert [len(handle.param_groups) for handle in optimizer.optimizers] == [1, 1]
    train(model, optimizer.optimizers, 1)


@pytest.mark.parametrize("other", ["order", "assignment", "options"])
def test_ranks_that_assign_differently_all_raise(other: str):
    def run(group: Any) -> str:
        model = mlp()
        muon, adamw = pair(model)
        optimizers = [muon, adamw]
        if group.rank() == 1:
            if other == "order":
                optimizers = [adamw, muon]
            elif other == "options":
                muon.param_groups[0]["row_splits"] = None
                muon.param_groups[0]["nesterov"] = False
            else:
                adamw.add_param_group({"params": [muon.param_groups[0]["params"].pop()]})
        with pytest.raises(RuntimeError) as caught:
            shard(model, optimizers, group)
        return str(caught.value)

    first, second = ThreadedWorld(2).run(run)
    assert first == second
    assert "rank" in first


def test_an_optimizer_that_wants_all_parameters_is_named_on_every_rank():
    def run(group: Any) -> None:
        model = mlp()
        muon, adamw = pair(model)
        with pytest.raises(TypeError, match="StepSizeOfAll cannot be sharded"):
            shard(model, [foreign.StepSizeOfAll(muon.param_groups[0]["params"]), adamw], group)

    ThreadedWorld(2).run(run)


def test_an_optimizer_that_counts_its_parameters_is_no_such_one():
    def build(model: nn.Module) -> Optimizers:
        muon, adamw = pair(model)
        return [foreign.Counts(muon.param_groups[0]["params"]), adamw]

    assert differences(build) == 0


# -- kernel calls ---------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts the operations that launch kernels; views launch none."""

    VIEWS = ("view", "split", "slice", "unbind", "transpose", "detach", "as_strided", "select")

    def __init__(self) -> None:
        super().__init__()
        self.products = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.products += name in ("bmm", "baddbmm", "mm", "addmm")
        self.calls += not name.startswith(self.VIEWS)
        return func(*args, **(kwargs or {}))


def launches(depth: int) -> tuple[int, int]:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(8, 12), nn.Linear(12, 8))]
    model = nn.Sequential(*layers)
    optimizer = shard(model, pair(model), pack_params=None)
    train(model, optimizer.optimizers, 1)
    set_grads(model, 1)
    with Counting() as count:
        optimizer.step()
    return count.products, count.calls


def test_kernel_calls_of_a_step_do_not_grow_with_depth():
    shapes, iterations, each = 2, 5, 3
    assert launches(2) == launches(8)
    assert launches(2)[0] == shapes * iterations * each


def test_plain_torch_launches_more_for_a_deeper_model():
    """The control."""
    found = []
    for depth in (2, 8):
        model = nn.Sequential(*(nn.Linear(8, 12) for _ in range(depth)))
        muon, _ = pair(model)
        set_grads(model, 0)
        with Counting() as count:
            muon.step()
        found.append(count.products)
    assert found[1] == 4 * found[0] > 0
