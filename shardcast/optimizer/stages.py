"""The stages of a pipeline that one rank holds: one tree of modules, and when they are reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from shardcast.messages import warn

if TYPE_CHECKING:
    from shardcast.optimizer.packed import PackedOptimizer


class Stages(nn.Module):
    """Several stages, named as in the whole model; it is never called."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self._stages = tuple(stages)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all stages; torch finds parameters and buffers by it."""
        memo = set() if memo is None else memo
        for stage in self._stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)


def joined(stages: Sequence[nn.Module]) -> nn.Module:
    """One stage itself; of several a module that holds what they hold.

    Raises:
        ValueError: two stages have different parameters under one name.
    """
    if len(stages) == 1:
        return stages[0]
    root = Stages(stages)
    params: dict[str, nn.Parameter] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        if params.setdefault(name, param) is not param:
            raise ValueError(
                f"model: two pipeline stages of this rank have a tensor named {name!r}; keep the "
                "names of the whole model, as when layers of a copy of it are deleted"
            )
    holders = Counter(param for stage in stages for param in set(stage.parameters()))
    if any(count > 1 and param.requires_grad for param, count in holders.items()):
        warn(
            "model: two pipeline stages of this rank share a Parameter, whose gradient torch's "
            "schedules divide once for each stage: pass scale_grads=False to the schedule and "
            "divide the loss, or call optimizer.overlap_reduce(stages), which divides it once"
        )
    return root


def called_by_script(module: nn.Module) -> list[nn.Module]:
    """``module``, or the modules in it where it has no forward, as a list of models has not."""
    children = list(module.children())
    owns = any(True for _ in module.parameters(recurse=False))
    if type(module).forward is not nn.Module.forward or owns or not children:
        return [module]
    return [inner for child in children for inner in called_by_script(child)]


def overlap_stages(optimizer: PackedOptimizer, stages: Sequence[Any]) -> None:
    """See :meth:`shardcast.ShardedOptimizer.overlap_reduce`.

    After its last backward torch calls one of two methods of a stage: ``perform_reduce_grad``,
    which is there for FSDP and ends with ``scale_grads``, or that one alone.
    """
    modules = [getattr(stage, "submod", None) for stage in stages]
    if len(modules) != len(optimizer.stages) or {id(m) for m in modules} != {
        id(m) for m in optimizer.stages
    }:
        raise ValueError(
            f"stages: expected the {len(optimizer.stages)} PipelineStage of the modules that were "
            f"given to shard(), got {len(modules)} of others; build them from these very modules"
        )
    reduce = optimizer.reduce
    reduce.at_step = True  # also where the pipeline has one rank
    done: set[int] = set()  # stages of this run of the schedule

    def finish(number: int, stage: Any, micro_batches: int) -> None:
        if not stage.has_backward:  # torch calls it in ``schedule.eval()`` too
            return
        if number in done:  # the last run failed
            done.clear()
        done.add(number)
        ready = []
        # Looked up in each run: add_param_group makes further packs. One of a weight that stages
        # share is sent when the last of them is done.
        params_by_stage = [set(stage.submod.parameters()) for stage in stages]
        for shard in optimizer.shards:
            in_pack = shard.pack.in_model
            holders = {n for n, params in enumerate(params_by_stage) if params & {*in_pack}}
            if number in holders <= done:
                ready.append(shard.pack)
        if len(done) == len(stages):
            done.clear()
        reduce.finish_early(ready, micro_batches)

    for number, stage in enumerate(stages):
        stage.perform_reduce_grad = stage.scale_grads = partial(finish, number, stage)
