"""Lightning: Lightning's Trainer with a sharded optimizer instead of DDP.

    import shardcast.lightning

    trainer = Trainer(strategy="shardcast", precision="bf16-true", ...)
    trainer = Trainer(strategy=ShardcastStrategy("bf16.yaml"), precision="bf16-true", ...)

``precision`` sets ``param_dtype`` and ``autocast`` unless the shardcast configuration sets them:
``"bf16-mixed"`` and ``"16-mixed"`` use autocast, ``"bf16-true"`` computes in bf16 throughout.

Under manual optimization, optimizers of the same child of the LightningModule are sharded together.
Optimizers of different children, as in a GAN, are sharded separately.

A Lightning checkpoint holds fp32 weights and the plain torch optimizer state, gathered on rank 0.
It resumes at any world size and under any other strategy. ``self.optimizers().grad_norm`` is the
norm of the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.config import ConfigSource, ShardcastConfig
from shardcast.frameworks import (
    check_loss_scales,
    clusters,
    divides_by_tokens,
    exact_state,
    following,
    scale_loss,
    with_buffers,
)
from shardcast.metrics import flat
from shardcast.optimizer.api import shard
from shardcast.optimizer.forwards import LowForward, install_casts
from shardcast.optimizer.model import is_sharded
from shardcast.optimizer.sharded import OptimizerHandle, ShardedOptimizer, packed_of
from shardcast.optimizer.state import load_step_state, step_state
from shardcast.plan.precision import Precision as Rules
from shardcast.plan.publishing import publishing_of
from shardcast.serving.forms import FORMS

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        "shardcast.lightning needs lightning, which is not installed here: "
        "pip install 'lightning>=2.5'"
    ) from error

if TYPE_CHECKING:
    from typing import TypeAlias

    from lightning.pytorch import LightningModule, Trainer

    AnyOptimizer: TypeAlias = torch.optim.Optimizer | LightningOptimizer

__all__ = ["EvaluateAverage", "LogMetrics", "ShardcastPrecision", "ShardcastStrategy"]

DTYPES = {
    "32-true": torch.float32,
    **dict.fromkeys(("bf16-true", "bf16-mixed"), torch.bfloat16),
    **dict.fromkeys(("16-true", "16-mixed"), torch.float16),
}


class ShardcastPrecision(Precision):
    """Precision plug-in that leaves casts, loss scale and clipping to the sharded optimizer."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.config = ShardcastConfig()  # the strategy's, from setup on
        self.device_type = "cpu"  # likewise
        self.sharded: list[ShardedOptimizer] = []  # kept after fit, to be saved
        self.accumulates = False  # within the micro-batches of a step but its last
        self.fits = False  # then shard() converts, and not this
        self._casts: list[LowForward] = []
        self._exact: list[tuple[Tensor, Tensor]] = []  # what was cast, and its values before

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast ``module`` as ``fit`` does, to validate, test or predict. Local."""
        if self.fits:
            return module
        rules = Rules(module, self.config)
        dtypes: dict[Tensor, torch.dtype | None] = {
            param: (rules.storage_dtype if param.requires_grad else rules.rest_dtype)(param)
            for param in module.parameters()
        }
        for child in module.modules():
            for buffer in child.buffers(recurse=False):
                dtypes[buffer] = rules.buffer_dtype(child, buffer)
        # A later fit must not begin from rounded weights.
        self._exact = [(t, t.data) for t, dtype in dtypes.items() if t.dtype != dtype]
        publishing = publishing_of(self.config)
        names: dict[Tensor, str] = {p: n for n, p in module.named_parameters() if p.requires_grad}
        for tensor, exact in self._exact:
            tensor.data = cast = exact.to(dtypes[tensor])
            if publishing and tensor in names:
                form, _ = publishing.cast(names[tensor], tuple(cast.shape), cast.dtype)
                tensor.data = FORMS[form].round(exact) if form else cast
        self._casts = install_casts(module, rules)
        return module

    def teardown(self) -> None:
        """Undo :meth:`convert_module`."""
        for handle in self._casts:
            handle.remove()
        for tensor, exact in self._exact:
            tensor.data = exact
        self._casts, self._exact = [], []

    def forward_context(self) -> AbstractContextManager[None]:
        """Autocast around a step of the module, which bypasses its forward; off if not wanted."""
        low, device_type = self.config.param_dtype, self.device_type
        enabled = self.config.autocast and low != torch.float32
        # Without the cache, as a root's own.
        return torch.autocast(device_type, low, cache_enabled=False) if enabled else nullcontext()

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Return the loss times the loss scale.

        If tokens are counted, this undoes Lightning's division by ``accumulate_grad_batches``.
        """
        loss: Tensor = super().pre_backward(tensor, module)
        batches = module.trainer.accumulate_grad_batches
        if module.automatic_optimization and divides_by_tokens(self.sharded):
            loss = loss * batches  # by which Lightning has divided it
        return scale_loss(self.sharded, loss)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Gather mean gradients for ``on_after_backward`` hooks. Collective: every rank."""
        if not self.accumulates:
            self._show_gradients(module, "on_after_backward")
        loss: Tensor = super().post_backward(tensor, module)
        return loss

    def _after_closure(
        self, model: LightningModule, optimizer: AnyOptimizer
    ) -> None:  # Lightning's own
        self._show_gradients(model, "on_before_optimizer_step", optimizer)
        super()._after_closure(model, optimizer)

    def _show_gradients(
        self, module: LightningModule, hook: str, optimizer: AnyOptimizer | None = None
    ) -> None:
        """Gather mean gradients into ``.grad`` if a hook may read them. Collective: every rank."""
        # A hook may read what the step left in .grad, before the next step clears it.
        hooks = (hook, "on_before_zero_grad") if optimizer is not None else (hook,)
        hooked = any(is_overridden(name, module) for name in hooks) or any(
            is_overridden(name, callback, Callback)
            for callback in module.trainer.callbacks
            for name in hooks
        )
        if hooked:
            for sharded in self.sharded:
                if optimizer is None or _unwrapped(optimizer) in (sharded, *sharded.optimizers):
                    sharded.gather_gradients()

    def optimizer_step(
        self,
        optimizer: AnyOptimizer,
        model: LightningModule,
        closure: Callable[[], object],
        **kwargs: object,
    ) -> Any:
        """Step ``optimizer``, without a closure if it is one of several. Collective: every rank."""
        if isinstance(optimizer, OptimizerHandle) and closure is do_nothing_closure:
            self._wrap_closure(model, optimizer, closure)  # its hooks
            return optimizer.step()
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def clip_gradients(self, optimizer: AnyOptimizer, *args: object, **kwargs: object) -> None:
        """Clip by norm or value, as Lightning does. Collective: every rank.

        Raises:
            RuntimeError: it is one of several optimizers that are sharded together.
        """
        if isinstance(_unwrapped(optimizer), OptimizerHandle):
            raise RuntimeError(
                "clip_gradients: optimizers that are sharded together are clipped together, "
                "within the step; remove the call and set max_grad_norm in the shardcast "
                "configuration, or in a parameter group that needs its own bound"
            )
        super().clip_gradients(optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: AnyOptimizer, clip_val: float) -> None:
        """Clip the norm over all ranks in the coming step. Collective: every rank."""
        if self.sharded:
            _unwrapped(optimizer).clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: AnyOptimizer, clip_val: float) -> None:
        """Clamp each element of the averaged gradients. Collective: every rank."""
        if self.sharded:
            _unwrapped(optimizer).clip_grad_value_(float(clip_val))

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale of each sharded optimizer."""
        return {"scalers": [step_state(packed_of(s)) for s in self.sharded]} if self.sharded else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for sharded, scaler in zip(self.sharded, state_dict.get("scalers", ()), strict=False):
            load_step_state(packed_of(sharded), scaler)


class EvaluateAverage(Callback):
    """Callback that puts an average into the module while Trainer validates during ``fit``.

    Args:
        name: name of an average, such as ``"ema"`` of
            ``ShardcastStrategy({"averages": {"ema": 0.999}})``.
    """

    def __init__(self, name: str) -> None:
        self._name, self._entered = name, ExitStack()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average into the module. Collective: every rank."""
        if trainer.state.fn == TrainerFn.FITTING:
            for sharded in trainer.strategy.precision_plugin.sharded:
                self._entered.enter_context(sharded.averaged(self._name))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights. Collective: every rank."""
        self._entered.close()

    def on_exception(self, *_args: object) -> None:
        """Restore the weights, before the strategy is torn down. Collective, as above."""
        self._entered.close()


class LogMetrics(Callback):
    """Callback that logs metrics of parameters every ``log_every_n_steps`` steps.

    It needs ``ShardcastStrategy({"metrics": True})``.

    Args:
        pattern: a pattern of parameter names, or a mapping from labels to patterns, as in
            ``optimizer.metrics``.
    """

    def __init__(self, pattern: str | Mapping[str, str] = "*") -> None:
        self._pattern = pattern

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: object, **kwargs: object
    ) -> None:
        """Log the metrics of the last step."""
        if trainer.global_step % trainer.log_every_n_steps == 0:
            for sharded in trainer.strategy.precision_plugin.sharded:
                pl_module.log_dict(flat(sharded.metrics(self._pattern)))


class ShardcastStrategy(DDPStrategy):
    """Lightning's DDP strategy with a sharded optimizer instead of the DDP wrapper.

    Args:
        shardcast_config: a config, a mapping or a YAML file. ``None`` reads the environment.
        kwargs: keywords of ``DDPStrategy`` (``process_group_backend``, ``timeout`` and so on).

    Raises:
        ValueError: a keyword is a communication hook of DDP or a size of ``ModelParallelStrategy``,
            the precision is unsupported or contradicts ``param_dtype``, or a parameter is a
            DTensor.
    """

    strategy_name = "shardcast"
    model: nn.Module | None
    optimizers: list[torch.optim.Optimizer]
    _sharded_module: nn.Module | None = None

    def __init__(self, shardcast_config: ConfigSource = None, **kwargs: object) -> None:
        for name in ("ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}: expected None, got {kwargs[name]!r}, which has no effect without "
                    "DDP; set reduce_dtype to choose the dtype in which gradients are sent"
                )
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if name in kwargs:
                _refuse_parallel(f"{name}={kwargs[name]!r}")
        self._source = shardcast_config
        super().__init__(**kwargs)

    @property
    def precision_plugin(self) -> ShardcastPrecision:
        """The precision plug-in, always a :class:`ShardcastPrecision`."""
        if self._precision_plugin is None:  # Trainer sets the one that its `precision` asks for
            return ShardcastPrecision("32-true")
        plugin: ShardcastPrecision = self._precision_plugin
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if type(plugin) in (Precision, HalfPrecision, MixedPrecision):
            plugin = ShardcastPrecision(plugin.precision)
        elif plugin is not None and not isinstance(plugin, ShardcastPrecision):
            raise ValueError(
                f"precision: strategy 'shardcast' expects {', '.join(DTYPES)}, got "
                f"{plugin.precision!r}"
            )
        self._precision_plugin = plugin

    def setup(self, trainer: Trainer) -> None:
        """Set up the module; for ``fit``, shard its optimizers. Collective: every rank."""
        precision, config = self.precision_plugin.precision, ShardcastConfig.load(self._source)
        config = following(
            config,
            "lightning: precision",
            precision,
            DTYPES[precision],
            mixed=None if precision == "32-true" else "mixed" in precision,
        )
        config = with_buffers(config, self._ddp_kwargs.get("broadcast_buffers", True))
        self.precision_plugin.config = config
        self.precision_plugin.device_type = self.root_device.type
        self.precision_plugin.fits = trainer.state.fn == TrainerFn.FITTING
        if self.precision_plugin.fits:
            self.precision_plugin.sharded = []  # of a fit before; its memory is needed now
        super().setup(trainer)
        if not self.precision_plugin.fits:
            return
        if any(
            base.__name__ == "WeightAveraging"
            for callback in trainer.callbacks
            for base in type(callback).__mro__
        ):
            warn_first(
                "WeightAveraging: it averages the weights in param_dtype, holds a copy on every "
                "rank and writes through .data; use averages={'ema': 0.999} of the shardcast "
                "configuration and the callback shardcast.lightning.EvaluateAverage('ema')"
            )
        module = self.lightning_module
        for name, param in module.named_parameters():
            if _compat.is_dtensor(param):
                _refuse_parallel(f"parameter {name!r} is a DTensor")
        if self.optimizers[0].param_groups:
            self._shard(module, config)
        else:  # configure_optimizers returned None
            self.precision_plugin.fits = False
            self.precision_plugin.convert_module(module)

    def configure_ddp(self) -> None:
        """Do nothing: the optimizers are sharded instead."""

    def _shard(self, module: nn.Module, config: ShardcastConfig) -> None:
        parts = _parts(module, self.optimizers)
        check_loss_scales([config] * len(parts))
        handles: dict[torch.optim.Optimizer, torch.optim.Optimizer] = {}
        for part, optimizers in parts:
            sharded = shard(part, optimizers, config)
            for handle, original in zip(sharded.optimizers, optimizers, strict=True):
                vars(handle)["optimizer"] = original  # LearningRateMonitor takes it for the same
                handles[original] = handle
            self.precision_plugin.sharded.append(sharded)
            if part is not module:  # of its own buffers, a new one where it was cast
                module._buffers.update(part._buffers)
        self.optimizers = [handles[original] for original in self.optimizers]
        self._sharded_module = module

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Broadcast buffers, then run the module's training step. Collective: every rank."""
        for sharded in self.precision_plugin.sharded:
            if (buffers := packed_of(sharded).hook_of("broadcast_buffers")) is not None:
                buffers.before(self.lightning_module)
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; Trainer's accumulation uses this."""
        plugin = self.precision_plugin
        with ExitStack() as stack:
            for sharded in plugin.sharded:
                stack.enter_context(sharded.no_sync())
            accumulated, plugin.accumulates = plugin.accumulates, True
            try:
                yield
            finally:
                plugin.accumulates = accumulated

    # -- state: Trainer asks every rank, and writes what rank 0 answers -------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with fp32 masters, on rank 0. Collective: every rank."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        if self._sharded_module is self.lightning_module:
            for sharded in self.precision_plugin.sharded:
                state = exact_state(state, sharded)
        return state

    def optimizer_state(self, optimizer: AnyOptimizer) -> dict[str, Any]:
        """Return the plain torch optimizer state, on rank 0. Collective: every rank."""
        inner = _unwrapped(optimizer)
        if isinstance(inner, (ShardedOptimizer, OptimizerHandle)):
            return inner.full_state_dict()
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers. Collective: every rank."""
        states = checkpoint["optimizer_states"]
        if not self.precision_plugin.sharded:
            super().load_optimizer_state_dict(checkpoint)
        for sharded in self.precision_plugin.sharded:
            own = [
                state
                for optimizer, state in zip(self.optimizers, states, strict=True)
                if optimizer in sharded.optimizers
            ]
            sharded.load_state_dict(own if len(own) > 1 else own[0])

    def teardown(self) -> None:
        """Remove the hooks from the module, so that it can be trained again.

        The state remains for ``trainer.save_checkpoint`` until the next fit or the trainer's end.
        """
        for sharded in self.precision_plugin.sharded:
            if is_sharded(packed_of(sharded).model):
                sharded.close(restore=False)
        optimizers, self.optimizers = self.optimizers, []  # no part of them moves to the host
        super().teardown()
        self.optimizers = optimizers

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistry) -> None:
        """Register the strategy under its name."""
        strategy_registry.register(
            cls.strategy_name, cls, description="Optimizer state sharded over data-parallel ranks"
        )


def _refuse_parallel(given: str) -> None:
    """Raise ValueError for settings of Lightning's ModelParallelStrategy."""
    raise ValueError(
        f"strategy: 'shardcast' is data-parallel, without the tensor parallelism of "
        f"ModelParallelStrategy, got {given}; use shardcast.shard(model, optimizer, mesh=...) in a "
        "loop of your own, or shardcast.accelerate"
    )


def _parts(
    module: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> list[tuple[nn.Module, list[torch.optim.Optimizer]]]:
    """Pair ``module`` with all optimizers, or parts of it with theirs if they share no child.

    A part keeps its children's names. The first part also has the children that nobody trains.
    """
    children = dict(module.named_children())
    groups = clusters(optimizers, list(children.values()))
    if len(groups) == 1 or any(True for _ in module.parameters(recurse=False)):
        return [(module, optimizers)]
    parts = []
    trained = {child for group in groups for child in group.models}
    for number, group in enumerate(groups):
        part = nn.Module()
        for name, child in children.items():
            if child in group.models or (number == 0 and child not in trained):
                part.add_module(name, child)
        if number == 0:
            part._buffers.update(module._buffers)
        parts.append((part, group.optimizers))
    return parts


def _unwrapped(optimizer: AnyOptimizer) -> Any:
    """Return the optimizer inside a LightningOptimizer."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


if ShardcastStrategy.strategy_name not in StrategyRegistry:
    ShardcastStrategy.register_strategies(StrategyRegistry)
