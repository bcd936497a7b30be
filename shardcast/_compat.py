"""The only place where interfaces of torch are used that are private or differ between releases.

Each function says what it relies on; ``tests/test_compat.py`` exercises every one of them on the
installed torch, so that a new release that breaks one of them fails there, by name.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map
from torch.utils.dlpack import from_dlpack

if dist.is_available():
    # Its functions have the default group of the moment at which they are imported as a default
    # argument. torch imports them with the first optimizer, usually when there is a group, which
    # then outlives destroy_process_group(), with threads that a process may not end with.
    import torch.distributed.nn.functional


def own_storage(view: Tensor) -> Tensor:
    """A tensor over the memory of the contiguous ``view``, with a storage object of its own.

    Views of one storage are taken for tied weights by everything that saves models (safetensors,
    ``save_pretrained``, Accelerate keep only the first). A DLPack round trip gives a storage that
    begins and ends with the view and keeps its memory alive. By way of a capsule, for which torch
    does not ask again what is known: the same device, the same stream.

    On a GPU ``record_stream`` does nothing for such a storage, since the caching allocator knows
    its own pointers only. Nobody here needs it: packs live as long as their parameters.
    """
    return view if view.is_meta else from_dlpack(torch._C._to_dlpack(view))


class Placement(Protocol):
    """How a DTensor lies along one dimension of its mesh."""

    def is_replicate(self) -> bool: ...
    def is_partial(self) -> bool: ...


PLAIN = (Tensor, nn.Parameter)  # for which it takes longer to have no attribute


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``, whose module takes long to import."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def placements(tensor: Any) -> dict[str, Placement]:
    """Those of a DTensor by the name of the mesh dimension; empty for a plain tensor.

    Raises:
        TypeError: the dimensions of its mesh have no names.
    """
    if not is_dtensor(tensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names
    if names is None:
        raise TypeError(
            "optimizer: a parameter is a DTensor over a mesh whose dimensions have no names; give "
            "init_device_mesh mesh_dim_names"
        )
    return dict(zip(names, tensor.placements, strict=True))


def mesh_line(mesh: Any, dim: str) -> tuple[int, ...]:
    """The ranks of this rank's group along a dimension of a mesh, in its order."""
    return tuple(_along(mesh, dim).mesh.flatten().tolist())


def _along(mesh: Any, dim: str) -> Any:
    """This rank's line of a mesh; a mesh of one dimension has no other to be sliced from."""
    return mesh if mesh.mesh_dim_names == (dim,) else mesh[dim]


def local_tensor(tensor: Any) -> Tensor:
    """The memory of a DTensor on this rank, the very tensor; a plain one itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[no-any-return]


def indices_of(tensor: Any, dim: int) -> Tensor:
    """The indices of a DTensor's dimension that its local tensor has, 1-d and rising.

    torch cuts them as it cuts the tensor: evenly or not, along several mesh dimensions, strided.
    ``src_data_rank=None`` has it take what is here and send nothing.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    shape = [tensor.shape[dim] if d == dim else 1 for d in range(tensor.dim())]
    along = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    every = torch.arange(tensor.shape[dim], device=tensor.device).view(shape)
    mine = distribute_tensor(every, tensor.device_mesh, along, src_data_rank=None)
    return mine.to_local().flatten()


def set_local_tensor(tensor: Any, local: Tensor) -> None:
    """Have a DTensor lie in ``local``, of the same shape and any dtype; it stays the same object.

    ``tensor.data = ...`` would change the dtype that it shows and leave the old memory below.
    """
    same = tensor._spec.placements
    wrapped = wrap_local(local, tensor, same)
    if wrapped.dtype != tensor.dtype:
        tensor.data = wrapped
    tensor._local_tensor, tensor._spec = local, wrapped._spec


def wrap_local(local: Tensor, like: Any, placements: Any) -> Any:
    """A DTensor over ``local``, the very tensor, of the mesh and shape of ``like``."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    known = like._spec.tensor_meta
    meta = TensorMeta(known.shape, known.stride, local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def arrived(local: Tensor) -> Tensor:
    """What a functional collective gives, once it is here."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def mesh_group(mesh: Any, dims: Sequence[str]) -> dist.ProcessGroup:
    """The group of some dimensions of a mesh, in its order; makes one for several of them.

    Uses ``DeviceMesh._flatten``, as torch's own guides do.
    """
    if len(dims) == 1:
        return _along(mesh, dims[0]).get_group()  # type: ignore[no-any-return]
    ordered = tuple(dim for dim in mesh.mesh_dim_names if dim in dims)
    some = mesh if ordered == mesh.mesh_dim_names else mesh[ordered]
    return some._flatten().get_group()  # type: ignore[no-any-return]


def subgroup(group: dist.ProcessGroup | None, members: Sequence[int]) -> dist.ProcessGroup:
    """A group of some ranks of ``group``, whom alone must call it."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group([ranks[member] for member in members], use_local_synchronization=True)
    return made  # type: ignore[no-any-return]


def rows_of(flat: Tensor, row: int) -> Tensor:
    """The same memory as rows, with an :func:`own_storage`, for :func:`compiled`.

    The number of rows may be any for one graph, that of elements in a row is a constant of it.

    Args:
        row: elements in a row; 0 leaves the tensor 1-d.
    """
    if not row:
        return own_storage(flat)
    rows = own_storage(flat.view(-1, row))
    torch._dynamo.mark_static(rows, 1)
    return rows


def hook_gradients(
    params: Sequence[Tensor], hooks: Iterable[Callable[[Tensor | None], None]]
) -> Callable[[], None]:
    """``param.register_hook(hook)`` for each of them; call what it returns to remove the hooks.

    Without a handle for each, which takes longer than all else that is done for a small parameter.
    Frozen ones, which torch refuses, have a hook for when they are unfrozen.
    """
    key = object()
    for param, hook in zip(params, hooks, strict=True):
        there: Any = param._backward_hooks
        if there is None:
            there = param._backward_hooks = OrderedDict()
        there[key] = hook

    def remove() -> None:
        for param in params:
            there: Any = param._backward_hooks
            if there is not None:
                there.pop(key, None)

    return remove


def weak_group(group: dist.ProcessGroup | None) -> Callable[[], dist.ProcessGroup | None] | None:
    """Gives ``group`` until ``destroy_process_group()``; None for None.

    torch keeps the groups that it has made in a private map. Nobody else may keep one that was
    made otherwise (a mock): that one is held.
    """
    if group is None:
        return None
    if group in dist.distributed_c10d._world.pg_map:
        return weakref.ref(group)
    return lambda: group


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running on this thread ends.

    Uses the engine's ``queue_callback`` as DDP and FSDP2 do; there is no public form of it.
    """
    Variable._execution_engine.queue_callback(callback)


# For a tensor subclass that leaves all to __torch_dispatch__.
no_torch_function: Any = torch._C._disabled_torch_function_impl

# A number that stands for the backward that is running on this thread, -1 for none. One that a
# re-entrant checkpoint runs inside another has a number of its own; no number comes twice.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def own_params(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that ``module`` itself holds, those inside it not; for hot hooks.

    ``module.parameters(recurse=False)`` says the same and takes ten times as long.
    """
    return [param for param in module._parameters.values() if param is not None]


def accumulates() -> bool:
    """Whether the backward that is running, seen from a tensor hook, adds to ``.grad``.

    ``torch.autograd.grad`` runs the same hooks and does not. Looks at one leaf of the graph below
    the hook: the engine refuses to say of a leaf whether it runs it only where ``grad`` wants it.
    With ``backward(inputs=...)`` the answer is exact in the hooks of parameters only.
    """
    node = torch._C._current_autograd_node()
    while below := [inner for inner, _ in node.next_functions if inner is not None]:
        node = below[0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def weak_hook(call: Callable[..., None], held: Any) -> Callable[[Tensor], None]:
    """A tensor hook that runs ``call(held, tensor)`` and does not keep ``held`` alive.

    torch keeps post-accumulate hooks where the garbage collector cannot look: one that leads back
    to its own parameter would never be freed, nor would the parameter.
    """
    reference = weakref.ref(held)

    def hook(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            call(alive, tensor)

    return hook


def held_elsewhere(tensors: list[Tensor], position: int) -> bool:
    """Whether something other than the list refers to the tensor there, as a Python object.

    Counts references, as CPython does; what an object of which nobody else knows counts is asked
    of the interpreter. To be asked only of tensors that are no parameter's ``.grad`` any more.
    """
    return sys.getrefcount(tensors[position]) > ALONE


def _count_alone() -> int:
    alone = [object()]
    return sys.getrefcount(alone[0])


ALONE = _count_alone()


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """``optimizer.step`` without the hooks and the profiler range that torch puts around it.

    torch marks its wrapper of the class's ``step`` with ``hooked``.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step.__get__(optimizer)  # type: ignore[no-any-return]


def all_gather_flat(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """``all_gather_single`` (torch >= 2.13) under either of its names."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)


def reduce_scatter_flat(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """``reduce_scatter_single`` (torch >= 2.13) under either of its names; the sum over ranks."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, input, group=group, async_op=async_op)


def coalesced(group: dist.ProcessGroup, device: torch.device, async_op: bool = False) -> Any:
    """A context within which collectives on ``device`` make one launch (NCCL's group calls).

    Not ``async_op``: on the current stream, as each of them alone. Else what the context gives has
    a ``wait()``, and each collective within must be ``async_op``, too; their works are not to be
    waited for. Uses ``_coalescing_manager``, as ``dist.batch_isend_irecv`` does.
    """
    return dist.distributed_c10d._coalescing_manager(group, device, async_op)


def fused_adam_(
    param: Tensor,
    grad: Tensor,
    state: Sequence[Tensor],
    step: Tensor,
    *,
    decoupled: bool,
    **options: Any,
) -> None:
    """torch's fused Adam or AdamW of one tensor; ``torch.optim`` gives it whole parameters only.

    Args:
        state: ``exp_avg``, ``exp_avg_sq`` and, with ``amsgrad``, ``max_exp_avg_sq``.
        options: ``lr``, ``beta1``, ``beta2``, ``weight_decay``, ``eps``, ``amsgrad``, ``maximize``.
    """
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    first, second, *largest = ([tensor] for tensor in state)
    kernel([param], [grad], first, second, *(largest or [[]]), [step], **options)


def fused_sgd_(param: Tensor, grad: Tensor, state: Sequence[Tensor], **options: Any) -> None:
    """torch's fused SGD of one tensor; ``state`` is its momentum buffer, if there is momentum."""
    torch._fused_sgd_([param], [grad], list(state), **options)


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as one compiled graph for all lengths of its tensors.

    Each combination of flags and dtypes is a graph of its own. The usual limit of 8, beyond which
    a full graph is an error, is raised where the release of torch can (>= 2.13). Under a dispatch
    mode, such as ``FlopCounterMode``, Dynamo compiles nothing: there the function itself runs.
    """
    # Triton would else try two block sizes in the first step, on copies of all that the kernel
    # overwrites: memory that no estimate has. The one that is left suits what memory bounds.
    settings = {"triton.autotune_pointwise": False}
    if divides_exactly():
        settings[EXACT_DIVISION] = True
    options: dict[str, Any] = {"options": settings}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = 64
    graph = torch.compile(function, dynamic=True, fullgraph=True, **options)

    def run(*args: Any) -> None:
        (graph if _get_current_dispatch_mode() is None else function)(*args)

    return run


EXACT_DIVISION = "eager_numerics.division_rounding"


@functools.cache
def divides_exactly() -> bool:
    """Whether :func:`compiled` code divides as eager operations do, rounded to nearest.

    Triton's own division may be one bit off; Inductor has a setting for it (torch >= 2.13).
    """
    from torch._inductor import config  # slow to import

    return EXACT_DIVISION in config.get_config_copy()


def compile_errors() -> tuple[type[Exception], ...]:
    """What :func:`compiled` code and :func:`native_library` raise if they cannot be compiled."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    compiler = (TorchDynamoException, CppCompileError, InvalidCxxCompiler)
    return *compiler, OSError, subprocess.SubprocessError  # such as a cache that is read-only


def native_library(source: str) -> ctypes.CDLL:
    """C++ source compiled for this processor, cached on disk as code of ``torch.compile`` is.

    Uses Inductor's cache of compiled C++, for its flags, its locks between processes and its
    OpenMP, which is torch's. Floating-point operations are not fused or reordered.
    """
    from torch._inductor.codecache import CppCodeCache  # slow to import

    # Its own code has vectors written out, so it turns these two off.
    flags = ("-ftree-loop-vectorize", "-fno-math-errno")
    library: ctypes.CDLL = CppCodeCache.load(source, extra_flags=flags)
    return library


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Tell a learning-rate scheduler built on ``optimizer`` that a step was made.

    Schedulers warn when their first ``step()`` comes before the optimizer's; they watch this flag.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_ddp(model: nn.Module) -> bool:
    """Whether ``model`` is, or wraps, a DistributedDataParallel."""
    return any(isinstance(layer, DistributedDataParallel) for layer in _wrappers(model))


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
    """Whether the running forward is that of a DDP wrapper of ``module``.

    DDP notes the wrapper whose forward runs, for Dynamo, in ``_active_ddp_module``.
    """
    active = DistributedDataParallel._get_active_ddp_module()
    return active is not None and unwrapped(active) is module


@contextmanager
def swapped_params() -> Iterator[None]:
    """Within it ``module.to_empty`` and ``module.to`` keep the identity of parameters.

    A switch of ``torch.__future__``; without it a parameter on ``meta`` is replaced by a new one
    that the optimizer does not know.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# -- process groups of a thread, for shardcast.testing -----------------------------------------

MOCK = "mock"
"""The backend under which torch knows the groups that :func:`own_process_groups` makes."""
NAMES = 10**6
"""Names of groups are numbers; each world has so many of its own."""


class _OwnWorld:
    """torch's record of its process groups, for one thread (``distributed_c10d._World``)."""

    def __init__(self, make: Callable[[str, tuple[int, ...]], dist.ProcessGroup]) -> None:
        self.make, self.number = make, next(_worlds)
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.comms: list[Any] = []
        # Names that no other world has had: what finds a group by its name, such as a DTensor,
        # never finds that of another rank.
        self.group_count = self.number * NAMES


class _Worlds:
    """Stands in for torch's record: each thread that has a world of its own sees that one."""

    def __init__(self, shared: Any) -> None:
        vars(self).update(shared=shared, own=threading.local())

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.own, "world", self.shared), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(self.own, "world", self.shared), name, value)


_worlds = itertools.count(1)


@contextmanager
def separate_process_groups() -> Iterator[None]:
    """Within it :func:`own_process_groups` works, in any thread.

    Does what torch's tests with threads do: puts another object in the place of
    ``distributed_c10d._world``. And marks each ``DeviceMesh`` with the world that it was made in:
    DTensor's caches take meshes of equal shape and names for the same one, whichever rank's.
    Groups that were made outside are not found by name inside.
    """
    from torch.distributed.device_mesh import DeviceMesh

    c10d: Any = dist.distributed_c10d
    mesh_type: Any = DeviceMesh
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    init, shared, worlds = mesh_type.__init__, c10d._world, _Worlds(c10d._world)

    def marked(mesh: Any, *args: Any, **fields: Any) -> None:
        init(mesh, *args, **fields)
        if (world := getattr(worlds.own, "world", None)) is not None:
            mesh._thread_id = world.number  # part of its hash and of ``==``

    c10d._world, mesh_type.__init__ = worlds, marked
    isolate(True)
    try:
        yield
    finally:
        c10d._world, mesh_type.__init__ = shared, init
        isolate(isinstance(shared, _Worlds))


@contextmanager
def own_process_groups(
    rank: int, world_size: int, make: Callable[[str, tuple[int, ...]], dist.ProcessGroup]
) -> Iterator[None]:
    """Within it this thread is ``rank`` of a default process group of its own.

    ``torch.distributed`` functions see that group and those that ``new_group`` makes here, and
    nothing of the rest of the process.

    Args:
        make: ``make(key, ranks)`` gives the process group of this rank, for the default one and
            then for each new group that it is in. A group has the same key on all its ranks.
    """
    c10d: Any = dist.distributed_c10d
    store = dist.HashStore()  # type: ignore[attr-defined]
    if MOCK not in dist.Backend.backend_list:
        dist.Backend.register_backend(MOCK, _mock_group, extended_api=True, devices=["cpu", "cuda"])
    own, hook = c10d._world.own, sys.excepthook
    outer = getattr(own, "world", None)
    own.world = world = _OwnWorld(make)
    try:
        dist.init_process_group(MOCK, store=store, rank=rank, world_size=world_size)
        sys.excepthook = hook
        yield
    finally:
        for name in world.pg_names.values():
            torch._C._distributed_c10d._unregister_process_group(name)
        own.world = outer
        if outer is None:
            del own.world


def _mock_group(options: Any, _backend_options: Any) -> dist.ProcessGroup:
    world: Any = dist.distributed_c10d._world
    ranks = options.global_ranks_in_group or range(options.group_size)
    name = options.group_id  # a number, or a hash of the ranks: use_local_synchronization=True
    key = str(int(name) - world.number * NAMES) if name.isdigit() else name
    made: dist.ProcessGroup = world.make(key, tuple(ranks))
    return made
