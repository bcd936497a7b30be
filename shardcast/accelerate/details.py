"""The parts of :mod:`shardcast.accelerate` that need no class: guards, config, state."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.config import CONFIG_VARIABLE, ENV_PREFIX, ShardcastConfig
from shardcast.optimizer.model_hooks import is_marked
from shardcast.optimizer.sharded import ShardedOptimizer

PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PLUGINS = {  # keyword of Accelerator -> (variable that the launcher sets, name)
    "deepspeed_plugin": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    "deepspeed_plugins": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    "fsdp_plugin": ("ACCELERATE_USE_FSDP", "FSDP"),
    "megatron_lm_plugin": ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    "parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism config"),
    "torch_tp_plugin": ("", "tensor parallelism"),
}


# -- guards -----------------------------------------------------------------------------------


def refuse_requested_plugins(keywords: Mapping[str, Any]) -> None:
    """Before Accelerate starts them, so that the message is ours and nothing is half set up."""
    for keyword, (variable, name) in PLUGINS.items():
        by_launcher = os.environ.get(variable, "").lower() == "true"
        if keywords.get(keyword) is not None or by_launcher:
            _refuse(name, f"{variable}=true" if by_launcher else f"{keyword}=")
    if str(keywords.get("mixed_precision") or "").lower() == "fp8":
        _refuse("fp8", "mixed_precision='fp8'")


def refuse_unsupported(accelerator: Any) -> None:
    """What an accelerator is, whatever made it so.

    Raises:
        RuntimeError: names what is in the way and what to do.
    """
    kind = accelerator.distributed_type.value
    names = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}
    if kind in names:
        _refuse(names[kind], f"distributed_type {kind}")
    if accelerator.mixed_precision == "fp8" or accelerator.has_fp8_handler:
        _refuse("fp8", "mixed_precision fp8")
    if getattr(accelerator, "parallelism_config", None) is not None:
        _refuse("a parallelism config", "parallelism_config=")
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced > 1 and accelerator.num_processes == 1:
        remedy = (
            "On CPU launch with ACCELERATE_USE_CPU=true accelerate launch --multi_gpu "
            f"--num_processes {announced} ..., or construct the Accelerator with cpu=True"
        )
        if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on"):
            remedy = (
                "ACCELERATE_USE_CPU is set, but Accelerate's state was made before the "
                "Accelerator: by a PartialState, a decorator such as on_main_process, or a "
                "tracker built first. Make the Accelerator first"
            )
        raise RuntimeError(
            f"accelerate: WORLD_SIZE is {announced} but this process is alone: Accelerate found no "
            f"GPU and did not join the processes, so each would train by itself. {remedy}"
        )
    _refuse_handlers(accelerator)


def _refuse_handlers(accelerator: Any) -> None:
    """Handlers of what is not used here, where they ask for more than the default."""
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and str(getattr(hook, "value", hook)) != "no":
        raise RuntimeError(
            f"accelerate: DistributedDataParallelKwargs(comm_hook={hook}) has no effect without "
            "DDP; choose the dtype of gradients on the wire with reduce_dtype in the shardcast "
            "configuration"
        )
    handler = accelerator.scaler_handler if accelerator.mixed_precision == "fp16" else None
    asked = {} if handler is None else handler.to_kwargs()
    if asked:
        raise RuntimeError(
            f"accelerate: GradScalerKwargs({', '.join(asked)}) has no effect: the loss scale is "
            "shardcast's; set loss_scale, loss_scale_init or loss_scale_growth_interval in the "
            "shardcast configuration"
        )


def _refuse(name: str, where: str) -> None:
    raise RuntimeError(
        f"accelerate: shardcast shards the optimizer itself and cannot be combined with {name} "
        f"({where}); expected plain data parallelism (distributed_type MULTI_GPU, MULTI_CPU or "
        "NO, mixed_precision no, bf16 or fp16). Turn the plug-in off, or use a plain Accelerator"
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether ``shardcast.shard`` was called on this model."""
    return is_marked(model)


def refuse_sharded(model: nn.Module) -> None:
    """A model that an earlier optimizer still shards: two would undo each other's updates."""
    if is_sharded(model):
        raise RuntimeError(
            "prepare: the model is sharded with another optimizer, of an accelerator or Trainer "
            "before this one; end that training first with its accelerator.free_memory(model) "
            "(trainer.accelerator.free_memory(trainer.model)), or with close() if the optimizer "
            "came from shardcast.shard"
        )


def refuse_training(model: nn.Module, _args: Any) -> None:
    """Forward pre-hook of a trainable model whose optimizer was not prepared."""
    if model.training and torch.is_grad_enabled() and not is_sharded(model):
        raise RuntimeError(
            "accelerate: the model was prepared without its optimizer, so its gradients would not "
            "be averaged over the ranks; prepare both, accelerator.prepare(model, optimizer, "
            "...), before training. A model that is not trained: call model.eval() or "
            "model.requires_grad_(False)"
        )


def clipped(
    sharded: ShardedOptimizer | None, params: Sequence[Tensor], reduced: bool, call: str
) -> ShardedOptimizer | None:
    """The sharded optimizer, where ``params`` are its own; ``None`` for those of others.

    Raises:
        ValueError: ``params`` are only a part of those that are trained.
        RuntimeError: the gradients are not ``reduced`` yet.
    """
    mine = {p for group in sharded.param_groups for p in group["params"]} if sharded else set()
    if mine.isdisjoint(params):
        return None
    left_out = sum(param.requires_grad for param in mine.difference(params))
    if left_out:
        raise ValueError(
            f"{call}: expected all trained parameters, got all but {left_out} of {len(mine)}; "
            "pass model.parameters(), or clip a group by itself with a max_grad_norm key in its "
            "optimizer group"
        )
    if not reduced:
        raise RuntimeError(
            f"{call}: called between the micro-batches of an accumulation, when gradients are "
            f"not reduced yet; write `if accelerator.sync_gradients: accelerator.{call}(...)`"
        )
    return sharded


# -- configuration ----------------------------------------------------------------------------


def resolve_config(mixed_precision: str, source: Any, fields: Mapping[str, Any]) -> ShardcastConfig:
    """The configuration, with ``mixed_precision`` as the default of ``param_dtype``.

    Raises:
        ValueError: both are given and differ.
    """
    wanted = PRECISIONS[mixed_precision]
    if isinstance(source, ShardcastConfig):
        config, given = source.replace(**fields), True
    else:
        config = ShardcastConfig.load(source, **fields)
        given = says_param_dtype(source, fields)
    if not given:
        return config.replace(param_dtype=wanted)
    if mixed_precision != "no" and config.param_dtype != wanted:
        raise ValueError(
            f"accelerate: mixed_precision is {mixed_precision!r} but the shardcast configuration "
            f"has param_dtype {config.to_dict()['param_dtype']!r}; give one of them, or equal ones"
        )
    return config


def says_param_dtype(source: Any, fields: Mapping[str, Any]) -> bool:
    """Whether what ``ShardcastConfig.load`` reads has a ``param_dtype``, be it the default."""
    if "param_dtype" in fields or f"{ENV_PREFIX}PARAM_DTYPE" in os.environ:
        return True
    source = source or os.environ.get(CONFIG_VARIABLE)
    if not source or isinstance(source, Mapping):
        return "param_dtype" in (source or {})
    import yaml

    return "param_dtype" in (yaml.safe_load(Path(source).read_text()) or {})


@contextmanager
def even_batches(loaders: Sequence[Any], even: bool) -> Iterator[None]:
    """Within it the batch samplers of ``loaders`` make even batches, or do not."""
    samplers: list[Any] = [getattr(loader, "batch_sampler", None) for loader in loaders]
    found = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
    before = [sampler.even_batches for sampler in found]
    for sampler in found:
        sampler.even_batches = even
    try:
        yield
    finally:
        for sampler, value in zip(found, before, strict=True):
            sampler.even_batches = value


# -- save_state and load_state ------------------------------------------------------------------

SHARDS = "shardcast"  # beside Accelerate's own files: the checkpoint of shardcast.checkpoint
FOLDER = re.compile(r"state-(\d+)")


def save_state(
    accelerator: Any, stock: Any, output_dir: Any, safe_serialization: bool, kwargs: Any
) -> Any:
    """Accelerate's files and every rank's shard, in a fresh folder, committed by the latter.

    ``output_dir/state-N/`` holds what Accelerate writes and, written last, ``shardcast/``, whose
    commit makes the whole folder count. Older folders are removed only then. With automatic
    checkpoint naming the folder is the fresh ``checkpoint_N`` itself. Collective.
    """
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    if not automatic:
        if output_dir is None:
            raise ValueError(
                "save_state: expected output_dir, got None; pass a folder, or turn "
                "automatic_checkpoint_naming on"
            )
        root = Path(output_dir)
        output_dir = root / f"state-{_same(max(_folders(root), default=-1) + 1)}"
    step = accelerator.save_iteration
    with _without_sharded(accelerator):
        folder = Path(stock(os.fspath(output_dir or ""), safe_serialization, **kwargs))
    accelerator.wait_for_everyone()
    model, sharded = accelerator._model, accelerator.sharded_optimizer
    _checkpoint().save(folder / SHARDS, model, sharded, step=step)
    accelerator.wait_for_everyone()
    if not automatic and accelerator.is_main_process:
        for other in _folders(root).values():
            if other != folder:
                shutil.rmtree(other)
    return folder


def load_state(accelerator: Any, stock: Any, input_dir: Any, load_kwargs: Any, kwargs: Any) -> None:
    """The newest committed state in ``input_dir``, or one that Accelerate saved under DDP.

    Collective; rank 0 chooses the folder for all. Where the newest one is damaged it warns and
    takes the one before, unless ``input_dir`` is that one.
    """
    chosen = _chosen(accelerator, input_dir)
    if chosen is not None:
        with _without_sharded(accelerator):
            stock(chosen, load_kwargs, **kwargs)
        # After the model's file, which is in param_dtype: the masters are exact.
        model, sharded = accelerator._model, accelerator.sharded_optimizer
        _checkpoint().load(Path(chosen) / SHARDS, model, sharded)
        return
    if input_dir is None or not (Path(input_dir) / "optimizer.bin").exists():
        raise FileNotFoundError(
            f"load_state: expected a committed checkpoint in {input_dir}, found none; saves that "
            "were interrupted do not count. Pass the folder that was given to save_state"
        )
    kwargs = {"map_location": "cpu", **kwargs}  # each rank keeps its part only
    with _as_under_ddp(accelerator, Path(input_dir)):
        stock(os.fspath(input_dir), load_kwargs, **kwargs)


def _checkpoint() -> Any:
    from shardcast import checkpoint

    return checkpoint


def _same(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    from accelerate.utils import broadcast_object_list  # not there for shardcast.lightning

    values = [value]
    broadcast_object_list(values)
    return values[0]


def _folders(root: Path) -> dict[int, Path]:
    """The ``state-N`` folders of ``root``, newest first."""
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = FOLDER.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def _chosen(accelerator: Any, input_dir: Any) -> str | None:
    """The folder that rank 0 finds, or its error, on every rank: none is left waiting for it."""
    folder: str | None = None
    error, told = None, None
    if accelerator.is_main_process:
        try:
            folder = _committed(accelerator, input_dir)
        except Exception as raised:
            error = raised
            kinds = (_checkpoint().DamagedCheckpointError, ValueError)
            kind = next((k for k in kinds if isinstance(raised, k)), RuntimeError)
            told = kind, str(raised)
    folder, told = _same((folder, told))
    if error is not None:
        raise error
    if told is not None:
        raise told[0](f"rank 0: {told[1]}")
    return folder


def _committed(accelerator: Any, input_dir: Any) -> str | None:
    """The newest sound folder; ``None`` where none was committed.

    Raises:
        DamagedCheckpointError: ``input_dir`` itself is damaged, or all folders are.
    """
    named = None
    if input_dir is not None:
        root = Path(input_dir).expanduser()
        named, folders = root, [root, *_folders(root).values()]
    else:
        root = Path(accelerator.project_dir or "", "checkpoints")
        numbered = [(re.search(r"\d+$", p.name), p) for p in root.glob("checkpoint_*")]
        found = [(int(match[0]), path) for match, path in numbered if match]
        folders = [path for _, path in sorted(found, reverse=True)]
    reasons: list[str] = []
    damaged = _checkpoint().DamagedCheckpointError
    for folder in folders:
        try:
            if not (folder / SHARDS).is_dir() or _checkpoint().latest(folder / SHARDS) is None:
                continue
        except damaged as error:
            if folder == named:
                raise
            reasons.append(str(error))
            continue
        if reasons:
            why = "; ".join(reasons)
            warnings.warn(f"load_state: falling back to {str(folder)!r}: {why}", stacklevel=5)
        return os.fspath(folder)
    if reasons:
        raise damaged(f"load_state: no sound checkpoint is left in {root}: " + "; ".join(reasons))
    return None


@contextmanager
def _without_sharded(accelerator: Any) -> Iterator[None]:
    """Accelerate saves optimizers on rank 0 alone; ours is saved by all."""
    before, accelerator._optimizers = accelerator._optimizers, []
    try:
        yield
    finally:
        accelerator._optimizers = before


class _Wrapped(nn.Module):
    """Gives the model's names the prefix that they have in a DDP wrapper's state."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@contextmanager
def _as_under_ddp(accelerator: Any, folder: Path) -> Iterator[None]:
    before = accelerator._models
    if _has_prefix(folder):
        accelerator._models = [_Wrapped(model) for model in before]
    try:
        yield
    finally:
        accelerator._models = before


def _has_prefix(folder: Path) -> bool:
    path = folder / "model.safetensors"
    if path.exists():
        from safetensors import safe_open

        with safe_open(path, "pt") as weights:
            names = list(weights.keys())
    else:
        names = list(torch.load(folder / "pytorch_model.bin", map_location="meta"))
    return all(name.startswith("module.") for name in names)
