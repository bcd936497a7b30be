"""Groups and state in and out: of this rank, of all ranks, and averages of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
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
from shardcast.step.decide.decision import Decision

# Those that load a rank's part on that rank: AcceleratedOptimizer() does so at once.
KEEP_PARTS = ("shardcast", "accelerate.optimizer")


class StatefulOptimizer(torch.optim.Optimizer):
    """Groups, masters and state of the packs, for scripts and for torch's own helpers."""

    _clipped: Decision | None = None  # by a clip, on the present gradients; loading forgets it
    _ready = False  # torch's own set-up fills in groups and state, which ours are already

    def __init__(self, packed: PackedOptimizer) -> None:
        self._packed = packed
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
        """The options that hold."""
        return self._packed.config

    @property
    def layout(self) -> Layout:
        """All packs, slots and spans, equal on all ranks; ``print`` it."""
        return self._packed.layout

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the original optimizers, whose own lists hold them.

        What is assigned goes there: other options for the same parameters, and further groups,
        which are added; every rank must then assign the same. A group that is removed, or that has
        got other parameters, is an error of the next step.
        """
        return self._packed.originals.groups

    @param_groups.setter
    def param_groups(self, value: Sequence[dict[str, Any]]) -> None:
        if self._ready:
            for group in assign_groups(self._packed, value):
                self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of model parameters, in packs of its own; every rank must add the same one.

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

        A dictionary; ``print(optimizer.memory_report())`` shows a table, ``.total`` is the sum.
        """
        return report_of(self._packed)

    def close(self, restore: bool = True) -> None:
        """End the training: give the model back as it was given, in fp32 from the masters.

        Every rank must call it. Use this optimizer no more; the model may be trained without it,
        or sharded anew. Parameters that no optimizer held, and buffers, keep their rounding.

        Args:
            restore: without it nothing is gathered, and no other rank is waited for: the model
                stays in low precision, and a ``shard()`` of it goes on from the fp32 masters, which
                this rank keeps until then. So it is, whatever is said, while an exception is
                handled, as in a ``finally:`` after it.
        """
        close(self._packed, restore)

    def check_copies(self) -> None:
        """Raise a RuntimeError on every rank, which must call it, if copies differ in a bit.

        To find out why a run went wrong: it reads all parameters to the host. Copies over
        tensor-parallel ranks and of tied weights are compared, too.
        """
        self._full.check_copies()

    @property
    def state(self) -> Any:
        """This rank's part of torch's state, by model parameter: 1-d tensors, 0-dim ``step``.

        Read-only; :meth:`load_state_dict` replaces. Edits of a tensor in place, on every rank,
        count where moments are kept in fp32 on the device, and are refused elsewhere.
        """
        if self._packed.plain_names is not None:
            return self._packed.plain_names
        if called_by_dcp("state"):
            raise outside_as_plain("state")
        self._packed.need_masters("state")
        return StateView(self._packed.shards, self._packed.update_of)

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            refuse_write()

    @contextmanager
    def as_plain(self) -> Iterator[None]:
        """Look like the plain optimizer to ``torch.distributed.checkpoint``; all ranks must enter.

        ``with optimizer.as_plain(): state = get_optimizer_state_dict(model, optimizer)``, likewise
        around ``set_optimizer_state_dict``, ``dcp.save`` and ``dcp.load``. Inside,
        :meth:`state_dict` gives the full state on every rank, in host memory of each, with
        masters where parameters are less exact. Before a first step it is a state as of a step with
        zero gradients, with which DCP begins a plain optimizer too; it is forgotten at the end
        unless one was loaded.

        Raises:
            RuntimeError: on every rank, with model parallelism, or inside :meth:`averaged`; of
                :meth:`step` inside it.
        """
        self._packed.refuse_averaged("as_plain")
        with self._full.as_plain():
            yield

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: local, without collectives, tensors and plain scalars only.

        Per parameter of which this rank owns a part, torch's state of that part and its ``master``
        (1-d fp32). Load it on the same rank of an equal layout; else there are checkpoints. On
        several ranks a script is warned once that saves it, or takes the state out of it: a file of
        it has no other rank's part.

        Inside :meth:`as_plain` the full state of all ranks; every rank must then call it.

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

        Every rank must call it: its own part, or the same plain state; of several optimizers a
        list, as :meth:`full_state_dicts` gives. Without masters in it the present ones stay.

        Raises:
            ValueError: on every rank, if one cannot load its state; nothing is changed then.
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
        self._clipped = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def full_parameters(self, average: str | None = None) -> dict[str, Tensor]:
        """The fp32 parameters by name, tied ones under each, on rank 0's host; empty elsewhere.

        Every rank must call it.

        Args:
            average: the name of an average, which is given in place of the parameters.

        Raises:
            ValueError: on every rank, for the name of no average.
        """
        return self._full.masters(average)

    def averaged(self, name: str) -> AbstractContextManager[None]:
        """Have an average in the model: ``with optimizer.averaged("ema"): evaluate(model)``.

        Every rank must enter and leave it. One sync publishes the average, cast as parameters are;
        another one restores the very same bits. Inside, :meth:`step` and what loads or changes
        weights are refused; state dicts and checkpoints hold the training's weights as ever.
        Needs room for the own span once more.

        Raises:
            ValueError: on every rank, for the name of no average.
            RuntimeError: on every rank, if an average is in the model already.
        """
        averages = self._packed.averages_of("averaged", name)
        switched: AbstractContextManager[None] = averages.switched(name)
        return switched

    def load_average(self, name: str, weights: Mapping[str, Tensor], steps: int = 0) -> None:
        """Go on from an existing average; every rank must call it.

        Args:
            name: of an average of the configuration.
            weights: full tensors by parameter name, such as ``AveragedModel.module.state_dict()``;
                what is no trained parameter is left out.
            steps: how many it has averaged, for its warm-up; one number on all ranks.

        Raises:
            ValueError: on every rank, for another name, a wrong number of steps, and a parameter
                that is missing or has another shape; nothing is changed then.
        """
        self._packed.averages_of("load_average", name).load(name, weights, steps)

    def full_state_dict(self, place: int | None = None) -> dict[str, Any]:
        """The unsharded optimizer's ``state_dict``, on rank 0; empty elsewhere. All must call it.

        Averages of weights are among the state.

        Args:
            place: of one of several optimizers, in the order in which they were given; without it
                groups of all are numbered through.
        """
        return self._full.gather(place)

    def full_state_dicts(self) -> list[dict[str, Any]]:
        """:meth:`full_state_dict` of each of the optimizers that were given; empty off rank 0."""
        places = range(len(self._packed.originals.optimizers))
        return [state for state in map(self._full.gather, places) if state]

    def wait_sync(self) -> None:
        """With ``overlap_sync``: have the updated parameters here. Local.

        Call it before you read or write parameters by hand, outside of a forward (an EMA, weight
        norms). Forwards, state dicts, ``copy.deepcopy``, and everything of this optimizer and of
        checkpoints wait by themselves. On a GPU it is the current stream that waits: call it before
        forwards on other streams branch off.
        """
        self._packed.sync.wait()


def packed_of(optimizer: StatefulOptimizer) -> PackedOptimizer:
    """Return what ``optimizer`` works with, for adapters and checkpoints of this library."""
    return optimizer._packed
