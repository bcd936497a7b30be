"""``overlap_sync``: sync during the next forward, and decide which module waits for which pack.

Life of a pack with ``overlap_sync``::

    step()                  updated, its broadcasts launched      (all packs, one fixed order)
    forward of the root     waits for packs that a module may read of another module
    forward of a module     waits for packs of its own parameters
    next step()             waits for all others before the update overwrites what is being sent

A parameter may be read without a call of its module: a tied weight by ``F.linear`` in the root,
``nn.MultiheadAttention``'s ``out_proj``, or a block that is compiled or replayed from a graph. So
modules wait for their own pack only if the modules of all its parameters were called, by
``__call__`` and eagerly, between every two steps so far. For all other packs the first called
module waits, usually the root. In an evaluation it waits for all packs, because nothing is known
about its calls. A step syncs at once if its gradients did not come from an eager forward of the
root, or if any part of the model was compiled after ``shard()``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.hook import Hook
from shardcast.memory.pack import Pack
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option
from shardcast.step.step_hook import StepHook


class Overlap(StepHook):
    """The hooks of one model that wait for its packs. Calling it syncs, like ``Sync``.

    It holds no reference to the optimizer, because graphs of backwards hold it.
    """

    name = "overlap_sync"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._model, self._stages, self._sync = optimizer.model, optimizer.stages, optimizer.sync
        self._is_needed = optimizer.comm.size > 1
        # torch calls functions marked as constant while it traces, so before the graph runs.
        self._while_tracing = torch.compiler.assume_constant_result(lambda: self._trace())
        self._handles: list[RemovableHandle] = []
        self._warned = False  # that the model is compiled
        self._forget()

    def _forget(self) -> None:
        self._pack_of: dict[nn.Parameter, Pack | None] = {}  # None: the parameter is not synced
        self._mapped = -1  # number of packs in _pack_of
        # a backward reached an eager forward of the root since the last step
        self._backward = False
        # modules called with gradients enabled since the last step
        self._called: set[nn.Module] = set()
        self._always: set[nn.Module] | None = None  # modules called between every two steps so far
        self._entered = False  # a module was called since the last step
        self._first: list[Pack] = []  # packs that the first called module waits for
        self._traced = False  # a hook is part of a compiled graph, where it cannot wait

    def attach(self) -> None:
        """Add hooks by which modules wait, and let this object run the syncs."""
        self._forget()
        if self._is_needed:
            self._sync.by = self
            for module in self._model.modules():
                if any(True for _ in _compat.parameters(module)):
                    self._handles += self._install(module)

    def _install(self, module: nn.Module) -> list[RemovableHandle]:
        def hook(call: Callable[..., None]) -> Hook:
            # Copies and pickles of the model wait, too. A copy takes a module's own parameters
            # first, then its hooks, then its submodules. So a hook precedes all parameters except
            # the root's own.
            return Hook(call, self._sync.wait)

        # Before all other hooks: weight_norm's hook computes the weight from two parameters.
        return [
            module.register_forward_pre_hook(hook(self._before_forward), prepend=True),
            module.register_state_dict_pre_hook(hook(self._wait)),
            module.register_load_state_dict_pre_hook(hook(self._wait)),
        ]

    def __call__(self) -> None:
        """Sync. Only start it if the forwards so far show which modules must wait. Collective.

        Each rank decides by itself whether to wait here; it launches the same collectives. So no
        rank calls ``sync``, which on gloo sends messages instead of broadcasts.
        """
        modules, self._called = self._called, set()
        eager, self._backward = self._backward, False
        # A compiled graph would not wait, and a captured one must finish what it starts.
        captures = any(_compat.is_capturing(pack.data.device) for pack in self._sync.packs)
        if not eager or self._traced or captures:
            self._sync.start()
            self._sync.wait()
            if self._traced and not self._warned:  # as an error only now: other ranks sync, too
                self._warned = True
                warn_first(
                    "overlap_sync: has no effect, because a part of the model was compiled after "
                    "shard(), and compiled code cannot wait for parameters; leave the option off"
                )
            return
        if len(self._sync.packs) != self._mapped:
            self._map()
        always = self._always
        if always is None or not always <= modules:
            self._always = modules if always is None else always & modules
            called = {
                p for module in self._always for p in _compat.parameters(module, recurse=False)
            }
            self._first = [
                pack for pack in self._sync.packs if not called.issuperset(pack.in_model)
            ]
        self._entered = False
        self._sync.start()
        for stage in self._stages:
            for param in _compat.parameters(stage, recurse=False):  # copied before any hook
                self._wait_for(param)

    def _map(self) -> None:
        self._mapped = len(self._sync.packs)
        self._always = None
        self._pack_of = dict.fromkeys(_compat.parameters(self._model))
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
                # an evaluation may read parameters in a way that no training step did
                self._sync.wait()
        for pack in self._first:
            pack.wait()
        for param in _compat.parameters(module, recurse=False):
            self._wait_for(param)

    def _wait_for(self, param: nn.Parameter) -> None:
        # new since, as by functional_call; may derive from any parameter
        if param not in self._pack_of:
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
