"""Options: their sources and precedence, and the errors of wrong ones."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MLP, adamw
from torch import nn

import shardcast
from shardcast import ShardcastConfig
from shardcast.cli.launch import split_config
from shardcast.option_files import preset
from shardcast.option_values import ELSEWHERE

pytestmark = pytest.mark.timeout(30)


def test_precedence_is_keyword_then_environment_then_file_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "options.yaml"
    file.write_text("alignment: 64\npack_mb: 2\nunpacked_first: 1\n")
    monkeypatch.setenv("SHARDCAST_CONFIG", str(file))
    monkeypatch.setenv("SHARDCAST_PACK_MB", "3.5")
    monkeypatch.setenv("SHARDCAST_UNPACKED_FIRST", "2")
    config = ShardcastConfig.load(unpacked_first=3)
    assert (config.unpacked_first, config.pack_mb, config.alignment) == (3, 3.5, 64)
    assert config.pack_params is None
    other = tmp_path / "other.yaml"
    other.write_text("alignment: 32\n")
    assert ShardcastConfig.load(other).alignment == 32, "the given file replaces it"


def test_shard_takes_a_config_a_mapping_a_path_or_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "options.yaml"
    file.write_text("param_dtype: fp16\npack_params: 2\n")
    for source in (
        ShardcastConfig(param_dtype=torch.float16, pack_params=2),
        {"param_dtype": "fp16", "pack_params": 2},
        str(file),
        file,
    ):
        model = MLP()
        optimizer = shardcast.shard(model, adamw(model), source, pack_params=3)
        assert (optimizer.config.param_dtype, optimizer.config.pack_params) == (torch.float16, 3)
    monkeypatch.setenv("SHARDCAST_PARAM_DTYPE", "fp32")
    model = MLP()
    assert shardcast.shard(model, adamw(model)).config.param_dtype == torch.float32
    with pytest.raises(TypeError, match="expected a ShardcastConfig, a mapping, a path"):
        shardcast.shard(MLP(), adamw(model), 3)  # type: ignore[arg-type]


def test_unknown_options_name_the_nearest_wherever_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "wrong.yaml"
    file.write_text("pack_size_mb: 1\n")
    expected = "unknown option 'pack_size_mb'; did you mean 'pack_mb'"
    sources = (None, "keyword"), (ShardcastConfig(), "keyword"), ({"pack_size_mb": 1}, "config")
    for source, where in (*sources, (file, r"wrong\.yaml, line 1, column 1")):
        model = MLP()
        keywords: dict[str, Any] = {"pack_size_mb": 1} if where == "keyword" else {}
        with pytest.raises(ValueError, match=f"{where}: {expected}"):
            shardcast.shard(model, adamw(model), source, **keywords)
    monkeypatch.setenv("SHARDCAST_PACK_SIZE_MB", "1")
    told = "unknown variable SHARDCAST_PACK_SIZE_MB; did you mean 'SHARDCAST_PACK_MB'"
    with pytest.raises(ValueError, match=told):
        ShardcastConfig.load()
    with pytest.raises(ValueError, match="known options: param_dtype, keep_fp32"):
        ShardcastConfig.load({"zzzzzz": 1})


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("reproducible", "8", "it was removed in 0.2.0; leave it out"),
        ("grads", "sharded", ".*set accumulate: sharded"),
        ("grads", "full", ".*set accumulate: sharded"),
    ],
)
def test_an_option_that_was_removed_is_an_error_that_says_so(
    name: str, value: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told = f"{name}'; {instead}"
    file = tmp_path / "old.yaml"
    file.write_text(f"param_dtype: bf16\n{name}: {value}\n")
    with pytest.raises(ValueError, match=rf"old\.yaml, line 2, column 1: unknown option '{told}"):
        ShardcastConfig.load(file)
    with pytest.raises(ValueError, match=f"keyword: unknown option '{told}"):
        ShardcastConfig.load(**{name: value})
    monkeypatch.setenv(f"SHARDCAST_{name.upper()}", value)
    with pytest.raises(ValueError, match=f"SHARDCAST_{name.upper()}; {instead}"):
        ShardcastConfig.load()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"param_dtype": "bf17"}, ValueError, "param_dtype: expected bf16, fp16 or fp32, got 'bf17'"),
    ({"param_dtype": torch.float64}, ValueError, "param_dtype: expected bf16"),
    ({"param_dtype": None}, ValueError, "param_dtype: expected bf16"),
    ({"grad_dtype": torch.int8}, ValueError, "grad_dtype: expected bf16"),
    ({"partition": "evn"}, ValueError, "partition: expected one of auto, even, whole, got 'evn'"),
    ({"sync": "all_reduce"}, ValueError, "sync: expected one of auto, broadcast, all_gather"),
    ({"pack_mb": 0}, ValueError, "pack_mb: expected a finite number of MiB above 0"),
    ({"pack_mb": "wide"}, TypeError, r"pack_mb: expected float \| None, got 'wide' \(str\)"),
    ({"pack_mb": True}, TypeError, r"pack_mb: expected float \| None, got True"),
    ({"pack_params": 0}, ValueError, "pack_params: expected a count >= 1 or null, got 0"),
    ({"pack_params": 1.5}, TypeError, "pack_params: expected int"),
    ({"unpacked_first": -1}, ValueError, "unpacked_first: expected a count >= 0"),
    ({"alignment": 100}, ValueError, "alignment: expected a power of two >= 8"),
    ({"alignment": 4}, ValueError, "alignment: expected a power of two >= 8"),
    ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm: expected a number above 0 or null"),
    ({"norm_type": -1.0}, ValueError, "norm_type: expected a number above 0"),
    ({"loss_scale": "static"}, ValueError, "loss_scale: expected 'dynamic'"),
    ({"loss_scale": -8.0}, ValueError, "loss_scale: expected 'dynamic', a number above 0"),
    ({"max_skipped_steps": 0}, ValueError, "max_skipped_steps: expected a count >= 1"),
    ({"cast_forward_inputs": "yes"}, TypeError, "cast_forward_inputs: expected bool, got 'yes'"),
    ({"group_fn": "name"}, TypeError, "group_fn: expected a callable"),
    ({"keep_fp32": (3,)}, TypeError, "keep_fp32: expected patterns"),
    ({"fp32_outputs": 3}, TypeError, "fp32_outputs: expected glob patterns"),
    ({"fp32_outputs": [3]}, TypeError, "fp32_outputs: expected glob patterns"),
    ({"keep_fp32": 3}, TypeError, r"keep_fp32: expected patterns.*got 3 \(int\)"),
    ({"keep_fp32": None}, TypeError, r"keep_fp32: expected patterns.*got None \(NoneType\)"),
    ({"pack_mb": math.inf}, ValueError, "pack_mb: expected a finite .* above 0 or null, got inf"),
    ({"pack_mb": math.nan}, ValueError, "pack_mb: expected a finite .* above 0 or null, got nan"),
    ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm: expected"),
    ({"loss_scale": math.nan}, ValueError, "loss_scale: expected"),
    ({"norm_type": math.nan}, ValueError, "norm_type: expected"),
    *(
        ({"averages": value}, error, f"averages: .*{named}")
        for value, error, named in (
            ({"ema": 1.0}, ValueError, "decay"),
            ({"ema": -0.1}, ValueError, "decay"),
            ({"ema": {"half_life": 0}}, ValueError, "half_life"),
            ({"ema": {"decay": 0.9, "half_life": 3}}, ValueError, "half_life"),
            ({"ema": {"decay": 0.9, "stored": "fp8"}}, ValueError, "stored"),
            ({"ema": {"decay": 0.9, "warmup": "yes"}}, TypeError, "warmup"),
            ({"a.b": 0.9}, ValueError, "name"),
            (["ema"], TypeError, "mapping"),
        )
    ),
    ({"sync": "all_gather", "partition": "whole"}, ValueError, "all_gather needs equal spans"),
]


@pytest.mark.parametrize(("fields", "error", "message"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_values_are_refused_with_what_was_expected(
    fields: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        ShardcastConfig(**fields)


def test_files_that_are_no_mapping_no_yaml_or_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "list.yaml"
    yaml = r"expected YAML, .*line 2, column 5"
    for text, told in (("- 1", "expected a mapping"), ("keep_fp32: [norms\nsync: auto", yaml)):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"list\.yaml: {told}"):
            ShardcastConfig.load(file)
    with pytest.raises(FileNotFoundError, match="given in code or by SHARDCAST_CONFIG"):
        ShardcastConfig.load(tmp_path / "missing.yaml")
    file.write_text("")
    assert ShardcastConfig.load(file) == ShardcastConfig()
    monkeypatch.setenv("SHARDCAST_KEEP_FP32", "[norms")
    with pytest.raises(ValueError, match=r"SHARDCAST_KEEP_FP32: expected YAML, got '\[norms'"):
        ShardcastConfig.load()


def test_a_file_named_by_the_environment_is_told_when_code_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "options.yaml"
    file.write_text("pack_params: 2")
    monkeypatch.setenv("SHARDCAST_CONFIG", str(file))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (None, str(file), ShardcastConfig()):
            ShardcastConfig.load(source)
    model = MLP()
    with pytest.warns(UserWarning, match="SHARDCAST_CONFIG=.* has no effect") as told:
        config = shardcast.shard(model, adamw(model), {}).config
    assert config.pack_params != 2
    assert told[0].filename == __file__


ENVIRONMENT = {
    ("keep_fp32", "[norms, 'head.*']"): ("norms", "head.*"),
    ("keep_fp32", "*.weight"): ("*.weight",),  # would be an alias in YAML
    ("max_grad_norm", "null"): None,
    ("max_grad_norm", "1e3"): 1000.0,  # text in YAML
    ("norm_type", "inf"): float("inf"),
    ("loss_scale", "1e2"): 100.0,
    ("loss_scale", "dynamic"): "dynamic",
    ("cast_forward_inputs", "false"): False,
}


@pytest.mark.parametrize(("name", "text"), ENVIRONMENT)
def test_text_of_the_environment_and_of_files_is_read_as_yaml(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = ENVIRONMENT[name, text]
    if not text.startswith("*"):
        (tmp_path / "file.yaml").write_text(f"{name}: {text}\n")
        assert getattr(ShardcastConfig.load(tmp_path / "file.yaml"), name) == expected
    monkeypatch.setenv(f"SHARDCAST_{name.upper()}", text)
    assert getattr(ShardcastConfig.load(), name) == expected


def test_to_dict_is_plain_and_loads_again():
    config = ShardcastConfig(param_dtype=torch.float16, keep_fp32=("norms",), pack_mb=4)
    plain = config.to_dict()
    assert plain["param_dtype"] == "fp16" and plain["keep_fp32"] == ["norms"]
    assert ShardcastConfig.load(plain) == config


def test_callables_of_every_kind_can_be_options():
    """Ranks compare such rules by name, and not all callables have a name."""

    class Rule:
        def __call__(self, name: str, param: nn.Parameter) -> bool:
            return name.startswith("a")

    def starts(letter: str, name: str, param: nn.Parameter) -> bool:
        return name.startswith(letter)

    for rule in (Rule(), functools.partial(starts, "a"), lambda name, _: name.startswith("a")):
        model = MLP()
        shardcast.shard(model, adamw(model), keep_fp32=rule)
        low = [n for n, p in model.named_parameters() if p.dtype != torch.float32]
        assert low == ["b.weight", "b.bias", "c.weight", "c.bias"]


def test_a_preset_is_the_file_of_its_name(monkeypatch: pytest.MonkeyPatch):
    file = Path(__file__).parents[1] / "configs" / "lean.yaml"
    assert preset("lean").read_text() == file.read_text()
    assert ShardcastConfig.load("lean") == ShardcastConfig.load(file)
    monkeypatch.setenv("SHARDCAST_CONFIG", "lean")
    assert ShardcastConfig.load(max_grad_norm=2.0).master == "split16"
    monkeypatch.delenv("SHARDCAST_CONFIG")
    with pytest.raises(FileNotFoundError, match=r"'learn'.* presets: lean"):
        ShardcastConfig.load("learn")


def test_an_unknown_option_in_a_file_is_told_with_its_line_and_column(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "num_processes: 2\nshardcast_config:\n  param_dtype: bf16\n  max_gradnorm: 1.0\n"
    )
    with pytest.raises(ValueError, match=r"line 4, column 3: .*'max_gradnorm'.*'max_grad_norm'"):
        split_config(str(path))
    path.write_text("max_grad_norm: 1.0\n7: bf16\n")
    with pytest.raises(ValueError, match=r"line 2, column 1: unknown option 7"):
        ShardcastConfig.load(path)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("param_dtype: bf17", ValueError, "param_dtype: expected bf16, .*'bf17'"),
        ("max_grad_norm: -1", ValueError, "max_grad_norm: expected a number above 0"),
        ("overlap_sync: 3", TypeError, "overlap_sync: expected bool"),
        ("guard:\n  norm: -6\n  window: 9", ValueError, "guard: norm: expected a number"),
        ("averages: {ema: 2.0}", ValueError, "averages: 'ema': decay: expected"),
    ],
)
def test_a_wrong_value_is_told_with_where_it_stands(
    text: str, kind: type[Exception], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "config.yaml"
    path.write_text(f"accumulate: local\n# a comment\n{text}\n")
    with pytest.raises(kind, match=rf"config\.yaml, line 3, column 1: {told}"):
        ShardcastConfig.load(path)
    section = "\n".join(f"  {line}" for line in text.splitlines())
    path.write_text(f"num_processes: 2\nshardcast_config:\n{section}\n")
    with pytest.raises(kind, match=rf"config\.yaml, line 3, column 3: {told}"):
        split_config(str(path))
    name, value = text.split(":", 1)
    monkeypatch.setenv(variable := f"SHARDCAST_{name.upper()}", value)
    with pytest.raises(kind, match=f"^{variable}: {told}"):
        ShardcastConfig.load()


def test_names_of_other_libraries_lead_to_the_option_that_does_the_same():
    options = {field.name for field in dataclasses.fields(ShardcastConfig)}
    for theirs, ours in ELSEWHERE.items():
        assert ours in options and theirs not in options
        with pytest.raises(ValueError, match=f"unknown option '{theirs}'; did you mean '{ours}'"):
            ShardcastConfig.load(None, **{theirs: 1})
