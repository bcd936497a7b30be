"""F3: the sharded optimizer; one step is reduce, combine, update and cast, sync."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.layout import Fragment, Layout
from shardcast.master import Master
from shardcast.precision import Precision
from shardcast.reduce import Reducer
from shardcast.scaler import Scaler, Verdict
from shardcast.sync import Sync
from shardcast.update import make_update

FORMAT = 1  # of state_dict


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose fp32 masters and state are sharded over data-parallel ranks.

    Made by :func:`shardcast.shard`. ``param_groups`` hold the *model* parameters and are shared
    with the optimizer it was made from, so schedulers built on either work. ``step`` and
    ``clip_grad_norm_`` are collective: every rank of the group must call them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        layout: Layout,
        masters: Sequence[Master],
        comm: Comm,
        precision: Precision,
        config: ShardcastConfig,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.layout = layout
        self.config = config
        self._original = optimizer
        self._comm = comm
        self._masters = list(masters)
        self._verdict: Verdict | None = None
        active = [master for master in masters if master.pack.layout.requires_grad]
        packs = [master.pack for master in active]
        self._reduce = Reducer(packs, comm, precision, config)
        for master, grads in zip(active, self._reduce.grads, strict=True):
            master.grads = grads
        device = masters[0].pack.data.device
        self._scaler = Scaler(self._reduce.grads, comm, config, device)
        self._update = make_update(optimizer, active, config)
        self._sync = Sync(packs, comm, config)
        self._handles = [
            *precision.install_casts(model),
            _on_backward(model, self._reduce.arm),
        ]
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            getattr(self, hooks).update(getattr(optimizer, hooks))
        optimizer.step = _refuse_step  # type: ignore[method-assign]

    # -- the step ---------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step: unscale, clip, update, cast, broadcast. Every rank must call it.

        Waits for no device; a step with a non-finite gradient on any rank changes nothing.

        Args:
            closure: reevaluates the model, runs backward and returns the loss.

        Returns:
            What ``closure`` returned, else ``None``.

        Raises:
            RuntimeError: inside :meth:`no_sync`; or with a loss scale in use and a loss that was
                not scaled; or after ``max_skipped_steps`` skips in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_scaled_loss()
        verdict = self._verdict or self._combine(self.config.max_grad_norm)
        self._update(verdict, self._present(verdict))
        self._scaler.update(verdict)
        self._sync()
        self._last_norm, self._verdict = verdict.norm, None
        _compat.note_step_called(self._original)
        self._scaler.poll()
        return loss

    def _combine(self, max_norm: float | None) -> Verdict:
        self._check_packs()
        self._reduce.finish()
        return self._scaler.combine(max_norm)

    def _present(self, verdict: Verdict) -> dict[Master, list[bool]]:
        """Per master and fragment, whether some rank has a gradient."""
        active = (master for master in self._masters if master.grads is not None)
        return {
            master: [
                there
                for slot, there in zip(master.pack.layout.slots, slots, strict=True)
                if slot.numel and slot.offset < master.pack.own.stop
                and slot.end > master.pack.own.start
            ]
            for master, slots in zip(active, verdict.present, strict=True)
        }  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as ``torch.optim.Optimizer.zero_grad``. Local."""
        self._verdict = None
        super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backwards accumulate locally and nothing is sent.

        Put all micro-batches of a step but the last in it, on every rank alike.
        """
        return self._reduce.no_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale; call ``backward()`` on the result.

        Needed with fp16 (``loss_scale``); elsewhere it returns ``loss`` itself, so a script may
        call it always. Local.
        """
        return self._scaler.scale_loss(loss)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global gradient norm in the coming step; every rank must call it.

        Finishes the reduction now; the clipping itself is folded into the update. Wins over
        ``max_grad_norm`` for this step.

        Returns:
            The global norm before clipping, 0-dim, loss scale removed; equal on all ranks.
        """
        self._require_scaled_loss()
        self._verdict = self._combine(float(max_norm))
        return self._verdict.norm.float()

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm of the last step before clipping, 0-dim; ``None`` before any."""
        return None if self._last_norm is None else self._last_norm.float()

    @property
    def loss_scale(self) -> Tensor | None:
        """The present loss scale, 0-dim, or ``None`` where none is in use."""
        return self._scaler.loss_scale

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for non-finite gradients. Reading it waits for the device."""
        return self._scaler.skipped_steps

    _last_norm: Tensor | None = None

    # -- state ------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Per model parameter, this rank's part of torch's state: 1-d views, 0-dim ``step``."""
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for master, position, param in self._owned():
            state = self._update.fragment_state(master, position)
            if state:
                found[param] = state
        return found

    @state.setter
    def state(self, value: Any) -> None:
        """The base class assigns an empty one; ours is a view of the shards."""

    def _owned(self) -> Iterator[tuple[Master, int, nn.Parameter]]:
        """Each fragment of this rank that is being optimized, with its model parameter."""
        for master in self._masters:
            if master.grads is not None:
                params = dict(zip(master.pack.layout.slots, master.pack.params, strict=True))
                for position, fragment in enumerate(master.fragments):
                    yield master, position, params[fragment.slot]

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: local, without collectives, tensors and plain scalars only.

        ``state`` maps the index of each parameter that this rank owns a part of to torch's state
        of that part and its ``master`` (1-d fp32). Load it on the same rank of an equal layout;
        for anything else there are checkpoints.
        """
        index = {
            param: number
            for number, param in enumerate(p for g in self.param_groups for p in g["params"])
        }
        state = {
            index[param]: {
                "master": _part(master, master.fragments[position]).clone(),
                **{
                    name: value.detach().clone() if isinstance(value, Tensor) else value
                    for name, value in self._update.fragment_state(master, position).items()
                },
            }
            for master, position, param in self._owned()
        }
        groups = [
            {**group, "params": [index[param] for param in group["params"]]}
            for group in self.param_groups
        ]
        return {
            "state": state,
            "param_groups": groups,
            "shardcast": {
                "format": FORMAT,
                "rank": self._comm.rank,
                "layout": self.layout.digest().hex(),
                "scaler": self._scaler.state_dict(),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's :meth:`state_dict`, publish the masters and sync.

        Every rank must call it, each with its own part.

        Raises:
            ValueError: the state is another rank's, or of another layout or format.
        """
        head = state_dict.get("shardcast")
        here = {"rank": self._comm.rank, "layout": self.layout.digest().hex()}
        if head is None or head["format"] != FORMAT or any(head[k] != v for k, v in here.items()):
            raise ValueError(
                "state_dict: expected the local state of this rank and layout "
                f"(rank {self._comm.rank} of {self._comm.size}), got "
                + ("a plain optimizer state" if head is None else f"one of rank {head['rank']}")
                + "; load states of other layouts with shardcast.checkpoint.load"
            )
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update((key, value) for key, value in loaded.items() if key != "params")
        index = {
            param: number
            for number, param in enumerate(p for g in self.param_groups for p in g["params"])
        }
        for master, position, param in self._owned():
            state = dict(state_dict["state"][index[param]])
            _part(master, master.fragments[position]).copy_(state.pop("master"))
            self._update.load_fragment(master, position, state)
        self._scaler.load_state_dict(head["scaler"])
        self._publish()

    @torch.no_grad()
    def resync_masters(self) -> None:
        """Take the model's present parameters as masters, after they were changed by hand. Local.

        Without it the next step overwrites the change by the update of the old masters. In low
        precision the masters then hold the rounded values.
        """
        for master in self._masters:
            master.absorb()

    def _publish(self) -> None:
        for master in self._masters:
            master.publish()
        self._sync()

    def memory_report(self) -> dict[str, int]:
        """Bytes that this rank holds, by kind: parameters, gradients, masters and state."""
        report = {"parameters": 0, "gradients": 0, "masters": 0, "state": 0}
        for master in self._masters:
            report["parameters"] += master.pack.data.nbytes
            if master.grads is not None and master.grads.allocated:
                report["gradients"] += master.grads.data.nbytes
            if not master.in_place:
                report["masters"] += master.data.nbytes
        report["state"] = self._update.nbytes()
        return report

    # -- the rest of the Optimizer contract -------------------------------------------------

    def __repr__(self) -> str:
        """The optimizer's class, its groups and the layout's summary."""
        return f"Sharded{type(self._original).__name__}: {self.layout.lines()[0]}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be pickled or copied: its masters belong to this process "
            "and process group; use state_dict(), or shardcast.checkpoint.save"
        )

    def _require_scaled_loss(self) -> None:
        if self._scaler.loss_scale is not None and not self._scaler.loss_was_scaled:
            raise RuntimeError(
                "step(): a loss scale is in use but the loss was not scaled; call "
                "optimizer.scale_loss(loss).backward()"
            )

    def _check_packs(self) -> None:
        for master in self._masters:
            name = master.pack.strayed()
            if name is not None:
                raise RuntimeError(
                    f"parameter {name!r} was moved out of its pack after shardcast.shard (by "
                    "model.to, model.half, load_state_dict(assign=True) or the like); do that "
                    "before sharding"
                )


def _part(master: Master, fragment: Fragment) -> Tensor:
    return master.data[master.local(fragment.start, fragment.stop)]


def _refuse_step(closure: Any = None) -> Any:
    raise RuntimeError(
        "step() of the original optimizer was called; it no longer owns the state: call step() of "
        "the optimizer that shardcast.shard returned"
    )


def _on_backward(model: nn.Module, begin: Callable[[], None]) -> Any:
    """Call ``begin`` whenever a backward reaches an output of ``model``; returns the handle."""

    def watch(_module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _grad: begin())

    return model.register_forward_hook(watch)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
