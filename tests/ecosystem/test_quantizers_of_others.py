"""Published forms beside the quantizers of torchao and transformers, which are called here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import run_world
from quantizers import train_plain, train_published, vectors
from torch import Tensor

import shardcast
from shardcast import checkpoint
from shardcast.extensions.published_forms.forms import FORMS

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(300)
MATRICES = "blocks.*[!12].weight"
MX = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}
CONFIG = transformers.FineGrainedFP8Config(scale_fmt="ue8m0")
QUANTIZER = fp8.Fp8Quantize(SimpleNamespace(quantization_config=CONFIG))


def theirs(values: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Codes and scales as bytes."""
    if form == "fp8_block128":
        found = QUANTIZER._quantize_one("it.weight", values)
        codes, scales = found["it.weight"], found["it.weight_scale_inv"]
    else:
        scales, codes = mx.to_mx(values, MX[form], 32, mx.ScaleCalculationMode.FLOOR)
    return codes.view(torch.uint8), scales.view(torch.uint8)


def fake(values: Tensor, form: str) -> Tensor:
    """Quantized and dequantized by their code."""
    if form == "fp8_block128":
        found = QUANTIZER._quantize_one("it.weight", values)
        dequantize = fp8.Fp8Dequantize(QUANTIZER.hf_quantizer)._dequantize_one
        return dequantize(found["it.weight"], found["it.weight_scale_inv"], torch.bfloat16)  # type: ignore[no-any-return]
    scales, codes = mx.to_mx(values, MX[form], 32, mx.ScaleCalculationMode.FLOOR)
    return mx.to_dtype(codes, scales, MX[form], 32, torch.bfloat16)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("kind", [*vectors(), "random bits", "infinite"])
def test_codes_and_scales_are_theirs(form: str, kind: str):
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(-(2**31), 2**31, (256, 256), generator=generator, dtype=torch.int64)
    values = {
        **vectors(),
        "random bits": pattern.to(torch.int32).view(torch.float32),
        "infinite": vectors()["usual"].masked_fill(torch.eye(128, 256).bool(), -torch.inf),
    }[kind]
    codes, scales = (tensor.view(torch.uint8) for tensor in FORMS[form].quantize(values))
    their_codes, their_scales = theirs(values, form)
    blocks = values.view(-1, FORMS[form].block_rows, values.shape[1] // FORMS[form].block_columns,
                         FORMS[form].block_columns)  # fmt: skip
    if form == "fp8_block128":  # ours of a block that is not finite are NaN; theirs are numbers
        usual = blocks.isfinite().all(-1).all(1).view(scales.shape)
    else:
        usual = ~blocks.isnan().any(-1).view(scales.shape)  # codes of a NaN block say nothing
        assert torch.equal(scales, their_scales)
    assert torch.equal(scales[usual], their_scales[usual])
    rows, columns = FORMS[form].block_rows, FORMS[form].block_columns * FORMS[form].bits // 8
    of_codes = usual.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert torch.equal(codes[of_codes], their_codes[of_codes])


@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_hundred_losses_are_those_of_their_fake_quantizer(form: str, ranks: int):
    losses, masters, _ = train_plain(form, MATRICES, ranks, 2, 100, fake)

    def run(group: Any) -> Any:
        return train_published(group, form, MATRICES, 2, 100)[:2]

    results, _ = run_world(ranks, run)
    assert [own for own, _ in results] == losses
    assert all(torch.equal(results[0][1][name], master) for name, master in masters.items())


@pytest.mark.parametrize("form", [*FORMS])
def test_transformers_loads_an_exported_folder_with_equal_values(form: str, tmp_path: Path):
    small = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(small)
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), autocast=False,
        published={form: ["*.mlp.*_proj", "*.self_attn.*_proj"]},
    )  # fmt: skip
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
        tmp_path / "out", dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )  # fmt: skip
    own, there = model.state_dict(), loaded.state_dict()
    assert own.keys() == there.keys()
    for name, values in own.items():
        if "_proj" in name:  # exact, whatever transformers stores it in
            assert torch.equal(there[name].float(), values.float()), name
        assert torch.equal(there[name].bfloat16(), values), name
