"""The part of ``deepspeed`` that DeepSpeed's tests of ZeRO use, on shardcast and CPUs.

Stage 1 is ``accumulate="local"`` and stage 2 is ``accumulate="sharded"``. Stage 3, which shards the
parameters, is not supported: its names can be imported, but raise an error when called.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardcast
from shardcast import checkpoint

GPU = "cpu"
# Each test starts processes, which must not import torch again.
multiprocessing.set_forkserver_preload(["deepspeed"])


class Accelerator:
    """``get_accelerator()``: eight CPU devices."""

    device_name = current_device_name = current_device = staticmethod(lambda *_: GPU)
    communication_backend_name = staticmethod(lambda: "gloo")
    is_available = staticmethod(lambda: True)
    # The tests choose the lowest dtype that is supported.
    is_bf16_supported = is_fp16_supported = staticmethod(lambda: "FP32" not in os.environ)
    device_count = staticmethod(lambda: 8)
    supported_dtypes = staticmethod(lambda: [torch.float32, torch.float16, torch.bfloat16])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None  # synchronize, set_device, empty_cache


class ZeROOptimizer:
    """A sharded optimizer with the attributes of DeepSpeed's that the tests use."""

    def __init__(self, sharded: Any) -> None:
        self.sharded = self.optimizer = sharded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sharded, name)

    def needs_scaler(self) -> bool:
        return self.sharded.loss_scale is not None


class DeepSpeedEngine(nn.Module):
    """``deepspeed.initialize(...)[0]``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Any) -> None:
        super().__init__()
        zero = config.get("zero_optimization", {})
        if (stage := zero.get("stage", 0)) not in (1, 2):
            raise NotImplementedError(f"ZeRO stage {stage} is not what shardcast has")
        low = next(
            (name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32"
        )
        self.module, self.device, self.config = model, torch.device(GPU), config
        self.optimizer = ZeROOptimizer(
            shardcast.shard(
                model,
                optimizer,
                param_dtype=low,
                autocast=False,
                accumulate="sharded" if stage == 2 else "local",
                max_grad_norm=config.get("gradient_clipping") or None,
                offload=zero.get("offload_optimizer", {}).get("device", "none") == "cpu",
            )
        )
        self.sharded = self.optimizer.sharded
        self.ranks = dist.get_world_size()
        if config.get("gradient_allreduce_op") == "sum":
            self.ranks = 1
        self._micro_steps = self.global_steps = self.global_samples = 0
        self._boundary: bool | None = None
        self._applied = False
        model.register_forward_pre_hook(self._scaled_by_steps)
        ENGINES.append(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _scaled_by_steps(self, *_: Any) -> None:
        """Divide gradients of the caller's own backwards by the number of micro-batches, too."""
        self.sharded.divisor = self.ranks * self.gradient_accumulation_steps()

    def gradient_accumulation_steps(self) -> int:
        return int(self.config.get("gradient_accumulation_steps", 1))

    def train_micro_batch_size_per_gpu(self) -> int:
        if "train_micro_batch_size_per_gpu" in self.config:
            return int(self.config["train_micro_batch_size_per_gpu"])
        steps = dist.get_world_size() * self.gradient_accumulation_steps()
        return int(self.config["train_batch_size"]) // steps

    def train_batch_size(self) -> int:
        ranks = dist.get_world_size()
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * ranks

    def managed_gradient_accumulation(self) -> bool:
        return bool(self.config.get("managed_gradient_accumulation", True))

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        assert self.managed_gradient_accumulation(), "set_gradient_accumulation_boundary()"
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        if not self.managed_gradient_accumulation():
            return True
        if self._boundary is not None:
            return self._boundary
        return (self._micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def scale(self, loss: Tensor) -> Tensor:
        assert loss.numel() == 1, "expected a scalar tensor"
        return self.sharded.scale_loss(loss)

    def backward(self, loss: Tensor, scale_wrt_gas: bool = True) -> None:
        if not scale_wrt_gas:
            self.sharded.divisor = self.ranks
        self.sharded.scale_loss(loss).backward()
        self._backwards = getattr(self, "_backwards", 0) + 1

    def step(self) -> None:
        self._applied = self.is_gradient_accumulation_boundary()
        if self._applied:
            self.sharded.step()
            self.sharded.zero_grad()
            self.global_steps += 1
        made = self.__dict__.pop("_backwards", 1)
        micro_batch = self.train_batch_size() // self.gradient_accumulation_steps()
        self.global_samples += micro_batch * (1 if self.managed_gradient_accumulation() else made)
        self._micro_steps += 1

    def was_step_applied(self) -> bool:
        return self._applied

    def empty_partition_cache(self) -> None:
        """No operation: parameters are not partitioned."""

    def save_checkpoint(self, folder: Any) -> None:
        checkpoint.save(str(folder), self.module, self.sharded, step=self.global_steps)

    def destroy(self) -> None:
        ENGINES.remove(self)
        self.sharded.close()


ENGINES: list[DeepSpeedEngine] = []
OPTIMIZERS: Mapping[str, Any] = {"adam": torch.optim.AdamW, "adamw": torch.optim.AdamW}


def initialize(
    model: nn.Module,
    config: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    **_: Any,
) -> tuple[DeepSpeedEngine, ZeROOptimizer, None, None]:
    """``deepspeed.initialize``; DeepSpeed's optimizers are replaced by torch's."""
    if isinstance(optimizer, Callable) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    if optimizer is None:
        asked = config["optimizer"]
        if asked["type"].lower() not in OPTIMIZERS:
            raise NotImplementedError(f"DeepSpeed's {asked['type']} is not what shardcast has")
        params: Iterable[Any] = model.parameters() if model_parameters is None else model_parameters
        options = {key: value for key, value in asked["params"].items() if key != "torch_adam"}
        # DeepSpeed's Adam has AdamW's weight decay, but 0 by default.
        optimizer = OPTIMIZERS[asked["type"].lower()](params, **{"weight_decay": 0.0, **options})
    engine = DeepSpeedEngine(model, optimizer, config or {})
    return engine, engine.optimizer, None, None


def init_distributed(
    dist_backend: str = "gloo",
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    **_: Any,
) -> None:
    if not dist.is_initialized():
        dist.init_process_group(dist_backend, init_method, rank=rank, world_size=world_size)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the unscaled mean over ranks. Collective."""
    for engine in ENGINES:
        if any(param is one for one in engine.module.parameters()):
            engine.sharded.gather_gradients()
            scale = engine.sharded.loss_scale
            return param.grad if scale is None or param.grad is None else param.grad / scale
    raise ValueError("a parameter of no engine")


def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """Return the master, which rank 0 gathers and broadcasts. Collective."""
    for engine in ENGINES:
        for name, one in engine.module.named_parameters():
            if one is param:
                masters = [engine.sharded.full_parameters().get(name)]
                dist.broadcast_object_list(masters, src=0)
                return param.detach() if masters[0] is None else masters[0]
    raise ValueError("a parameter of no engine")


def load_state_dict_from_zero_checkpoint(model: nn.Module, folder: Any) -> nn.Module:
    """Load the exported fp32 weights of the newest checkpoint of ``folder``."""
    with tempfile.TemporaryDirectory() as out:
        checkpoint.export(str(folder), out)
        model.load_state_dict(safetensors.torch.load_file(f"{out}/model.safetensors"))
    return model


def all_gather_into_tensor(out: Tensor, own: Tensor) -> None:
    """Gather 0-dim tensors like NCCL; gloo does not accept them."""
    dist.all_gather_into_tensor(out, own.view(-1))


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(f"deepspeed.{name}")
    module.__path__ = []  # type: ignore[attr-defined]
    module.__getattr__ = _absent  # type: ignore[method-assign]
    vars(module).update(members)
    sys.modules[module.__name__] = module
    above, _, last = name.rpartition(".")
    setattr(sys.modules[f"deepspeed.{above}" if above else "deepspeed"], last, module)
    return module


def _absent(name: str) -> Any:
    """Return a name of stage 3 that can be imported but not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name}, of ZeRO stage 3, is not what shardcast has")

    return type(name, (), {"__init__": refuse})


ONE = Accelerator()
FOLDERS = ("pipe", "moe", "moe.layer", "runtime", "runtime.zero", "ops", "ops.aio", "zero")
for path in FOLDERS:
    _module(path)


@contextmanager
def init(enabled: bool = True, **_: Any) -> Iterator[None]:
    """``deepspeed.zero.Init``; only ``enabled=False`` is supported."""
    if enabled:
        raise NotImplementedError("zero.Init, of ZeRO stage 3, is not what shardcast has")
    yield


sys.modules["deepspeed.zero"].Init = init  # type: ignore[attr-defined]
_module(
    "comm",
    **{key: getattr(dist, key) for key in dir(dist) if not key.startswith("__")}
    | {"all_gather_into_tensor": all_gather_into_tensor},
)
_module("accelerator", get_accelerator=lambda: ONE, is_current_accelerator_supported=lambda: True)
_module("git_version_info", torch_info={})
_module(
    "utils",
    safe_get_full_grad=safe_get_full_grad,
    safe_get_full_fp32_param=safe_get_full_fp32_param,
)
_module(
    "utils.zero_to_fp32", load_state_dict_from_zero_checkpoint=load_state_dict_from_zero_checkpoint
)
_module("runtime.base_optimizer", ZeROOptimizer=ZeROOptimizer)
_module("runtime.engine", DeepSpeedEngine=DeepSpeedEngine)
_module(
    "runtime.zero.offload_config",
    OffloadDeviceEnum=Enum(
        "OffloadDeviceEnum", {key: key for key in ("none", "cpu", "nvme")}, type=str
    ),
)
for path in ("bf16_optimizer", "zero.partition_parameters", "zero.utils"):
    _module(f"runtime.{path}")
