"""Interfaces of torch that are private or differ between releases.

Other folders use only the private names that ``tests/test_architecture.py`` lists, such as
``torch._foreach_copy_``. This module has what every training uses; the other modules have one
purpose each. If torch lacks a name of :data:`NEEDED`, the import raises.

If a new release of torch breaks something, the tests of its users notice. ``tests/test_compat.py``
has the few cases that no other test would notice.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

SUPPORTED = "2.11 to 2.15"
# Private names of torch, below ``torch.``. Names of modules that are imported late are not among
# them.
NEEDED = (
    "_C.DisableTorchFunctionSubclass _C._current_autograd_node _C._current_graph_task_id "
    "_C._dynamo.eval_frame._FrameAction _C._dynamo.eval_frame._FrameExecStrategy "
    "_C._dynamo.eval_frame.set_code_exec_strategy _C._is_alias_of _C._storage_Use_Count "
    "_C._will_engine_execute_node _amp_update_scale_ _compile._disable_dynamo _foreach_add_ "
    "_foreach_copy_ _foreach_lerp _foreach_lerp_ _foreach_mul_ _foreach_norm _fused_adam_ "
    "_fused_adamw_ _fused_sgd_ Tensor._backward_hooks Tensor._base "
    "Tensor._post_accumulate_grad_hooks Tensor._version UntypedStorage._cdata "
    "UntypedStorage._free_weak_ref UntypedStorage._new_with_weak_ptr UntypedStorage._weak_ref "
    "autograd.Variable._execution_engine.queue_callback nn.Module._call_impl "
    "nn.parallel.DistributedDataParallel._get_active_ddp_module"
).split()
NEEDED_BY_GROUPS = (
    "_C._distributed_c10d.AllgatherOptions distributed.ProcessGroup._get_backend "
    "distributed.distributed_c10d._coalescing_manager "
    "distributed.distributed_c10d._get_default_store distributed.distributed_c10d._world"
).split()


def _lacks(name: str) -> bool:
    try:
        operator.attrgetter(name)(torch)
    except AttributeError:
        return True
    return False


# Otherwise the first use would raise an AttributeError, perhaps in a backward.
if missing := [*filter(_lacks, NEEDED + (NEEDED_BY_GROUPS if dist.is_available() else []))]:
    raise ImportError(
        f"shardcast: expected torch {SUPPORTED}, got torch {torch.__version__}, which lacks "
        f"torch.{', torch.'.join(missing)}; install one of these versions, or a newer shardcast"
    )

P = ParamSpec("P")
T = TypeVar("T")

if dist.is_available():
    # Its functions capture the default group at import time as a default argument. torch imports
    # them with the first optimizer, usually when a group exists. That group would then outlive
    # destroy_process_group(), with threads that must not run when a process exits.
    import torch.distributed.nn.functional

    # The names in torch >= 2.13, and the earlier ones.
    all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of the contiguous ``view``, with its own storage object.

    Code that saves models treats views of one storage as tied weights. A DLPack round trip gives a
    storage of the view's size that keeps its memory alive; the capsule avoids checks of device and
    stream. On a GPU ``record_stream`` does nothing for it, because the allocator knows only its own
    pointers. That is fine, because packs live as long as their parameters.
    """
    return view if view.is_meta else from_dlpack(to_dlpack(view))


def parameters(module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Return a module's parameters, even if its class has its own ``parameters()``, like MAML's."""
    return nn.Module.parameters(module, recurse)


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Return whether it is a ``DTensor``, without importing that slow module."""
    return hasattr(tensor, "device_mesh")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor itself; a plain tensor unchanged."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def without_torch_function() -> AbstractContextManager[object]:
    """Let functions treat tensors of any class as plain ones in this block, on this thread."""
    return torch._C.DisableTorchFunctionSubclass()


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Make ``torch.compile`` break its graph around ``function``, as around torch's own steps."""
    return torch._compile._disable_dynamo(function)


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` such that ``torch.compile`` runs it, and all that it calls, eagerly.

    For hooks that the autograd engine calls. A backward in a compiled script runs on the script's
    thread. There Dynamo would compile the frames of hooks as if they belonged to the script, which
    takes seconds and fails if a gradient is freed before its guard is built. A call costs nothing
    extra, unlike a call of an :func:`uncompiled` function (a microsecond).
    """
    dynamo, inner = torch._C._dynamo.eval_frame, cast(Any, function)
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(inner.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


_LONE = [object()]


def is_kept(values: list[Any], position: int) -> bool:
    """Return whether a script refers to an object of the list ``values``; no variable may.

    A call's own references differ between releases of CPython: 3.14 borrows those of variables.
    Therefore this compares with an object that only a list has.
    """
    if values[position] is None:
        return False
    return sys.getrefcount(values[position]) > sys.getrefcount(_LONE[0])


def is_shared(tensor: Tensor, known: int = 0) -> bool:
    """Return whether another tensor, besides ``known`` ones, shares this tensor's memory."""
    storage = tensor.untyped_storage()  # this reference counts, besides ``tensor``
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2 + known)


_NOTHING = nullcontext()


def without_grad() -> AbstractContextManager[object]:
    """Return ``torch.no_grad()`` if gradients are on, since it takes two microseconds."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def has_bits_of(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two host tensors of equal shape and dtype have the same bits.

    It uses ``memcmp``, which takes two thirds of the time of ``torch.equal`` on 64-bit words.
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


def is_alias(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share a storage, on the meta device too."""
    return bool(torch._C._is_alias_of(tensor, other))  # type: ignore[attr-defined]


def constants_of(tensor: Tensor) -> Tensor:
    """Return the same 0-dim or 1-d memory with an :func:`own_storage`, of one length in each call.

    Its length is a constant in a graph of :func:`compiled`.
    """
    numbers = own_storage(tensor)
    if numbers.dim():
        torch._dynamo.mark_static(numbers, 0)
    return numbers


def rows_of(tensor: Tensor, row: int, stack: int = 1) -> Tensor:
    """Return the same memory as rows of ``row`` elements (0: 1-d), with an :func:`own_storage`.

    ``row`` is a constant in a graph of :func:`compiled`; the number of rows may vary.

    Args:
        stack: number of equal parts, which may lie apart; if not 1, the first dimension of both.
    """
    if not row:
        # otherwise an object that keeps both would never be freed
        return own_storage(tensor.view(-1))
    shape = (-1, row) if stack == 1 else (stack, -1, row)
    rows = own_storage(tensor.view(shape))
    torch._dynamo.mark_static(rows, len(shape) - 1)
    return rows


def weak_group(group: dist.ProcessGroup | None) -> Callable[[], dist.ProcessGroup | None] | None:
    """Return a function that returns ``group`` until ``destroy_process_group()``; None for None.

    A group that torch did not create and does not keep, such as a mock, is held strongly.
    """
    if group is None:
        return None
    if group in dist.distributed_c10d._world.pg_map:
        return weakref.ref(group)
    return lambda: group


def frame_of_thread(number: int) -> types.FrameType | None:
    """Return the innermost frame of a running thread; None if it has ended."""
    return sys._current_frames().get(number)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of this thread's running backward, as DDP does."""
    Variable._execution_engine.queue_callback(callback)


# Returns a unique number for the backward that runs on this thread; -1 for none. A backward inside
# another one (re-entrant checkpoint) has its own number. There is no public name for it. Two
# guarantees need it: an inner backward sends no pack, and two models in one backward are launched
# at its end, so that ranks do not wait for one another.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def accumulates() -> bool:
    """Return whether the running backward, seen from a tensor hook, adds to ``.grad``.

    ``torch.autograd.grad`` runs the same hooks but does not: there the engine refuses to say
    whether it runs a leaf. This asks about the first leaf below the hook. With
    ``backward(inputs=...)`` the answer is exact only in hooks of parameters. Without this check, a
    rank that alone calls ``torch.autograd.grad`` would wait for the others; there is no public name
    for it.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        raise RuntimeError(
            "backward: expected torch's own autograd engine, got compiled autograd, which does "
            "not run gradient hooks; turn it off (torch._dynamo.config.compiled_autograd = "
            "False)"
        )
    while below := [inner for inner, _ in node.next_functions if inner is not None]:
        node = below[0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def reaches_checkpoint() -> bool:
    """Return whether the running backward, seen from a hook, will reach a re-entrant checkpoint.

    Its backward runs another one inside, which may produce a gradient a second time.
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
    """Return whether torch has a fast matmul kernel in ``dtype`` on this CPU, not a plain loop.

    oneDNN decides this from the CPU, so it is the same in each run, whatever the load.
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

    All differences between a step on a CPU and on an accelerator depend on this function. Tests and
    benchmarks replace it, to run the accelerator's path with values on a CPU.
    """
    return device.type == "cpu"


def current_stream(device: torch.device) -> torch.Stream:
    """Return the accelerator's stream on which a hook runs."""
    return torch.accelerator.current_stream(device.index)


def wait_streams(streams: Iterable[torch.Stream], tensors: Iterable[Tensor | None]) -> None:
    """Make the current stream wait for the ``streams`` that made ``tensors``, and then use these.

    Autograd runs each node on the stream of its forward, and joins streams at the end of a
    backward.
    """
    made = [tensor for tensor in tensors if tensor is not None]
    for stream in streams:
        current = current_stream(stream.device)
        if stream != current:
            current.wait_stream(stream)
            for tensor in made:
                tensor.record_stream(current)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured; then nothing may wait or be uploaded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# torch's fused kernels over lists of tensors; ``torch.optim`` passes them only whole parameters.
fused_adam_: Callable[..., None] = torch._fused_adam_
fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_sgd_: Callable[..., None] = torch._fused_sgd_


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Set the flag that stops schedulers from warning that they step before ``optimizer``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def calling_module() -> nn.Module | None:
    """Return the module whose call runs the current forward, if nothing is in between."""
    frame = sys._getframe(2)
    if frame.f_code.co_name == "inner" and frame.f_back is not None:  # if there are hooks
        frame = frame.f_back
    if frame.f_code is not nn.Module._call_impl.__code__:
        return None
    caller: nn.Module | None = frame.f_locals.get("self")
    return caller


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return the hooks that were passed to ``tensor.register_hook``."""
    return list((tensor._backward_hooks or {}).values())


def has_hooks_of_grad(tensor: Tensor) -> bool:
    """Return whether a hook was passed to ``tensor.register_post_accumulate_grad_hook``."""
    return bool(tensor._post_accumulate_grad_hooks)


def is_ddp(model: nn.Module) -> bool:
    """Return whether ``model`` is, or wraps, a DistributedDataParallel."""
    return any(isinstance(layer, DistributedDataParallel) for layer in _wrappers(model))


def state_key(name: str) -> str:
    """Return a name's key in ``state_dict``, which leaves out torch's checkpoint wrapper."""
    return name.replace("_checkpoint_wrapped_module.", "")


def bare_name(name: str) -> str:
    """Return a name without what torch's wrappers for checkpoints and ``torch.compile`` add."""
    return state_key(name).replace("_orig_mod.", "")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and ``torch.compile`` wrappers."""
    *_, innermost = _wrappers(model)
    return innermost


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    while True:
        yield model
        name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        # _orig_mod is an attribute of torch._dynamo.OptimizedModule
        inside = getattr(model, name, None)
        if not isinstance(inside, nn.Module):
            return
        model = inside


def inside_ddp(module: nn.Module) -> bool:
    """Return whether a DDP wrapper of ``module`` runs the current forward; DDP notes that."""
    active = DistributedDataParallel._get_active_ddp_module()
    return active is not None and unwrapped(active) is module


@contextmanager
def swapped_params() -> Iterator[None]:
    """Let ``module.to_empty`` and ``module.to`` keep the identity of parameters in this block.

    Otherwise a parameter on ``meta`` is replaced by a new one that the optimizer does not know.
    """
    setting = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(setting)


class WeakStorage:
    """A weak reference to a tensor's storage; it lives while a tensor of this process has it."""

    def __init__(self, tensor: Tensor) -> None:
        self._pointer = tensor.untyped_storage()._weak_ref()

    def __call__(self) -> torch.UntypedStorage | None:
        """Return the storage, or ``None`` if no tensor has it any more."""
        storage: torch.UntypedStorage | None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._pointer)
        return storage

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` has this storage."""
        storage = self()
        return storage is not None and storage._cdata == tensor.untyped_storage()._cdata

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._pointer)


def plain_tensors(values: object) -> Iterator[Tensor]:
    """Yield tensors with their own memory in nested containers and wrapper tensors."""
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
    """Return the tensor that autograd knows as its base, and keeps."""
    return tensor._base


def put_first(handle: Any) -> Any:
    """Make a hook run before all others of its kind; return its handle."""
    hooks = handle.hooks_dict_ref()
    earlier = {number: hook for number, hook in hooks.items() if number != handle.id}
    # inserts the others again, after it, because autograd ignores move_to_end
    for number in earlier:
        del hooks[number]
    hooks.update(earlier)
    return handle


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return ``optimizer.step`` without torch's hooks and profiler range around it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's flag on its wrapper
        step = step.__wrapped__
    bound: Callable[[], Any] = step.__get__(optimizer)
    return bound
