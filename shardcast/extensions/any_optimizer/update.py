"""Update by any torch optimizer: its own ``step`` on masters instead of model parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast._compat import bare_step, observer
from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.extensions.any_optimizer import muon, probe, twins
from shardcast.memory.shard import Shard
from shardcast.plan.layout import Fragment, GroupId, with_values
from shardcast.plan.originals import ELEMENTWISE, is_known
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.decision import Decision
from shardcast.step.update.epilogues import Epilogue
from shardcast.step.update.fusion import UpdateNumbers, choose_executor
from shardcast.step.update.rules import NoRule
from shardcast.step.update.state import Ready, ShardState, Update

PROBATION = 10  # steps in which a third-party class is watched


class AnyOptimizerUpdate(Update):
    """Any torch optimizer, run on masters: one master parameter per fragment, in its group.

    The inner optimizer is a twin of the user's: same class and attributes, but with masters instead
    of model parameters. With the ``whole`` partition masters have their parameter's shape; with
    ``even`` they are 1-d.

    Muon updates its packs in turns, so that finished packs are synced meanwhile. A turn is as large
    as one of Muon's batches, so the number of kernel launches does not grow.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        ready: Ready,
        config: ShardcastConfig,
        epilogues: tuple[Epilogue, ...] = (),
    ) -> None:
        super().__init__(optimizer, config, epilogues, ready)
        self._comm = comm
        self.elementwise = type(optimizer) in ELEMENTWISE
        self._watched = 0 if is_known(optimizer) else PROBATION  # steps left
        self._params: dict[Shard, list[nn.Parameter]] = {}
        self._inner = twins.bare_twin(optimizer)
        if isinstance(optimizer, torch.optim.Muon):
            self._step: Callable[[], object] = partial(muon.step_, self._inner)
        else:
            self._step = bare_step(self._inner)

    def add(self, shard: Shard) -> None:
        self._shards.append(shard)
        if shard.fragments:
            self._params[shard] = [self._master_parameter(shard, part) for part in shard.fragments]
            self._states[shard] = ShardState(shard, self._config, self.epilogues, 0)
            self._read_groups()

    @staticmethod
    def _master_parameter(shard: Shard, fragment: Fragment) -> nn.Parameter:
        flat = shard.data[shard.local(fragment.start, fragment.stop)]
        return nn.Parameter(flat.view(fragment.shape))

    def _read_groups(self, shards: Sequence[Shard] = ()) -> None:
        """Set the inner groups' options to the outer ones' current options, and their masters.

        Args:
            shards: shards whose masters to use; by default all.
        """
        groups = self._inner.param_groups
        groups += [{} for _ in self._optimizer.param_groups[len(groups) :]]
        for outer, inner in zip(self._optimizer.param_groups, groups, strict=True):
            inner.clear()
            inner.update({**outer, "params": []})
        for shard in shards or self._params:
            params = self._params.get(shard, [])
            for fragment, param in zip(shard.fragments, params, strict=True):
                groups[fragment.slot.group.position]["params"].append(param)

    @torch.no_grad()
    def __call__(self, decision: Decision) -> None:
        """See :meth:`Update.__call__`.

        The class decides on the host whether to step, so on an accelerator this waits once for the
        decision.
        """
        if decision.skip.tolist():
            for shard in self._params:
                shard.settle()
            return
        self._read_groups()
        self._begin_epilogues(torch.ones((), device=decision.skip.device))
        *early, last = self._turns()
        for shards in early:
            self._update(shards, decision)
            if not self._is_apart:
                self._ready([shard.pack for shard in shards])
        self._update(last, decision)
        self._write_groups()
        if early:
            self._read_groups()  # all masters again

    def _turns(self) -> list[list[Shard]]:
        """Return lists of shards that are updated together. Equal on all ranks."""
        if self.elementwise and self._is_apart:
            return [[shard] for shard in self._shards]  # one is copied up while the next is updated
        if not isinstance(self._optimizer, torch.optim.Muon):
            return [self._shards]  # one step() for all, because the class may count steps
        turns: list[list[Shard]] = [[]]
        elements = 0
        for shard in self._shards:
            if elements >= muon.BATCH * self._comm.size:
                turns.append([])
                elements = 0
            turns[-1].append(shard)
            elements += shard.pack.layout.numel
        return turns

    def _update(self, shards: Sequence[Shard], decision: Decision) -> None:
        owned = [shard for shard in shards if shard in self._params]
        if len(shards) < len(self._shards):
            self._read_groups(shards)
        for shard in owned:
            shard.absorb(publishes=True)  # takes in values that a script wrote
        for shard in owned:
            self._set_gradients(shard, decision)
        with torch.enable_grad():  # some optimizers use autograd
            if self._watched and self._comm.size > 1:
                self._watched -= 1
                self._step_watched(shards[0].pack.data.device)
            else:
                self._step()
        for shard in owned:
            self._take_masters(shard)
            shard.publish()
            if self.epilogues:
                self._run_epilogues(shard)
        for shard in shards:
            self._finish(shard)

    def _set_gradients(self, shard: Shard, decision: Decision) -> None:
        """Set the masters' gradients, times the factors, until :meth:`_take_masters`."""
        own = shard.mean
        shard.home.arrive()
        grads = own.to(MASTER_DTYPE)
        for part, factor in with_values(shard.pack.ranges, decision.factors):
            if factor is not None:
                grads = grads.clone() if grads is own else grads
                grads[part].mul_(factor)
        present = shard.present(decision.present[shard.pack])
        for param, fragment, is_present in zip(
            self._params[shard], shard.fragments, present, strict=True
        ):
            # Otherwise grad is None and the class skips it. Some would divide by its elements.
            if is_present and (fragment.numel or self.elementwise):
                grad = grads[shard.local(fragment.start, fragment.stop)]
                param.grad = grad.view(param.shape)

    def _write_groups(self) -> None:
        """Copy numbers that the inner optimizer keeps in its groups, such as counters, outwards."""
        groups = zip(self._optimizer.param_groups, self._inner.param_groups, strict=True)
        # in place, because the script and its schedulers hold the outer groups
        for outer, inner in groups:
            for key in outer.keys() - inner.keys():
                del outer[key]
            outer.update((key, value) for key, value in inner.items() if key != "params")

    def _step_watched(self, device: torch.device) -> None:
        """Step a third-party class, and check what its probe could not see.

        Raises:
            TypeError: on every rank: the step called a collective, or failed, for example on a rank
                that owns no parameter of some group.
            RuntimeError: on every rank: a number in the groups differs between ranks. So it was
                computed from all of a rank's parameters, and no partition can be right.
        """

        def stepped() -> dict[str, float]:
            try:  # compiled functions would not be recompiled under a StepObserver
                with torch.compiler.set_stance("force_eager"), observer.StepObserver():
                    self._step()
            except observer.CollectiveError as error:
                raise probe.collective_refusal(self._optimizer) from error
            except (MemoryError, torch.OutOfMemoryError):
                raise  # scripts catch these
            except Exception as error:
                raise self._failed(error) from error
            return {
                f"{name!r} of group {number}": value
                for number, group in enumerate(self._inner.param_groups)
                for name, value in probe.numbers(group).items()
            }

        numbers_of_ranks = self._comm.collect(stepped, device, "step")
        # A rank without parameters may have fewer numbers, but raises with the others.
        for option in dict.fromkeys(name for numbers in numbers_of_ranks for name in numbers):
            values = [numbers[option] for numbers in numbers_of_ranks if option in numbers]
            if any(value != values[0] for value in values):
                raise RuntimeError(
                    f"optimizer: {type(self._optimizer).__name__} computed {option} as "
                    f"{', '.join(map(str, values))} on the ranks: its update of one parameter "
                    "depends on all of them, so it cannot be sharded; use it with DDP, or use "
                    "another optimizer"
                )

    def _failed(self, error: Exception) -> TypeError:
        name, groups = type(self._optimizer).__name__, self._inner.param_groups
        own, every = (
            sum(len(group["params"]) for group in of)
            for of in (groups, self._optimizer.param_groups)
        )
        empty = [number for number, group in enumerate(groups) if not group["params"]]
        return TypeError(
            f"optimizer: step() of {name} failed on rank {self._comm.rank}, which owns {own} of "
            f"{every} parameters" + (f", none of group {empty[0]}" if empty else "") + " "
            f"({type(error).__name__}: {error}); if that is the reason, let its step use only the "
            "parameters that it finds in its groups and skip empty groups, or use another optimizer"
        )

    def _take_masters(self, shard: Shard) -> None:
        """Copy masters that the class stored elsewhere, and remove the gradients."""
        for param, part in zip(self._params[shard], shard.fragments, strict=True):
            param.grad = None  # otherwise the pack's gradients would stay alive
            flat = shard.data[shard.local(part.start, part.stop)]
            if param.data_ptr() != flat.data_ptr():  # the class assigned param.data
                flat.copy_(param.detach().reshape(-1))
                param.data = flat.view(param.shape)

    def _run_epilogues(self, shard: Shard) -> None:
        """Run the epilogues in a pass of their own, over published masters."""
        state, home = self._states[shard], shard.home
        fusion = state.prepare(NoRule())
        execute = choose_executor(self._config, home.device, home.is_apart)
        behind = self._behind_rules(execute.on_host)
        numbers = UpdateNumbers(self._epilogue_steps.new_zeros(()), (), *behind)
        execute(fusion, state.operands(slice(0, shard.pack.own.numel), fusion), numbers, None, None)

    def switch(self, mode: str) -> bool:
        self._read_groups()
        for shard in self._params if callable(getattr(self._inner, mode, None)) else ():
            shard.absorb()  # values that a script wrote in the other mode
        if not twins.switch(self._inner, mode):
            return False
        self._write_groups()
        for shard in self._params:
            self._take_masters(shard)
            shard.publish()
            shard.home.send()
        return True

    def begin_state(self) -> None:
        masters = [param for params in self._params.values() for param in params]
        copies = [param.detach().clone() for param in masters]
        self._read_groups()
        for param in masters:
            param.grad = torch.zeros_like(param)
        with torch.enable_grad():
            self._step()
        for shard in self._params:
            self._take_masters(shard)
        for param, values in zip(masters, copies, strict=True):
            param.detach().copy_(values)
            param.grad = None

    def nbytes(self) -> int:
        return sum(
            value.nbytes
            for params in self._params.values()
            for param in params
            for value in self._inner.state.get(param, {}).values()
            if isinstance(value, Tensor) and value.dim()
        )

    def memory(self) -> Iterator[Tensor]:
        """See :meth:`Update.memory`. Tensors in a class's own objects are not found.

        A NumPy array refers to a tensor rather than its memory; that memory then has to stay in
        place.
        """
        yield from super().memory()
        for params in self._params.values():
            yield from params
            states = [self._inner.state.get(param, {}) for param in params]
            for value in _compat.plain_tensors(states):
                if value.dim() and value.untyped_storage().resizable():
                    yield value

    def fragment_state(self, shard: Shard, number: int, decode: bool = True) -> dict[str, Any]:
        """See :meth:`Update.fragment_state`; every tensor has the master parameter's shape."""
        averages = super().fragment_state(shard, number, decode)
        if shard not in self._params:
            return {}
        param = self._params[shard][number]
        shaped = {name: v.view(param.shape) if v.dim() else v for name, v in averages.items()}
        of_class = {
            name: shard.home.given(v) if isinstance(v, Tensor) and v.dim() else v
            for name, v in self._inner.state.get(param, {}).items()
        }
        return {**of_class, **shaped}

    def edit(self, shard: Shard, number: int, name: str, changed: Tensor, values: Tensor) -> None:
        state = self._inner.state[self._params[shard][number]][name]
        new = values.view(state.shape).to(state)
        state.copy_(torch.where(changed.view(state.shape).to(state.device), new, state))

    def _load_state(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        param = self._params[shard][number]
        loaded = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                # Copies, because the class writes into them.
                value = value.detach().clone().to(param.device)
                if value.dim() and self.elementwise:
                    value = value.view(param.shape)
                if value.is_floating_point() and name != "step":  # as in torch's load_state_dict
                    value = value.to(param.dtype)
            loaded[name] = value
        self._inner.state.pop(param, None)
        if loaded:
            self._inner.state[param] = self._read_by_class(
                shard.fragments[number].slot.group, param, loaded
            )

    def _read_by_class(
        self, number: GroupId, param: Tensor, state: dict[str, Any]
    ) -> dict[str, object]:
        """Return a loaded state as the class converts it; it may keep values in another dtype.

        Like torch's ``load_state_dict``, this calls ``__setstate__`` at the end.
        """
        inner = self._inner
        if type(inner).__setstate__ is torch.optim.Optimizer.__setstate__:
            return state
        group = {**inner.param_groups[number.position], "params": [param]}
        whole = {"state": inner.state, "param_groups": inner.param_groups}
        try:
            inner.__setstate__(
                {"state": defaultdict(dict, {param: state}), "param_groups": [group]}
            )
            return dict(inner.state[param])
        finally:
            vars(inner).update(whole)
