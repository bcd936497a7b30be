"""The only folder where interfaces of torch are used that are private or differ between releases.

Here is what every training uses; the other modules are for one purpose each.

What a new release of torch breaks, a test of what uses it notices; ``tests/test_compat.py`` has the
few of which no other test could tell.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch.autograd.graph import Node

P = ParamSpec("P")
T = TypeVar("T")

if dist.is_available():
    # Its functions have the default group of the moment at which they are imported as a default
    # argument. torch imports them with the first optimizer, usually when there is a group, which
    # then outlives destroy_process_group(), with threads that a process may not end with.
    import torch.distributed.nn.functional

    # The names of torch >= 2.13, and those before.
    all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all_flat(
    group: Any,
    output: Tensor,
    input: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
) -> dist.Work:
    """Start ``dist.all_to_all_single`` of plain tensors, without two thirds of its host time.

    Args:
        received, sent: lengths by rank; empty: all are equal.
    """
    name = "all_to_all_single"  # of torch >= 2.13, and the one before
    launch: Any = getattr(group, name, None) or group.alltoall_base
    work: dist.Work = launch(output, input, received, sent, _exchange())
    return work


@functools.cache
def _exchange() -> Any:
    options: Any = torch._C._distributed_c10d.AllToAllOptions()
    options.asyncOp = True
    return options


def own_storage(view: Tensor) -> Tensor:
    """A tensor over the memory of the contiguous ``view``, with a storage object of its own.

    Everything that saves models takes views of one storage for tied weights. A DLPack round trip
    gives a storage of the view's size that keeps its memory alive; the capsule spares questions
    about device and stream. On a GPU ``record_stream`` does nothing for it, since the allocator
    knows its own pointers only, and nobody needs it: packs live as long as their parameters.
    """
    return view if view.is_meta else from_dlpack(to_dlpack(view))


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether it is a ``DTensor``, whose module takes long to import."""
    return hasattr(tensor, "device_mesh")


def local_tensor(tensor: Any) -> Tensor:
    """The memory of a DTensor on this rank, the very tensor; a plain one itself."""
    local: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local


def without_torch_function() -> AbstractContextManager[object]:
    """Have functions take tensors of any class for plain ones inside it, on this thread."""
    return torch._C.DisableTorchFunctionSubclass()


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Have ``torch.compile`` break its graph around ``function``, as around those of torch."""
    return _disable_dynamo(function)


def is_shared(tensor: Tensor) -> bool:
    """Return whether another tensor has the memory of this one, too."""
    storage = tensor.untyped_storage()  # counts itself, beside ``tensor``
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


_NOTHING = nullcontext()


def without_grad() -> AbstractContextManager[object]:
    """Return ``torch.no_grad()``, which takes two microseconds, where gradients are on."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def has_bits_of(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the host, of one shape and dtype, have the same bits.

    By ``memcmp``, which takes two thirds of the time of ``torch.equal`` over words of 64 bits.
    """
    if not (tensor.is_contiguous() and other.is_contiguous()):
        return torch.equal(
            tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        )
    return not _memcmp()(tensor.data_ptr(), other.data_ptr(), tensor.nbytes)


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).memcmp
    function.argtypes, function.restype = (ctypes.c_void_p,) * 2 + (ctypes.c_size_t,), ctypes.c_int
    return function


def constants_of(tensor: Tensor) -> Tensor:
    """Return the same 0-dim or 1-d memory with an :func:`own_storage`, of one length in each call.

    For one graph of :func:`compiled` the length is a constant.
    """
    numbers = own_storage(tensor)
    if numbers.dim():
        torch._dynamo.mark_static(numbers, 0)
    return numbers


def rows_of(tensor: Tensor, row: int, stack: int = 1) -> Tensor:
    """Return the same memory as rows of ``row`` elements (0: 1-d), with an :func:`own_storage`.

    For one graph of :func:`compiled` ``row`` is a constant, and the number of rows may be any.

    Args:
        stack: of so many equal parts, which may lie apart; not 1: the first dimension of both.
    """
    if not row:
        return own_storage(tensor.view(-1))  # what keeps both as one would never be freed else
    shape = (-1, row) if stack == 1 else (stack, -1, row)
    rows = own_storage(tensor.view(shape))
    torch._dynamo.mark_static(rows, len(shape) - 1)
    return rows


def weak_group(group: dist.ProcessGroup | None) -> Callable[[], dist.ProcessGroup | None] | None:
    """Return a function that gives ``group`` until ``destroy_process_group()``; None for None.

    A group that torch has not made and does not keep, such as a mock, is held.
    """
    if group is None:
        return None
    if group in dist.distributed_c10d._world.pg_map:
        return weakref.ref(group)
    return lambda: group


def frame_of_thread(number: int) -> types.FrameType | None:
    """The innermost frame of a running thread; None of one that has ended."""
    return sys._current_frames().get(number)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running on this thread ends, as in DDP."""
    Variable._execution_engine.queue_callback(callback)


# A number that stands for the backward that is running on this thread, -1 for none. One that a
# re-entrant checkpoint runs inside another has a number of its own; no number comes twice. There is
# no public name for it, and two promises need it: the inner backward sends no pack, and two
# models in one backward are launched at its end, so that ranks do not wait for one another.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def accumulates() -> bool:
    """Return whether the backward that is running, seen from a tensor hook, adds to ``.grad``.

    ``torch.autograd.grad`` runs the same hooks and does not: there the engine refuses to say
    whether it runs a leaf, of which the first below the hook is asked. With
    ``backward(inputs=...)`` the answer is exact in the hooks of parameters only. Without it a rank
    that alone calls ``torch.autograd.grad`` would wait for the others; no public name says it.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        raise RuntimeError(
            "backward: expected torch's own engine, got compiled autograd, which runs no hook when "
            "a gradient comes; turn it off (torch._dynamo.config.compiled_autograd = False)"
        )
    while below := [inner for inner, _ in node.next_functions if inner is not None]:
        node = below[0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def reaches_checkpoint() -> bool:
    """Return whether the running backward, seen from a hook, comes to a re-entrant checkpoint.

    Its backward runs another one inside it, which may bring a gradient for a second time.
    """
    nodes: list[Node | None] = [torch._C._current_autograd_node()]
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CheckpointFunction"):
            return True
        seen.add(node)
        nodes += [below for below, _ in node.next_functions]
    return False


def has_products(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices in ``dtype`` by a kernel on this CPU, not a loop.

    What oneDNN says of the CPU, and so the same in each run, whatever else the machine does.
    """
    asked = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    if dtype not in asked:
        return True
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, asked[dtype])())


def is_host(device: torch.device) -> bool:
    """Return whether the host reads values on ``device`` without waiting for it.

    What a step does differently on accelerators hangs on this alone; tests and benchmarks put
    another function in its place, and so run the accelerator's path, with values, on a CPU.
    """
    return device.type == "cpu"


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which a hook runs, of an accelerator."""
    return torch.accelerator.current_stream(device.index)


def wait_streams(streams: Iterable[torch.Stream], tensors: Iterable[Tensor | None]) -> None:
    """Have the current stream wait for the ``streams`` that made ``tensors``, and then use them.

    Autograd runs each node on the stream of its forward, and joins them at the end of a backward.
    """
    made = [tensor for tensor in tensors if tensor is not None]
    for stream in streams:
        current = current_stream(stream.device)
        if stream != current:
            current.wait_stream(stream)
            for tensor in made:
                tensor.record_stream(current)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is captured here, where nothing waits or is uploaded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# torch's fused kernels over lists of tensors; ``torch.optim`` gives them whole parameters only.
fused_adam_: Any = torch._fused_adam_
fused_adamw_: Any = torch._fused_adamw_
fused_sgd_: Any = torch._fused_sgd_


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Set the flag without which schedulers warn that they step before ``optimizer``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def calling_module() -> nn.Module | None:
    """The module whose call runs the forward that asks for it, if nothing stands between."""
    frame = sys._getframe(2)
    if frame.f_code.co_name == "inner" and frame.f_back is not None:  # where there are hooks
        frame = frame.f_back
    if frame.f_code is not nn.Module._call_impl.__code__:
        return None
    caller: nn.Module | None = frame.f_locals.get("self")
    return caller


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return what ``tensor.register_hook`` was given."""
    return list((tensor._backward_hooks or {}).values())


def is_ddp(model: nn.Module) -> bool:
    """Return whether ``model`` is, or wraps, a DistributedDataParallel."""
    return any(isinstance(layer, DistributedDataParallel) for layer in _wrappers(model))


def state_key(name: str) -> str:
    """The key that ``state_dict`` has for a name: torch's checkpoint wrapper is left out."""
    return name.replace("_checkpoint_wrapped_module.", "")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP and ``torch.compile`` wrappers."""
    *_, innermost = _wrappers(model)
    return innermost


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    while True:
        yield model
        name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        inside = getattr(model, name, None)  # _orig_mod: of torch._dynamo.OptimizedModule
        if not isinstance(inside, nn.Module):
            return
        model = inside


def inside_ddp(module: nn.Module) -> bool:
    """Return whether the running forward is that of a DDP wrapper of ``module``; DDP notes it."""
    active = DistributedDataParallel._get_active_ddp_module()
    return active is not None and unwrapped(active) is module


@contextmanager
def swapped_params() -> Iterator[None]:
    """Have ``module.to_empty`` and ``module.to`` keep the identity of parameters inside it.

    Else one on ``meta`` is replaced by a new one that the optimizer does not know.
    """
    setting = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(setting)


class WeakStorage:
    """The storage of a tensor, as long as some tensor of this process has it."""

    def __init__(self, tensor: Tensor) -> None:
        self._pointer = tensor.untyped_storage()._weak_ref()

    def __call__(self) -> torch.UntypedStorage | None:
        """The storage, or ``None`` where nobody has it any more."""
        storage: torch.UntypedStorage | None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._pointer)
        return storage

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._pointer)


def plain_tensors(values: Any) -> Iterator[Tensor]:
    """Find tensors with memory of their own in nested containers, and in wrapper tensors."""
    if isinstance(values, Tensor):
        flatten = getattr(values, "__tensor_flatten__", None)
        if flatten is None:
            yield values
        else:
            yield from plain_tensors([getattr(values, name) for name in flatten()[0]])
    elif isinstance(values, Mapping):
        yield from plain_tensors([*values.values()])
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from plain_tensors(value)


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which autograd knows it as a view, and which it keeps."""
    return tensor._base


def put_first(handle: Any) -> Any:
    """Have a hook run before all others of its kind; gives the handle."""
    hooks = handle.hooks_dict_ref()
    earlier = {number: hook for number, hook in hooks.items() if number != handle.id}
    for number in earlier:  # anew, behind it: autograd sees no move_to_end
        del hooks[number]
    hooks.update(earlier)
    return handle


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return ``optimizer.step`` without the hooks and profiler range that torch puts around it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's mark of its wrapper
        step = step.__wrapped__
    bound: Callable[[], Any] = step.__get__(optimizer)
    return bound


def _is_of_context() -> bool:
    """Return whether ``torch.save``'s checksums are set for a context, not for the process."""
    get, change = torch.serialization.get_crc32_options, torch.serialization.set_crc32_options
    setting = get()
    contextvars.copy_context().run(change, not setting)
    if get() == setting:
        return True
    change(setting)
    return False


CRC_IS_OF_CONTEXT = _is_of_context()  # at the import: the process's setting changes for a moment


def context_without_crc() -> contextvars.Context:
    """A context in which ``torch.save`` leaves out checksums, which ``torch.load`` never compares.

    Where that is a setting of the whole process (torch 2.11), other threads save meanwhile, and the
    context changes nothing.
    """
    context = contextvars.copy_context()
    if CRC_IS_OF_CONTEXT:
        context.run(torch.serialization.set_crc32_options, False)
    return context
