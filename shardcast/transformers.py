"""Transformers: Hugging Face's Trainer with a sharded optimizer.

Replace ``Trainer``, or put the mixin before your own Trainer class::

    trainer = ShardcastTrainer(model=model, args=args, ..., shardcast_config="bf16.yaml")

    class MyShardcastTrainer(ShardcastTrainerMixin, MyTrainer): ...

The arguments ``bf16=True`` and ``fp16=True`` set ``param_dtype``. A checkpoint directory has every
rank's shard in ``shardcast/`` instead of ``optimizer.pt``, and loads at any world size. Its file
``optimizer.pt.txt`` explains how the stock Trainer can resume from it.

``optimizers=`` also takes a list of optimizers. Trainer's schedule then scales every
group's own learning rate.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardcast import _compat, checkpoint
from shardcast.accelerate import ShardcastAccelerator
from shardcast.accelerate.mesh import is_cut
from shardcast.checkpoint.directory import steps
from shardcast.comm import warn_first
from shardcast.config import ConfigSource, ShardcastConfig
from shardcast.metrics import flat
from shardcast.optimizer.sharded import ShardedOptimizer, packed_of

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "shardcast.transformers needs transformers, which is not installed here: "
        "pip install 'accelerate>=1.10.1' 'transformers>=5'"
    ) from error

if TYPE_CHECKING:  # the mixin stands before a Trainer class, whose methods it extends
    from transformers import Trainer as _Trainer
    from transformers import TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler
else:
    _Trainer = object

__all__ = ["ShardcastTrainer", "ShardcastTrainerMixin"]

FOLDER = "shardcast"  # of a checkpoint directory
SCHEDULER, OPTIMIZER = "scheduler.pt", "optimizer.pt"  # Trainer's own names
NOTE = """The optimizer's state of this checkpoint is in {folder}/, which ShardcastTrainer loads.
The stock Trainer does not look there, and raises an error. For it, first

    shardcast export {folder} exported && mv exported/{optimizer} .
"""
# Saved instead of the state. torch.load refuses it with this name, so the stock Trainer raises.
STAND_IN = b"\x80\x02cshardcast\nTHE_STATE_IS_IN_shardcast__SEE_optimizer_pt_txt\n."


class ShowGradients(TrainerCallback):
    """Gathers mean gradients if another callback may read ``.grad`` (AdaLoRA, norms, pruning).

    A callback may read them if it has a method of :attr:`HOOKS`.
    """

    HOOKS = "on_pre_optimizer_step", "on_optimizer_step"

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    def on_pre_optimizer_step(self, *_args: object, **_kwargs: object) -> None:
        """Gather them. Collective: every rank has the same callbacks."""
        trainer = self._trainer()
        hooked = trainer is not None and any(
            getattr(type(callback), hook, None) is not getattr(TrainerCallback, hook)
            for callback in trainer.callback_handler.callbacks
            if callback is not self
            for hook in self.HOOKS
        )
        if hooked and _shards(trainer):
            sharded = _pair(trainer)[1]
            sharded.gather_gradients()


class ShardcastTrainerMixin(_Trainer):
    """A mixin before a Trainer class that shards its optimizer. Every rank calls ``train()``.

    Args:
        args, kwargs: arguments of the Trainer.
        shardcast_config: a config, a mapping or a YAML file. ``None`` reads the environment.
        evaluate_average: name of one of the ``averages`` in the configuration. The model has it
            while it evaluates and predicts.
        log_metrics: a pattern of parameter names (``"*"`` for all), or a mapping from labels to
            patterns. Trainer logs their ``metrics()`` with the loss. Needs the option ``metrics``.

    Raises:
        ValueError: a scheduler was passed for several optimizers.
    """

    accelerator: ShardcastAccelerator
    args: TrainingArguments
    callback_handler: CallbackHandler
    lr_scheduler: Any
    model: Any
    optimizer: Any
    state: TrainerState

    def __init__(
        self,
        *args: Any,
        shardcast_config: ConfigSource = None,
        evaluate_average: str | None = None,
        log_metrics: str | Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._log_metrics = log_metrics
        self._shardcast_config, self._evaluate_average = shardcast_config, evaluate_average
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, ShowGradients(self))
        if is_cut(self.model):  # every rank takes part when it is saved; Accelerate places nothing
            self.is_distributed_loading_by_transformers = True
        if isinstance(self.optimizer, (list, tuple)) and self.lr_scheduler is not None:
            raise ValueError(
                f"optimizers: expected no scheduler with several optimizers, got a "
                f"{type(self.lr_scheduler).__name__}, which would drive the groups of only one of "
                "them; pass optimizers=([muon, adamw], None): the schedule that "
                "lr_scheduler_type names then scales every group's own learning rate"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Create Trainer's accelerator as one that shards."""
        module: Any = sys.modules[Trainer.__module__]  # by whose name Trainer calls the class
        stock = module.Accelerator
        module.Accelerator = partial(ShardcastAccelerator, shardcast_config=self._shardcast_config)
        try:
            super().create_accelerator_and_postprocess()
        finally:
            module.Accelerator = stock
        if not isinstance(self.accelerator, ShardcastAccelerator):
            raise TypeError(
                "ShardcastTrainer: expected create_accelerator_and_postprocess() to make an "
                f"accelerator of {Trainer.__module__}.Accelerator, got a "
                f"{type(self.accelerator).__name__}; if your Trainer overrides this method, make a "
                "shardcast.accelerate.ShardcastAccelerator there"
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the metrics that ``log_metrics`` names to ``logs``, and log them."""
        if self._log_metrics is not None and "loss" in logs and _shards(self):
            logs = {**logs, **flat(_pair(self)[1].metrics(self._log_metrics))}
        super().log(logs, *args, **kwargs)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's step of one micro-batch. Collective if the optimizer's step follows.

        When a dataset without a length ends within an accumulation, Trainer reduces gradients
        that its next epoch continues locally. Here they stay local, too.
        """
        accelerator, stack = self.accelerator, ExitStack()
        each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if not (accelerator.sync_gradients or each):
            stack.enter_context(accelerator.no_sync(model))
        with stack:
            return super().training_step(model, *args, **kwargs)

    def compute_loss_context_manager(self) -> ExitStack:
        """Return Trainer's context. If the loss counts tokens, it is divided by them only."""

        def undivided() -> None:
            if _shards(self) and packed_of(_pair(self)[1]).decider.tokens.counted:
                self.current_gradient_accumulation_steps = 1  # by which Trainer divides

        stack = ExitStack()
        stack.callback(undivided)
        stack.enter_context(super().compute_loss_context_manager())
        return stack

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, with ``evaluate_average`` in the model if set. Collective: every rank."""
        with ExitStack() as stack:
            if self._evaluate_average is not None and _shards(self):
                stack.enter_context(_pair(self)[1].averaged(self._evaluate_average))
            return super().evaluation_loop(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, and shard weights of the loss as well (sentence-transformers).

        Loss modules outside the model are prepared as another model. Stock DDP does not average
        their gradients.

        Raises:
            ValueError: the shardcast configuration has options that Trainer would not use.
        """
        if isinstance(self.accelerator, ShardcastAccelerator):
            self._check_config(self.accelerator.shardcast_config)
        optimizer = super().create_optimizer(*args, **kwargs)
        loss, accelerator = getattr(self, "loss", None), self.accelerator
        model_params = set(self.model.parameters())
        for module in loss.values() if isinstance(loss, Mapping) else [loss]:
            if isinstance(module, nn.Module):
                extra = nn.Module()
                for name, child in module.named_children():
                    if model_params.isdisjoint(child.parameters()):
                        extra.add_module(name, child)
                own = dict(module.named_parameters(recurse=False))
                if own:
                    extra.add_module("own", nn.ParameterDict(own))
                if any(param.requires_grad for param in extra.parameters()):
                    accelerator.prepare_model(extra)
                    params = {*accelerator.loss_params, *extra.parameters()}
                    accelerator.loss_params = tuple(params)
        return optimizer

    def _check_config(self, config: ShardcastConfig) -> None:
        bound = self.args.max_grad_norm
        if config.max_grad_norm not in (None, bound):
            raise ValueError(
                f"max_grad_norm: got {config.max_grad_norm} in the shardcast configuration, but "
                f"Trainer clips to the {bound} of TrainingArguments; set it only there"
            )
        if getattr(config.guard, "loss", None) is not None:
            raise ValueError(
                "guard: expected {'norm': ...} alone, got 'loss' too: Trainer steps without a loss"
            )

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Create the schedule for the groups of all optimizers, which are sharded now."""
        if isinstance(self.optimizer, (list, tuple)):  # Trainer 5.0 prepares them after this
            _, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            optimizer = self.optimizer
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if not is_cut(self.model):  # whose values come with the masters
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint, FOLDER)
        # What was best may be an average, which the model's file does not have.
        if is_cut(self.model) or (self._evaluate_average is not None and folder.is_dir()):
            checkpoint.load(folder, *_pair(self))
        else:
            super()._load_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model in fp32. Collective: every rank, as Trainer itself does.

        If only rank 0 calls it, it warns after a minute and saves in ``param_dtype``. With
        ``trainer.accelerator.save_masters = False`` it always saves in ``param_dtype``.
        """
        with ExitStack() as stack:
            if _shards(self) and not is_cut(self.model):
                exact = self.accelerator.get_state_dict(self.model)
                stack.enter_context(_holding(self.model, exact))
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write every rank's shard, committed as a whole, and the scheduler on rank 0."""
        if not _shards(self):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder = Path(output_dir, FOLDER)
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))
        # Trainer may save a step a second time; a committed checkpoint is never overwritten.
        number = max(steps(folder), default=-1) + 1
        checkpoint.save(folder, *_pair(self), step=number, keep=1)
        if self.args.should_save:
            note = NOTE.format(folder=FOLDER, optimizer=OPTIMIZER)
            Path(output_dir, f"{OPTIMIZER}.txt").write_text(note)
            Path(output_dir, OPTIMIZER).write_bytes(STAND_IN)

    def _load_optimizer_and_scheduler(self, directory: str | None) -> None:
        """Load from ``shardcast/``, or what the stock Trainer saved."""
        if directory is None or not _shards(self) or not Path(directory, FOLDER).is_dir():
            if directory and _is_stand_in(Path(directory, OPTIMIZER)):
                raise FileNotFoundError(
                    f"resume_from_checkpoint: {directory!r} lacks {FOLDER!r}, which has the "
                    f"optimizer's state; restore it, or delete {OPTIMIZER!r} to begin with a "
                    "fresh optimizer"
                )
            if directory and _shards(self) and not Path(directory, OPTIMIZER).exists():
                warn_first(
                    f"resume_from_checkpoint: {directory!r} has neither {FOLDER!r} nor "
                    f"{OPTIMIZER!r}: the optimizer begins with fresh state"
                )
            super()._load_optimizer_and_scheduler(directory)
            return
        checkpoint.load(Path(directory, FOLDER), *_pair(self))
        state = torch.load(Path(directory, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the sharded optimizer has the norm over all of them

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Do nothing: they are reduced like all others."""


class ShardcastTrainer(ShardcastTrainerMixin, Trainer):
    """``transformers.Trainer`` with a sharded optimizer; see :class:`ShardcastTrainerMixin`."""


@cache
def sharding(kind: type) -> type:
    """Return the Trainer class ``kind`` with the mixin before it, cached."""
    if issubclass(kind, ShardcastTrainerMixin):
        return kind
    return type(f"Shardcast{kind.__name__}", (ShardcastTrainerMixin, kind), {})


def _is_stand_in(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == len(STAND_IN) and path.read_bytes() == STAND_IN


@contextmanager
def _holding(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Let the modules of ``model`` hold the parameters of ``state`` that are other tensors. Local.

    A Trainer class saves these in whichever way. The replaced parameters do not change.
    """
    values = {_compat.bare_name(name): value for name, value in state.items()}
    named = {param: values.get(_compat.bare_name(n)) for n, param in model.named_parameters()}
    exact = {
        param: nn.Parameter(value, param.requires_grad)
        for param, value in named.items()
        if isinstance(value, Tensor) and value.data_ptr() != param.data_ptr()
    }
    held = [(module, {**module._parameters}) for module in model.modules()]
    try:
        for module, params in held:
            module._parameters.update({k: exact[p] for k, p in params.items() if p in exact})
        yield
    finally:
        for module, params in held:
            module._parameters.update(params)


def _pair(trainer: Any) -> tuple[nn.Module, ShardedOptimizer]:
    return trainer.accelerator.sharded_model, trainer.accelerator.sharded_optimizer


def _shards(trainer: Any) -> bool:
    accelerator = trainer.accelerator
    return isinstance(accelerator, ShardcastAccelerator) and accelerator.is_sharding
