"""Common behavior of the adapters: Accelerate, and with it the Trainer, and Lightning."""

from __future__ import annotations

import configparser
import copy
import importlib
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_lightning
import torch
from accelerate import DistributedDataParallelKwargs
from test_accelerate_processes import fresh
from torch import nn

from shardcast import ShardcastConfig
from shardcast.accelerate import ShardcastAccelerator
from shardcast.lightning import ShardcastStrategy

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}


def in_accelerate(folder: Path, precision: str, source: Any) -> torch.dtype:
    fresh()
    mixed = {"fp32": "no"}.get(precision, precision)
    accelerator = ShardcastAccelerator(cpu=True, mixed_precision=mixed, shardcast_config=source)
    model = nn.Linear(7, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fresh()
    return model.weight.dtype


def in_lightning(folder: Path, precision: str, source: Any) -> torch.dtype:
    flag = {"fp32": "32-true", "bf16": "bf16-true", "fp16": "16-true"}[precision]
    module, strategy = test_lightning.Net(), ShardcastStrategy(source)
    trainer = test_lightning.trainer_of(
        str(folder), 1, strategy=strategy, precision=flag, max_steps=1
    )
    trainer.fit(module, test_lightning.loader())
    return module.net[0].weight.dtype


FRAMEWORKS = pytest.mark.parametrize("dtype_in", [in_accelerate, in_lightning])
Framework = Callable[[Path, str, Any], torch.dtype]


@FRAMEWORKS
@pytest.mark.parametrize("precision", DTYPES)
def test_the_precision_of_a_framework_decides_where_param_dtype_is_not_named(
    dtype_in: Framework, precision: str, tmp_path: Path
):
    unnamed = (ShardcastConfig(max_grad_norm=1.0), ShardcastConfig().replace(pack_mb=2.0), None)
    for source in (*unnamed, {"max_grad_norm": 1.0}) if precision == "fp32" else (None,):
        assert dtype_in(tmp_path, precision, source) == DTYPES[precision]


@FRAMEWORKS
@pytest.mark.parametrize("place", ["object", "copy", "mapping", "file", "variable", "both"])
def test_a_param_dtype_that_is_named_wins_over_fp32_and_must_agree_otherwise(
    dtype_in: Framework, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "named.yaml"
    path.write_text("param_dtype: bf16\n")  # the default, but given explicitly
    if place in ("variable", "both"):
        monkeypatch.setenv("SHARDCAST_PARAM_DTYPE", "bf16")
        monkeypatch.setenv("SHARDCAST_CONFIG", str(path))
    source: Any = {
        "object": ShardcastConfig(BF16),
        "copy": copy.deepcopy(
            pickle.loads(pickle.dumps(ShardcastConfig().replace(param_dtype=BF16)))
        ).replace(pack_mb=2.0),
        "mapping": {"param_dtype": "bf16"},
        "file": path,
    }.get(place)
    assert dtype_in(tmp_path, "fp32", source) == BF16
    with pytest.raises(ValueError, match=r"precision is '(fp)?16.*' but .* param_dtype 'bf16'"):
        dtype_in(tmp_path, "fp16", source)


def buffers_in_accelerate(_folder: Path, source: Any) -> bool:
    fresh()
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = ShardcastAccelerator(cpu=True, shardcast_config=source, kwargs_handlers=[ddp])
    return accelerator.shardcast_config.broadcast_buffers


def buffers_in_lightning(folder: Path, source: Any) -> bool:
    strategy = ShardcastStrategy(source, broadcast_buffers=False)
    trainer = test_lightning.trainer_of(str(folder), 1, strategy=strategy, max_steps=1)
    trainer.fit(test_lightning.Net(), test_lightning.loader())
    return strategy.precision_plugin.sharded[0].config.broadcast_buffers


@pytest.mark.parametrize("in_framework", [buffers_in_accelerate, buffers_in_lightning])
def test_buffers_that_ddp_is_told_to_leave_alone_are_left_alone(
    in_framework: Callable[[Path, Any], bool], tmp_path: Path
):
    assert not in_framework(tmp_path, None)
    assert in_framework(tmp_path, {"broadcast_buffers": True}), "unless given explicitly"


@pytest.mark.parametrize(
    ("package", "adapter"),
    [
        ("accelerate", "accelerate"),
        ("accelerate", "cli.launch"),
        ("transformers", "transformers"),
        ("lightning", "lightning"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(
    package: str, adapter: str, monkeypatch: pytest.MonkeyPatch
):
    """The remedy works in a clone, too: it names the requirements of the extra, not the extra."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    needed = setup["options.extras_require"][package].split()
    remedy = re.escape("pip install " + " ".join(f"'{each}'" for each in needed))
    for name in [package, *(name for name in sys.modules if name.split(".")[0] == package)]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in (adapter, package):
        monkeypatch.delitem(sys.modules, f"shardcast.{name}", raising=False)
    with pytest.raises(ImportError, match=remedy):
        module = importlib.import_module(f"shardcast.{adapter}")
        module.launch(["script.py"])
