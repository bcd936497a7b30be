"""The entry point :func:`shard`: from a model and an optimizer to a :class:`ShardedOptimizer`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcast import _compat, launched
from shardcast.comm import Comm, ProcessGroups
from shardcast.comm.process_groups import over_fewer_ranks
from shardcast.config import ConfigSource, ShardcastConfig
from shardcast.extensions.waiting import look_after
from shardcast.memory.aliases import find_aliases, tie
from shardcast.messages import LOG
from shardcast.optimizer import setup
from shardcast.optimizer.model import (
    called_by_script,
    convert_rest,
    is_sharded,
    joined,
    waiting_restores,
)
from shardcast.optimizer.packed import PackedOptimizer, summary_of
from shardcast.optimizer.setup import warn_of_slow_products
from shardcast.optimizer.sharded import ShardedOptimizer
from shardcast.plan.originals import OptimizerList
from shardcast.step.compiling import compiles
from shardcast.step.reduce.reducer import left_in_flight
from shardcast.step.update import updates_of

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh


def shard(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: ConfigSource = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    dp: str | Sequence[str] | DeviceMesh = "dp",
    pp: str = "pp",
    tied: Sequence[Sequence[Any]] = (),
    grad_sum_over: Mapping[str, Sequence[str]] | None = None,
    experts: Mapping[str, Sequence[str]] | None = None,
    divisor: float | Tensor | None = None,
    materialize: Callable[[nn.Module], object] | None = None,
    **fields: Any,
) -> ShardedOptimizer:
    """Shard the fp32 masters and the state of ``optimizer`` over the data-parallel ranks.

    Converts ``model`` in place. Its parameters become views of packs in ``param_dtype``, equal on
    all ranks (rank 0's values). This rank keeps the fp32 masters of its spans. By default the
    model's modules compute under autocast (option ``autocast``). Do not wrap the model in DDP. Peak
    memory is the fp32 model, one pack and this rank's masters. Gradients are cleared.

    Collective: every rank of the group, with the same model and options.

    Args:
        model: on its device, materialized, usually in fp32. If one optimizer trains several models,
            pass ``nn.ModuleDict({"unet": unet, "text": text})`` and call the models as before. In a
            pipeline, pass the list of stages on this rank. Their parameters must have the names of
            the whole model. Backwards then send nothing, and the one reduction of a step runs in
            ``step()``.
        optimizer: a torch optimizer over parameters of ``model``, or a sequence such as
            ``[muon, adamw]`` that holds every trained parameter exactly once. Elementwise
            optimizers are split evenly; for all others each parameter has one owner. All share one
            reduction, norm, decision and sync. Their own ``step`` is disabled; see
            :attr:`ShardedOptimizer.optimizers`.
        config: a config, a mapping, a YAML file or the name of a preset (``"lean"``). ``None``
            reads the environment, see :meth:`ShardcastConfig.load`.
        process_group: ranks to shard over. By default the default group, or this process alone if
            ``torch.distributed`` is not initialized.
        mesh: device mesh of a job that is more than data-parallel, instead of ``process_group``.
            Dimensions other than ``dp`` are model-parallel: ranks along them agree on norms, skips
            and clips, and parameters are DTensors (``Shard`` or ``Replicate``) or plain replicas.
        dp: the data-parallel dimension of ``mesh``; or two, ``(replicas, shards)``; or several,
            flattened into one: with context parallelism ``mesh["dp", "cp"]._flatten("dp_cp")``.
        pp: the pipeline dimension of ``mesh``, if it has one. Along it, ranks hold different
            stages.
        tied: pairs of weights that two pipeline stages hold, the earlier stage's name first:
            ``[("tokens.weight", "head.weight")]``. They start equal and stay equal, and their
            gradients are summed.
        grad_sum_over: by model-parallel dimension, name patterns of plain parameters with a partial
            gradient on each rank, such as norms that see part of the sequence.
        experts: by data-parallel dimension, name patterns of parameters that only the ranks along
            it share: ``{"edp": ["*.experts.*"]}``. Their gradients are divided by ``divisor`` like
            all others.
        divisor: divisor of sums over ranks, see :attr:`ShardedOptimizer.divisor`.
        materialize: function that allocates and initializes a model built on ``meta``, such as
            ``lambda model: model.to_empty(device="cuda").apply(initialize)``. Parameters keep their
            identity. Only rank 0's values count.
        fields: single options; they take precedence over ``config``.

    Returns:
        The optimizer to use from now on.

    Raises:
        TypeError, ValueError: an argument cannot be used; the error says which and what to do.
        RuntimeError: the model is already sharded, the process group is missing, or the ranks have
            different models or options.
    """
    beside_mesh = {"tied": tied, "grad_sum_over": grad_sum_over, "experts": experts}

    def prepare() -> _Given:
        options = ShardcastConfig.load(config, **fields)
        stages = _stages(model)
        originals = _check(stages, optimizer)
        _check_mesh(options, mesh, process_group, beside_mesh)
        if materialize is not None:
            with _compat.swapped_params():
                for stage in stages:
                    materialize(stage)
        restores = waiting_restores(root for stage in stages for root in called_by_script(stage))
        return _Given(options, stages, originals, restores)

    given = _attempted(prepare)  # errors are raised on all ranks, at their first meeting
    roots = [stage for stage in _listed(model) if isinstance(stage, nn.Module)]
    device = _device(roots)
    if mesh is None:
        process_groups = ProcessGroups.flat(Comm.resolve(process_group))
    else:
        from shardcast.extensions.parallel import groups_of

        shapes = {
            name: _compat.local_tensor(param).shape
            for root in roots
            for name, param in root.named_parameters()
        }
        process_groups = groups_of(
            mesh,
            dp,
            pipeline=pp,
            sum_over=grad_sum_over,
            experts=experts,
            tied=tied,
            shapes=shapes,
            check=given,
        )

    def planned() -> setup.Plan:
        config, stages, originals, restores = given()
        if not stages:
            raise ValueError("model: expected at least one pipeline stage, got an empty list")
        root = model if isinstance(model, nn.Module) else joined(stages)
        plan = setup.plan_for(root, originals, config, process_groups.parallel_dims, stages)
        left = left_in_flight(process_groups)
        closed = (
            f"after {len(restores)} closed without restore, which left {left} packs of gradients "
            "in flight in this process group (if ranks differ, make a new one)"
        )
        updates_of(originals, config, process_groups.dp)  # raises before the model is converted
        compiles(config, device)
        options, aliases = (*plan.options, closed), tuple(find_aliases(stages))
        return dataclasses.replace(plan, options=options, aliases=aliases)

    with torch.no_grad(), look_after(process_groups):
        plan = setup.agreed(planned, process_groups, device, "shard")
        if mesh is None and process_groups.dp.size > 1:
            process_groups = over_fewer_ranks(given().config, process_groups)
            if not process_groups.is_data_parallel:
                plan = setup.agreed(planned, process_groups, device, "shard")
        _, stages, _, restores = given()
        for restore in restores:
            restore()
        dtypes = setup.dtypes_of(stages)
        convert_rest(plan, stages, process_groups)
        shards = setup.allocate(plan, process_groups)
        tie(plan.aliases)  # before buffers are looked at
        for param in plan.params.values():
            param.grad = None
        launched.note_sharded(process_groups.everyone.rank)
        if process_groups.everyone.rank == 0 and device.type == "cpu":
            warn_of_slow_products(pack.dtype for pack in plan.layout.packs)
        packed = PackedOptimizer(plan, shards, process_groups, dtypes)
        sharded = ShardedOptimizer(packed)
        if divisor is not None:
            sharded.divisor = divisor
        if process_groups.everyone.rank == 0 and LOG.isEnabledFor(logging.INFO):
            LOG.info(summary_of(packed))
        return sharded


class _Given(NamedTuple):
    """The checked arguments of one rank."""

    config: ShardcastConfig
    stages: list[nn.Module]
    originals: OptimizerList
    restores: list[Callable[[], None]]


def _attempted(prepare: Callable[[], _Given]) -> Callable[[], _Given]:
    """Return a function that repeats the result, or the error, of one call of ``prepare``."""
    try:
        options = prepare()
    except Exception as error:
        failure = error  # `error` is unbound after the block

        def fail() -> _Given:
            raise failure

        return fail
    return lambda: options


def _listed(given: object) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _stages(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    stages = _listed(model)
    for stage in stages:
        if not isinstance(stage, nn.Module):
            raise TypeError(
                f"model: expected a torch.nn.Module, or a list of them, got {type(stage).__name__}"
                "; call shard(model, optimizer), with the model itself first"
            )
        if isinstance(stage, nn.DataParallel):
            raise TypeError(
                "model: expected one model for each process, got nn.DataParallel, which copies "
                "it to several devices in every forward; pass model.module, and start one "
                "process per device (torchrun)"
            )
        for name, module in stage.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"model: expected nn.Modules, got TorchScript in {name or 'the root'!r}, whose "
                    "forward has no hooks; shard the nn.Module, and script it after "
                    "optimizer.close()"
                )
    return [_compat.unwrapped(stage) for stage in stages]


def _check_mesh(
    config: ShardcastConfig, mesh: Any, process_group: Any, beside: Mapping[str, Any]
) -> None:
    if mesh is None:
        for option, value in beside.items():
            if value:
                raise ValueError(f"{option}: needs a mesh; pass mesh=")
    elif process_group is not None:
        raise ValueError(
            "process_group: expected None with mesh=, which defines the groups; pass one of them"
        )
    elif config.shard_ranks != "all":
        raise ValueError(
            f"shard_ranks: expected 'all' with mesh=, got {config.shard_ranks!r}; add a "
            "dimension for replicas to the mesh and pass dp=(replicas, shards)"
        )


def _device(stages: Sequence[nn.Module]) -> torch.device:
    """Return the device on which ranks exchange the outcome of planning.

    For a model on ``meta`` it is the CPU, unless the default group does not support it (NCCL only).
    """
    first = next((param for stage in stages for param in _compat.parameters(stage)), None)
    if first is not None and not first.is_meta:
        return first.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not dist.is_initialized() or "cpu" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _check(
    stages: Sequence[nn.Module], given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> OptimizerList:
    optimizers = _listed(given)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "optimizer: expected a torch.optim.Optimizer, or a list of them, got "
                f"{type(optimizer).__name__}; build one over model.parameters() and pass the "
                "object, not the class"
            )
        replaced = vars(optimizer).get("step")
        if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
            raise TypeError(
                f"optimizer: the step of this {type(optimizer).__name__} was replaced by "
                f"{getattr(replaced, '__qualname__', replaced)!r}, which would not be called; "
                "use register_step_pre_hook or register_step_post_hook, or replace step on the "
                "optimizer that shard() returns"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                "optimizer: differentiable=True cannot be sharded, because the update runs without "
                "autograd; use differentiable=False"
            )
    if not optimizers:
        raise ValueError("optimizer: expected at least one, got an empty list")
    sharded = any(isinstance(optimizer, ShardedOptimizer) for optimizer in optimizers)
    if sharded or any(is_sharded(module) for stage in stages for module in called_by_script(stage)):
        raise RuntimeError(
            "shard() was already called on this model or optimizer; call it once, with one "
            "optimizer or a list that holds all parameters: shard(model, [muon, adamw]). For a "
            "second training phase, first call close() on the optimizer that shard() returned, "
            "or free_memory(model) of the accelerator (trainer.accelerator), on all ranks"
        )
    return OptimizerList(optimizers)
