"""``changes``: the published values that have changed since the last answer.

At a small learning rate a step changes few published values, and an inference engine that follows
the training needs only those. The owner of an element keeps the value of the last answer
(:class:`.FollowedShard`). An answer has the values that differ from it, with their indices in whole
parameters (:mod:`.patches`), which :mod:`shardcast.publish` writes and applies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.extensions.chance import global_index
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.setup import Plan
from shardcast.option_values import Option
from shardcast.plan.layout import Fragment
from shardcast.plan.parallel_dims import ParallelDims
from shardcast.serving.patches import Changes, WeightPatch, in_32_bits
from shardcast.serving.shards import FollowedShard, Serving
from shardcast.step.step_hook import StepHook


class ChangesOfRank(StepHook):
    """Changes of one rank since a version."""

    name = "changes"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        if not optimizer.config.changes:
            raise RuntimeError(
                "changes: the option is off, so no changes were recorded; pass changes=True to "
                "shard()"
            )
        self._optimizer = optimizer
        comm = optimizer.process_groups.everyone
        self._run = comm.exchange(os.urandom(4).hex(), optimizer.device)[0]  # one name per run
        self._number = 0
        self._last = ""  # version of the last answer

    @torch.no_grad()
    def changes(self, since: str | None = None) -> Changes:
        """Return this rank's published values that have changed since a version.

        Every rank must call it, at the same point of the script and with the same ``since``. It
        issues no collective and waits for the device.

        The result has the current values, whether they come from steps, edits, loads, or averages
        that were swapped in and out. Only changes since the last result are known. The first
        result, and a result since any other version, has all elements
        (:attr:`.Changes.is_full`). For several readers, use one sender.

        Args:
            since: ``version`` of the last result; ``None`` asks for all elements.

        Returns:
            Patches with indices into whole parameters. Values and indices are copies on the device;
            an index has 4 or 8 bytes. Buffers and parameters outside the optimizer are left out.

        Raises:
            RuntimeError: without the option ``changes``, inside ``averaged()``, or after
                ``close()``.
            TypeError: ``since`` is not a version.
        """
        optimizer = self._optimizer
        if since is not None and not isinstance(since, str):
            raise TypeError(
                "changes: since: expected the version of an earlier result, or None, got "
                f"{since!r} ({type(since).__name__})"
            )
        if optimizer.is_closed:
            raise RuntimeError("changes: the optimizer is closed; call it before optimizer.close()")
        optimizer.refuse_inside("changes")
        optimizer.ready_to_read()
        shards = [shard for shard in optimizer.shards if isinstance(shard, FollowedShard)]
        base = since if since and since == self._last else None
        # First, so that after an error the last version is one that nobody has.
        self._number += 1
        self._last = f"{self._run}-{self._number:08d}-{optimizer.comm.steps}"
        patches: list[WeightPatch] = []
        for shard in shards:
            shard.look()
            if shard.pack.layout.pack_groups.is_primary:  # others may have copies
                for _, fragment, param in shard.owned():
                    patches += _patches(shard, fragment, param, base is None)
            shard.note_told()
        comm = optimizer.process_groups.everyone
        return Changes(tuple(patches), self._last, base, comm.rank, comm.size, self._aliases())

    def _aliases(self) -> dict[str, str]:
        first: dict[nn.Parameter, str] = {}
        for shard in self._optimizer.shards:
            for slot, param in zip(shard.pack.layout.slots, shard.pack.in_model, strict=True):
                first[param] = slot.name
        named = self._optimizer.model.named_parameters(remove_duplicate=False)
        return {
            _compat.state_key(name): _compat.state_key(first[param])
            for name, param in named
            if param in first and first[param] != name
        }


def _patches(
    shard: FollowedShard, fragment: Fragment, param: nn.Parameter, full: bool
) -> Iterator[WeightPatch]:
    part = shard.local(fragment.start, fragment.stop)
    values, start = shard.published[part], fragment.param_range[0]
    places = torch.arange(len(values), device=values.device) if full else shard.changed(part)
    if not places.numel():
        return
    whole: Tensor = param  # of a DTensor the shape of all ranks' parts
    indices = in_32_bits(global_index(param, places + start), whole)
    told = values.clone() if places.numel() == values.numel() else values[places]
    name = _compat.state_key(fragment.slot.name)
    yield WeightPatch(name, tuple(whole.shape), values.dtype, told, indices)


def _fits(plan: Plan, dims: ParallelDims) -> None:
    """Raise ValueError for a parameter whose elements have no index in a whole parameter."""
    for pack in plan.new:
        if dims.expert_blocks(pack.pack_groups)[0] > 1:
            for slot in pack.slots:
                if not _compat.is_dtensor(plan.params[slot.name]):
                    raise ValueError(
                        f"changes: {slot.name!r} is a plain parameter of an expert that not all "
                        "ranks hold, and other ranks may have another expert under this name: make "
                        "experts DTensors, even if their names are numbered, or leave changes off"
                    )


OPTION = Option(
    help="keep the published values of the last optimizer.changes(since=version), to tell which "
    "have changed: 2 bytes per owned element, 4 in fp32",
    fits=_fits,
    publishing=Serving,
    hook=ChangesOfRank,
)
