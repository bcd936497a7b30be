"""``overlap_sync``: sync during the next forward; who waits for which pack, and when.

Life of a pack with ``overlap_sync``::

    step()                  updated, its broadcasts launched      (all packs, one fixed order)
    forward of the root     packs waited for that some module may read of another one
    forward of a module     packs of its own parameters waited for
    next step()             all others waited for, before the update writes what is being sent

A parameter may be read without its module being called: a tied weight by ``F.linear`` in the
root, ``nn.MultiheadAttention``'s ``out_proj``, a whole block that is compiled or replayed from a
graph. So a pack is left to its modules only if the modules of all its parameters were called, by
``__call__`` and eagerly, between every two steps so far; all others are waited for by the first
module that is called, usually the root. An evaluation, of which nothing is known, waits for all
packs there. A step whose gradients did not come from an eager forward of the root syncs at once,
and so do all steps of a model of which any part was compiled since it was sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardcast import _compat
from shardcast.hook import Hook
from shardcast.memory.pack import Pack
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option
from shardcast.step.step_hook import StepHook


class Overlap(StepHook):
    """The hooks of one model that wait for its packs; calling it syncs, as ``Sync`` does.

    It does not keep the optimizer: graphs of backwards keep it.
    """

    name = "overlap_sync"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._model, self._stages, self._sync = optimizer.model, optimizer.stages, optimizer.sync
        self._is_needed = optimizer.comm.size > 1
        # torch calls what it takes for a constant while it traces, so before the graph runs.
        self._while_tracing = torch.compiler.assume_constant_result(lambda: self._trace())
        self._handles: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self._pack_of: dict[nn.Parameter, Pack | None] = {}  # None: not synced
        self._mapped = -1  # number of packs in it
        self._backward = False  # one came through an eager forward of the root since the last step
        self._called: set[nn.Module] = set()  # with gradients enabled, since the last step
        self._always: set[nn.Module] | None = None  # between every two steps so far
        self._entered = False  # a module was called since the last step
        self._first: list[Pack] = []  # those that the first module waits for
        self._traced = False  # some hook is part of a compiled graph, where it waits for nothing

    def attach(self) -> None:
        """Have modules wait for their parameters, and syncs run as this object says."""
        self._forget()
        if self._is_needed:
            self._sync.by = self
            for module in self._model.modules():
                if any(True for _ in module.parameters()):
                    self._handles += self._install(module)

    def _install(self, module: nn.Module) -> list[RemovableHandle]:
        def hook(call: Callable[..., None]) -> Hook:
            # Copies and pickles of the model wait, too. In a copy a module's own parameters come
            # first, then its hooks, then the modules inside it: all but the root's own parameters
            # come after a hook.
            return Hook(call, self._sync.wait)

        # Before all others: one of weight_norm's computes the weight from two parameters.
        return [
            module.register_forward_pre_hook(hook(self._before_forward), prepend=True),
            module.register_state_dict_pre_hook(hook(self._wait)),
            module.register_load_state_dict_pre_hook(hook(self._wait)),
        ]

    def __call__(self) -> None:
        """Sync: start it, if the forwards so far show who is to wait. Collective.

        Whether a rank only starts or also waits is its own business; it launches the same. So no
        rank calls ``sync``, which on gloo sends messages where what is started are broadcasts.
        """
        modules, self._called = self._called, set()
        eager, self._backward = self._backward, False
        # A compiled graph would not wait, a captured one must end what it starts.
        captures = any(_compat.is_capturing(pack.data.device) for pack in self._sync.packs)
        if not eager or self._traced or captures:
            self._sync.start()
            self._sync.wait()
            return
        if len(self._sync.packs) != self._mapped:
            self._map()
        always = self._always
        if always is None or not always <= modules:
            self._always = modules if always is None else always & modules
            called = {p for module in self._always for p in module.parameters(recurse=False)}
            self._first = [
                pack for pack in self._sync.packs if not called.issuperset(pack.in_model)
            ]
        self._entered = False
        self._sync.start()
        for stage in self._stages:
            for param in stage.parameters(recurse=False):  # copied before any hook
                self._wait_for(param)

    def _map(self) -> None:
        self._mapped = len(self._sync.packs)
        self._always = None
        self._pack_of = dict.fromkeys(self._model.parameters())
        for pack in self._sync.packs:
            self._pack_of.update(dict.fromkeys(pack.in_model, pack))

    def begin_backward(self) -> None:
        """Note that the gradients will come from an eager forward of the root."""
        self._backward = True

    def close(self) -> None:
        """Remove the hooks."""
        self._sync.by = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(self, module: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling():
            self._while_tracing()
            return
        if torch.is_grad_enabled():
            self._called.add(module)
        if not self._sync.started:
            return
        if module is self._model or not self._entered:
            self._entered = True
            if not (module.training and torch.is_grad_enabled()):
                self._sync.wait()  # an evaluation may read what no training step has shown
        for pack in self._first:
            pack.wait()
        for param in module.parameters(recurse=False):
            self._wait_for(param)

    def _wait_for(self, param: nn.Parameter) -> None:
        if param not in self._pack_of:  # put there since, as by functional_call: made of any
            self._sync.wait()
        elif (pack := self._pack_of[param]) is not None:
            pack.wait()

    def _trace(self) -> None:
        self._traced = True
        self._sync.wait()

    def _wait(self, *_args: object) -> None:
        self._sync.wait()


OPTION = Option(
    help="sync during the next forward, where each module waits for its own parameters; call "
    "wait_sync() before you read parameters outside a forward",
    hook=Overlap,
)
