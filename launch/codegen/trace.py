"""One step of the library on a GPU that is not there: what it launches, and where it would wait.

The optimizer, the model and its gradients are fake tensors on "cuda", so the branches for CUDA
run. What is compiled goes to :mod:`codegen.lower`; everything else is noted operation
by operation. Data has no values: where the host asks for one, it would wait for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from codegen.lower import CUDA, Compiler, Graph, lower
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardcast
from shardcast import _compat
from shardcast._compat import inductor
from shardcast.step.update.epilogues import Epilogue
from shardcast.testing import fake_world

SHAPES = ((1000, 700), (700,), (420, 701), (33,))  # 995,153 elements: no multiple of anything
SMALL = 128  # operations on less than 1/128 of the elements are not counted as passes
WRITES_ONLY = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")


@dataclass
class Pass:
    """One eager operation on many elements.

    Attributes:
        stage: folder or module of the library below which it was called.
        bytes: read and written, each operand once.
    """

    name: str
    stage: str
    bytes: int
    double: bool


@dataclass
class Step:
    """What one step launches.

    Attributes:
        graphs: compiled ones, with the number of calls in this step.
        scalars: eager operations on few elements.
        waits: where the host asks for a value of the device.
    """

    elements: int
    graphs: list[Graph] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    scalars: int = 0
    waits: list[str] = field(default_factory=list)


class Log(TorchDispatchMode):
    """Notes every operation in a :class:`Step`."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        view = not schema.is_mutable and any(r.alias_info for r in schema.returns)
        name = func.overloadpacket.__name__
        if not view and "empty" not in name and func.namespace != "prim":
            self.note(name, schema, args, kwargs or {}, result)
        return result

    def note(self, name: str, schema: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = list(zip(schema.arguments, args, strict=False))
        given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        read: dict[int, Tensor] = {}
        written = {id(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
        for argument, value in given:
            mutated = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    written.update({id(tensor): tensor} if mutated else {})
                    if not (mutated and name in WRITES_ONLY):
                        read[id(tensor)] = tensor
        everything = [*read.values(), *written.values()]
        crosses = name in ("_to_copy", "copy_") and len({t.device for t in everything}) > 1
        if crosses and not (kwargs.get("non_blocking") or args[-1] is True):
            self.step.waits.append("a copy between host and device")
        if max((stored(tensor) for tensor in everything), default=0) < self.step.elements // SMALL:
            self.step.scalars += any(tensor.is_cuda for tensor in everything)
            return
        traffic = sum(stored(t) * t.itemsize for t in everything)
        double = any(t.dtype == torch.float64 and stored(t) > 1 for t in everything)
        double |= kwargs.get("dtype") == torch.float64
        stage = caller()
        if stage is not None:
            self.step.passes.append(Pass(name, stage, traffic, double))


def stored(tensor: Tensor) -> int:
    """Elements in memory: of an expanded dimension one."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


def caller() -> str | None:
    """The stage of a step from which a call comes; ``None`` for the work of the mock group."""
    frame, found = sys._getframe(1), "elsewhere"
    while frame is not None:
        _, inside, name = frame.f_code.co_filename.rpartition("shardcast/")
        if inside and name.startswith("testing/"):
            return None
        if inside and name.startswith("step/"):
            found = name.split("/")[1]
        frame = frame.f_back  # type: ignore[assignment]
    return found


class _Event:
    """An event of a stream; never reached."""

    def record(self, *_args: Any) -> None:
        """Nothing is recorded."""

    def query(self) -> bool:
        return False


class _Stream:
    """A stream that orders nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Streams of fake devices are alike."""

    def record_event(self, *_args: Any) -> _Event:
        return _Event()

    def wait_event(self, *_args: Any) -> None:
        """Nothing waits."""

    wait_stream = wait_event


@contextmanager
def fake_gpu(compiler: Compiler, waits: list[str]) -> Iterator[None]:
    """Within it tensors are made on a GPU that is not there, and the library runs on them."""

    def asked(kind: str, answer: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def ask(tensor: Tensor) -> Any:
            if tensor.is_cuda:
                frame = sys._getframe(1)
                waits.append(f"{kind} in {frame.f_code.co_name}")
            return answer(tensor)

        return ask

    def address(tensor: Tensor) -> int:
        start = tensor.untyped_storage()._cdata
        return start + tensor.storage_offset() * tensor.itemsize

    make = torch.tensor

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*args, **options)

    forget_graphs()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        # DLPack knows no fake tensors; a view has the same address.
        enter(mock.patch.object(_compat, "own_storage", Tensor.detach))
        # A fake tensor cannot be of another class too.
        enter(mock.patch("shardcast.memory.gradients.hide", lambda *_, **__: None))
        enter(mock.patch.object(inductor, "_get_current_dispatch_mode", lambda: None))
        enter(mock.patch("torch.compile", compiler))
        enter(mock.patch("torch.tensor", unpinned))  # memory is pinned by the driver
        enter(mock.patch.object(FakeTensor, "data_ptr", address, create=True))
        for kind, answer in {
            "__bool__": lambda _: False,
            "__float__": lambda _: 0.0,
            "__int__": lambda _: 0,
            "item": lambda _: 0,
            "tolist": lambda t: _zeros(t.shape),
        }.items():
            enter(mock.patch.object(FakeTensor, kind, asked(kind, answer), create=True))
        # It compares digests; the mock group's ranks are replicas anyway.
        enter(mock.patch("shardcast.comm.Comm.check_equal"))
        enter(mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)))
        enter(mock.patch("torch.cuda.Event", _Event))
        enter(mock.patch("torch.cuda.Stream", _Stream))
        enter(mock.patch("torch.cuda.current_stream", _Stream))
        enter(mock.patch("torch.cuda.stream", lambda _: nullcontext()))
        enter(mock.patch("torch.cuda.is_current_stream_capturing", lambda: False))
        yield
    forget_graphs()


def _zeros(shape: Sequence[int]) -> Any:
    """Of that shape, as nested lists."""
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def forget_graphs() -> None:
    """The library keeps what it compiled for all models of a process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardcast"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def trace(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], ranks: int = 1,
    epilogues: Sequence[Epilogue] = (), shapes: Sequence[tuple[int, ...]] = SHAPES, **fields: Any,
) -> Step:  # fmt: skip
    """The third step of an optimizer on one rank of so many; its state is there by then."""
    compiler, waits = Compiler(), list[str]()
    step = Step(0)
    given = mock.patch("shardcast.step.update.epilogues_of", lambda _: tuple(epilogues))
    with given, fake_world(ranks, rank=ranks // 2) as group, fake_gpu(compiler, waits):
        model = nn.ParameterList(torch.empty(shape, device=CUDA) for shape in shapes)
        step.elements = sum(param.numel() for param in model.parameters()) // ranks
        optimizer = shardcast.shard(
            model, kind(model.parameters(), **options),
            {"param_dtype": "bf16", "fuse": "compile", "max_grad_norm": 1.0, **fields},
            process_group=group,
        )  # fmt: skip
        for number in range(3):
            for param in model.parameters():
                param.grad = torch.empty_like(param)
            compiler.calls.clear()
            waits.clear()
            optimizer.scale_loss(torch.empty((), device=CUDA))
            log = Log(step)
            with log if number == 2 else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
    step.graphs = lower(compiler.calls)
    step.waits += waits
    return step
