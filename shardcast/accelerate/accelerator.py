"""Accelerate: Hugging Face's Accelerator with a sharded optimizer instead of DDP and autocast.

There are two ways to use it::

    accelerator = ShardcastAccelerator(shardcast_config="bf16.yaml")   # instead of Accelerator
    python -m shardcast.run script.py                                  # an unchanged script

``prepare`` places the model without wrapping it and shards its optimizer. Unsupported settings
raise an error.

Collective, on every rank: ``prepare``, ``backward`` of the last micro-batch, ``clip_grad_norm_``,
``clip_grad_value_``, the optimizer's ``step``, ``save_state``, ``load_state``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from shardcast import _compat
from shardcast.accelerate import guards, mesh, state
from shardcast.accelerate.optimizer import ShardcastHandle, ShardcastOptimizer
from shardcast.comm import warn_first
from shardcast.config import ConfigSource
from shardcast.frameworks import (
    check_loss_scales,
    clusters,
    divides_by_tokens,
    models_of,
    scale_loss,
    with_buffers,
)
from shardcast.optimizer.api import shard
from shardcast.optimizer.model import is_sharded
from shardcast.optimizer.sharded import ShardedOptimizer, packed_of
from shardcast.plan.precision import MASTER_DTYPE

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    Parameters: TypeAlias = Tensor | Iterable[Tensor]


class ShardcastAccelerator(Accelerator):
    """An Accelerator that shards the optimizers it prepares.

    Args:
        args, kwargs: arguments of ``accelerate.Accelerator``. ``mixed_precision`` sets
            ``param_dtype`` (``"no"``: fp32) unless the shardcast configuration sets it.
        shardcast_config: a config, a mapping or a YAML file. ``None`` reads the environment, see
            :meth:`shardcast.ShardcastConfig.load`.

    Raises:
        ValueError: ``mixed_precision`` and ``param_dtype`` contradict each other.
        RuntimeError: another plug-in shards or casts (DeepSpeed, FSDP, Megatron-LM, XLA, fp8), or
            the processes are not connected.
    """

    def __init__(
        self, *args: object, shardcast_config: ConfigSource = None, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        guards.refuse_unsupported(self)
        config = guards.resolve_config(self.mixed_precision, shardcast_config)
        broadcasts = getattr(self.ddp_handler, "broadcast_buffers", True)
        self.shardcast_config = with_buffers(config, broadcasts)
        self.native_amp = self.native_amp and self.shardcast_config.autocast
        self.scaler = None  # the sharded optimizer scales the loss, and skips, for all ranks
        self._owners: dict[nn.Module, ShardcastOptimizer] = {}  # of each bare model that is sharded
        self._unsharded: dict[nn.Module, Any] = {}  # placed, and waiting for their optimizer

    native_amp: bool
    """Accelerate's own flag: run forwards under autocast."""
    _models: list[Any]  # likewise
    _optimizers: list[Any]
    loss_params: tuple[nn.Parameter, ...] = ()
    """Trained weights of a loss module; Trainer leaves them out when it clips."""
    save_masters = True
    """``get_state_dict`` and ``save_model`` give fp32, as under DDP with autocast."""

    @property
    def sharded(self) -> tuple[ShardcastOptimizer, ...]:
        """The prepared optimizers, in the order of their models."""
        return tuple(dict.fromkeys(self._owners.values()))

    @property
    def bare_models(self) -> list[nn.Module]:
        """The prepared models without Accelerate's wrappers."""
        return [*dict.fromkeys(map(_compat.unwrapped, self._models))]

    @property
    def is_sharding(self) -> bool:
        """Whether a model and its optimizer are sharded."""
        return bool(self._owners)

    @property
    def sharded_model(self) -> nn.Module:
        """The bare model of :attr:`sharded_optimizer`; raises the same errors."""
        return self._only().model

    @property
    def sharded_optimizer(self) -> ShardedOptimizer:
        """The :class:`ShardedOptimizer`, with ``grad_norm``, ``loss_scale``, ``layout`` and so on.

        Raises:
            RuntimeError: no optimizer was prepared yet, or several were; each prepared optimizer
                has its own as ``.optimizer``.
        """
        sharded: ShardedOptimizer = self._only().optimizer
        return sharded

    def _only(self) -> ShardcastOptimizer:
        if len(self.sharded) != 1:
            raise RuntimeError(
                f"expected one sharded optimizer, got {len(self.sharded)}; call "
                "accelerator.prepare(model, optimizer, ...) first, or, if you prepared several "
                "optimizers, use the .optimizer of each"
            )
        return self.sharded[0]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Place models and shard their optimizers. Collective: every rank.

        Models are placed first, in any order of ``args``, because parameters must be on their
        device before they are sharded. Several models of one optimizer are sharded as one. Models
        of different optimizers are sharded separately.

        Args:
            args: what ``Accelerator.prepare`` takes. Several optimizers of one model are sharded
                together; step all of them. A list of optimizers becomes one optimizer with the
                groups of all.
            device_placement: as in ``Accelerator.prepare``.

        Returns:
            The prepared objects, in the order of ``args``.

        Raises:
            ValueError: an optimizer's parameters are in no prepared model.
            RuntimeError: a model already has a sharded optimizer.
        """
        placement: list[Any] = device_placement or [None] * len(args)
        if len(placement) == len(args):  # else Accelerate says what is wrong
            args = tuple(
                self.prepare_model(item, wanted) if isinstance(item, nn.Module) else item
                for item, wanted in zip(args, placement, strict=True)
            )
        args = tuple(self._shard(given) if _is_list(given) else given for given in args)
        handles: dict[int, ShardcastHandle] = {}
        for optimizers, _ in clusters(filter(_is_plain, args), self.bare_models):
            if len(optimizers) > 1:
                prepared = self._shard(optimizers)
                for plain, handle in zip(optimizers, prepared.optimizer.optimizers, strict=True):
                    handles[id(plain)] = ShardcastHandle(prepared, handle)
        self._optimizers += handles.values()
        args = tuple(handles.get(id(item), item) for item in args)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Place (and compile) ``model`` without DDP and autocast. Local.

        On several processes, a forward in training raises until the optimizer is prepared, too.

        Raises:
            ValueError: the model is wrapped in DistributedDataParallel.
        """
        if any(model is prepared for prepared in self._models):
            return model
        inner = _compat.unwrapped(model)
        if _compat.is_ddp(model):
            raise ValueError(
                "prepare: the model is wrapped in DistributedDataParallel already; pass the "
                "bare model: shardcast averages the gradients itself"
            )
        placed: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        watched = inner in self._owners or inner in self._unsharded or is_sharded(inner)
        if not (watched or evaluation_mode) and any(p.requires_grad for p in inner.parameters()):
            watch = partial(guards.refuse_training, self.mixed_precision, self.num_processes)
            self._unsharded[inner] = inner.register_forward_pre_hook(watch)
        return placed

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> ShardcastOptimizer | ShardcastHandle:
        """Shard ``optimizer``. Collective: every rank.

        Prepare its models before it or in the same call.

        Raises:
            ValueError: its models are not prepared.
            RuntimeError: one of its models is sharded with another optimizer.
        """
        if isinstance(optimizer, ShardcastHandle):
            self.prepare_optimizer(optimizer.prepared)
            super().prepare_optimizer(optimizer)
            self._optimizers = [kept for kept in self._optimizers if kept is not optimizer.prepared]
            return optimizer
        if isinstance(optimizer, ShardcastOptimizer):  # prepared, perhaps before free_memory()
            models = models_of(optimizer.optimizer, self.bare_models)
            super().prepare_optimizer(optimizer)
            self._owners |= dict.fromkeys(models, optimizer)
            return optimizer
        prepared = self._shard([optimizer])
        self._optimizers.append(prepared)
        return prepared

    def _shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> ShardcastOptimizer:
        first = optimizers[0]
        for optimizer in optimizers:
            guards.check_prepared(optimizer, self.bare_models)
        models = [*dict.fromkeys(m for opt in optimizers for m in models_of(opt, self.bare_models))]
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        if isinstance(first, ShardedOptimizer):  # by hand, with shardcast.shard
            sharded = first
        else:
            config = guards.with_fp32_heads(self.shardcast_config, models)
            check_loss_scales([config, *(sharded.optimizer.config for sharded in self.sharded)])
            sharded = shard(model, optimizers, config, **mesh.options(self, model))
        for each in models:
            watch = self._unsharded.pop(each, None)
            if watch is not None:
                watch.remove()
        prepared = ShardcastOptimizer(sharded, model, models)
        self._owners |= dict.fromkeys(models, prepared)
        return prepared

    def _prepare_tp(self, *args: object) -> tuple[object, ...]:  # Accelerate's own
        return args  # it would find the optimizer's parameters by address, which empty parts share

    def prepare_data_loader(
        self, data_loader: DataLoader[object], *args: object, **kwargs: object
    ) -> Any:
        """Prepare a data loader; the tp and cp ranks of a group get the same batches.

        Raises:
            ValueError: rank 0 would read for all ranks (``dispatch_batches=True``) in a job that
                combines tp with dp, or uses cp.
        """
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        mesh.refuse_dispatch(self, isinstance(prepared, DataLoaderDispatcher))
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Prepare a scheduler; it pauses only when its own optimizer skips a step."""
        prepared = super().prepare_scheduler(scheduler)
        for optimizer in self.sharded:
            originals = packed_of(optimizer.optimizer).originals.optimizers
            if getattr(scheduler, "optimizer", None) in originals:
                prepared.optimizers = [optimizer]
        return prepared

    # -- backward and step --------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale ``loss``, divide it by the accumulation steps, and run its backward.

        If tokens are counted (:meth:`ShardedOptimizer.count`), the loss is divided by them only.
        Collective in the last micro-batch of a step: every rank.
        """
        optimizers = [prepared.optimizer for prepared in self.sharded]
        scaled = scale_loss(optimizers, loss)
        if divides_by_tokens(optimizers):
            kwargs.pop("learning_rate", None)  # which Accelerate takes for LOMO
            scaled.backward(**kwargs)
        else:
            super().backward(scaled, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate the gradients of ``model`` locally; ``accumulate`` uses this, too."""
        prepared = self._owners.get(_compat.unwrapped(model))
        with super().no_sync(model) if prepared is None else prepared.optimizer.no_sync():
            yield

    def unscale_gradients(self, optimizer: object = None) -> None:
        """Do nothing: ``step()`` unscales, and ``clip_grad_norm_`` returns an unscaled norm.

        Raises:
            RuntimeError: there is a loss scale, so ``.grad`` would stay scaled.
        """
        if not self.is_sharding:
            super().unscale_gradients(optimizer)
        elif any(prepared.optimizer.loss_scale is not None for prepared in self.sharded):
            raise RuntimeError(
                "unscale_gradients: gradients are unscaled inside optimizer.step(), over all "
                "ranks; remove the call, and clip with accelerator.clip_grad_norm_ or "
                "accelerator.clip_grad_value_, which take the loss scale into account"
            )

    def clip_grad_norm_(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the global gradient norm in the coming step. Collective: every rank.

        Args:
            parameters: all parameters of one optimizer.
            max_norm: upper bound of the norm.
            norm_type: must equal the configuration's ``norm_type``.

        Returns:
            The unscaled norm before clipping, a 0-dim tensor.

        Raises:
            ValueError: ``parameters`` are only some of an optimizer's or belong to several
                optimizers, or ``norm_type`` differs from the configuration's.
            RuntimeError: called between the micro-batches of an accumulation.
        """
        norm: Tensor | None = self._clip("clip_grad_norm_", parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Parameters, clip_value: float) -> None:
        """Clamp each element of the averaged gradients. Collective: every rank.

        Raises:
            ValueError, RuntimeError: for the same mistakes as :meth:`clip_grad_norm_`.
        """
        self._clip("clip_grad_value_", parameters, clip_value)

    def _clip(self, call: str, parameters: Parameters, *bounds: float) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        params += [param for param in self.loss_params if param not in set(params)]
        clipped = [each.optimizer for each in self.sharded if not each.params.isdisjoint(params)]
        if not clipped:
            return getattr(super(), call)(params, *bounds)  # of a model that is not sharded
        if len(clipped) > 1:
            raise ValueError(
                f"{call}: expected parameters of one optimizer, got parameters of {len(clipped)}, "
                "which are sharded separately and have separate norms; call it once for each"
            )
        if not self.sync_gradients:
            raise RuntimeError(
                f"{call}: called between micro-batches, before gradients are reduced; write `if "
                f"accelerator.sync_gradients: accelerator.{call}(...)`"
            )
        return getattr(clipped[0], call)(params, *bounds)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Do nothing, because batches are even.

        Raises:
            RuntimeError: ``even_batches`` is off and there are several processes.
        """
        if not self.is_sharding:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        if self.num_processes > 1 and not (self.even_batches and even_batches in (None, True)):
            raise RuntimeError(
                "join_uneven_inputs: expected even_batches=True, got False: all ranks must make "
                "the same number of steps; leave even_batches on (Accelerate's default; "
                "gather_for_metrics drops the repeated samples), or use drop_last"
            )
        yield

    # -- state --------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: object
    ) -> Any:
        """Save Accelerate's files and every rank's shard. Collective: every rank.

        The checkpoint is committed last, so a run that is killed while saving leaves the previous
        one intact. It takes the arguments of ``Accelerator.save_state``.

        Returns:
            The folder of the checkpoint.
        """
        if not self.is_sharding:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        options = {"safe_serialization": safe_serialization, **kwargs}
        return state.save(self, output_dir, partial(super().save_state, **options))

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """Load a checkpoint at any world size. Collective: every rank.

        It also loads a checkpoint that stock Accelerate saved under DDP. It takes the arguments of
        ``Accelerator.load_state``.

        Raises:
            FileNotFoundError: ``input_dir`` has no committed checkpoint.
            ValueError: the checkpoint has another number of sharded optimizers, or comes from DDP
                and the model is tensor-parallel.
        """
        if not self.is_sharding:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        options = {"load_kwargs": load_kwargs, **kwargs}
        state.load(self, input_dir, partial(super().load_state, **options))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the model's state with the fp32 masters, on rank 0. Collective: every rank.

        Other ranks get the parameters in ``param_dtype``, and so do all ranks with
        ``accelerator.save_masters = False``. If only rank 0 calls it, it warns after a minute and
        returns them in ``param_dtype``, too. ``save_model`` writes this state.
        """
        state = mesh.whole(super().get_state_dict(model, unwrap))
        inner = _compat.unwrapped(model)
        prepared = self._owners.get(inner)
        if prepared is None or not unwrap or not self.save_masters or mesh.is_cut(inner):
            return state
        return prepared.exact_state(state, inner, "get_state_dict")

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save like ``Accelerator.save``; warn once about low-precision weights. Local.

        ``unwrap_model(model).state_dict()`` has the weights in ``param_dtype``, not the masters.
        """
        if self.save_masters and isinstance(obj, Mapping):
            low = {
                param.data_ptr()
                for model in self._owners
                for param in model.parameters()
                if param.dtype.itemsize < MASTER_DTYPE.itemsize
            }
            saved = [it for it in obj.values() if isinstance(it, Tensor) and it.data_ptr() in low]
            if saved:
                dtype = str(saved[0].dtype).removeprefix("torch.")
                warn_first(
                    f"accelerator.save: these weights are in {dtype}, which is enough for "
                    "inference but not for training. To save the fp32 masters, call "
                    "accelerator.get_state_dict(model) on every rank (rank 0 gets them), or run "
                    "`shardcast export` on what save_state() wrote"
                )
        super().save(obj, f, safe_serialization)

    @contextmanager
    def seen_by_stock(self, *, models: bool = True, optimizers: bool = False) -> Iterator[None]:
        """Hide models or optimizers from Accelerate's own methods inside the block. Local."""
        prepared = self._models, self._optimizers
        self._models = prepared[0] if models else []
        self._optimizers = prepared[1] if optimizers else []
        try:
            yield
        finally:
            self._models, self._optimizers = prepared

    def free_memory(self, *objects: Any) -> Any:
        """Release all references, like ``Accelerator.free_memory``. Local.

        The hooks on a model's gradients are removed at once if the model or its optimizer is among
        ``objects``, and otherwise when the caller drops the optimizer. A kept optimizer can be
        prepared again.
        """
        for prepared in self._optimizers:
            if any(item is prepared or item in self._models for item in objects):
                prepared.close()
        for watch in self._unsharded.values():
            watch.remove()
        self._unsharded, self._owners, self.loss_params = {}, {}, ()
        return super().free_memory(*objects)


def _is_plain(item: object) -> bool:
    """Whether ``item`` is an optimizer that is not sharded yet."""
    return isinstance(item, torch.optim.Optimizer) and not isinstance(
        item, (AcceleratedOptimizer, ShardedOptimizer)
    )


def _is_list(item: object) -> bool:
    """Whether ``item`` is a list of optimizers to be sharded together."""
    return isinstance(item, (list, tuple)) and len(item) > 0 and all(map(_is_plain, item))
