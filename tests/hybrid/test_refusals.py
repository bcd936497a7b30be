"""What a hybrid job gets wrong is named, on every rank, whichever of them got it wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bag import Bag
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardcast
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(60)

GRID = {"pp": 2, "dp": 2, "tp": 2}


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **options)


def bag(mesh: DeviceMesh, **placements: Any) -> Bag:
    model = Bag(one=(4, 4), two=(4,))
    model.place(mesh["tp"], **placements)
    return model


def partial(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    if mesh.get_rank() == 3:
        pending = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()], run_check=False)
        model.register_parameter("one", nn.Parameter(pending))
    shardcast.shard(model, adamw(model), mesh=mesh)


def partial_and_left_out_on_a_stage(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    optimizer = adamw(model)
    if mesh.get_local_rank("pp"):
        pending = DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()], run_check=False)
        model.register_parameter("rest", nn.Parameter(pending, requires_grad=False))
    shardcast.shard(model, optimizer, mesh=mesh)


def buffer_of_a_stage_without_memory(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    if mesh.get_local_rank("pp"):
        model.register_buffer("table", torch.empty(3, device="meta"))
    shardcast.shard(model, adamw(model), mesh=mesh)


def no_such_dimension(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, dp="data")


def no_such_dimension_on_one_rank(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, dp="data" if mesh.get_rank() == 5 else "dp")


def other_dimensions_on_one_rank(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, dp="tp" if mesh.get_rank() == 2 else "dp")


def one_dimension_twice(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, dp=("dp", "dp"))


def no_data_parallel_dimension(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh["tp"])


def not_a_mesh(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh.get_group("dp"))


def group_and_mesh(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, process_group=mesh.get_group("dp"))


def cut_over_data(mesh: DeviceMesh) -> None:
    model = Bag(one=(4, 4))
    model.place(mesh["dp"], one=Shard(0))
    shardcast.shard(model, adamw(model), mesh=mesh)


def two_meshes(mesh: DeviceMesh) -> None:
    """The second one has the same dimensions, in another order of ranks."""
    other = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("tp", "dp", "pp"))
    model = bag(mesh, one=Shard(0))
    model.place(other["tp"], two=Shard(0))
    shardcast.shard(model, adamw(model), mesh=mesh)


def other_mesh(mesh: DeviceMesh) -> None:
    other = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("tp", "dp", "pp"))
    model = bag(other, one=Shard(0))
    shardcast.shard(model, adamw(model), mesh=mesh)


def no_stages(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    first = mesh.get_local_rank("pp") == 0
    shardcast.shard([model] if first else [], adamw(model), mesh=mesh)


def stage_without_parameters(mesh: DeviceMesh) -> None:
    first = mesh.get_local_rank("pp") == 0
    model = bag(mesh) if first else Bag()
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}])
    shardcast.shard([model], optimizer, mesh=mesh)


def stages_differ_in_groups(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    first = mesh.get_local_rank("pp") == 0
    groups = [list(model.parameters())] if first else [[model.one], [model.two]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    shardcast.shard([model], optimizer, mesh=mesh)


def stages_differ_in_options(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    optimizer = adamw(model, lr=0.1 if mesh.get_local_rank("pp") else 0.2)
    shardcast.shard([model], optimizer, mesh=mesh)


def stages_differ_in_configuration(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    dtype = "fp32" if mesh.get_local_rank("pp") else "bf16"
    shardcast.shard([model], adamw(model), mesh=mesh, param_dtype=dtype)


def copies_differ_in_shape(mesh: DeviceMesh) -> None:
    model = Bag(one=(4 + mesh.get_local_rank("tp"),))
    shardcast.shard(model, adamw(model), mesh=mesh)


def same_names_in_stages(mesh: DeviceMesh) -> None:
    stages = [bag(mesh), bag(mesh)]
    params = [param for stage in stages for param in stage.parameters()]
    shardcast.shard(stages, torch.optim.AdamW(params), mesh=mesh)


def sum_of_nothing(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, grad_sum_over={"tp": ["q_norm.*"]})


def sum_over_nothing(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, grad_sum_over={"cp": ["one"]})


def experts_of_nothing(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, experts={"tp": ["one"]})


def tie_within_a_stage(mesh: DeviceMesh) -> None:
    model = bag(mesh) if mesh.get_local_rank("pp") == 0 else Bag(three=(2,))
    shardcast.shard([model], adamw(model), mesh=mesh, tied=[("one", "two")])


def tie_of_other_shapes(mesh: DeviceMesh) -> None:
    model = Bag(one=(4, 2)) if mesh.get_local_rank("pp") == 0 else Bag(two=(2, 4))
    shardcast.shard([model], adamw(model), mesh=mesh, tied=[("one", "two")])


def tie_of_three(mesh: DeviceMesh) -> None:
    model = Bag(one=(4,)) if mesh.get_local_rank("pp") == 0 else Bag(two=(4,), three=(4,))
    shardcast.shard([model], adamw(model), mesh=mesh, tied=[("one", "two"), ("one", "three")])


def ties_of_one_stage_alone(mesh: DeviceMesh) -> None:
    first = mesh.get_local_rank("pp") == 0
    model = Bag(one=(4,)) if first else Bag(two=(4,))
    shardcast.shard([model], adamw(model), mesh=mesh, tied=[("one", "two")] if first else [])


def tie_with_the_group_of_others(mesh: DeviceMesh) -> None:
    first = mesh.get_local_rank("pp") == 0
    model = Bag(one=(4,)) if first else Bag(two=(4,))
    group = mesh.get_group("pp" if first else "tp")
    shardcast.shard([model], adamw(model), mesh=mesh, tied=[("one", "two", group)])


def unlike_ties(mesh: DeviceMesh, **fields: Any) -> None:
    first = mesh.get_local_rank("pp") == 0
    model = Bag(one=(4,), two=(2,)) if first else Bag(two=(2,), three=(4,))
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
    if fields.pop("frozen", False):
        groups = [{"params": params}]
        params[-1].requires_grad_(first)
    if fields.pop("left_out", False):
        groups = [{"params": params[:1]}]
    optimizer = torch.optim.AdamW(groups)
    shardcast.shard([model], optimizer, mesh=mesh, tied=[("one", "three")], **fields)


def tie_in_other_groups(mesh: DeviceMesh) -> None:
    unlike_ties(mesh)


def tie_frozen_on_a_stage(mesh: DeviceMesh) -> None:
    unlike_ties(mesh, frozen=True)


def tie_left_out_on_a_stage(mesh: DeviceMesh) -> None:
    unlike_ties(mesh, left_out=True)


def tie_kept_in_fp32_on_a_stage(mesh: DeviceMesh) -> None:
    unlike_ties(mesh, keep_fp32=["three"])


def copies_in_other_groups(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    params = list(model.parameters())[:: 1 if mesh.get_local_rank("tp") else -1]
    optimizer = torch.optim.AdamW([{"params": [param]} for param in params])
    shardcast.shard(model, optimizer, mesh=mesh)


def sums_of_some_ranks(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    sums = {"tp": ["one"]} if mesh.get_local_rank("tp") else None
    shardcast.shard(model, adamw(model), mesh=mesh, grad_sum_over=sums)


def options_without_a_mesh(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), tied=[("one", "two")])


def matrix_optimizer(mesh: DeviceMesh) -> None:
    model = Bag(one=(4, 4))
    model.place(mesh["tp"], one=Shard(0))
    shardcast.shard(model, torch.optim.Muon(model.parameters()), mesh=mesh)


def bad_divisor(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh, divisor=0)


def rates_differ_in_a_step(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    optimizer = shardcast.shard([model], adamw(model), mesh=mesh)
    if mesh.get_rank() == 6:
        optimizer.param_groups[0]["lr"] = 0.5
    model({"one": torch.ones(4, 4), "two": torch.ones(4)}).backward()
    optimizer.step()


def stages_differ_in_a_step(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    optimizer = shardcast.shard([model], adamw(model), mesh=mesh)
    optimizer.param_groups[0]["betas"] = (0.9, 0.9 + 0.01 * mesh.get_local_rank("pp"))
    model({"one": torch.ones(4, 4), "two": torch.ones(4)}).backward()
    optimizer.step()


def clips_differ(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    optimizer = shardcast.shard([model], adamw(model), mesh=mesh)
    model({"one": torch.ones(4, 4), "two": torch.ones(4)}).backward()
    optimizer.clip_grad_norm_(1.0 + mesh.get_local_rank("tp"))


def scale_forgotten(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    optimizer = shardcast.shard([model], adamw(model), mesh=mesh, param_dtype="fp16")
    loss = model({"one": torch.ones(4, 4), "two": torch.ones(4)})
    (loss if mesh.get_rank() % 4 == 3 else optimizer.scale_loss(loss)).backward()
    optimizer.step()


REFUSED: list[tuple[Callable[[DeviceMesh], None], str, str]] = [
    (partial, "TypeError", "'one' is Partial along 'tp'"),
    (partial_and_left_out_on_a_stage, "TypeError", "'rest' is Partial along 'tp'"),
    (buffer_of_a_stage_without_memory, "ValueError", "'table' is on the meta device"),
    (no_such_dimension, "ValueError", "dp: expected a dimension of the mesh.*pp, dp, tp"),
    (no_such_dimension_on_one_rank, "ValueError", "dp: expected .* got 'data'"),
    (other_dimensions_on_one_rank, "RuntimeError", "dp='tp'.*"),
    (one_dimension_twice, "ValueError", "dp: expected .* different"),
    (no_data_parallel_dimension, "ValueError", "dp: expected a dimension of the mesh.*of tp"),
    (not_a_mesh, "TypeError", "mesh: expected a .*DeviceMesh"),
    (group_and_mesh, "ValueError", "process_group: expected None beside mesh="),
    (cut_over_data, "TypeError", "'one' is a DTensor over mesh dimension 'dp'"),
    (two_meshes, "ValueError", "'two' is a DTensor over another mesh, whose 'tp' has the ranks"),
    (other_mesh, "ValueError", "'one' is a DTensor over another mesh, whose 'tp' has the ranks"),
    (no_stages, "ValueError", "at least one pipeline stage"),
    (
        stage_without_parameters,
        "ValueError",
        "ranks 4, 5, 6, 7: .* hold no parameter|hold no parameter",
    ),
    (stages_differ_in_groups, "RuntimeError", "differ"),
    (stages_differ_in_options, "RuntimeError", "lr"),
    (stages_differ_in_configuration, "RuntimeError", "param_dtype"),
    (copies_differ_in_shape, "RuntimeError", "one .*held as copies over tp"),
    (same_names_in_stages, "ValueError", "two pipeline stages .* named 'one'"),
    (sum_of_nothing, "ValueError", r"grad_sum_over: the pattern 'q_norm.\*' .* matches no"),
    (sum_over_nothing, "ValueError", "grad_sum_over: expected a mesh dimension among pp, tp"),
    (experts_of_nothing, "ValueError", "experts: expected a mesh dimension among dp"),
    (tie_within_a_stage, "ValueError", r"tied: .* found them on stages \[0\]"),
    (tie_of_other_shapes, "ValueError", "tied: expected 'one' and 'two' of one shape"),
    (tie_of_three, "ValueError", "tied: expected each weight in one pair, got 'one' in two"),
    (ties_of_one_stage_alone, "ValueError", "tied: expected the same names on all .* stages"),
    (tie_with_the_group_of_others, "ValueError", r"tied: expected \(name on its first holder"),
    (tie_in_other_groups, "ValueError", "tied: .* 'one' and 'three' .* group 0 and .* group 1"),
    (tie_frozen_on_a_stage, "ValueError", "tied: .* trained, .* frozen, "),
    (tie_left_out_on_a_stage, "ValueError", "tied: .* in group 0 and .*in no group"),
    (tie_kept_in_fp32_on_a_stage, "ValueError", "tied: .*bfloat16.* and torch.float32"),
    (copies_in_other_groups, "RuntimeError", "group 0.*held as copies over tp"),
    (sums_of_some_ranks, "RuntimeError", "grad_sum_over"),
    (options_without_a_mesh, "ValueError", "tied: expected a mesh beside it"),
    (matrix_optimizer, "TypeError", "'one' is cut over .* 'tp', and Muon needs whole"),
    (bad_divisor, "ValueError", "divisor: expected a number above 0"),
    (rates_differ_in_a_step, "RuntimeError", "lr of group 0 .*0.001.*; rank 6: 0.5"),
    (stages_differ_in_a_step, "RuntimeError", "betas of group 0"),
    (clips_differ, "RuntimeError", "max_norm"),
    (scale_forgotten, "RuntimeError", "scale_loss"),
]


def caught(mesh: DeviceMesh, wrong: Callable[[DeviceMesh], None]) -> tuple[str, str]:
    try:
        wrong(mesh)
    except (ValueError, TypeError, RuntimeError) as error:
        dist.barrier()  # nobody waits in another collective
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("case", REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_it_is_refused_on_every_rank(case: tuple[Any, str, str]):
    wrong, kind, message = case
    for rank, (raised, text) in enumerate(threaded_world(GRID, caught, wrong, timeout=20)):
        assert raised == kind, (rank, raised, text)

        assert re.search(message, text, re.DOTALL), (rank, text)


def test_copies_are_not_trained_at_different_rates_where_nothing_is_data_parallel():
    grid = {"dp": 1, "tp": 2, "pp": 1}
    for raised, text in threaded_world(grid, caught, rates_differ_along_tp, timeout=20):
        assert raised == "RuntimeError" and "lr of group 0" in text and "rank 0: 0.5" in text


def rates_differ_along_tp(mesh: DeviceMesh) -> None:
    model = bag(mesh)
    optimizer = shardcast.shard([model], adamw(model), mesh=mesh)
    optimizer.param_groups[0]["lr"] = 0.5 + mesh.get_local_rank("tp")
    model({"one": torch.ones(4, 4), "two": torch.ones(4)}).backward()
    optimizer.step()


def right(mesh: DeviceMesh) -> bool:
    model = bag(mesh, one=Shard(0), two=Replicate())
    optimizer = shardcast.shard([model], adamw(model), mesh=mesh)
    model({"one": torch.ones(2, 4), "two": torch.ones(4)}).backward()
    optimizer.step()
    return True


def full_tensor_after_shard(mesh: DeviceMesh) -> bool:
    """torch 2.13 gathers rows in a wrong order over a mesh that has been flattened."""
    model = bag(mesh)
    shardcast.shard(model, adamw(model), mesh=mesh)
    uneven = torch.arange(25.0).view(5, 5)
    cut = distribute_tensor(uneven, mesh["dp", "tp"], [Shard(0), Shard(0)])
    return torch.equal(cut.full_tensor(), uneven)


def test_shard_does_not_flatten_the_mesh_of_the_script():
    assert threaded_world(GRID, full_tensor_after_shard) == [True] * 8


def test_what_is_right_is_not():
    assert threaded_world(GRID, right) == [True] * 8
