"""Lightning: Lightning's Trainer with a sharded optimizer in place of DDP.

    import shardcast.lightning

    trainer = Trainer(strategy="shardcast", precision="bf16-true", ...)
    trainer = Trainer(strategy=ShardcastStrategy("bf16.yaml"), precision="bf16-true", ...)

``precision`` decides ``param_dtype`` where the shardcast configuration does not name it. Several
optimizers are sharded together under manual optimization. A Lightning checkpoint holds fp32 weights
and the plain torch optimizer state, gathered on rank 0: it resumes at any world size, and under any
other strategy. The norm of the last step is ``self.optimizers().grad_norm``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.messages import warn
from shardcast.optimizer.api import shard
from shardcast.optimizer.model_hooks import is_marked
from shardcast.optimizer.original import OptimizerHandle
from shardcast.optimizer.sharded import ShardedOptimizer
from shardcast.plan.precision import Precision as Rules

try:
    from lightning.fabric.utilities.apply_func import apply_to_collection
    from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
    from lightning.pytorch.plugins.precision import HalfPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import grad_norm
except ImportError as error:
    raise ImportError(
        "shardcast.lightning needs lightning, which is not installed here: "
        "pip install 'shardcast-optim[lightning]'"
    ) from error

DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class ShardcastPrecision(Precision):
    """Leaves casts, loss scale and clipping to the sharded optimizer."""

    def __init__(self, precision: Any) -> None:
        self.precision = precision
        self.config = ShardcastConfig()  # the strategy's, from setup on
        self.sharded: ShardedOptimizer | None = None  # kept after fit, to be saved
        self._casts: list[Any] = []
        self._exact: list[tuple[Tensor, Tensor]] = []  # what was cast, and its values before

    def convert_module(self, module: Any) -> Any:
        """Give it the dtypes of ``fit``, to validate, test or predict. Local."""
        rules = Rules(module, self.config)
        dtypes = {param: rules.storage_dtype(param) for param in module.parameters()}
        for child in module.modules():
            for buffer in child.buffers(recurse=False):
                dtypes[buffer] = rules.buffer_dtype(child, buffer)
        # A later fit must not begin from rounded weights.
        self._exact = [(it, it.data) for it, dtype in dtypes.items() if it.dtype != dtype]
        for tensor, exact in self._exact:
            tensor.data = exact.to(dtypes[tensor])
        self._casts = rules.install_casts(module)
        return module

    def teardown(self) -> None:
        """Undo :meth:`convert_module`."""
        for handle in self._casts:
            handle.remove()
        for tensor, exact in self._exact:
            tensor.data = exact
        self._casts, self._exact = [], []

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors of a batch in ``param_dtype``: steps bypass the root's forward."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.config.param_dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(data, Tensor, cast) if self.config.cast_forward_inputs else data

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """The loss times the loss scale."""
        loss: Tensor = super().pre_backward(tensor, module)
        return loss if self.sharded is None else self.sharded.scale_loss(loss)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """As Lightning's; a handle of several optimizers steps without a closure."""
        if isinstance(optimizer, OptimizerHandle) and closure is do_nothing_closure:
            self._wrap_closure(model, optimizer, closure)  # its hooks
            return optimizer.step()
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; a RuntimeError for one of several optimizers alone."""
        if isinstance(_unwrapped(optimizer), OptimizerHandle):
            raise RuntimeError(
                "clip_gradients: optimizers that are sharded together are clipped together, within "
                "the step; remove the call and set max_grad_norm in the shardcast configuration, "
                "or in a parameter group that is to have a bound of its own"
            )
        super().clip_gradients(optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """By the global norm over all ranks, in the coming step."""
        if self.sharded is not None:
            self.sharded.clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Each element of the averaged gradients."""
        if self.sharded is not None:
            self.sharded.clip_grad_value_(float(clip_val))

    def state_dict(self) -> dict[str, Any]:
        """The loss scale."""
        return {} if self.sharded is None else {"scaler": self.sharded.engine.decider.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        if self.sharded is not None and "scaler" in state_dict:
            self.sharded.engine.decider.load_state_dict(state_dict["scaler"])


class ShardcastStrategy(DDPStrategy):
    """Lightning's DDP strategy, with the launching and without the wrapper.

    Args:
        shardcast_config: a config, a mapping or a YAML file; ``None`` reads the environment.
        kwargs: those of ``DDPStrategy`` (``process_group_backend``, ``timeout`` ...).

    Raises:
        ValueError: for a hook of DDP's communication, or sizes of ``ModelParallelStrategy``; for
            another precision, one that contradicts ``param_dtype``, or a DTensor.
    """

    strategy_name = "shardcast"
    model: Any
    optimizers: list[Any]

    def __init__(self, shardcast_config: Any = None, **kwargs: Any) -> None:
        for name in ("ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}: expected nothing, got {kwargs[name]!r}, which has no effect without "
                    "DDP; reduce_dtype says in which dtype gradients travel"
                )
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if name in kwargs:
                _refuse_parallel(f"{name}={kwargs[name]!r}")
        self._source = shardcast_config
        super().__init__(**kwargs)

    @property
    def precision_plugin(self) -> Any:
        """Always a :class:`ShardcastPrecision`."""
        if self._precision_plugin is None:  # Trainer sets the one that its `precision` asks for
            return ShardcastPrecision("32-true")
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if type(plugin) in (Precision, HalfPrecision):
            plugin = ShardcastPrecision(plugin.precision)
        elif plugin is not None and not isinstance(plugin, ShardcastPrecision):
            raise ValueError(
                f"precision: strategy 'shardcast' expects {', '.join(DTYPES)}, got "
                f"{plugin.precision!r}; the masters are fp32 and nothing is autocast, so mixed "
                "precision is 'bf16-true' or '16-true' here"
            )
        self._precision_plugin = plugin

    def setup(self, trainer: Any) -> None:
        """As DDPStrategy's; to fit, the module's optimizer is sharded instead of wrapping it."""
        precision, config = self.precision_plugin.precision, ShardcastConfig.load(self._source)
        config = config.following("lightning: precision", precision, DTYPES[precision])
        self.precision_plugin.config = config
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        if self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model_to_device()
        self.precision_plugin.sharded = None  # of a fit before; its memory is needed now
        self.setup_optimizers(trainer)
        module, originals = self.lightning_module, self.optimizers
        for name, param in module.named_parameters():
            if _compat.is_dtensor(param):
                _refuse_parallel(f"parameter {name!r} is a DTensor")
        if not originals[0].param_groups:  # configure_optimizers returned None: nothing is trained
            self.precision_plugin.convert_module(module)
        else:
            sharded = shard(module, originals, config)
            for handle, original in zip(sharded.optimizers, originals, strict=True):
                vars(handle)["optimizer"] = original  # LearningRateMonitor takes it for the same
            self.optimizers = list(sharded.optimizers)
            self.precision_plugin.sharded = sharded
            if self.world_size > 1:
                _warn_of_local_norms([module, *trainer.callbacks])
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it gradients accumulate locally; Trainer's accumulation uses it."""
        sharded = self.precision_plugin.sharded
        if sharded is None:
            yield
        else:
            with sharded.no_sync():
                yield

    # -- state: Trainer asks every rank, and writes what rank 0 answers -------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with the fp32 masters as parameters; whole on rank 0. Collective.

        A parameter that was written since the last step, by weight averaging or the best
        checkpoint's load, is saved as the module has it.
        """
        found: dict[str, Any] = super().lightning_module_state_dict()
        sharded = self.precision_plugin.sharded
        if sharded is not None and sharded.engine.model is self.lightning_module:
            for name, exact in sharded.full_parameters().items():
                mine = found.get(name)  # a module may leave parameters out of its state
                if mine is not None and torch.equal(exact.to(mine.dtype), mine.to(exact.device)):
                    found[name] = exact
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of the unsharded optimizer, on rank 0. Collective."""
        inner = _unwrapped(optimizer)
        if isinstance(inner, (ShardedOptimizer, OptimizerHandle)):
            return inner.full_state_dict()
        return super().optimizer_state(optimizer)  # type: ignore[no-any-return]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """The inverse of :meth:`optimizer_state`, of all optimizers. Collective."""
        sharded = self.precision_plugin.sharded
        if sharded is None or len(self.optimizers) == 1:
            super().load_optimizer_state_dict(checkpoint)
        else:
            sharded.load_state_dict(checkpoint["optimizer_states"])

    def teardown(self) -> None:
        """Take the hooks off the module, which may then be trained again.

        The state stays for ``trainer.save_checkpoint``, until the next fit or the trainer's end.
        """
        sharded = self.precision_plugin.sharded
        if sharded is not None and is_marked(sharded.engine.model):
            sharded.close()
        optimizers, self.optimizers = self.optimizers, []  # no part of them moves to the host
        super().teardown()
        self.optimizers = optimizers

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its name."""
        strategy_registry.register(
            cls.strategy_name, cls, description="Optimizer state sharded over data-parallel ranks"
        )


def _refuse_parallel(found: str) -> None:
    """What Lightning's ModelParallelStrategy is for."""
    raise ValueError(
        f"strategy: 'shardcast' is data-parallel, without the tensor parallelism of "
        f"ModelParallelStrategy, got {found}; use shardcast.shard(model, optimizer, mesh=...) in a "
        "loop of your own, or shardcast.accelerate"
    )


def _warn_of_local_norms(hooked: Sequence[Any]) -> None:
    """Warn of hooks that log Lightning's ``grad_norm``, which would be this rank's part."""
    for owner in hooked:
        for hook in ("on_before_optimizer_step", "on_after_backward"):
            function = getattr(type(owner), hook)
            code = getattr(inspect.unwrap(function), "__code__", None)
            if code is None or "grad_norm" not in code.co_names:
                continue
            imported = any(name.startswith("lightning.") for name in code.co_names)
            if imported or function.__globals__.get("grad_norm") is grad_norm:
                warn(
                    f"{type(owner).__name__}.{hook} calls Lightning's grad_norm, which sees only "
                    "the part of the averaged gradients that this rank owns, and differs between "
                    "ranks; log self.optimizers().grad_norm, the global norm of the last step"
                )


def _unwrapped(optimizer: Any) -> Any:
    """What may be inside a LightningOptimizer."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


if ShardcastStrategy.strategy_name not in StrategyRegistry:
    ShardcastStrategy.register_strategies(StrategyRegistry)
