"""Groups and state in and out: of this rank, of all ranks, and averages of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.optimizer.clipping import Clip
from shardcast.optimizer.closing import close
from shardcast.optimizer.full_state import FullState
from shardcast.optimizer.groups import add_group, assign_groups
from shardcast.optimizer.memory_report import MemoryReport, report_of
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.state_dict import StateDict
from shardcast.optimizer.state_view import (
    RankPart,
    StateView,
    called_by_dcp,
    caller_of,
    outside_as_plain,
    refuse_write,
)
from shardcast.plan.layout import Layout

# Those that load a rank's part on that rank: AcceleratedOptimizer() does so at once.
KEEP_PARTS = ("shardcast", "accelerate.optimizer")


class StatefulOptimizer(torch.optim.Optimizer):
    """Groups, masters and state of the packs, for scripts and for torch's own helpers."""

    _ready = False  # torch's own set-up fills in groups and state, which ours are already

    def __init__(self, packed: PackedOptimizer) -> None:
        self._packed, self._clip = packed, Clip(packed.reduce)
        originals = packed.originals
        several = len(originals.optimizers) > 1
        super().__init__(originals.groups, {} if several else originals.optimizers[0].defaults)
        self._ready = True

    @cached_property
    def _states(self) -> StateDict:
        return StateDict(self._packed)

    @cached_property
    def _full(self) -> FullState:
        return FullState(self._packed)

    @property
    def config(self) -> ShardcastConfig:
        """Options in effect. Local."""
        return self._packed.config

    @property
    def layout(self) -> Layout:
        """All packs, slots and spans, equal on all ranks; ``print`` it. Local."""
        return self._packed.layout

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the original optimizers, whose own lists hold them.

        Assign to change options of the same parameters, or to add groups; every rank must then
        assign the same. Removing a group or its parameters is an error of the next step.
        """
        return self._packed.originals.groups

    @param_groups.setter
    def param_groups(self, value: Sequence[dict[str, Any]]) -> None:
        if self._ready:
            for group in assign_groups(self._packed, value):
                self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of model parameters, in packs of its own.

        Collective: every rank, with the same group.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``.

        Raises:
            TypeError, ValueError, RuntimeError: on every rank, as of ``shard()``; nothing is added.
        """
        if not self._ready:  # the original optimizers' own have been checked
            return
        originals = self._packed.originals
        if len(originals.optimizers) > 1:
            raise RuntimeError(
                f"add_param_group: {originals.name} are sharded together; add the group to "
                "one of optimizer.optimizers"
            )
        add_group(self._packed, 0, param_group)

    def memory_report(self) -> MemoryReport:
        """Count the bytes of this rank by kind: parameters, gradients, masters, state, averages.

        Local. Returns a dictionary; ``print`` shows one line, ``.total`` is the sum.
        """
        return report_of(self._packed)

    def close(self, restore: bool = True) -> None:
        """End the training: return the model as it was given, in fp32 from the masters.

        Do not use this optimizer afterwards; the model can be trained without it, or sharded again.
        Parameters that no optimizer held, and buffers, keep their rounding.

        Collective: every rank, unless ``restore=False``.

        Args:
            restore: ``False`` gathers nothing and waits for no other rank: the model stays in
                low precision, and a later ``shard()`` of it continues from the fp32 masters,
                which this rank keeps until then. This also happens while an exception is
                handled, as in a ``finally:``, whatever the argument says.
        """
        close(self._packed, restore)

    def check_copies(self) -> None:
        """Compare all replicas bit by bit, for debugging.

        Reads all parameters to the host. Replicas over tensor-parallel ranks and of tied weights
        are compared too.

        Collective: every rank.

        Raises:
            RuntimeError: on every rank, if replicas differ; names the parameter.
        """
        self._full.check_copies()

    @property
    def state(self) -> Any:
        """torch's state by model parameter, read-only: its numbers, such as ``step``.

        Tensors are spread over the ranks, and raise by name: read and edit them in ``whole()``, or
        each rank its part in ``owned()``. A number is known where this rank owns a part of the
        parameter. :meth:`load_state_dict` replaces the state.
        """
        if self._packed.plain_names is not None:
            return self._packed.plain_names
        if called_by_dcp("state"):
            raise outside_as_plain("state")
        self._packed.need_masters("state")
        return StateView(self._packed)

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            refuse_write()

    @contextmanager
    def as_plain(self) -> Iterator[None]:
        """Present all ranks' state as a plain optimizer's to ``torch.distributed.checkpoint``.

        ``with optimizer.as_plain(): state = get_optimizer_state_dict(model, optimizer)``, likewise
        around ``set_optimizer_state_dict``, ``dcp.save`` and ``dcp.load``. Inside,
        :meth:`state_dict` returns the full state on every rank, in host memory, with masters for
        parameters of lower precision. Before the first step it is the state after a step with zero
        gradients, which is how DCP initializes a plain optimizer; it is discarded at the end unless
        a state was loaded.

        Collective: every rank must enter and leave it.

        Raises:
            RuntimeError: on every rank, with model parallelism, or inside :meth:`averaged`; of
                :meth:`step` inside it.
        """
        self._packed.refuse_averaged("as_plain")
        with self._full.as_plain():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard: tensors and plain scalars, without collectives.

        For each parameter of which this rank owns a part: torch's state of that part, and its
        ``master`` (1-d, fp32). Load it on the same rank of an equal layout; use
        :mod:`shardcast.checkpoint` for anything else. On several ranks a script that saves it is
        warned once, since the file lacks the other ranks' parts.

        Local; inside :meth:`as_plain` it is collective, and returns the full state.

        Raises:
            RuntimeError: ``torch.distributed.checkpoint`` calls it outside of :meth:`as_plain`.
        """
        if self._packed.plain_names is None and called_by_dcp("state_dict"):
            raise outside_as_plain("state_dict")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._packed.plain_names is not None:
            result = self._full.gather_on_all()
        else:
            result = self._states.dump()
            size = self._packed.process_groups.everyone.size
            if size > 1 and not caller_of("state_dict").startswith(KEEP_PARTS):
                result = RankPart(result, size)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's :meth:`state_dict`, or a plain state of the unsharded optimizer.

        Without masters in the state the present ones stay.

        Collective: every rank.

        Args:
            state_dict: this rank's own part, or the same plain state on all ranks; for several
                optimizers a list, as :meth:`full_state_dicts` returns.

        Raises:
            ValueError: on every rank, if one cannot load its state; nothing is changed.
        """
        self._packed.refuse_averaged("load_state_dict")
        self.wait_sync()
        loaded: Any
        if isinstance(state_dict, RankPart):
            loaded = state_dict.plain()
        else:
            loaded = dict(state_dict) if isinstance(state_dict, Mapping) else list(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        self._states.apply(self._states.plan(loaded))
        self._full.note_loaded()
        self._clip.note(None)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def full_parameters(self, average: str | None = None) -> dict[str, Tensor]:
        """Return the fp32 parameters by name on rank 0, on the host; elsewhere an empty dict.

        Tied parameters are listed under each of their names.

        Collective: every rank.

        Args:
            average: name of an average to return in place of the parameters.

        Raises:
            ValueError: on every rank, if there is no average of this name.
        """
        return self._full.masters(average)

    def full_state_dict(self, place: int | None = None) -> dict[str, Any]:
        """Return the unsharded optimizer's ``state_dict`` on rank 0; elsewhere an empty dict.

        Averages of weights are part of the state.

        Collective: every rank.

        Args:
            place: index of one optimizer, in the order given to ``shard()``; by default the groups
                of all optimizers are numbered consecutively.
        """
        return self._full.gather(place)

    def full_state_dicts(self) -> list[dict[str, Any]]:
        """Return :meth:`full_state_dict` of each optimizer on rank 0; elsewhere empty dicts.

        Collective: every rank.
        """
        places = range(len(self._packed.originals.optimizers))
        return [state for state in map(self._full.gather, places) if state]

    def wait_sync(self) -> None:
        """Wait for the updated parameters, if ``overlap_sync`` still sends them. Local.

        Call it before you read or write parameters outside of a forward (an EMA, weight norms).
        Forwards, state dicts, ``copy.deepcopy`` and all methods of this optimizer wait by
        themselves. On a GPU the current stream waits: call it before other streams branch off.
        """
        self._packed.sync.wait()


def packed_of(optimizer: StatefulOptimizer) -> PackedOptimizer:
    """Return what ``optimizer`` works with, for adapters and checkpoints of this library."""
    return optimizer._packed
