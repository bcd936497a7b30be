"""Real architectures of transformers, built from tiny configurations: which dtype meets which."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import run_world
from torch import Tensor, nn

import shardcast

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(120)

BF16, FP32 = torch.bfloat16, torch.float32
VOCAB = 50
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IMAGE = {"image_size": 8, "patch_size": 4}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


def ids(length: int = 8) -> Tensor:
    return torch.randint(1, VOCAB, (2, length))


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def of(name: str, **options: Any) -> nn.Module:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


def causal(**rest: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {**dict.fromkeys(("input_ids", "labels"), ids()), **rest}


# The model, a batch, a rule that keeps something awkward in fp32, and the head, if the model
# computes its loss in what the head returns.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], Any, Any]] = {
    "vit": (
        lambda: of("ViTForImageClassification", num_labels=3, **IMAGE, **LAYERS),
        lambda: {"pixel_values": images(), "labels": torch.tensor([0, 1])},
        ("*.cls_token", "*.position_embeddings"),
        "classifier",
    ),
    "clip": (
        lambda: of(
            "CLIPModel",
            projection_dim=16,
            vision_config={**IMAGE, **LAYERS},
            text_config={
                "vocab_size": VOCAB,
                "max_position_embeddings": 16,
                "eos_token_id": 2,
                **LAYERS,
            },
        ),
        lambda: {"input_ids": ids(), "pixel_values": images(), "return_loss": True},
        ("*.class_embedding", "logit_scale"),
        "*_projection",
    ),
    "switch": (
        lambda: of(
            "SwitchTransformersForConditionalGeneration",
            num_decoder_layers=2,
            num_experts=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            **T5,
        ),
        lambda: {"input_ids": ids(), "labels": ids()},
        "*.router.classifier.*",
        "lm_head",
    ),
    "t5": (
        lambda: of("T5ForConditionalGeneration", **T5),
        lambda: {"input_ids": ids(), "labels": ids()},
        "*.wo.weight",
        "lm_head",
    ),
    "whisper": (
        lambda: of(
            "WhisperForConditionalGeneration",
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        lambda: {"input_features": torch.randn(2, 8, 20), "labels": ids()},
        "*.embed_positions.weight",
        "proj_out",
    ),
    # Its mixer reads the weights of its children itself: it is kept with all inside.
    "mamba": (
        lambda: of(
            "MambaForCausalLM", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2
        ),
        causal(),
        lambda name, _param: ".mixer." in name,
        None,
    ),
    "llama": (
        lambda: of(
            "LlamaForCausalLM",
            vocab_size=VOCAB,
            num_key_value_heads=1,
            max_position_embeddings=16,
            **LAYERS,
        ),
        causal(),
        "lm_head.weight",
        None,
    ),
}


def trained(name: str, group: Any = None, **fields: Any) -> tuple[Tensor, Tensor]:
    """The loss of the fp32 model in evaluation, and of the sharded one; which then makes a step."""
    make, batch, *_ = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inputs = make(), batch()
    model.eval()
    with torch.no_grad():
        expected = model(**inputs).loss
    optimizer = shardcast.shard(
        model,
        torch.optim.AdamW(model.parameters()),
        process_group=group,
        param_dtype=BF16,
        fuse="eager",
        **fields,
    )
    with torch.no_grad():
        found = model(**inputs).loss
    before = [param.detach().clone() for param in model.parameters()]
    model.train()
    model(**inputs).loss.backward()
    optimizer.step()
    after = zip(before, model.parameters(), strict=True)
    assert sum(not torch.equal(old, new) for old, new in after) > len(before) / 2
    assert math.isfinite(float(optimizer.grad_norm))
    return expected, found


@pytest.mark.parametrize("name", [name for name in CASES if name != "switch"])
def test_it_trains_in_low_precision(name: str):
    expected, found = trained(name)
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.0)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_with_what_suits_it_kept_in_fp32(name: str):
    expected, found = trained(name, keep_fp32=CASES[name][2])
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.0)


@pytest.mark.parametrize("name", CASES)
def test_kept_whole_it_computes_what_it_does_without_shardcast(name: str):
    expected, found = trained(name, keep_fp32="*")
    assert found.dtype == FP32 and torch.equal(found, expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3]])
def test_a_head_that_returns_fp32_makes_the_models_own_loss_fp32(name: str):
    *_, kept, head = CASES[name]
    keep = kept if name == "switch" else ()
    _, low = trained(name, keep_fp32=keep, autocast=False)
    expected, found = trained(name, keep_fp32=keep, fp32_outputs=head, autocast=False)
    assert low.dtype == BF16, "the control: without it the loss has 8 bits"
    assert found.dtype == FP32 and found != found.bfloat16()
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.0)


def test_a_forward_that_converts_a_module_is_refused_by_name_on_every_rank():
    """Switch's router does ``self.classifier.to(float32)``; the remedy is what is tested above."""

    def run(group: Any) -> str:
        with pytest.raises(RuntimeError) as error:
            trained("switch", group)
        return str(error.value)

    with torch.random.fork_rng():
        ranks, _ = run_world(2, run)
    assert len(set(ranks)) == 1
    assert "router.classifier.weight' from torch.bfloat16 to torch.float32" in ranks[0]
    assert "keep_fp32=('encoder.block.1.layer.1.mlp.router.classifier.*',)" in ranks[0]


def test_all_outputs_can_be_fp32():
    make, batch, *_ = CASES["llama"]
    model = make()
    shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), param_dtype=BF16, fp32_outputs=("",)
    )
    out = model(**batch())
    assert type(out).__name__ == "CausalLMOutputWithPast"
    assert out.loss.dtype == out.logits.dtype == FP32
