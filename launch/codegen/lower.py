"""From a function that the library gives to ``torch.compile`` to the Triton kernels of a GPU.

Dynamo traces it on tensors of the host, as it does on any device, with the options that the
library gave, so that sizes are symbols wherever they are in a real run; the graph is then moved
to a GPU and handed to Inductor, which stops when the code is written.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from codegen.pretend import gpu
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule
from torch.fx.experimental import _config
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda:0")
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''\n(.*?)\n''', device_str", re.S)


@dataclass(frozen=True)
class Call:
    """A call of a function given to ``torch.compile``; ``args`` are tensors of the host."""

    function: Callable[..., None]
    options: dict[str, Any]
    args: tuple[Any, ...]


@dataclass
class Graph:
    """What was generated for one compiled graph.

    Attributes:
        name, stage: of the function.
        source: the module that Inductor wrote, with a function ``call`` that launches the kernels.
        kernels: source of every Triton kernel, by name.
        others: kernels of libraries and copies that a call launches beside them.
        calls: of the graph, each with the elements of its largest operand.
    """

    name: str
    stage: str
    source: str
    kernels: dict[str, str]
    others: list[str]
    calls: list[int] = field(default_factory=list)


class _WrittenError(Exception):
    """The code is there; nothing else is wanted of Inductor."""


class Compiler:
    """Stands for ``torch.compile`` while tensors are fake: notes the calls, which compute nothing.

    Attributes:
        calls: in order.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """As ``torch.compile(function, **options)``."""

        def call(*args: Any) -> None:
            with _disable_current_modes():
                self.calls.append(Call(function, options, on_host(args)))

        return call


def lower(
    calls: list[Call], note: Callable[[str, Sequence[Any]], None] = lambda _source, _args: None
) -> list[Graph]:
    """Trace calls as ``torch.compile`` does, in order; what a GPU would run for them.

    ``note`` gets the source of each call's graph, with the arguments of the source's ``call``.
    """
    found: list[Graph] = []
    compiled: dict[Any, Callable[..., None]] = {}
    torch.compiler.reset()
    for call in calls:
        options = dict(call.options)
        # Settings of Inductor; our backend knows none.
        patches = options.pop("options", None) or options.pop("backend").settings

        def backend(
            graph_module: GraphModule,
            _inputs: list[Any],
            of: Callable[..., None] = call.function,
            patches: dict[str, Any] = patches,
        ) -> Callable[..., Any]:
            graph = generated(of, graph_module, patches)
            found.append(graph)
            outputs = next(node for node in graph_module.graph.nodes if node.op == "output")

            def run(*args: Any) -> tuple[None, ...]:
                graph.calls.append(max(a.numel() for a in args if isinstance(a, Tensor)))
                note(graph.source, args)
                return (None,) * len(outputs.args[0])

            return run

        if call.function not in compiled:
            compiled[call.function] = torch.compile(call.function, **options, backend=backend)
        # As the library compiles several ranges in one graph: equal lengths mean nothing.
        with _config.patch(use_duck_shape=not patches.get("combo_kernels")):
            compiled[call.function](*call.args)
    return found


def on_host(args: Any) -> Any:
    """Real tensors of the host in place of fake ones; one object stays one object."""
    known: dict[int, Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = torch.zeros(value.shape, dtype=value.dtype)
            for name, mark in vars(value).items():
                if name.startswith("_dynamo"):  # of torch._dynamo.mark_static and its like
                    setattr(known[id(value)], name, mark)
        return known[id(value)]

    return tree_map(real, args)


def stage_of(function: Callable[..., None]) -> str:
    """The stage of a step in whose folder a function is; of an option's, what it is called."""
    if function.__module__.startswith("shardcast.extensions."):
        return function.__name__
    return function.__module__.removeprefix("shardcast.step.").partition(".")[0]


def generated(
    function: Callable[..., None], graph_module: GraphModule, patches: dict[str, Any]
) -> Graph:
    """What Inductor writes for a graph that Dynamo traced on the host, on a GPU."""
    moved = copy.deepcopy(graph_module)
    for node in moved.graph.nodes:
        node.kwargs = {
            key: CUDA if isinstance(value, torch.device) else value
            for key, value in node.kwargs.items()
        }
    moved.recompile()
    traced = [n.meta["example_value"] for n in graph_module.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(traced)
    assert mode is not None
    with mode:
        inputs = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
            if isinstance(value, Tensor)
            else value
            for value in traced
        ]
    written: list[str] = []
    codegen = GraphLowering.codegen

    def stop(self: GraphLowering) -> None:
        code, _ = codegen(self)
        written.append(getattr(code, "value", code))
        raise _WrittenError

    with gpu(), mock.patch.object(GraphLowering, "codegen", stop):
        try:
            compile_fx.compile_fx(moved, inputs, config_patches=patches)
        except Exception:  # _WrittenError, within others
            if not written:
                raise
    (source,) = written
    others = re.findall(r"^\s+(extern_kernels\.\w+|\w+\.copy_|aten\.\w+)\(", source, re.M)
    kernels = dict(KERNEL.findall(source))
    return Graph(function.__name__, stage_of(function), source, kernels, others)
