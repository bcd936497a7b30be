"""``reproducible``: the same bits at any number of ranks, however they accumulate."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import run_world
from oracle import pair
from torch import Tensor, nn

import shardcast
from shardcast import checkpoint
from shardcast.estimate import estimate
from shardcast.extensions.reproducible.exact_norm import ExactNorm
from shardcast.extensions.reproducible.tree import nodes_of
from shardcast.optimizer.stateful import packed_of
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)
TOTAL = 8
GRIDS = (1, 2, 4, 8)  # ranks, of which each has TOTAL / ranks micro-batches


class Skips(nn.Module):
    """Layers of which a micro-batch leaves out some, where it has a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 18), nn.Linear(18, 37)
        self.branches = nn.ModuleList(nn.Linear(18, 18) for _ in range(4))

    def forward(self, tokens: Tensor, micro: int | None) -> Tensor:
        x = self.embed(tokens)
        for number, branch in enumerate(self.branches):
            if micro is None or (micro + number) % 3 == 0:
                x = x + torch.tanh(branch(x))
        return self.head(x)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """To be copied: the generator is one for all threads."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


SKIPS, LINEAR = seeded(Skips), seeded(lambda: nn.Linear(3, 5))


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def muon(model: nn.Module) -> Any:
    return pair(model)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A pairwise cover: kind of optimizer, parameters, moments, master, clip, model.
LEAN, EMA = {"moments": "int8"}, {"averages": {"ema": 0.9}, "counts": True}
SPLIT, CLIP = {"master": "split16"}, {"max_grad_norm": 0.5}
GUARD = {"guard": {"norm": 0.5, "window": 2}}
MATRIX: dict[str, tuple[Any, torch.dtype, dict[str, Any], bool]] = {
    "adamw bf16 metrics": (adamw, BF16, {"metrics": True}, False),
    "adamw bf16 clip absent int8": (adamw, BF16, {**CLIP, **LEAN}, True),
    "adamw bf16 split16 bf16 clip": (adamw, BF16, {**CLIP, **SPLIT, "moments": "bf16"}, False),
    "adamw fp32 clip guard": (adamw, FP32, {**CLIP, **GUARD}, False),
    "sgd fp32 absent": (sgd, FP32, {"pack_params": 2}, True),
    "sgd fp16 clip absent": (sgd, FP16, CLIP, True),
    "sgd bf16 int8 split16": (sgd, BF16, {**LEAN, **SPLIT}, False),
    "muon bf16 clip absent": (muon, BF16, CLIP, True),
    "muon fp32 packs": (muon, FP32, {"pack_params": 2}, False),
    "adamw bf16 clip averages count": (adamw, BF16, {**CLIP, **EMA}, True),
    "sgd fp32 averages count": (sgd, FP32, EMA, False),
    "adamw fp16 int8": (adamw, FP16, LEAN, False),
}


def train(
    group: Any,
    build: Any,
    fields: dict[str, Any],
    absent: bool,
    steps: int,
    total: int = TOTAL,
) -> tuple[str, float, int]:
    """Digest, last norm and skipped steps of a run; each rank its block of the micro-batches."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    model = copy.deepcopy(SKIPS)
    fields = {**fields}
    counts = fields.pop("counts", False)
    fp16 = fields["param_dtype"] == FP16
    scale = {"loss_scale": "dynamic", "loss_scale_init": 2.0**17} if fp16 else {}
    optimizer = shardcast.shard(
        model, build(model), process_group=group, fuse="eager", **scale, **fields
    )
    if not counts:
        optimizer.divisor = float(total)
    count = total // ranks
    for step in range(steps):
        for micro in range(count):
            index = rank * count + micro
            generator = torch.Generator().manual_seed(step * 100 + index)
            tokens = torch.randint(37, (2, 5 + index % 3), generator=generator)
            if counts:
                optimizer.count(tokens.numel())
            out = model(tokens, index if absent else None)
            loss = torch.nn.functional.cross_entropy(out.float().flatten(0, 1), tokens.flatten())
            with optimizer.no_sync() if micro < count - 1 else contextlib.nullcontext():
                optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    norm = optimizer.grad_norm
    assert norm is not None
    return optimizer.digest(), norm.item(), optimizer.skipped_steps


def on_grids(grids: tuple[int, ...], *args: Any) -> list[Any]:
    results = []
    for size in grids:
        ranks = [train(None, *args)] if size == 1 else run_world(size, train, *args)[0]
        assert len(set(ranks)) == 1, "ranks agree"
        results.append(ranks[0])
    return results


@pytest.mark.parametrize("case", MATRIX)
def test_all_grids_end_with_the_same_bits(case: str):
    build, dtype, options, absent = MATRIX[case]
    fields = {"param_dtype": dtype, **options}
    steps = int(os.environ.get("STEPS", "4"))
    results = on_grids(GRIDS, build, {**fields, "reproducible": TOTAL}, absent, steps)
    assert len(set(results)) == 1, results
    if fields["param_dtype"] == FP16:
        assert results[0][2] > 0, "some steps were skipped for an overflow"
    plain = on_grids((1, 4), build, fields, absent, steps)
    assert len({digest for digest, *_ in plain}) > 1, "the control: without it they differ"


@pytest.mark.parametrize("absent", [False, True])
def test_micro_batches_that_the_first_step_counts_give_the_bits_of_their_number(absent: bool):
    fields = {"param_dtype": BF16, "max_grad_norm": 0.5}
    (expected,) = on_grids((2,), adamw, {**fields, "reproducible": TOTAL}, absent, 3)
    assert on_grids(GRIDS, adamw, {**fields, "reproducible": True}, absent, 3) == [expected] * 4
    six = [{**fields, "reproducible": total} for total in (True, 6)]
    (counted,) = {*on_grids((1, 3, 6), adamw, six[0], absent, 3, 6)}
    assert [counted] == on_grids((2,), adamw, six[1], absent, 3, 6)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_mean_over_tokens_has_the_same_bits_on_three_ranks(dtype: torch.dtype):
    """Sums of six micro-batches over 3 or 2 ranks would be rounded, and overflow, unlike."""
    fields = {"param_dtype": dtype, "counts": True, "reproducible": 6}
    digests = on_grids((1, 2, 3, 6), adamw, fields, False, 4, 6)
    digests += on_grids((1, 3, 6), adamw, {**fields, "reproducible": True}, False, 4, 6)
    assert len({*digests}) == 1


@pytest.mark.parametrize("total", [1, 6, 12])
def test_any_number_of_micro_batches_may_be_divided(total: int):
    """Ranks then have parts of the tree that are not one node."""
    grids = tuple(size for size in (1, 2, 3, 4, 6) if total % size == 0)
    results = on_grids(grids, adamw, {"param_dtype": BF16, "reproducible": total}, True, 3, total)
    assert len(set(results)) == 1, results


@pytest.mark.parametrize("count", [1, 2, 4, 6, 8, 12, 24])
def test_ranks_send_no_more_nodes_than_a_binary_counter_has(count: int):
    for first in range(0, 24, count):
        nodes = nodes_of(range(first, first + count))
        covered = [i for n in nodes for i in range(n.number << n.level, (n.number + 1) << n.level)]
        assert covered == [*range(first, first + count)]
        assert len(nodes) <= math.log2(count) + 1


def test_one_micro_batch_per_rank_is_sent_as_without_the_tree():
    fields = {"param_dtype": BF16}
    logs = []
    for more in ({}, {"reproducible": 4}):
        _, world = run_world(4, train, adamw, {**fields, **more}, False, 2, 4)
        calls = [(c.op, c.nbytes) for c in world.logs[0] if c.op != "all_reduce"]
        logs.append([call for call in calls if call[0] == "all_to_all_single"])
    assert logs[0] == logs[1] and logs[0]


# -- micro-batches with numbers, and those that are missing ----------------------------------------


def linear(group: Any, **fields: Any) -> tuple[nn.Module, shardcast.ShardedOptimizer]:
    model = copy.deepcopy(LINEAR)
    optimizer = shardcast.shard(
        model, torch.optim.SGD(model.parameters(), lr=1.0), process_group=group,
        **{"param_dtype": "fp32", "reproducible": 4, **fields},
    )  # fmt: skip
    optimizer.divisor = 4.0
    return model, optimizer


def backward(model: nn.Module, index: int) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(index))
    model(x).square().mean().backward()


def test_numbered_micro_batches_may_come_in_any_order_in_parts_and_not_at_all():
    def run(group: Any, order: list[int]) -> str:
        model, optimizer = linear(group)
        for index in order:
            if index * group.size() // 4 == group.rank():
                optimizer.micro_batch(index)
                backward(model, index)
                backward(model, 10 + index)
        optimizer.step()
        return optimizer.digest()

    digests = [
        run_world(size, run, order)[0] for size in (1, 2, 4) for order in ([0, 2, 3], [3, 2, 0])
    ]
    assert len({digest for ranks in digests for digest in ranks}) == 1
    assert run_world(2, run, [0, 2])[0][0] != digests[0][0]


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_micro_batches_that_were_cleared_are_no_part_of_a_step(clear: str):
    def run(group: Any, failed: bool) -> str:
        model, optimizer = linear(group)
        if failed:
            backward(model, 7)
            (optimizer if clear == "optimizer" else model).zero_grad()
        for index in range(group.rank() * 2, group.rank() * 2 + 2):
            backward(model, index)
        optimizer.step()
        return optimizer.digest()

    assert run_world(2, run, True)[0] == run_world(2, run, False)[0]


def test_gradients_that_a_script_has_not_cleared_are_added_to():
    def run(group: Any, twice: bool) -> list[Tensor]:
        model, optimizer = linear(group)
        for group_ in optimizer.param_groups:
            group_["lr"] = 0.0
        grads = []
        for _ in range(1 + twice):
            for index in range(group.rank() * 2, group.rank() * 2 + 2):
                backward(model, index)
            optimizer.step()
            grads.append(optimizer.grad_norm)
        return grads

    (once, doubled), *_ = run_world(2, run, True)[0]
    torch.testing.assert_close(doubled, 2 * once)


@pytest.mark.parametrize(
    ("reproducible", "counts", "message"),
    [
        (4, (1, 2), "micro_batches"), (4, (1, 1), "micro_batches"), (4, (3, 3), "one more"),
        (True, (3, 3), r"a power of two, got ranks 0, 1: 3; .* all ranks \(6\)"),
        (True, (2, 1), r"one number .* rank 0: 2; rank 1: 1; .* all ranks \(3\)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_with_another_number_of_micro_batches_is_an_error_of_all_ranks(
    reproducible: int, counts: tuple[int, int], message: str
):
    def run(group: Any) -> None:
        model, optimizer = linear(group, reproducible=reproducible)
        optimizer.step()  # without backwards: nothing is counted
        with pytest.raises(RuntimeError, match=message):
            for index in range(counts[group.rank()]):
                backward(model, index)
            optimizer.step()

    run_world(2, run)


def test_numbers_of_other_ranks_and_a_second_time_are_refused():
    def run(group: Any) -> None:
        model, optimizer = linear(group)
        first = 2 * group.rank()
        with pytest.raises(ValueError, match=f"from {first} to {first + 1}"):
            optimizer.micro_batch(3 - first)
        for index in (first, first + 1):
            optimizer.micro_batch(index)
            backward(model, index)
        with pytest.raises(ValueError, match="ended"):
            optimizer.micro_batch(first)

    run_world(2, run)
    for option in (False, True):
        with pytest.raises(RuntimeError, match=r"micro_batch: .* reproducible"):
            linear(None, reproducible=option)[1].micro_batch(0)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data += 1e-3 * torch.randn_like(param)


def test_gradients_that_are_added_to_are_no_leaf_of_a_micro_batch_without_a_pack():
    def run(group: Any) -> str:
        model, optimizer = optimizer_of(group, pack_params=1)
        for step in range(2):
            make_step(model, optimizer, step, clears=step == 1)
        return optimizer.digest()

    assert len({digest for size in (1, 2, 4) for digest in run_world(size, run)[0]}) == 1


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"reproducible": 3}, "2 ranks do not divide"),
        ({"reduce": "reduce_scatter"}, "reduce_scatter"),
        ({"grads": "sharded"}, "sharded"),
        ({"norm_type": 1.0}, "norm_type"),
        ({"optimizer": Noisy}, "Noisy draws"),
    ],
    ids=str,
)
def test_what_cannot_be_reproducible_is_refused_by_name(fields: dict[str, Any], option: str):
    def run(group: Any) -> None:
        model = nn.Linear(3, 5)
        build = fields.get("optimizer", torch.optim.SGD)
        options = {"reproducible": 4, **fields}
        options.pop("optimizer", None)
        with pytest.raises(ValueError, match=f"reproducible: .*{option}"):
            shardcast.shard(
                model, build(model.parameters(), lr=0.1), process_group=group, **options
            )

    run_world(2, run)


@pytest.mark.parametrize("unfrozen_by", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_a_parameter_that_is_unfrozen_later_is_refused_by_name_on_all_ranks(
    unfrozen_by: tuple[int, ...],
):
    def run(group: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5))
        model[0].requires_grad_(False)
        optimizer = shardcast.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group,
            reproducible=2, param_dtype="fp32",
        )  # fmt: skip
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(group.rank() in unfrozen_by)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"'0\.(weight|bias)'.*was frozen at shard"):
            optimizer.step()

    run_world(2, run)


# -- the norm --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e15, 3e38])
def test_an_exact_norm_is_the_norm_and_has_no_order(size: float):
    torch.manual_seed(0)
    norm = ExactNorm(torch.device("cpu"))
    values = (torch.randn(3000 * 64) * 10 ** (8 * torch.rand(3000 * 64) - 8)).clamp(-1, 1) * size
    powers = []
    for pieces in (1, 3, 7):
        cuts = values.view(-1, 64).tensor_split(pieces)
        parts = [norm.powers([cut.reshape(-1)], [64])[0] for cut in cuts][::-1]
        powers.append(norm.agreed(torch.stack(parts).sum(0), 1))
    assert powers[0].equal(powers[1]) and powers[0].equal(powers[2])
    expected = values.double().square().sum()
    if size == 1e-30:
        assert powers[0].item() < 1e-40, "far below any gradient"
    else:
        torch.testing.assert_close(powers[0][0], expected, rtol=1e-13, atol=0)
    values[70] = torch.inf
    assert not norm.powers([values], [64]).sum().isfinite()


# -- the digest ------------------------------------------------------------------------------------


def test_a_digest_sees_one_bit_of_a_master_and_of_a_moment_and_two_that_change_places():
    def run(group: Any) -> list[str]:
        model, optimizer = linear(group, reproducible=False, alignment=8)
        backward(model, 0)
        optimizer.step()
        digests = [optimizer.digest()] * 2
        if group.rank() == group.size() - 1:
            bits = packed_of(optimizer).shards[0].data.view(torch.int32)
            bits[1] ^= 1
        digests.append(optimizer.digest())
        if group.rank() == group.size() - 1:
            bits[1] ^= 1
            bits[:2] = bits[:2].flip(0)
        return [*digests, optimizer.digest()]

    for ranks in (run_world(1, run)[0], run_world(3, run)[0]):
        for first, again, flipped, swapped in ranks:
            assert first == again and len({first, flipped, swapped}) == 3


def test_a_digest_sees_the_experts_of_every_rank():
    def run(mesh: Any, seeds: tuple[int, int]) -> str:
        generator = torch.Generator().manual_seed(seeds[mesh.get_local_rank("ep")])
        model = nn.ParameterDict({"expert": nn.Parameter(torch.randn(8, 8, generator=generator))})
        optimizer = shardcast.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, dp=("ep", "edp"),
            experts={"edp": ["expert"]},
        )  # fmt: skip
        return optimizer.digest()

    seeds = [(0, 1), (0, 2), (3, 1)]
    digests = [set(threaded_world({"ep": 2, "edp": 2}, run, it)) for it in seeds]
    assert all(len(of_ranks) == 1 for of_ranks in digests)
    assert len(set.union(*digests)) == 3


# -- across a resume -------------------------------------------------------------------------------


def optimizer_of(group: Any, **fields: Any) -> tuple[nn.Module, shardcast.ShardedOptimizer]:
    model = copy.deepcopy(SKIPS)
    fields = {"param_dtype": BF16, "max_grad_norm": 0.5, "fuse": "eager", **fields}
    fields.setdefault("reproducible", 4)
    optimizer = shardcast.shard(model, adamw(model), process_group=group, **fields)
    optimizer.divisor = 4.0
    return model, optimizer


def make_step(model: nn.Module, optimizer: Any, step: int, clears: bool = True) -> None:
    comm = packed_of(optimizer).comm
    count = 4 // comm.size
    for index in range(comm.rank * count, (comm.rank + 1) * count):
        generator = torch.Generator().manual_seed(step * 100 + index)
        tokens = torch.randint(37, (2, 5), generator=generator)
        model(tokens, index).float().square().mean().backward()
    optimizer.step()
    if clears:
        optimizer.zero_grad()


@pytest.mark.parametrize("counted", [False, True])
def test_a_run_that_goes_on_at_other_numbers_of_ranks_keeps_its_bits(counted: bool, tmp_path: Path):
    fields = {"moments": "bf16", "master": "split16", "averages": {"ema": 0.9}}

    def go_on(group: Any, first: int, last: int) -> tuple[str, str]:
        more = {"reproducible": True} if counted and last - first < 8 else {}
        model, optimizer = optimizer_of(group, **fields, **more)
        folder = tmp_path / str(last - first)
        resumed = checkpoint.resume(folder, model, optimizer)
        loaded = optimizer.digest()
        assert resumed is None or resumed.extra == loaded
        for step in range(first, last):
            make_step(model, optimizer, step)
        digest = optimizer.digest()
        checkpoint.save(folder, model, optimizer, step=last, extra=digest)
        return loaded, digest

    undisturbed = run_world(2, go_on, 0, 8)[0]
    parts = [run_world(size, go_on, 2 * n, 2 * n + 2)[0] for n, size in enumerate((4, 2, 1, 4))]
    assert {digest for _, digest in parts[-1]} == {digest for _, digest in undisturbed}
    for before, after in itertools.pairwise(parts):
        assert before[0][1] == after[0][0], "what was saved is what was loaded"


@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_a_replay_on_other_ranks_finds_the_bit_that_was_flipped(
    flips: bool, size: int, tmp_path: Path
):
    def record(group: Any) -> tuple[str, int]:
        model, optimizer = optimizer_of(group)
        (shard,) = packed_of(optimizer).shards
        _, fragment, _ = list(shard.owned())[-1]
        for step in range(1, 7):
            make_step(model, optimizer, step)
            if flips and step == 4 and group.rank() == 1:
                values = shard.exact(fragment).clone()
                values.view(torch.int32)[3] ^= 1
                shard.set_exact(fragment, values)
            if step % 2 == 0:
                checkpoint.save(tmp_path / "run", model, optimizer, step=step)
        return fragment.slot.name, fragment.param_range[0] + 3

    def again(group: Any) -> Any:
        model, optimizer = optimizer_of(group)
        return checkpoint.replay(
            tmp_path / "run",
            model,
            optimizer,
            lambda step: make_step(model, optimizer, step),
            start=1,
        )

    _, flipped = run_world(2, record)[0]
    differences = {*run_world(size, again)[0]}
    if not flips:
        assert differences == {None}
        return
    (difference,) = differences
    assert (difference.first, difference.last, difference.kind) == (2, 4, "master")
    assert (difference.parameter, difference.element) == flipped
    with pytest.raises(ValueError, match="two checkpoints"):
        checkpoint.replay(tmp_path, *linear(None), lambda step: None)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("total", "counted"), [(2, False), (4, False), (8, False), (12, False), (4, True), (8, True)]
)
def test_the_estimate_knows_the_sums_that_a_rank_keeps(
    total: int, dtype: str, wire: str, counted: bool
):
    fields = {"param_dtype": dtype, "reduce_dtype": wire}

    def run(group: Any) -> int:
        model, optimizer = linear(group, **fields, reproducible=counted or total)
        for index in range(total // 2):
            backward(model, index)
        if counted:  # what its first step made too much of is gone in the second one
            optimizer.step()
            optimizer.zero_grad()
            for index in range(total // 2):
                backward(model, index)
        optimizer.step()
        return optimizer.memory_report()["gradients"]

    model = seeded(lambda: nn.Linear(3, 5))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    estimated = estimate(model, sgd, 2, {**fields, "reproducible": total}, "gloo")
    assert max(run_world(2, run)[0]) == estimated.gradients, "on the rank that keeps most"


def test_ranks_that_do_not_divide_the_micro_batches_of_a_checkpoint_are_refused(tmp_path: Path):
    def run(group: Any, saves: bool) -> None:
        model, optimizer = linear(group, reproducible=True)
        if saves:
            backward(model, 0)
            optimizer.step()
            checkpoint.save(tmp_path, model, optimizer, step=1)
        else:
            checkpoint.resume(tmp_path, model, optimizer)
            with pytest.raises(RuntimeError, match=r"reproducible: .* divides .* 2, got 3"):
                backward(model, 0)

    run_world(2, run, True)
    run_world(3, run, False)
