"""Published forms: owners quantize each weight once per step."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, job, local, on_each_rank, run_world
from models import values as values_of
from oracle import pair
from pairwise import WHOLE, pairwise, thinned
from quantizers import batch, by_table, gpt, loss_of, train_plain, train_published, vectors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardcast
from shardcast import checkpoint
from shardcast.estimate import estimate
from shardcast.optimizer.sharded import packed_of
from shardcast.serving.forms import FORMS, Form
from shardcast.serving.kernels import Kernels
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(120)
MATRICES = "blocks.*[!12].weight"  # not norms
FORM_NAMES = ("mxfp8", "mxfp4", "fp8_block128")
of_each_form = pytest.mark.parametrize("form", FORM_NAMES)
# In training, forms differ by their blocks, rows or squares, and by packed codes.
of_unlike_forms = pytest.mark.parametrize(
    "form", FORM_NAMES if WHOLE else ("mxfp4", "fp8_block128")
)
# Results of torchao 0.18.0 (to_mx, ScaleCalculationMode.FLOOR) and transformers 5.23.0
# (Fp8Quantize, scale_fmt ue8m0): hashes of codes and scales of vectors(), in FORM_NAMES' order.
RECORDED = {
    "usual": ("030dd8b21e658e39", "63687f405c6afda0", "c64e6c58a609efd2"),
    "wide": ("5b030403d3ef01f4", "f7c9e862bf21b309", "101b628480aeb505"),
    "bf16": ("81576fd39f0aba7c", "b42bd4c205e5e770", "570409578d7efbc0"),
    "denormal": ("4ec364dbf066ac90", "bb0484b1e4cef2f2", "83def18bb3e6e85d"),
    "huge": ("54aeb7951a2a17fa", "3c768b62d3bbedae", "a03c21f26ad5d7fb"),
    "zeros": ("16735d831727f687", "e5efbefb493e1640", "094a9bccf2c7e895"),
    "largest": ("2ed9ce4b2a089f36", "6980f0030a857535", "f0073993ef5fb08c"),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(bits(left), bits(right))


def digest(codes: Tensor, scales: Tensor) -> str:
    """Return a hash of codes and scales, 16 hexadecimal digits."""
    joined = b"".join(bits(tensor).numpy().tobytes() for tensor in (codes, scales))
    return hashlib.blake2b(joined, digest_size=8).hexdigest()


def sharded(
    group: Any, form: str, make: Callable[..., Any] = torch.optim.AdamW, **more: Any
) -> Any:
    model = gpt()
    optimizer = pair(model) if make is torch.optim.Muon else make(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"autocast": False, "published": {form: MATRICES}, **more}
    return model, shardcast.shard(model, optimizer, process_group=group, **options)


def train(model: nn.Module, optimizer: Any, rank: int = 0, first: int = 0, steps: int = 2) -> None:
    for step in range(first, first + steps):
        inputs, targets = batch(step, rank, 0)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the matrices that have a form."""
    params = model.named_parameters()
    return {name: p.detach().clone() for name, p in params if fnmatch.fnmatch(name, MATRICES)}


def assert_on_grid(model: nn.Module, optimizer: Any, form: str, average: str | None = None) -> None:
    """Assert that each matrix is what another implementation computes from all masters."""
    exact = optimizer.full_parameters(average)
    for name, values in matrices(model).items() if exact else ():
        assert same(values, by_table(exact[name], form)), name
    optimizer.check_copies()


# -- forms ----------------------------------------------------------------------------------


def test_codes_and_scales_are_those_that_were_recorded_of_others():
    for kind, values in vectors().items():
        found = (digest(*FORMS[form].quantize(values)) for form in FORM_NAMES)
        assert (*found,) == RECORDED[kind], kind


@pytest.mark.parametrize("form", ["fp8_block128", "mxfp8_rceil", "mxfp4_rceil"])
def test_a_scale_that_covers_is_the_smallest_with_which_no_code_saturates(form: str):
    """This includes the numbers next to each step of the scale."""
    kind = FORMS[form]
    steps = (kind.limit * 2.0 ** torch.arange(-110, 117, 7)).view(torch.int32)
    largest = torch.cat([steps - 1, steps, steps + 1]).view(torch.float32)
    rows = largest.repeat_interleave(kind.block_rows)[:, None]
    scales = 2.0 ** (kind.quantize(rows.expand(-1, kind.block_columns))[1].double() - 127)
    limits = kind.limit * scales.view(-1)
    assert (limits / 2 < largest).all() and (largest <= limits).all()


@pytest.mark.parametrize("form", [*FORMS])
def test_values_are_those_of_a_table_of_all_codes(form: str):
    for kind in ("usual", "wide", "bf16", "zeros", "largest"):
        values = vectors()[kind]
        assert same(FORMS[form].round(values), by_table(values, form)), kind


@of_each_form
def test_any_bits_at_all_are_rounded_once(form: str):
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(-(2**31), 2**31, (256, 256), generator=generator, dtype=torch.int64)
    values = pattern.to(torch.int32).view(torch.float32)
    once = FORMS[form].round(values)
    again = FORMS[form].round(once)
    assert same(once, again)
    assert same(FORMS[form].dequantize(*FORMS[form].quantize(values)), once)
    assert (bits(once[once.isnan()]) == 0x7FC0).all()


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", thinned(2, ("mxfp8", "fp8_block128")))
def test_compiled_kernels_have_the_bits_of_eager_ones(form: str, monkeypatch: pytest.MonkeyPatch):
    """Also for NaN, whose codes are arbitrary; the host acts as an accelerator."""
    kernels = Kernels(FORMS[form], shardcast.ShardcastConfig(fuse="compile"))
    monkeypatch.setattr("shardcast._compat.is_host", lambda _device: False)
    pattern = torch.randint(-(2**31), 2**31, (128, 256), generator=torch.Generator().manual_seed(0))
    for values in (*vectors().values(), pattern.to(torch.int32).view(torch.float32)):
        codes, scales = FORMS[form].quantize(values)
        published = FORMS[form].round(values)[None]
        rounded, again = torch.zeros(2, *published.shape, dtype=torch.bfloat16).unbind()
        new_codes, new_scales = bits(codes[None]).clone(), scales[None].clone()
        kernels.round(values[None], rounded)
        kernels.collapse(rounded, new_codes.zero_(), new_scales.zero_())
        kernels.expand(again, new_codes, new_scales)
        assert same(rounded, published) and same(again, published) and same(new_scales[0], scales)
        height, width = FORMS[form].block_rows, FORMS[form].block_columns
        finite = scales.repeat_interleave(height, 0).repeat_interleave(width, 1) != 255
        assert torch.equal(new_codes[0][finite], bits(codes)[finite])


@of_each_form
def test_a_nan_makes_its_block_nan_and_an_infinity_is_seen(form: str):
    values = vectors()["usual"].clone()
    values[0, 0], values[127, 255] = torch.nan, -torch.inf
    published, (_, scales) = FORMS[form].round(values), FORMS[form].quantize(values)
    rows, columns = FORMS[form].block_rows, FORMS[form].block_columns
    assert published[:rows, :columns].isnan().all()
    assert not published[127, 255].isfinite()
    assert scales[0, 0] == 255
    assert published[:64, 128:].isfinite().all() == (form != "fp8_block128")


COVERING = ("fp8_block128", "mxfp8_rceil", "mxfp4_rceil")


@pytest.mark.parametrize("form", COVERING)
def test_codes_times_any_power_of_two_are_as_they_were(form: str):
    """So a model loaded from a checkpoint in a form starts with exactly the file's values.

    This holds for any scales, also with headroom. It does not hold for mxfp8, which rounds
    exponents down, with scales that were rounded up: 240 times a power of two exceeds 448 times
    half of it.
    """
    generator = torch.Generator().manual_seed(0)
    its, floor = FORMS[form], FORMS[form.removesuffix("_rceil")]
    most = 127 if its.bits == 8 else 256
    codes = torch.randint(0, most, (256, 256 * its.bits // 8), generator=generator)
    codes = codes.to(torch.uint8)
    if its.bits == 8:
        sign = torch.randint(0, 2, codes.shape, generator=generator).to(torch.uint8) << 7
        codes = (codes | sign).view(torch.float8_e4m3fn)
    shape = (256 // its.block_rows, 256 // its.block_columns)
    scales = torch.randint(10, 240, shape, generator=generator).to(torch.uint8)
    smaller = torch.randint(0, 2, codes.shape, generator=generator).bool()
    if its.bits == 8:
        codes = torch.where(smaller, codes.float() / 16, codes.float()).to(torch.float8_e4m3fn)
    values = its.dequantize(codes, scales)
    assert same(its.round(values), values)
    if form == "mxfp8_rceil":
        assert not same(floor.round(values), values)


@pytest.mark.parametrize("form", COVERING)
def test_a_block_at_either_end_of_bf16_is_rounded_once(form: str):
    """There, rounded values have half the scale, or could become infinite."""
    its = FORMS[form]
    height = its.block_rows
    steps = torch.linspace(0.2, 2.2, 4001).double()
    for power in (*range(-136, -110), 124, 125, 126, 127):
        sizes = (steps * 2.0**power).float()
        sizes = sizes[sizes.isfinite()].view(-1, 1)
        values = torch.cat([sizes, sizes / 3, sizes / 200], 1)[:: 160 if height > 1 else 1]
        blocks = torch.zeros(len(values), height, its.block_columns)
        blocks[:, 0, :3] = values
        once = its.round(blocks)
        assert same(its.round(once), once), power
        assert same(its.dequantize(*its.quantize(once)), once), power
        assert not once.isinf().any()


# -- training -------------------------------------------------------------------------------


FORM_AND_RANKS = [*zip(2 * FORM_NAMES, (1, 4, 1, 4, 1, 4), strict=True)]


@pytest.mark.parametrize(
    ("form", "ranks"), [*((form, 2) for form in FORM_NAMES), *thinned(3, FORM_AND_RANKS)]
)
def test_losses_are_those_of_a_fake_quantizer_in_every_forward(form: str, ranks: int):
    steps, micro_batches = 4, 2
    losses, masters, _ = train_plain(form, MATRICES, ranks, micro_batches, steps, by_table)

    def run(group: Any) -> Any:
        own, gathered, _, _ = train_published(group, form, MATRICES, micro_batches, steps)
        return own, gathered

    results, _ = run_world(ranks, run)
    assert [own for own, _ in results] == losses
    assert all(torch.equal(results[0][1][name], master) for name, master in masters.items())


def test_a_weight_is_quantized_once_per_step_whatever_the_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
):
    """Count the elements of all ranks."""
    rounded, ranks, micro_batches, steps = [0], 2, 3, 2
    inner = Form.round_bits

    def counted(self: Form, values: Tensor) -> Tensor:
        rounded[0] += values.numel()
        return inner(self, values)

    def run(group: Any) -> None:
        model, optimizer = sharded(group, "mxfp8")
        group.barrier().wait()
        if group.rank() == 0:
            rounded[0] = 0
        group.barrier().wait()
        for step in range(steps):
            for micro in range(micro_batches):
                inputs, targets = batch(step, group.rank(), micro)
                loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    monkeypatch.setattr(Form, "round_bits", counted)
    run_world(ranks, run)
    assert rounded[0] == steps * sum(weight.numel() for weight in matrices(gpt()).values())


@pytest.mark.parametrize(("form", "ranks"), thinned(2, FORM_NAMES, (1, 3)))
@on_each_rank("ranks")
def test_everything_that_writes_weights_leaves_them_on_the_grid(
    group: Any, form: str, ranks: int, tmp_path: Path
):
    rank = group.rank()
    model, optimizer = sharded(group, form, averages={"ema": 0.5})
    assert_on_grid(model, optimizer, form)
    train(model, optimizer, rank)
    assert_on_grid(model, optimizer, form)
    trained = matrices(model)
    with optimizer.averaged("ema"):
        assert_on_grid(model, optimizer, form, "ema")
        assert not all(map(same, matrices(model).values(), trained.values()))
    assert_same_bits(matrices(model), trained)
    before = optimizer.digest()
    checkpoint.save(tmp_path, model, optimizer, step=1)
    local = optimizer.state_dict()
    train(model, optimizer, rank, first=2)
    checkpoint.load(tmp_path, model, optimizer)
    assert_on_grid(model, optimizer, form)
    assert_same_bits(matrices(model), trained)
    assert optimizer.digest() == before
    train(model, optimizer, rank, first=2)
    optimizer.load_state_dict(local)
    assert_on_grid(model, optimizer, form)
    assert optimizer.digest() == before


def assert_close_gives(model: nn.Module, optimizer: Any, exact: dict[str, Tensor]) -> None:
    """Close; assert that rank 0 gets its exact fp32 masters back."""
    optimizer.close()
    params = dict(model.named_parameters(remove_duplicate=False))
    assert all(values.dtype == torch.float32 for values in matrices(model).values())
    assert all(torch.equal(params[name], value) for name, value in exact.items())


@of_unlike_forms
def test_what_a_script_writes_is_trained_and_all_else_keeps_its_master(form: str):
    """Also if masters are read in between, and although the block's scale changes."""

    def run(group: Any, looks: bool) -> None:
        model, optimizer = sharded(group, form)
        train(model, optimizer, group.rank())
        before = optimizer.full_parameters()
        weight = model.get_parameter("blocks.0.fc.weight")
        with torch.no_grad():
            weight[3, 5] = 7.125
        for _ in range(2 * looks):
            optimizer.digest()
        after = optimizer.full_parameters()
        if after:
            expected = before["blocks.0.fc.weight"].clone()
            expected[3, 5] = 7.125
            assert torch.equal(after["blocks.0.fc.weight"], expected)
        with torch.no_grad():
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
        optimizer.param_groups[0].update(lr=0.0)
        optimizer.step()
        assert_on_grid(model, optimizer, form)
        later = optimizer.full_parameters()
        assert all(torch.equal(after[name], later[name]) for name in after)
        with torch.no_grad():
            weight[1, 1] = 9.0
        assert_close_gives(model, optimizer, optimizer.full_parameters())

    for looks in (False, True):
        run_world(2, run, looks)


@of_unlike_forms
@on_each_rank(2)
def test_a_loaded_state_dict_of_the_model_is_on_the_grid_before_the_next_forward(
    group: Any, form: str
):
    model, optimizer = sharded(group, form)
    exact = {name: values * 1.7 for name, values in gpt().state_dict().items()}
    model.load_state_dict(exact)
    assert_on_grid(model, optimizer, form)
    gathered = optimizer.full_parameters()
    assert all(torch.equal(gathered[name], exact[name]) for name in gathered)
    train(model, optimizer, group.rank())
    masters, own = optimizer.digest(), model.state_dict()
    model.load_state_dict(own)  # bf16 values that are already published keep their masters
    assert optimizer.digest() == masters
    low = {name: values.bfloat16() for name, values in exact.items()}
    model.load_state_dict(low)
    assert_on_grid(model, optimizer, form)
    masters_of_low = optimizer.full_parameters()
    model.float()
    assert_close_gives(model, optimizer, masters_of_low)


@of_unlike_forms
@on_each_rank(2)
def test_an_added_group_is_on_the_grid_and_a_skipped_step_changes_nothing(group: Any, form: str):
    model = gpt()
    first = [*model.get_submodule("blocks.0").parameters()]
    optimizer = shardcast.shard(
        model,
        torch.optim.AdamW(first, lr=1e-2),
        process_group=group,
        autocast=False,
        published={form: MATRICES.replace("*", "[01]*")},
    )
    optimizer.add_param_group({"params": [*model.get_submodule("blocks.1").parameters()]})
    assert all(same(v, by_table(v.float(), form)) for v in matrices(model).values())
    train(model, optimizer, group.rank())
    before = matrices(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same_bits(matrices(model), before)
    assert_close_gives(model, optimizer, optimizer.full_parameters())


CLASSES = [{"make": kind} for kind in (torch.optim.SGD, torch.optim.Muon, torch.optim.NAdam)]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"overlap_sync": True},
    {"accumulate": "sharded"},
    {"moments": "bf16"},
    {"sync": "broadcast"},
    {"partition": "whole"},
    {"fuse": "compile"},
)


@pytest.mark.parametrize(
    ("form", "options"),
    [*thinned(3, FORM_NAMES, CLASSES), *thinned(3, FORM_NAMES, OPTIONS)],
    ids=str,
)
def test_any_class_of_optimizer_and_other_options_go_with_it(form: str, options: dict[str, Any]):
    """Every rank can read the codes and scales of every parameter."""
    its = FORMS[form]

    def run(group: Any) -> None:
        model, optimizer = sharded(group, form, **options)
        train(model, optimizer, group.rank())
        optimizer.wait_sync()
        assert_on_grid(model, optimizer, form)
        for name, values in matrices(model).items():
            read = optimizer.published(name)
            assert (read.form, read.shape) == (form, tuple(values.shape))
            *stack, rows, columns = read.shape
            blocks = (*stack, rows // its.block_rows, columns // its.block_columns)
            assert read.scales.shape == blocks
            assert same(read.dequantize(), values)
        with pytest.raises(ValueError, match=r"'wpe\.weight'"):
            optimizer.published("wpe.weight")

    run_world(2 if "make" in options else 4, run)


# -- the wire -------------------------------------------------------------------------------


WAYS: dict[str, dict[str, Any]] = {
    "messages": {},
    "gathered": {"sync": "all_gather"},
    "broadcast": {"overlap_sync": True},
    "whole": {"partition": "whole"},
    "split": {"pack_mb": 0.1, "alignment": 8},
}


COVER = [
    ("mxfp4", "messages"),
    ("mxfp4", "gathered"),
    ("mxfp4", "whole"),
    ("mxfp8", "split"),
    ("fp8_block128", "broadcast"),
    ("fp8_block128", "split"),
    ("mxfp8_rceil", "messages"),
    ("mxfp4_rceil", "broadcast"),
]


@pytest.mark.parametrize(("form", "way"), [*itertools.product(FORMS, WAYS)] if WHOLE else COVER)
def test_codes_on_the_wire_give_the_bits_of_bf16_on_it(form: str, way: str):
    """Also for a script's writes, skipped steps, and NaN."""

    def run(group: Any, wire: str) -> list[dict[str, Tensor]]:
        published = {form: MATRICES, "wire": wire}
        model, optimizer = sharded(group, form, published=published, **WAYS[way])
        seen = []
        for step in range(4):
            optimizer.wait_sync()
            with torch.no_grad():  # in each owner's span
                model.get_parameter("blocks.0.fc.weight")[7::16, 5] = 7.3 + step
                if step == 3:
                    model.get_parameter("blocks.1.qkv.weight")[3, 3] = torch.nan
            if step == 2:
                for param in model.parameters():
                    param.grad = torch.full_like(param, torch.inf)
                optimizer.step()
                optimizer.zero_grad()
            else:
                train(model, optimizer, group.rank(), first=step, steps=1)
            optimizer.wait_sync()
            seen.append(values_of(model))
        assert optimizer.skipped_steps == 2
        return seen

    codes, bf16 = (run_world(3, run, wire)[0] for wire in ("codes", "bf16"))
    for seen in (*codes, *bf16):
        for one, expected in zip(seen, bf16[0], strict=True):
            assert_same_bits(one, expected)


@pytest.mark.parametrize("form", ["mxfp4", "fp8_block128"])
def test_an_accelerator_expands_codes_in_the_same_way(form: str, monkeypatch: pytest.MonkeyPatch):
    """It expands the parts of all owners in one launch; here the CPU acts as one."""

    def run(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the model's values, and its masters rounded to the form."""
        model, optimizer = sharded(group, form, fuse="eager", sync=sync)
        train(model, optimizer, group.rank())
        optimizer.check_copies()
        masters = optimizer.full_parameters()  # empty except on rank 0
        shards = packed_of(optimizer).shards if masters else []
        expected = {
            slot.name: shard.rounded(slot, masters[slot.name].reshape(-1)).view(slot.shape)
            for shard in shards
            for slot in shard.pack.layout.slots
        }
        return {name: param.detach() for name, param in model.named_parameters()}, expected

    sync = "auto" if form == "fp8_block128" else "all_gather"
    monkeypatch.setattr("shardcast._compat.is_host", lambda _device: False)
    assert_same_bits(*run_world(4, run)[0][0])


def tensor_parallel(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


def with_experts(mesh: Any) -> nn.Module:
    """Return a stack of two of four experts, as in an MoE layer, and the router."""
    torch.manual_seed(mesh.get_local_rank("ep"))
    model = nn.ParameterDict({"experts": nn.Parameter(torch.randn(2, 128, 256) / 16)})
    torch.manual_seed(0)
    model["router"] = nn.Parameter(torch.randn(128, 256) / 16)
    return model


MESHES: dict[str, tuple[dict[str, int], Callable[[Any], nn.Module], dict[str, Any]]] = {
    "tensor parallel": ({"dp": 2, "tp": 2}, tensor_parallel, {}),
    "copies of tensor parallel shards": (
        {"replicas": 2, "shards": 2, "tp": 2},
        tensor_parallel,
        {"dp": ("replicas", "shards")},
    ),
    "shard_ranks": (
        {"dp": 4},
        lambda _: nn.Sequential(nn.Linear(256, 384), nn.Linear(384, 128)),
        {"shard_ranks": 2},
    ),
    "experts": (
        {"ep": 2, "edp": 2},
        with_experts,
        {"dp": ("ep", "edp"), "experts": {"edp": ["experts"]}},
    ),
}
OF_MESHES = [
    ("mxfp4", "copies of tensor parallel shards"),
    ("mxfp4", "experts"),
    ("fp8_block128", "tensor parallel"),
    ("fp8_block128", "experts"),
    ("mxfp8", "shard_ranks"),
]


@pytest.mark.parametrize(
    ("form", "where"), [*itertools.product(FORM_NAMES, MESHES)] if WHOLE else OF_MESHES
)
def test_codes_on_the_wire_of_a_mesh_give_the_bits_of_bf16_on_it(form: str, where: str):
    """Also for a script's writes; ranks with parts of one parameter have equal gradients."""
    axes, build, options = MESHES[where]

    def run(mesh: Any, wire: str) -> list[dict[str, Tensor]]:
        model = build(mesh)
        matrices = [name for name, param in model.named_parameters() if param.dim() > 1]
        optimizer = shardcast.shard(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            autocast=False,
            published={form: matrices, "wire": wire},
            **options,
            **({} if where == "shard_ranks" else {"mesh": mesh}),
        )
        formed = [shard.pack for shard in packed_of(optimizer).shards if shard.in_blocks]
        assert all((pack.encoding is None) == (wire == "bf16") for pack in formed) and formed
        seen = []
        for step in range(3):
            for number, param in enumerate(model.parameters()):
                seed = torch.Generator().manual_seed(100 * step + 10 * number)
                grad = torch.randn(local(param).shape, generator=seed).to(param.dtype)
                if isinstance(param, DTensor):
                    grad = DTensor.from_local(grad, param.device_mesh, param.placements)
                param.grad = grad
                if step == 1:
                    local(param).view(-1)[::257] = 0.7
            optimizer.step()
            optimizer.check_copies()
            values = {name: local(param).clone() for name, param in model.named_parameters()}
            assert all(same(FORMS[form].round(values[n].float()), values[n]) for n in matrices)
            seen.append(values)
        return seen

    codes, bf16 = (
        ThreadedWorld(axes).run(lambda mesh, wire=wire: run(mesh, wire))
        for wire in ("codes", "bf16")
    )
    for ours, expected in zip(codes, bf16, strict=True):
        for one, other in zip(ours, expected, strict=True):
            assert_same_bits(one, other)
    first, *_, last = codes[0]
    assert not any(map(same, first.values(), last.values()))


@on_each_rank(2)
def test_ranks_that_differ_in_what_they_send_are_refused(group: Any):
    wire = "codes" if group.rank() else "bf16"
    with pytest.raises(RuntimeError, match="wire"):
        sharded(group, "mxfp8", published={"mxfp8": MATRICES, "wire": wire})


def test_without_published_forms_the_option_is_named():
    layer = nn.Linear(3, 3)
    plain = shardcast.shard(layer, torch.optim.SGD(layer.parameters()))
    with pytest.raises(AttributeError, match=r"published: .* to shard"):
        plain.published("0")
    assert not hasattr(plain, "published")


@pytest.mark.parametrize(("form", "max_shard_mb"), thinned(2, FORM_NAMES, (0.1, 100.0)))
def test_an_exported_folder_has_codes_and_scales(form: str, max_shard_mb: float, tmp_path: Path):
    from safetensors.torch import load_file

    model, optimizer = sharded(None, form)
    train(model, optimizer)
    checkpoint.save(tmp_path / "saved", model, optimizer, step=2)
    written = checkpoint.export(
        tmp_path / "saved", tmp_path / "out", weights="published", max_shard_mb=max_shard_mb
    )
    files = [path for path in written if path.suffix == ".safetensors"]
    assert (len(files) > 1) == (max_shard_mb < 1)
    tensors = {key: value for path in files for key, value in load_file(path).items()}
    formed = matrices(model)
    for name, values in formed.items():
        codes, scales = tensors.pop(name), tensors.pop(f"{name}_scale_inv")
        if form == "fp8_block128":
            scales = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        codes = codes.view(torch.uint8) if form == "mxfp4" else codes
        assert same(FORMS[form].dequantize(codes, scales), values)
    assert tensors.keys() == model.state_dict().keys() - formed.keys()
    checkpoint.save(tmp_path / "plain", *job(steps=0), step=0)
    with pytest.raises(ValueError, match="published"):
        checkpoint.export(tmp_path / "plain", tmp_path / "none", weights="published")


# -- plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "alignment", "ranks"), pairwise(FORM_NAMES, (8, 128), (2, 3, 5, 8, 16))
)
def test_no_block_has_two_owners(form: str, alignment: int, ranks: int):
    model = nn.Sequential(nn.Linear(384, 128), nn.Linear(128, 640), nn.Linear(640, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"published": {form: "*.weight"}, "alignment": alignment, "autocast": False}
    layout = estimate(model, optimizer, ranks, options, "gloo").layout
    cut = [pack for pack in layout.packs if pack.cast]
    assert {pack.cast for pack in cut} == {form}
    numel = sum(slot.numel for pack in cut for slot in pack.slots)
    assert numel == 384 * 128 + 128 * 640 + 640 * 256
    for pack in cut:
        assert [span.start for span in pack.spans] == [0, *(span.stop for span in pack.spans[:-1])]
        assert pack.spans[-1].stop == pack.numel
        for rank in range(ranks):
            for fragment in pack.fragments(rank):
                unit = FORMS[form].unit(fragment.slot.shape)
                assert all(place % unit == 0 for place in fragment.param_range)
                assert fragment.numel, "a rank has no fragment rather than an empty one"
    sizes = [
        sum(part for owner, _, part in pack.parts() if owner == rank)
        for rank in range(ranks)
        for pack in cut
    ]
    assert max(sizes) - min(sizes) <= 2 * 128 * 640 if form == "fp8_block128" else True


def refusal(**fields: Any) -> str:
    model = nn.Sequential(
        nn.Linear(128, 128), nn.Linear(128, 48), nn.Linear(48, 10), nn.LayerNorm(10)
    )
    options: dict[str, Any] = {"autocast": False, **fields}
    with pytest.raises(ValueError) as error:
        shardcast.shard(model, torch.optim.AdamW(model.parameters()), **options)
    assert model[0].weight.dtype == torch.float32  # nothing was converted
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"published": {"mxfp8": "2.weight"}}, "'2.weight'"),
        ({"published": {"fp8_block128": "1.weight"}}, "'1.weight'"),
        ({"published": {"mxfp8": "*"}}, "'0.bias'"),
        ({"published": {"mxfp8": "3.weight"}}, "'3.weight'"),
        ({"published": {"mxfp8": "nobody.*"}}, "'nobody.*'"),
        ({"published": {"mxfp8": "0.weight", "mxfp4": "0.*"}}, "mxfp8 and mxfp4"),
        ({"published": {"nvfp4": "0.weight"}}, "nvfp4"),
        ({"published": {"mxfp8": "0.weight"}, "keep_fp32": ["0.*"]}, "'0.weight'"),
        ({"published": {"mxfp8": "0.weight"}, "master": "split16"}, "master"),
        ({"published": {"mxfp8": "0.weight"}, "param_dtype": "fp16"}, "param_dtype"),
        ({"published": {"mxfp8": "0.weight"}, "param_dtype": "fp32"}, "param_dtype"),
    ],
)
def test_what_cannot_have_a_form_is_refused_by_name(fields: dict[str, Any], named: str):
    assert named in refusal(**fields)


def test_a_pattern_of_a_module_takes_its_matrix_and_leaves_its_bias():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 48))
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), autocast=False, published={"mxfp4": "0"}
    )
    formed = {slot.name for pack, slot in optimizer.layout.slots() if pack.cast}
    assert formed == {"0.weight"}


@of_unlike_forms
def test_the_estimate_is_what_ranks_hold(form: str):
    model = gpt()
    options = {"autocast": False, "published": {form: MATRICES}, "fuse": "eager"}
    found = estimate(model, torch.optim.AdamW(model.parameters()), 3, options, "gloo")

    def run(group: Any) -> int:
        own, optimizer = sharded(group, form, fuse="eager")
        train(own, optimizer, group.rank())
        report = optimizer.memory_report()
        assert report["masters"] == sum(shard.nbytes for shard in packed_of(optimizer).shards)
        return int(report["masters"])

    masters, _ = run_world(3, run)
    assert max(masters) == found.masters
