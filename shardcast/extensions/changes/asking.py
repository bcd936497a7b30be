"""The changes of the own elements of all parameters, when a script asks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.extensions.chance import global_index
from shardcast.extensions.changes.patches import Changes, WeightPatch, in_32_bits
from shardcast.extensions.changes.records import Changed
from shardcast.memory.shard import Shard
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.plan.layout import Fragment
from shardcast.plan.pack_groups import PLAIN
from shardcast.step.step_hook import StepHook

RECOMPUTED = "_checkpoint_wrapped_module."  # torch takes it out of the keys of state dicts


class ChangesOfRank(StepHook):
    """Answers of one rank; versions are numbered, and named by the run that they belong to."""

    name = "changes"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        if not optimizer.config.changes:
            raise RuntimeError(
                "changes: nothing is noted of what has changed; pass changes=True to shard()"
            )
        self._optimizer = optimizer
        comm = optimizer.process_groups.everyone
        self._run = comm.exchange(os.urandom(4).hex(), optimizer.device)[0]  # one for each run
        self._number = 0
        self._last = ""  # version that was told last

    def attach(self) -> None:
        """Refuse what has no place in a whole parameter.

        Raises:
            ValueError: names a parameter that is no DTensor, though other ranks have other experts
                under its name.
        """
        dims = self._optimizer.process_groups.parallel_dims
        for shard in self._optimizer.shards:
            groups = shard.pack.layout.pack_groups
            if groups.shard == PLAIN or dims.expert_blocks(groups)[0] == 1:
                continue
            for slot, param in zip(shard.pack.layout.slots, shard.pack.in_model, strict=True):
                if not _compat.is_dtensor(param):
                    raise ValueError(
                        f"changes: other ranks have other experts under the name {slot.name!r}, so "
                        "that its elements have no place in one parameter; make it a DTensor"
                    )

    @torch.no_grad()
    def changes(self, since: str | None = None, weights: str | None = None) -> Changes:
        """Return what has changed, since a version, of the elements that this rank owns.

        Every rank must call it, at the same point of the script and with the same ``since``; it
        issues no collective, and waits for the device. What scripts have written, loads, skipped
        steps and averages that were in the model count by what is there in the end. Versions are
        one chain: changes are known since the last answer alone. For any other version, one of
        another run too, the answer has all elements (:attr:`.Changes.is_full`), and so has the
        first one. Let one sender write for several readers.

        Args:
            since: the ``version`` of the last answer; ``None`` asks for all elements.
            weights: ``published``: of parameters that have a form (``published``) codes, and scales
                as ``..._scale_inv``, of the blocks in which a value has changed, as
                ``checkpoint.export`` writes them; in place of their bf16 values.

        Returns:
            patches in the coordinates of whole parameters, values on the device: copies, of 2 bytes
            for bf16 and 4 or 8 for their indices. Parameters that the optimizer does not have, and
            buffers, are not among them.

        Raises:
            RuntimeError: without the option ``changes``; inside ``averaged()``; after ``close()``.
            TypeError: ``since`` is no version.
            ValueError: ``weights`` is something else, or there are no published forms.
        """
        optimizer = self._optimizer
        if since is not None and not isinstance(since, str):
            raise TypeError(
                f"changes: since: expected the version of an answer, or None, got {since!r} "
                f"({type(since).__name__})"
            )
        if weights is not None and (weights != "published" or not optimizer.config.published):
            raise ValueError(
                f"changes: weights: expected None, or 'published' beside published={{...}} of "
                f"shard(), got {weights!r}"
            )
        if optimizer.is_closed:
            raise RuntimeError("changes: the optimizer is closed; ask before optimizer.close()")
        optimizer.refuse_averaged("changes")
        optimizer.ready_to_read()
        written = [shard.note_written() for shard in optimizer.shards]
        base = since if since and since == self._last else None
        patches: list[WeightPatch] = []
        for shard in optimizer.shards:
            if shard.pack.layout.pack_groups.is_primary:  # others may have copies
                for _, fragment, param in shard.owned():
                    patches += _patches(shard, fragment, param, base is None, bool(weights))
        for shard, is_written in zip(optimizer.shards, written, strict=True):
            _record(shard).tell(is_written)
        self._number += 1
        comm = optimizer.process_groups.everyone
        self._last = f"{self._run}-{self._number:08d}-{optimizer.comm.steps}"
        return Changes(tuple(patches), self._last, base, comm.rank, comm.size, self._aliases())

    def _aliases(self) -> dict[str, str]:
        first: dict[nn.Parameter, str] = {}
        for shard in self._optimizer.shards:
            slots, params = shard.pack.layout.slots, shard.pack.in_model
            first |= {param: slot.name for slot, param in zip(slots, params, strict=True)}
        named = self._optimizer.model.named_parameters(remove_duplicate=False)
        return {
            _key(name): _key(first[param])
            for name, param in named
            if first.get(param, name) != name
        }


def _patches(
    shard: Shard, fragment: Fragment, param: nn.Parameter, full: bool, as_codes: bool
) -> Iterator[WeightPatch]:
    record, part = _record(shard), shard.local(fragment.start, fragment.stop)
    values, start = shard.published[part], fragment.param_range[0]
    if full or record.is_new:
        places = torch.arange(fragment.numel, device=values.device)
    else:
        places = record.since(part.start, part.stop)
    if not places.numel():
        return
    name, form = _key(fragment.slot.name), shard.pack.layout.cast
    if as_codes and form:
        from shardcast.extensions.changes.coded import coded

        yield from coded(name, values, param, start, places, form)
        return
    whole: Tensor = param  # of a DTensor the shape of all ranks' parts
    indices = in_32_bits(global_index(param, places + start), whole)
    told = values.clone() if places.numel() == values.numel() else values[places]
    yield WeightPatch(name, tuple(whole.shape), values.dtype, told, indices)


def _record(shard: Shard) -> Changed:
    record = shard.record
    assert isinstance(record, Changed)
    return record


def _key(name: str) -> str:
    return name.replace(RECOMPUTED, "")
