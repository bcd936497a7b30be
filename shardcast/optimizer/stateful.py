"""State in and out: of this rank, of all ranks, and averages of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import ProcessGroups, warn_first
from shardcast.memory.shard import Shard
from shardcast.messages import called_by_dcp, caller_of, outside_as_plain
from shardcast.optimizer.digest import digest
from shardcast.optimizer.full_state import FullState
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.setup import Plan
from shardcast.optimizer.state_dict import StateDict
from shardcast.optimizer.state_view import StateView, refuse_write
from shardcast.step.decide.decision import Decision

# Those that load a rank's part on that rank: AcceleratedOptimizer() does so at once.
KEEP_PARTS = ("shardcast", "accelerate.optimizer")


class StatefulOptimizer(PackedOptimizer):
    """Masters and state of the packs, for scripts and for torch's own helpers."""

    _warned = False
    _clipped: Decision | None = None  # by a clip, on the present gradients; loading forgets it

    def __init__(
        self, plan: Plan, shards: Sequence[Shard], process_groups: ProcessGroups,
        dtypes: Sequence[Mapping[str, torch.dtype]],
    ) -> None:  # fmt: skip
        super().__init__(plan, shards, process_groups, dtypes)
        self._states, self._full = StateDict(self), FullState(self)

    def digest(self) -> str:
        """A hash of all masters and optimizer state, 16 hexadecimal digits; all ranks must call it.

        It depends neither on the number of ranks nor on packs and partition, so it says whether two
        runs are equal bit for bit, or whether a checkpoint was loaded as it was saved. Costs a pass
        over the own masters and state, and waits for the device.
        """
        self.process_groups.everyone.together(self.resync_masters, self.device, "digest")
        return digest(self)

    def check_copies(self) -> None:
        """Raise a RuntimeError on every rank, which must call it, if copies differ in a bit.

        To find out why a run went wrong: it reads all parameters to the host. Copies over
        tensor-parallel ranks and of tied weights are compared, too.
        """
        self._full.check_copies()

    @property
    def state(self) -> Any:
        """Per model parameter, this rank's part of torch's state: 1-d tensors, 0-dim ``step``.

        Read-only; :meth:`load_state_dict` replaces. Edits of a tensor in place, on every rank,
        count where moments are kept in fp32 on the device, and are refused elsewhere.
        """
        if self._full.names is not None:
            return self._full.names
        if called_by_dcp("state"):
            raise outside_as_plain("state")
        return StateView(self.shards, self.update_of)

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
            RuntimeError: on every rank, beside model parallelism, or inside :meth:`averaged`; of
                :meth:`step` inside it.
        """
        self.refuse_averaged("as_plain")
        with self._full.as_plain():
            yield

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: local, without collectives, tensors and plain scalars only.

        Per parameter of which this rank owns a part, torch's state of that part and its ``master``
        (1-d fp32). Load it on the same rank of an equal layout; else there are checkpoints. Warns
        once where a script calls it on one of several ranks: a file of it has no other rank's part.

        Inside :meth:`as_plain` the full state of all ranks; every rank must then call it.

        Raises:
            RuntimeError: ``torch.distributed.checkpoint`` calls it outside of :meth:`as_plain`.
        """
        if self._full.names is None and called_by_dcp("state_dict"):
            raise outside_as_plain("state_dict")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._full.names is not None:
            result = self._full.gather_on_all()
        else:
            self._warn_of_a_part(caller_of("state_dict"))
            result = self._states.dump()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    def _warn_of_a_part(self, module: str) -> None:
        comm = self.process_groups.everyone
        if comm.size > 1 and not self._warned and not module.startswith(KEEP_PARTS):
            self._warned = True
            warn_first(
                f"state_dict: this is the part of one rank of {comm.size} alone, without "
                "which the others cannot resume: save with shardcast.checkpoint.save, or call "
                "full_state_dict() on every rank, which gives rank 0 the state of all"
            )

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's :meth:`state_dict`, or a plain state of the unsharded optimizer.

        Every rank must call it: its own part, or the same plain state; of several optimizers a
        list, as :meth:`full_state_dicts` gives. Without masters in it the present ones stay.

        Raises:
            ValueError: on every rank, if one cannot load its state; nothing is changed then.
        """
        self.refuse_averaged("load_state_dict")
        self.wait_sync()
        loaded: Any = dict(state_dict) if isinstance(state_dict, Mapping) else list(state_dict)
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
        switched: AbstractContextManager[None] = self.averages_of("averaged", name).switched(name)
        return switched

    def load_average(self, name: str, weights: Mapping[str, Tensor], steps: int = 0) -> None:
        """Go on from an existing average; every rank must call it.

        Args:
            name: of an average of the configuration.
            weights: full tensors by parameter name, such as ``AveragedModel.module.state_dict()``;
                what is no trained parameter is left out.
            steps: how many it has averaged, for its warm-up.

        Raises:
            ValueError: on every rank, for another name, and a parameter that is missing or has
                another shape; nothing is changed then.
        """
        self.averages_of("load_average", name).load(name, weights, steps)

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
        places = range(len(self.originals.optimizers))
        return [state for state in map(self._full.gather, places) if state]

    def wait_sync(self) -> None:
        """With ``overlap_sync``: have the updated parameters here. Local.

        Call it before you read or write parameters by hand, outside of a forward (an EMA, weight
        norms, a copy of a part of the model). Forwards, state dicts, a copy of the whole model, and
        everything of this optimizer and of checkpoints wait by themselves. On a GPU it is the
        current stream that waits: call it before forwards on other streams branch off.
        """
        self.sync.wait()
