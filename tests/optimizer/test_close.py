"""Close an optimizer, and shard the same model again."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, FORMS, assert_same_bits, install, of, on_each_rank, run_world, values
from pairwise import pairwise
from torch import Tensor, nn

import shardcast
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import SpawnedWorld, ThreadedWorld, threaded_world

sgd = of("SGD", lr=1e-3)


def phases(model: nn.Module, begin: Callable[..., Any], end: Callable[[Any], None]) -> None:
    """Run eight phases of one step, each with its own optimizer."""
    for step in range(8):
        optimizer = begin(sgd(model))
        install(model, step)
        optimizer.step()
        optimizer.zero_grad()
        end(optimizer)


@pytest.mark.parametrize(("kind", "restore"), pairwise(FORMS, (True, False)))
def test_phases_of_one_step_are_one_training(kind: str, restore: bool):
    """Changes up to 1e-3 would be lost if a phase began with rounded weights."""
    expected = CASES["mlp"].build()
    phases(expected, lambda optimizer: optimizer, lambda _optimizer: None)

    def run(group: Any) -> dict[str, Tensor]:
        model = CASES["mlp"].build()
        phases(
            model,
            lambda inner: shardcast.shard(model, inner, process_group=group, **FORMS[kind]),
            lambda optimizer: optimizer.close(restore=restore),
        )
        if not restore:
            shardcast.shard(model, sgd(model), process_group=group, **FORMS[kind]).close()
        assert all(tensor.dtype == torch.float32 for tensor in model.state_dict().values())
        return values(model)

    one, other = run_world(2, run)[0]
    assert_same_bits(one, other)
    close, rounded = 0.0, 0.0
    for name, value in values(expected).items():
        close = max(close, float((one[name] - value).abs().max()))
        rounded = max(rounded, float((value.bfloat16().float() - value).abs().max()))
    # The gradients are rounded to low precision.
    assert close <= (1e-6 if kind == "fp32" else 2e-4) and rounded > 5e-4


def test_the_model_comes_back_as_it_was_given():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.register_buffer("table", torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.norm(self.first(x)))

    def run(group: Any) -> None:
        torch.manual_seed(0)
        model = Net()
        given = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        trained = [p for p in model.parameters() if p.requires_grad]
        inner = torch.optim.SGD(trained, lr=0.1)
        optimizer = shardcast.shard(model, inner, process_group=group, cast_buffers=True)
        (model(torch.rand(5, 4)).float().sum() + model.low.weight.sum()).backward()
        optimizer.step()
        masters = optimizer.full_parameters()
        identity = list(map(id, model.parameters()))
        optimizer.close()
        optimizer.close()
        assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == given
        assert list(map(id, model.parameters())) == identity
        for name, master in masters.items():
            assert torch.equal(model.get_parameter(name).float(), master.to(given[name]).float())
        model(torch.rand(5, 4)).sum().backward()  # an ordinary model again
        torch.optim.SGD(trained, lr=0.1).step()

    ThreadedWorld(2).run(run)


@on_each_rank(2)
def test_close_in_a_finally_after_an_error_waits_for_no_other_rank(group: Any):
    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, sgd(model), process_group=group)
    try:
        if group.rank() == 0:
            raise KeyError("a script's own")
    except KeyError:
        optimizer.close()  # the other rank makes no call
    assert str(model.a.weight.dtype) == "torch.bfloat16"


def fails_and_shards_again(group: Any, failing: list[str]) -> list[str]:
    """Close in a ``finally:`` after a failed backward, then shard the model again."""
    own: Any = dist.new_group(timeout=timedelta(seconds=5))
    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, sgd(model), process_group=own, pack_params=1)
    layer = model.get_submodule(failing[group.rank()])
    handle = layer.register_forward_hook(lambda _m, _i, output: output.register_hook(fail) and None)
    told = []
    try:
        try:
            CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
        finally:
            optimizer.close()
    except Exception as error:
        told.append(repr(error))
    handle.remove()
    dist.barrier(group)
    try:
        optimizer = shardcast.shard(model, sgd(model), process_group=own, pack_params=1)
        CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
        optimizer.step()
    except RuntimeError as error:
        told.append(str(error))
    dist.barrier(group)
    dist.destroy_process_group(own)
    return told


def fail(_grad: torch.Tensor) -> None:
    raise MemoryError("of this rank")


@pytest.mark.parametrize("failing", [["c", "b"], ["b", "b"]], ids=" ".join)
def test_close_after_a_failed_backward_leaves_its_gradients_in_flight(
    gloo: SpawnedWorld, failing: list[str]
):
    """They may never land. The next ``shard()`` raises unless all ranks left the same number."""
    for own, *later in gloo.run(fails_and_shards_again, failing):
        assert own == "MemoryError('of this rank')"
        if failing[0] == failing[1]:
            assert not later
        else:
            assert "rank 0: after 1 closed without restore, which left 0 packs" in later[0]
            assert "rank 1: after 1 closed without restore, which left 1 packs" in later[0]


def test_a_phase_takes_what_the_script_did_to_the_model_between():
    model = CASES["mlp"].build()
    first = shardcast.shard(model, sgd(model))
    install(model, 0)
    first.step()
    masters = first.full_parameters()
    first.close(restore=False)
    model.float()
    with torch.no_grad():
        model.c.bias.fill_(0.1)
    second = shardcast.shard(model, sgd(model))
    masters["c.bias"].fill_(0.1)
    assert_same_bits(second.full_parameters(), masters)


@on_each_rank(2)
def test_ranks_of_which_some_have_masters_of_an_earlier_phase_are_refused(group: Any):
    model = CASES["mlp"].build()
    first = shardcast.shard(model, sgd(model), process_group=group)
    first.close(restore=False)
    if group.rank():
        model = CASES["mlp"].build()
    with pytest.raises(RuntimeError, match="closed without restore"):
        shardcast.shard(model, sgd(model), process_group=group)


def test_copies_of_a_closed_model_hold_no_masters():
    model = CASES["mlp"].build()
    shardcast.shard(model, sgd(model)).close(restore=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        optimizer = shardcast.shard(twin, sgd(twin))
        rounded = model.a.weight.float()
        assert torch.equal(optimizer.full_parameters()["a.weight"], rounded)


def on_mesh(mesh: Any) -> bool:
    from torch.distributed.tensor import DTensor, Shard

    torch.manual_seed(0)
    whole = torch.randn(8, 4)
    model = nn.Linear(4, 8, bias=False)
    local = whole.chunk(2)[mesh.get_local_rank("tp")].clone()
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]))
    optimizer = shardcast.shard(model, sgd(model), mesh=mesh)
    assert model.weight.dtype == torch.bfloat16
    optimizer.close()
    return model.weight.dtype == torch.float32 and torch.equal(model.weight.full_tensor(), whole)


def test_tensor_parallel_weights_come_back_too():
    assert all(threaded_world({"dp": 2, "tp": 2}, on_mesh))


def test_a_step_after_close_is_refused_by_name_and_changes_nothing():
    model = nn.Linear(4, 4)
    original = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = shardcast.shard(model, original)
    optimizer.close()
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"step: the optimizer is closed; .*shardcast\.shard"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"original optimizer.*close\(\) make a new"):
        original.step()
    assert torch.equal(model.weight, before)


def test_a_closed_optimizer_that_a_script_keeps_holds_no_state_nor_operands():
    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
    install(model, 0)
    optimizer.step()
    packed = packed_of(optimizer)
    update = weakref.ref(packed.update_of(packed.shards[0]))
    assert update() is not None and optimizer.memory_report()["state"]
    optimizer.close()
    gc.collect()
    assert update() is None and optimizer.memory_report()["state"] == 0


@pytest.mark.parametrize("converted", [False, True])
@on_each_rank(2)
def test_close_gives_a_group_that_was_added_later_its_fp32_masters(group: Any, converted: bool):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    inner = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    optimizer = shardcast.shard(model, inner, process_group=group, convert_rest=converted)
    model.append(nn.Linear(3, 5))  # after shard()
    for layer in model[1:]:
        optimizer.add_param_group({"params": [*layer.parameters()]})
    assert {param.dtype for param in copy.deepcopy(model).parameters()} == {torch.float32}
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.3)
    optimizer.step()
    masters = packed_of(optimizer).comm.share(optimizer.full_parameters(), torch.device("cpu"))
    optimizer.close()
    for name, param in model.named_parameters():
        assert torch.equal(param, masters[name]), name


def test_close_restores_what_was_compiled_in_place_meanwhile():
    """``model[0] = torch.compile(model[0])`` renames parameters and buffers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    dtypes = [tensor.dtype for tensor in (*model.parameters(), *model.buffers())]
    trained = [param for param in model.parameters() if param.requires_grad]
    inner = torch.optim.AdamW(trained)
    optimizer = shardcast.shard(model, inner, autocast=False, cast_buffers=True)
    for place in (0, 1):
        model[place] = torch.compile(model[place], backend="eager")
    optimizer.close()
    assert [tensor.dtype for tensor in (*model.parameters(), *model.buffers())] == dtypes
