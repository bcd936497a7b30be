"""The stages of a pipeline that one rank holds: one tree of modules, and when they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardcast.memory.pack import Pack
from shardcast.step.reduce.averaged import AveragedReducer
from shardcast.step.reduce.reducer import Reducer

if TYPE_CHECKING:
    from shardcast.optimizer.engine import Engine


def joined(stages: Sequence[nn.Module]) -> nn.Module:
    """One stage itself; of several a module that is never called, and holds what they hold.

    Raises:
        ValueError: two stages have something under one name.
    """
    if len(stages) == 1:
        return stages[0]
    root = nn.Module()
    for stage in stages:
        _graft(root, stage, "")
    return root


def _graft(target: nn.Module, source: nn.Module, prefix: str) -> None:
    for name, param in source.named_parameters(recurse=False):
        _check_free(
            dict(target.named_parameters(recurse=False)).get(name, param), param, prefix, name
        )
        target.register_parameter(name, param)
    for name, buffer in source.named_buffers(recurse=False):  # such as tables that all stages have
        if name not in dict(target.named_buffers(recurse=False)):
            target.register_buffer(name, buffer, name not in source._non_persistent_buffers_set)
    for name, child in source.named_children():
        there = dict(target.named_children()).get(name, child)
        if there is child:
            target.add_module(name, child)
        else:
            both = nn.Module()  # neither stage's own is touched
            _graft(both, there, f"{prefix}{name}.")
            _graft(both, child, f"{prefix}{name}.")
            target.add_module(name, both)


def _check_free(there: Tensor, mine: Tensor, prefix: str, name: str) -> None:
    if there is not mine:
        raise ValueError(
            f"model: two pipeline stages of this rank have a tensor named {prefix + name!r}; keep "
            "the names of the whole model, as when layers of a copy of it are deleted"
        )


def overlap_stages(engine: Engine, stages: Sequence[Any]) -> None:
    """See :meth:`shardcast.ShardedOptimizer.overlap_reduce`.

    After its last backward torch calls one of two methods of a stage: ``perform_reduce_grad``,
    which is there for FSDP and ends with ``scale_grads``, or that one alone.
    """
    held = [getattr(stage, "submod", None) for stage in stages]
    if len(held) != len(engine.stages) or {id(m) for m in held} != {id(m) for m in engine.stages}:
        raise ValueError(
            f"stages: expected the {len(engine.stages)} PipelineStage of the modules that were "
            f"given to shard(), got {len(held)} of others; build them from these very modules"
        )
    if isinstance(engine.reduce, AveragedReducer):
        raise ValueError("stages: expected bare modules, got one in DDP; leave DDP out")
    engine.reduce.at_step = True  # also where the pipeline has one rank
    for stage in stages:
        params = set(stage.submod.parameters())
        packs = [s.pack for s in engine.shards if params.intersection(s.pack.in_model)]
        stage.perform_reduce_grad = stage.scale_grads = _reduces(engine.reduce, packs)


def _reduces(reducer: Reducer, packs: Sequence[Pack]) -> Callable[[int], None]:
    @torch.no_grad()
    def reduce(grad_scale_factor: int) -> None:
        reducer.finish_early(packs, grad_scale_factor)

    return reduce
