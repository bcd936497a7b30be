"""What an optimizer promises beside the step: state in and out, memory, modes, repr."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.shard import Shard
from shardcast.optimizer import state
from shardcast.optimizer.state import Piece
from shardcast.plan.layout import Layout
from shardcast.step.combine.combine import Combine
from shardcast.step.sync.in_step import Sync
from shardcast.step.update.fused import Update

# Attributes in which a torch optimizer keeps the hooks that users registered on it.
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class StatefulOptimizer(torch.optim.Optimizer):
    """The part of :class:`shardcast.ShardedOptimizer` that makes no step."""

    layout: Layout
    config: ShardcastConfig
    _original: torch.optim.Optimizer
    _model: nn.Module
    _masters: list[Shard]
    _comm: Comm
    _combine: Combine
    _update: Update
    _sync: Sync
    _groups: list[dict[str, Any]]

    def _take_over(self, original: torch.optim.Optimizer) -> None:
        """Go on with the hooks and the state of ``original``, which can make no step any more."""
        for hooks in HOOKS:
            getattr(self, hooks).update(getattr(original, hooks))
        if original.state:
            self._take(*self._plan_plain(original.state))
        original.state = defaultdict(dict)
        for name in ("step", "add_param_group", "state_dict", "load_state_dict"):
            setattr(original, name, _refused(name))

    def _activate(self, master: Shard) -> None:
        """Reduce, update and sync this pack from now on."""
        raise NotImplementedError

    def _publish(self) -> None:
        """Cast all masters into their packs and sync."""
        raise NotImplementedError

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer that it was made from, by the model's parameters.

        What is assigned goes into them: other options for the same parameters, and further groups,
        which are added; every rank must then assign the same.
        """
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Sequence[dict[str, Any]]) -> None:
        if not self._masters:  # the base class is being initialised
            self._groups = list(value)
            return
        known, further = value[: len(self._groups)], value[len(self._groups) :]
        theirs, mine = (
            [[*map(id, g["params"])] for g in groups] for groups in (known, self._groups)
        )
        if theirs != mine:
            raise ValueError(
                "param_groups: expected the present groups with their parameters in order, got "
                "other parameters, which have no place in the packs; change options or add groups"
            )
        for group, options in zip(self._groups, [dict(options) for options in known], strict=True):
            group.clear()
            group.update(options)
        for group in further:
            self.add_param_group(group)

    @property
    def state(self) -> Any:
        """Per model parameter, this rank's part of torch's state: 1-d tensors, 0-dim ``step``.

        What is assigned or removed, here or in the state of one parameter, is so from the next
        step on; do the same on every rank. ``state.clear()`` has all moments begin anew. Edits of
        a tensor in place count where moments are kept in fp32 on the device.
        """
        return state.States(self._masters, self._update)

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        if self._masters:  # else the base class is being initialised
            # They may be views of what is cleared, as in state = dict(state).
            new = {param: state.apart(values) for param, values in value.items()}
            found = self.state
            found.clear()
            found.update(new)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: local, without collectives, tensors and plain scalars only.

        ``state`` maps the index of each parameter that this rank owns a part of to torch's state
        of that part and its ``master`` (1-d fp32). Load it on the same rank of an equal layout;
        for anything else there are checkpoints, and :meth:`full_state_dict`.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._sync.wait()
        result: dict[str, Any] = {
            "state": state.local_state(self._masters, self._update, self.param_groups),
            "param_groups": state.plain_groups(self.param_groups),
            "shardcast": {
                "format": state.FORMAT,
                "rank": self._comm.rank,
                "layout": self.layout.digest().hex(),
                "active": self._active(),
                "scaler": self._combine.state_dict(),
            },
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's :meth:`state_dict`, or a plain state of the unsharded optimizer.

        Every rank must call it: its own part, or the same plain state. The masters of a local
        state are published and synced; a plain state has none, the present ones stay.

        Raises:
            ValueError: on every rank, if the state of one is another rank's, or of another layout,
                format or model, or plain where another's is local; nothing is changed then.
        """
        self._sync.wait()
        loaded = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        self._take(*self._plan(loaded))
        head = loaded.get("shardcast")
        if head is not None:
            self._combine.load_state_dict(head["scaler"])
            self._publish()
        state.load_groups(self.param_groups, loaded["param_groups"])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _plan(self, loaded: Mapping[str, Any]) -> tuple[set[int], list[Piece]]:
        """What is to be activated and written; raises on all ranks if one of them cannot load.

        A rank that raises alone leaves the others waiting for it where they publish.
        """
        problem: Exception | None = None
        try:
            planned = self._plan_alone(loaded)
        except Exception as error:  # whatever it is, the others must hear of it
            problem = error
        local = "shardcast" in loaded
        told = torch.tensor(
            [problem is not None, local],
            dtype=torch.float32,
            device=self._masters[0].pack.data.device,
        )
        self._comm.all_reduce(told)
        refused, locals_ = told.tolist()
        if problem is not None:
            raise problem
        if refused or locals_ not in (0, self._comm.size):
            raise ValueError(
                "state_dict: another rank was given a state that it cannot load, its own error "
                "says why, or a plain one where this one's is local or the other way round; every "
                "rank loads what it saved itself, or all of them one and the same plain state"
            )
        return planned

    def _plan_alone(self, loaded: Mapping[str, Any]) -> tuple[set[int], list[Piece]]:
        for key in ("state", "param_groups"):
            if key not in loaded:
                raise ValueError(
                    f"state_dict: expected 'state' and 'param_groups', got no {key!r}; every rank "
                    "needs a state, full_state_dict() gives one to rank 0 alone: broadcast it"
                )
        state.check_groups(self.param_groups, loaded["param_groups"])
        head = loaded.get("shardcast")
        if head is None:
            params = list(state.numbered(self.param_groups))
            return self._plan_plain({params[n]: value for n, value in loaded["state"].items()})
        self._check_head(head)
        pieces = state.plan_local(self._masters, self._update, self.param_groups, loaded["state"])
        return set(head["active"]), pieces

    def _check_head(self, head: Mapping[str, Any]) -> None:
        here = {
            "format": state.FORMAT,
            "rank": self._comm.rank,
            "layout": self.layout.digest().hex(),
        }
        if any(head[key] != value for key, value in here.items()):
            raise ValueError(
                "state_dict: expected the local state of this rank and layout (rank "
                f"{self._comm.rank} of {self._comm.size}), got one of rank {head['rank']}"
                + (", another layout" if head["layout"] != here["layout"] else "")
                + "; load states of other layouts with shardcast.checkpoint.load"
            )

    def _active(self) -> list[int]:
        """Indices of the packs that are trained, or were at some time."""
        return [m.pack.layout.index for m in self._masters if m.grads is not None]

    def _activate_all(self, packs: set[int]) -> None:
        for master in self._masters:
            if master.grads is None and master.pack.layout.index in packs:
                self._activate(master)

    def _plan_plain(
        self, by_param: Mapping[Any, Mapping[str, Any]]
    ) -> tuple[set[int], list[Piece]]:
        used = (m for m in self._masters if any(by_param.get(p) for p in m.pack.params))
        pieces = state.plan_plain(self._masters, self._update, by_param)
        return {master.pack.layout.index for master in used}, pieces

    def _take(self, active: set[int], pieces: list[Piece]) -> None:
        self._activate_all(active)
        state.take(self._update, pieces)

    def full_parameters(self) -> dict[str, Tensor]:
        """The fp32 values of the parameters by name, tied ones under each; on rank 0's host.

        Every rank must call it; the others get an empty one. What ``model.state_dict()`` has is
        the cast of it.
        """
        names = {param: name for name, param in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        self._sync.wait()
        found = state.gather_masters(self._masters, self._comm)
        return {n: found[names[param]] for n, param in every if names[param] in found}

    def full_state_dict(self) -> dict[str, Any]:
        """The state as the unsharded optimizer's own ``state_dict`` would be; on rank 0.

        Every rank must call it; the others get an empty one. Loads into the plain optimizer,
        whose next step on the masters' values is then identical.
        """
        return state.gather_plain(self._masters, self._update, self.param_groups, self._comm)

    def wait_sync(self) -> None:
        """With ``overlap_sync``: have the updated parameters here. Local; else it does nothing.

        Call it before you read or write parameters by hand, outside of a forward (an EMA, weight
        norms, a copy of a part of the model). Forwards, ``state_dict()`` and ``load_state_dict()``
        of the model, a copy of all of it, and everything of this optimizer and of checkpoints
        wait by themselves. On a GPU it is the current stream that waits, not the host: call it
        before forwards on other streams branch off.

        Raises:
            RuntimeError: from the process group, where another rank was lost on the way.
        """
        self._sync.wait()

    def resync_masters(self) -> None:
        """Take model parameters that were changed by hand (surgery, EMA swap) as masters. Local.

        Without it the next step overwrites the change by the update of the old masters.
        ``model.load_state_dict`` is noticed by itself. Unchanged ones keep their full precision;
        changed ones have what ``param_dtype`` can hold.
        """
        self.wait_sync()
        for master in self._masters:
            master.absorb()

    def memory_report(self) -> dict[str, int]:
        """Bytes that this rank holds, by kind: parameters, gradients, masters and state.

        With ``offload`` masters and state are in host memory, the others on the device.
        """
        report = {"parameters": 0, "gradients": 0, "masters": 0, "state": 0}
        for master in self._masters:
            report["parameters"] += master.pack.data.nbytes
            if master.grads is not None:
                report["gradients"] += master.grads.nbytes
            if not master.in_place:
                report["masters"] += master.store.nbytes
        report["state"] = self._update.nbytes()
        return report

    def __repr__(self) -> str:
        """The optimizer's class, its groups and the layout's summary."""
        return f"Sharded{type(self._original).__name__}: {self.layout.lines()[0]}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be pickled or copied: its masters belong to this process "
            "and process group; use state_dict(), or shardcast.checkpoint.save"
        )

    def train(self, mode: bool = True) -> None:
        """Switch optimizers that have a ``train`` and an ``eval`` mode (schedule-free ones).

        Every rank must call it; the parameters are published and synced. Others ignore it.
        """
        self._sync.wait()
        if self._update.switch("train" if mode else "eval"):
            self._sync()

    def eval(self) -> None:
        """The evaluation mode of :meth:`train`."""
        self.train(False)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name}() of the original optimizer was called; it no longer owns the state: call "
            f"{name}() of the optimizer that shardcast.shard returned"
        )

    # A scheduler that watches the original looks for its own wrapper's mark, and would warn.
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return refuse
