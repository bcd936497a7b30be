"""Published forms, compared with the quantizers of torchao, transformers and verl."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from models import run_world
from quantizers import train_plain, train_published, vectors
from torch import Tensor

import shardcast
from shardcast import checkpoint
from shardcast.serving.forms import FORMS

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(300)
MATRICES = "blocks.*[!12].weight"
MODES = mx.ScaleCalculationMode
MX = {
    "mxfp8": (torch.float8_e4m3fn, MODES.FLOOR),
    "mxfp4": (torch.float4_e2m1fn_x2, MODES.FLOOR),
    "mxfp8_rceil": (torch.float8_e4m3fn, MODES.RCEIL),
    "mxfp4_rceil": (torch.float4_e2m1fn_x2, MODES.RCEIL),
}
FLOOR_AND_BLOCKS = ("mxfp8", "mxfp4", "fp8_block128")
CONFIG = transformers.FineGrainedFP8Config(scale_fmt="ue8m0")
QUANTIZER = fp8.Fp8Quantize(SimpleNamespace(quantization_config=CONFIG))


@contextlib.contextmanager
def exact_logarithms() -> Iterator[None]:
    """Make ``torch.log2`` exact enough for a ceiling, like the conversion of new GPUs.

    In fp32, as on CPUs, their scale is rounded down if the largest value of a block exceeds the
    largest code times a power of two by only a few units in the last place.
    """

    def log2(values: Tensor, exact: Any = torch.log2) -> Tensor:
        return exact(values.double())  # type: ignore[no-any-return]

    with mock.patch.object(torch, "log2", log2):
        yield


@exact_logarithms()
def theirs(values: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Return their codes and scales as bytes."""
    if form == "fp8_block128":
        found = QUANTIZER._quantize_one("it.weight", values)
        codes, scales = found["it.weight"], found["it.weight_scale_inv"]
    else:
        dtype, mode = MX[form]
        scales, codes = mx.to_mx(values, dtype, 32, mode)
    return codes.view(torch.uint8), scales.view(torch.uint8)


@exact_logarithms()
def fake(values: Tensor, form: str) -> Tensor:
    """Quantize and dequantize with their code."""
    if form == "fp8_block128":
        found = QUANTIZER._quantize_one("it.weight", values)
        dequantize = fp8.Fp8Dequantize(QUANTIZER.hf_quantizer)._dequantize_one
        return dequantize(found["it.weight"], found["it.weight_scale_inv"], torch.bfloat16)  # type: ignore[no-any-return]
    dtype, mode = MX[form]
    scales, codes = mx.to_mx(values, dtype, 32, mode)
    return mx.to_dtype(codes, scales, dtype, 32, torch.bfloat16)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("kind", [*vectors(), "random bits", "infinite", "above"])
def test_codes_and_scales_are_theirs(form: str, kind: str):
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(-(2**31), 2**31, (256, 256), generator=generator, dtype=torch.int64)
    values = {
        **vectors(),
        "random bits": pattern.to(torch.int32).view(torch.float32),
        "infinite": vectors()["usual"].masked_fill(torch.eye(128, 256).bool(), -torch.inf),
        # One unit in the last place above the largest code, times powers of two.
        "above": torch.tensor([448.0, 6.0]).nextafter(torch.tensor(512.0)).repeat(64)[:, None]
        * torch.arange(-60.0, 68.0).exp2()[:, None].expand(128, 256),
    }[kind]
    codes, scales = (tensor.view(torch.uint8) for tensor in FORMS[form].quantize(values))
    their_codes, their_scales = theirs(values, form)
    blocks = values.view(
        -1,
        FORMS[form].block_rows,
        values.shape[1] // FORMS[form].block_columns,
        FORMS[form].block_columns,
    )
    if form not in ("mxfp8", "mxfp4"):
        # Our scales of blocks that are not finite, or exceed bf16, are NaN; theirs are numbers.
        usual = ((blocks.abs() < 2.0**126).all(-1).all(1)).view(scales.shape)
    else:
        usual = ~blocks.isnan().any(-1).view(scales.shape)  # codes of NaN blocks are arbitrary
        assert torch.equal(scales, their_scales)
    assert torch.equal(scales[usual], their_scales[usual])
    rows, columns = FORMS[form].block_rows, FORMS[form].block_columns * FORMS[form].bits // 8
    of_codes = usual.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert torch.equal(codes[of_codes], their_codes[of_codes])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_hundred_losses_are_those_of_their_fake_quantizer(form: str, ranks: int):
    losses, masters, _ = train_plain(form, MATRICES, ranks, 2, 100, fake)

    def run(group: Any) -> Any:
        return train_published(group, form, MATRICES, 2, 100)[:2]

    results, _ = run_world(ranks, run)
    assert [own for own, _ in results] == losses
    assert all(torch.equal(results[0][1][name], master) for name, master in masters.items())


def verl_kernels() -> Any:
    """Import only verl's quantizer of blocks: the package needs ray, vLLM and more."""
    found = importlib.util.find_spec("verl")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("verl is not installed: pip install --no-deps verl")
    path = Path(found.submodule_search_locations[0]) / "utils" / "kernel" / "fp8_kernel.py"
    spec = importlib.util.spec_from_file_location("fp8_kernel_of_verl", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_verl_gives_the_same_codes_where_its_scale_is_a_power_of_two():
    """It is for blocks whose largest code is 448. Others have fp32 scales and different values."""
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    blocks = values.unflatten(1, (4, 128)).unflatten(0, (4, 128))
    full = torch.eye(4).bool()  # blocks with a largest value of 448 times a power of two
    blocks[:, 0, :, 0][full] = 448 * 2.0**-12
    form = FORMS["fp8_block128"]
    published = form.round(values)
    codes, scales = form.quantize(values)
    kernels = verl_kernels()
    of_values, of_published = (
        kernels._scaled_fp8_blockwise_pytorch(given, [128, 128]) for given in (values, published)
    )
    for their_codes, their_scales in (of_values, of_published):
        their_scales = their_scales.squeeze(-1)
        assert torch.equal(their_scales[full], torch.full((4,), 2.0**-12))
        assert torch.equal(scales[full], torch.full((4,), 127 - 12, dtype=torch.uint8))
        both = [
            it.view(torch.uint8).unflatten(1, (4, 128)).unflatten(0, (4, 128))
            for it in (codes, their_codes)
        ]
        ours, other = (it.transpose(1, 2)[full] for it in both)
        assert torch.equal(ours, other)
        again = their_codes.float().unflatten(1, (4, 128)).unflatten(0, (4, 128))
        again = (again * their_scales[:, None, :, None]).flatten(2).flatten(0, 1)
        differ = (again.bfloat16() != published).unflatten(1, (4, 128)).unflatten(0, (4, 128))
        share = differ.float().mean((1, 3))
        assert (share[full] == 0).all()
        assert (share[~full] > 0.5).all()


@pytest.mark.parametrize("form", FLOOR_AND_BLOCKS)
def test_transformers_loads_an_exported_folder_with_equal_values(form: str, tmp_path: Path):
    small = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(small)
    optimizer = shardcast.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        autocast=False,
        published={form: ["*.mlp.*_proj", "*.self_attn.*_proj"]},
    )
    for seed in range(2):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(tmp_path / "saved", model, optimizer, step=2)
    checkpoint.export(tmp_path / "saved", tmp_path / "out", weights="published", optimizer=False)
    more = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    written = {**small.to_dict(), "architectures": ["LlamaForCausalLM"], **more}
    (tmp_path / "out" / "config.json").write_text(json.dumps(written))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    own, there = model.state_dict(), loaded.state_dict()
    assert own.keys() == there.keys()
    for name, values in own.items():
        if "_proj" in name:  # exact in transformers' dtype
            assert torch.equal(there[name].float(), values.float()), name
        assert torch.equal(there[name].bfloat16(), values), name
