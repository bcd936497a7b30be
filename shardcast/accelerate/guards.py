"""Checks of :mod:`shardcast.accelerate` that raise errors, and its configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardcast.comm import warn_first
from shardcast.config import ConfigSource, ShardcastConfig
from shardcast.frameworks import following, models_of
from shardcast.optimizer.model import is_sharded

if TYPE_CHECKING:
    from accelerate import Accelerator

PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = ("lm_head", "classifier", "score", "qa_outputs", "proj_out")  # in transformers


def resolve_config(mixed_precision: str, source: ConfigSource) -> ShardcastConfig:
    """Return the configuration; ``mixed_precision`` sets ``param_dtype`` unless it is given.

    Raises:
        ValueError: both are given and differ.
    """
    config, dtype = ShardcastConfig.load(source), PRECISIONS[mixed_precision]
    mixed = True if dtype != torch.float32 else None
    return following(config, "accelerate: mixed_precision", mixed_precision, dtype, mixed=mixed)


def with_fp32_heads(config: ShardcastConfig, models: Sequence[nn.Module]) -> ShardcastConfig:
    """Add the heads of transformers models to ``fp32_outputs``, unless the option is given.

    Such a model computes its own loss; under DDP with autocast that loss is fp32.
    """
    if "fp32_outputs" in config.named:
        return config
    heads = []
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        if hasattr(model, "base_model_prefix"):
            heads += [prefix + name for name, _ in model.named_children() if name in HEADS]
    return config.replace(fp32_outputs=tuple(heads)) if heads else config


def refuse_unsupported(accelerator: Accelerator) -> None:
    """Check the settings that an accelerator got from its keywords and the environment.

    Raises:
        RuntimeError: names the unsupported setting and the remedy.
    """
    kind = accelerator.distributed_type.value
    names = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}
    if kind in names:
        _refuse(names[kind], f"distributed_type {kind}")
    if accelerator.mixed_precision == "fp8" or accelerator.has_fp8_handler:
        _refuse("fp8", "mixed_precision fp8")
    parallel: Any = getattr(accelerator, "parallelism_config", None)
    if getattr(parallel, "sp_size", 1) > 1:
        _refuse("DeepSpeed's sequence parallelism", f"sp_size={parallel.sp_size}")
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced > 1 and accelerator.num_processes == 1:
        raise RuntimeError(
            f"accelerate: WORLD_SIZE is {announced} but this process is alone: Accelerate found no "
            "GPU and did not join the processes, so each would train alone. On CPUs, launch with "
            f"ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {announced}, "
            "or pass cpu=True to the Accelerator. Create it before a PartialState, a tracker or a "
            "decorator such as on_main_process"
        )
    _refuse_handlers(accelerator)


def _refuse_handlers(accelerator: Accelerator) -> None:
    """Raise RuntimeError for handlers of DDP, autocast or GradScaler that change the default."""
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and str(getattr(hook, "value", hook)) != "no":
        raise RuntimeError(
            f"accelerate: DistributedDataParallelKwargs(comm_hook={hook}) has no effect without "
            "DDP; choose the dtype of gradients on the wire with reduce_dtype in the shardcast "
            "configuration"
        )
    if not getattr(accelerator.autocast_handler, "enabled", True):
        raise RuntimeError(
            "accelerate: AutocastKwargs(enabled=False) has no effect on parameters, which are "
            f"in the dtype of mixed_precision {accelerator.mixed_precision!r}; use "
            "mixed_precision 'no' for fp32, or autocast: false in the shardcast configuration "
            "to compute in that dtype"
        )
    handler = accelerator.scaler_handler if accelerator.mixed_precision == "fp16" else None
    asked = {} if handler is None else handler.to_kwargs()
    if asked:
        raise RuntimeError(
            f"accelerate: GradScalerKwargs({', '.join(asked)}) has no effect: shardcast "
            "scales the loss itself; set loss_scale, loss_scale_init or loss_scale_growth_interval "
            "in the shardcast configuration"
        )


def _refuse(name: str, where: str) -> None:
    raise RuntimeError(
        f"accelerate: shardcast shards the optimizer itself and cannot be combined with {name} "
        f"({where}); expected distributed_type MULTI_GPU, MULTI_CPU or NO, with or without a "
        "ParallelismConfig of tp and dp, and mixed_precision no, bf16 or fp16. Turn the plug-in "
        "off, or use a plain Accelerator"
    )


def check_prepared(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
    """Raise ValueError unless one of the prepared ``models`` has the optimizer's parameters."""
    if not models_of(optimizer, models):
        raise ValueError(
            f"prepare: expected the {type(optimizer).__name__}'s parameters in a prepared model, "
            f"found them in none of {len(models)}; prepare model and optimizer in one call, "
            "accelerator.prepare(model, optimizer, ...)"
        )


def refuse_training(mixed_precision: str, processes: int, model: nn.Module, _args: object) -> None:
    """Raise RuntimeError in the forward of a trainable model whose optimizer was not prepared."""
    if not model.training or not torch.is_grad_enabled() or is_sharded(model):
        return
    remedy = (
        "prepare both before training: accelerator.prepare(model, optimizer, ...). For a model "
        "that is not trained, call model.eval() or model.requires_grad_(False)"
    )
    if processes > 1:
        raise RuntimeError(
            "accelerate: the model was prepared without its optimizer, so its gradients would not "
            f"be averaged over the ranks; {remedy}"
        )
    if mixed_precision != "no":
        warn_first(
            f"accelerate: mixed_precision {mixed_precision!r} has no effect on a model that was "
            f"prepared without its optimizer; {remedy}"
        )
