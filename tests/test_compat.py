"""Every private or changing interface of torch that the library uses, one by one."""

from __future__ import annotations

import gc
import math
import platform
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import python
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from shardcast import _compat
from shardcast._compat import (
    dtensor,
    groups,
    inductor,
    observer,
)
from shardcast.memory.pack_only import weak_hook
from shardcast.testing import SpawnedWorld, ThreadedWorld, fake_world
from shardcast.testing import _compat as mocks
from shardcast.testing.fake import FakeGroup

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("shape", [(3, 4), (12,), (), (0, 3)])
def test_own_storage_shares_memory_but_not_the_storage(shape: tuple[int, ...]):
    flat = torch.arange(40, dtype=torch.bfloat16)
    numel = torch.Size(shape).numel()
    view = _compat.own_storage(flat[7 : 7 + numel].view(shape))
    assert view.shape == shape and view.dtype == flat.dtype and view.is_contiguous()
    assert view.storage_offset() == 0 and view.untyped_storage().nbytes() == 2 * numel
    flat[7] = 99
    del flat
    assert not numel or view.flatten()[0] == 99, "the memory lives as long as the view"
    assert _compat.own_storage(torch.empty(2, 3, device="meta")).is_meta


def test_a_context_saves_without_checksums_and_the_script_with_them(tmp_path: Path):
    get, value = torch.serialization.get_crc32_options, torch.arange(5)
    context = _compat.context_without_crc()
    assert get() is True
    assert context.run(get) is not _compat.CRC_IS_OF_CONTEXT
    assert ("2.11." in torch.__version__) is not _compat.CRC_IS_OF_CONTEXT
    for path, run in (
        (tmp_path / "with", lambda f, *a: f(*a)),
        (tmp_path / "without", context.run),
    ):
        run(torch.save, value, path)
        assert torch.equal(torch.load(path, weights_only=True), value)
    with zipfile.ZipFile(tmp_path / "with") as file:
        assert file.testzip() is None


def test_the_callback_runs_once_when_the_outermost_backward_ends():
    calls: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _grad: _compat.at_end_of_backward(lambda: calls.append(x.grad.clone())))
    y.sum().backward()
    assert len(calls) == 1 and torch.equal(calls[0], torch.full((2,), 2.0))


def gathers(group: Any) -> tuple[Tensor, Tensor]:
    out, mine = torch.empty(4), torch.full((2,), float(group.rank()))
    _compat.all_gather_flat(out, mine, group)
    reduced = torch.empty(2)
    _compat.reduce_scatter_flat(reduced, out * (group.rank() + 1), group=group)
    work = _compat.all_gather_flat(torch.empty(4), mine, group, async_op=True)
    work.wait()
    for async_op in (False, True):  # gloo knows no launch of several: they are made one by one
        with groups.coalesced(group, mine.device, async_op) as launch:
            pass
        launch.wait()
        several = torch.empty(4), torch.empty(4)
        launch = groups.all_gather_several([(t, mine) for t in several], group, async_op)
        assert (launch is not None) == async_op
        if launch is not None:
            launch.wait()
        assert torch.equal(torch.stack(several), torch.stack((out, out)))
    return out, reduced


def test_flat_gather_and_scatter_under_either_name():
    world = ThreadedWorld(2)
    for rank, (gathered, reduced) in enumerate(world.run(gathers)):
        assert gathered.tolist() == [0, 0, 1, 1]
        assert reduced.tolist() == [3.0 * rank] * 2
    flags = [False, False, True, *[False] * 2, *[True] * 2]
    assert [c.async_op for c in world.logs[0]] == flags
    assert len({c.launch for c in world.logs[0]}) == 5, "several all-gathers are one launch"


@pytest.mark.parametrize(
    "splits", [[([], []), ([], [])], [([2, 1], [2, 1]), ([1, 1], [1, 1])]], ids=["equal", "unequal"]
)
def test_an_exchange_is_that_of_torch_distributed(splits: Any):
    """Of each rank: how much it sends to both, and how much it receives from them."""

    def run(group: Any) -> tuple[Tensor, Tensor]:
        sent, received = splits[group.rank()]
        values = torch.arange(float(sum(sent) or 4)) + 10 * group.rank()
        outs = torch.zeros(sum(received) or 4), torch.zeros(sum(received) or 4)
        dist.all_to_all_single(outs[0], values, received or None, sent or None, group=group)
        _compat.all_to_all_flat(group, outs[1], values, received, sent).wait()
        return outs

    world = ThreadedWorld(2)
    for plain, flat in world.run(run):
        assert torch.equal(plain, flat) and bool(plain.any())
    first, second = world.logs[0]
    assert (first.input_splits, first.nbytes) == (second.input_splits, second.nbytes)
    assert (first.async_op, second.async_op) == (False, True)


def test_a_scheduler_knows_that_a_step_was_made():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _compat.note_step_called(optimizer)
    with pytest.warns(UserWarning) as caught:
        scheduler.step()
        optimizer._opt_called = False  # type: ignore[attr-defined]
        torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
    assert any("lr_scheduler.step()" in str(w.message) for w in caught), "the control warns"


def meets(group: Any) -> bytes:
    store = groups.default_store()
    groups.store_of(group).set(f"of_group/{group.rank()}", "here")
    assert groups.store_of(group).get(f"of_group/{1 - group.rank()}") == b"here"
    store.set(f"met/{group.rank()}", "here")
    return bytes(store.get(f"met/{1 - group.rank()}"))


def test_the_store_of_the_default_group_is_shared(gloo: SpawnedWorld):
    assert gloo.run(meets) == [b"here"] * 2


def test_a_thread_can_be_looked_at_from_another_one():
    ready, done = threading.Event(), threading.Event()

    def waits() -> None:
        ready.set()
        done.wait(30)

    thread = threading.Thread(target=waits)
    thread.start()
    assert ready.wait(30)
    frame = _compat.frame_of_thread(thread.ident or 0)
    while frame is not None and frame.f_code is not waits.__code__:
        frame = frame.f_back
    done.set()
    thread.join()
    assert frame is not None
    assert _compat.frame_of_thread(thread.ident or 0) is None


def test_compiled_models_are_unwrapped_and_an_attribute_called_module_is_no_wrapper():
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert _compat.unwrapped(model) is model
    assert _compat.unwrapped(torch.compile(model)) is model
    assert not _compat.is_ddp(torch.compile(model))


def test_parameters_keep_their_identity_when_a_meta_model_is_materialised():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    weight = model.weight
    with _compat.swapped_params():
        model.to_empty(device="cpu")
    assert model.weight is weight and not weight.is_meta
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_each_backward_has_a_number_and_one_inside_another_has_its_own():
    numbers: list[int] = []
    assert _compat.current_backward() == -1
    inner = torch.ones(1, requires_grad=True)
    inner.register_hook(lambda _grad: numbers.append(_compat.current_backward()))
    outer = torch.ones(1, requires_grad=True)

    def nested(_grad: Tensor) -> None:
        numbers.append(_compat.current_backward())
        with torch.enable_grad():
            (inner * 2).sum().backward()
        numbers.append(_compat.current_backward())

    outer.register_hook(nested)
    (outer * 3).sum().backward()
    before, inside, after = numbers
    assert before == after and before >= 0 and inside >= 0 and inside != before
    assert _compat.current_backward() == -1


def under_ddp(group: Any) -> dict[str, Any]:
    seen: list[bool] = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda m, _args: seen.append(_compat.inside_ddp(m)))
    wrapped = DistributedDataParallel(model)
    model(torch.ones(1, 2))
    wrapped(torch.ones(1, 2))
    model(torch.ones(1, 2))
    return {
        "seen": seen,
        "is_ddp": (_compat.is_ddp(wrapped), _compat.is_ddp(model)),
        "compiled": _compat.is_ddp(torch.compile(wrapped)),
        "unwrapped": _compat.unwrapped(wrapped) is model,
        "both": _compat.unwrapped(torch.compile(wrapped)) is model,
    }


def test_a_ddp_wrapper_is_seen_from_outside_and_from_inside_its_forward(gloo: SpawnedWorld):
    for found in gloo.run(under_ddp):
        assert found == {
            "seen": [False, True, False],
            "is_ddp": (True, False),
            "compiled": True,
            "unwrapped": True,
            "both": True,
        }


def test_a_thread_has_process_groups_of_its_own_under_names_of_its_own():
    made: list[tuple[str, tuple[int, ...]]] = []

    def make(key: str, ranks: tuple[int, ...]) -> FakeGroup:
        made.append((key, ranks))
        return FakeGroup(ranks.index(5), len(ranks))

    names = []
    for _ in range(2):
        with mocks.separate_process_groups(), mocks.own_process_groups(5, 8, make):
            assert dist.get_rank() == 5 and dist.get_world_size() == 8
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            assert mesh["tp"].get_local_rank() == 1 and mesh.get_group("dp").size() == 2
            names += [mesh.get_group("tp").group_name, hash(mesh), hash(mesh["tp"])]
        assert not dist.is_initialized()
    assert len(set(names)) == 6, "neither a group nor a mesh is taken for one of another world"
    assert made[:3] == [("0", tuple(range(8))), ("2", (1, 5)), ("6", (4, 5, 6, 7))]


def test_threads_trace_one_after_the_other_where_a_build_for_cuda_sees_no_gpu():
    code = """
import threading
from torch._subclasses.fake_tensor import FakeTensorMode
from shardcast.testing import _compat as mocks

def trace():
    with FakeTensorMode():
        pass

mocks.keep_device_guard()
for _ in range(20):
    thread = threading.Thread(target=trace)
    thread.start()
    thread.join()
"""
    done = python("-c", code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_the_memory_of_a_dtensor_is_read_and_replaced_below_it():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    with fake_world({"dp": 2, "tp": 4}, rank=5) as mesh:
        assert dtensor.mesh_line(mesh, "tp") == (4, 5, 6, 7)
        assert dtensor.mesh_line(mesh["dp"], "dp") == (1, 5)
        assert dtensor.mesh_group(mesh, ["dp"]) is mesh.get_group("dp")
        assert dtensor.mesh_group(mesh, ["dp", "tp"]).size() == 8
        pair = groups.group_of([1, 5], "pair")
        assert pair.size() == 2 and groups.group_of([1, 5], "pair") is pair, "made once"

        local = torch.ones(2, 3)
        param = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False))
        assert _compat.is_dtensor(param) and not _compat.is_dtensor(local)
        assert dtensor.placements(local) == {} and not dtensor.placements(param)["tp"].is_partial()
        assert _compat.local_tensor(local) is local
        assert _compat.local_tensor(param).data_ptr() == local.data_ptr()
        assert dtensor.indices_of(param, 0).tolist() == [2, 3]  # of 8, the second of four ranks
        assert dtensor.indices_of(param, 1).tolist() == [0, 1, 2]
        other = torch.full((2, 3), 2.0, dtype=torch.bfloat16)
        dtensor.set_local_tensor(param, other)
        assert param.shape == (8, 3) and param.dtype == torch.bfloat16
        assert param.to_local().data_ptr() == other.data_ptr()

        pending = dtensor.wrap_local(torch.ones(2, 3), param, [Partial()])
        assert dtensor.placements(pending)["tp"].is_partial() and pending.shape == (8, 3)
        whole = DTensor.from_local(local, mesh["tp"], [Partial()], run_check=False)
        here = _compat.local_tensor(whole.redistribute(mesh["tp"], [Replicate()]))
        assert torch.equal(dtensor.arrived(here), 4 * local) and dtensor.arrived(local) is local


def test_the_host_reads_its_own_values_alone_without_waiting():
    kinds = ("cpu", "cuda", "meta")
    assert [_compat.is_host(torch.device(kind)) for kind in kinds] == [True, False, False]


def test_what_multiplies_in_low_precision_is_what_onednn_says_of_the_cpu():
    """A limit of the instruction set of x86 is a CPU for which torch has no kernel."""
    code = "import torch; from shardcast._compat import has_products as h; print(h(torch.bfloat16))"
    found = python("-c", code, ONEDNN_MAX_CPU_ISA="AVX2").stdout.split()
    assert found == ["False"] or (platform.machine() != "x86_64" and len(found) == 1)
    assert _compat.has_products(torch.float32)


def test_a_forward_knows_the_module_that_calls_it_and_a_tensor_its_hooks():
    class Asks(nn.Module):
        def forward(self) -> Any:
            return _compat.calling_module()

    module = Asks()
    assert module() is module and module.forward() is None
    weight = nn.Parameter(torch.ones(1))
    assert _compat.gradient_hooks(weight) == []
    weight.register_hook(print)
    assert _compat.gradient_hooks(weight) == [print]


class Refusing(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"{func.__name__} is refused")


def test_tensors_of_a_class_that_refuses_everything_are_plain_ones_on_this_thread():
    tensor = torch.ones(3)
    tensor.__class__ = Refusing
    with pytest.raises(RuntimeError, match="is refused"):
        tensor.sum()
    with _compat.without_torch_function():
        assert type(tensor.detach()) is Tensor and tensor.sum() == 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_share_memory_are_known_also_without_any(device: str):
    tensor, other = (torch.zeros(4, device=device) for _ in range(2))
    assert _compat.is_alias(tensor, tensor[1:].view(3, 1))
    assert not _compat.is_alias(tensor, other)


def test_without_grad_has_gradients_off_and_leaves_the_rest_as_it_was():
    for before in (True, False):
        with torch.set_grad_enabled(before):
            with _compat.without_grad():
                assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled() == before


def test_only_a_cuda_stream_is_ever_captured(monkeypatch: pytest.MonkeyPatch):
    answers = [True, False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answers.pop(0))
    assert _compat.is_capturing(torch.device("cuda"))
    assert not _compat.is_capturing(torch.device("cuda"))
    assert not _compat.is_capturing(torch.device("cpu"))


def test_a_tensor_knows_whether_another_one_has_its_memory():
    tensor = torch.ones(3)
    assert not _compat.is_shared(tensor)
    part = tensor[1:]
    assert _compat.is_shared(tensor) and _compat.is_shared(part)
    del part
    assert not _compat.is_shared(tensor)
    weight = torch.ones(3, requires_grad=True)
    held = torch.ones(3)
    weight.backward(held)  # autograd takes what nobody else holds, and clones this
    assert weight.grad is not None and not _compat.is_shared(weight.grad)


class PretendedStream:
    """Notes what waits for what, and which tensors are used on it."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.device, self.name, self._told = torch.device("cpu", 0), name, told

    def wait_stream(self, other: PretendedStream) -> None:
        self._told.append(f"{self.name} waits for {other.name}")


def test_a_stream_waits_for_others_that_made_tensors(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    current, side = PretendedStream("current", told), PretendedStream("side", told)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _index: current)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, s: told.append(f"{len(tensor)} on {s.name}")
    )
    assert _compat.current_stream(torch.device("cpu", 0)) is current
    _compat.wait_streams({current}, [torch.ones(2)])
    assert told == []
    _compat.wait_streams([current, side], [torch.ones(2), None, torch.ones(3)])
    assert told == ["current waits for side", "2 on current", "3 on current"]


def test_a_function_that_is_uncompiled_breaks_a_graph_and_has_its_result():
    inner = _compat.uncompiled(lambda x: x * 2)
    assert float(inner(torch.ones(()))) == 2
    outer = torch.compile(lambda x: inner(x + 1) + 1, backend="eager")
    assert float(outer(torch.ones(()))) == 5
    whole = torch.compile(lambda x: inner(x + 1) + 1, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(torch.ones(()))


def test_constants_have_the_same_memory_in_a_storage_of_their_own():
    table = torch.arange(12.0).view(3, 4)
    for row in (table[1], table[1, 2]):
        numbers = _compat.constants_of(row)
        assert torch.equal(numbers, row) and numbers.data_ptr() == row.data_ptr()
        assert numbers.untyped_storage().nbytes() == row.nbytes


def test_state_dict_leaves_the_checkpoint_wrapper_out_of_its_keys():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    names = [name for name, _ in model.named_parameters()]
    assert [_compat.state_key(name) for name in names] == [*model.state_dict()]
    assert names != [*model.state_dict()], "without the wrapper there is nothing to leave out"


def test_a_backward_knows_whether_it_comes_to_a_reentrant_checkpoint():
    from torch.utils.checkpoint import checkpoint

    layer, seen = nn.Linear(3, 3), []
    for reentrant in (True, False, None):
        x = torch.ones(2, 3, requires_grad=True)
        inner = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        out = layer(inner.tanh()).sum()
        out.register_hook(lambda _grad: seen.append(_compat.reaches_checkpoint()))
        out.backward()
    assert seen == [True, False, False]


def test_a_hook_can_tell_a_backward_from_autograd_grad():
    seen: list[bool] = []
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    inputs = torch.ones(2, 3, requires_grad=True)
    everything = [*first.parameters(), *second.parameters()]

    def loss() -> Tensor:
        hidden = first(inputs)
        hidden.register_hook(lambda _grad: seen.append(_compat.accumulates()))
        return second(hidden).sum()

    loss().backward()
    torch.autograd.grad(loss(), everything)
    torch.autograd.grad(loss(), inputs)
    assert seen == [True, False, False]
    seen.clear()
    handle = first.weight.register_hook(lambda _grad: seen.append(_compat.accumulates()))
    second(first(inputs)).sum().backward(inputs=[first.weight])
    torch.autograd.grad(second(first(inputs)).sum(), first.weight)
    handle.remove()
    assert seen == [True, False]


FREED = """
import sys, time, weakref, torch, torch.distributed as dist, shardcast
from collections.abc import Callable
from pathlib import Path
from torch import nn

def workers():
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text())
        except OSError:  # it has ended since it was listed
            pass
    return sum("gloo" in name for name in names)

def wait_for(holds):  # a thread takes its name, and leaves the list, when it runs
    while not holds():
        time.sleep(0.01)

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
model = nn.Linear(3, 3)
optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
wait_for(lambda: workers() > 0)
dist.destroy_process_group()
assert group() is None
wait_for(lambda: workers() == 0)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux")
def test_a_model_does_not_keep_the_threads_of_a_process_group_that_is_destroyed(tmp_path: Path):
    done = python("-c", FREED, str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr


def test_a_group_that_torch_does_not_keep_is_held():
    mock = _compat.weak_group(FakeGroup(0, 2))
    gc.collect()
    assert mock is not None and mock() is not None and _compat.weak_group(None) is None


def test_errors_of_torch_distributed_are_told_from_others():
    def raised(call: Callable[[], Any]) -> bool:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        return observer.raised_in_distributed(caught.value)

    assert raised(lambda: torch.distributed.all_reduce(torch.ones(1)))
    assert not raised(lambda: torch.ones(2) @ torch.ones(3))


def test_a_weak_hook_calls_while_what_it_holds_lives():
    seen: list[Tensor] = []

    class Holder:
        def called(self, tensor: Tensor) -> None:
            seen.append(tensor)

    holder, weight = Holder(), torch.ones(2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(weak_hook(Holder.called, holder))
    (weight * 2).sum().backward()
    del holder
    (weight * 2).sum().backward()
    assert len(seen) == 1 and seen[0] is weight


def test_the_bare_step_runs_no_hooks_and_makes_the_same_step():
    weights = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    hooked, bare = (torch.optim.Adafactor([weight], lr=0.1) for weight in weights)
    seen: list[object] = []
    for optimizer, weight in zip((hooked, bare), weights, strict=True):
        optimizer.register_step_pre_hook(lambda *args: seen.append(args[0]))
        weight.grad = torch.full_like(weight, 0.5)
    hooked.step()
    _compat.bare_step(bare)()
    assert torch.equal(*weights) and (weights[0] != 1).all() and seen == [hooked]


def test_rows_are_the_same_memory_with_a_storage_of_their_own():
    flat = torch.arange(24.0)
    rows = _compat.rows_of(flat[8:], 4)
    assert rows.shape == (4, 4) and rows.data_ptr() == flat[8:].data_ptr()
    assert rows.untyped_storage().nbytes() == 64 and rows.storage_offset() == 0
    assert _compat.rows_of(flat[8:], 0).shape == (16,)


def test_what_a_broken_compiler_raises_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    broken = torch._inductor.config.patch({"cpp.cxx": (None, "/bin/false")})
    with broken, pytest.raises(inductor.compile_errors()):
        inductor.compiled(lambda x: x.add_(3.25))(torch.zeros(64))
    torch._dynamo.reset()


def test_too_many_graphs_of_a_function_are_an_error_of_compiling():
    """Before torch 2.13 more than 8 kinds of updates in one process are."""
    torch._dynamo.reset()
    grow = torch.compile(lambda x: x.add_(1), fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(inductor.compile_errors()):
        for dtype in (torch.float32, torch.float64, torch.int32):
            grow(torch.zeros(4, dtype=dtype))
    torch._dynamo.reset()


@pytest.mark.needs_compiler
def test_a_compiled_function_has_one_graph_for_all_lengths():
    torch._dynamo.reset()
    double = inductor.compiled(_double_)
    tensors = [torch.ones(length) for length in (3, 5, 1000)]
    double(tensors[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tensor in tensors[1:]:
            double(tensor)
    assert all(bool((tensor == 2).all()) for tensor in tensors)


def test_under_a_dispatch_mode_a_compiled_function_runs_as_it_is():
    tensor = torch.ones(8)
    with FlopCounterMode(display=False):
        inductor.compiled(_double_)(tensor)  # torch.compile(fullgraph=True) raises here
    assert bool((tensor == 2).all())


def _double_(tensor: Tensor) -> None:
    tensor.mul_(2)


def test_a_storage_is_there_as_long_as_somebody_has_it():
    base = torch.arange(4.0)
    view, weak = base[1:], _compat.WeakStorage(base)
    assert _compat.base_of(view) is base and _compat.base_of(view.detach()) is None
    view.data = torch.empty(0)  # the base has it still, which the view keeps
    del base
    found = weak()
    assert found is not None and found.nbytes() == 16
    del found, view
    assert weak() is None
    shared = torch.arange(4.0)
    weak, other = _compat.WeakStorage(shared), _compat.own_storage(shared)
    del shared
    assert weak() is not None, "a tensor over its memory keeps it"
    del other
    assert weak() is None


def test_a_hook_can_come_first():
    seen: list[str] = []
    tensor, module = torch.ones(1, requires_grad=True), nn.Linear(1, 1)
    for place, note in enumerate((seen.append, lambda text: seen.append(text.upper()))):
        handles = (
            tensor.register_hook(lambda _grad, note=note: note("backward")),
            module.register_load_state_dict_pre_hook(lambda *_, note=note: note("load")),
        )
        if place:
            [_compat.put_first(handle) for handle in handles]
    (2 * tensor).backward()
    module.load_state_dict(module.state_dict())
    assert seen == ["BACKWARD", "backward", "LOAD", "load"]


def test_tensors_inside_of_others_are_found():
    one, two = torch.zeros(2), torch.ones(3)
    nested = {"a": [one, (two, "text")], "b": 3, "c": torch.nested.nested_tensor([one])}
    found = [*_compat.plain_tensors(nested)]
    assert found[0] is one and found[1] is two


def test_bits_of_the_host_are_compared_exactly():
    values = torch.tensor([[1.0, -0.0, math.nan], [2.0, 3.0, math.inf]], dtype=torch.bfloat16)
    assert _compat.has_bits_of(values, values.clone())
    assert _compat.has_bits_of(values.t(), values.clone().t())
    assert _compat.has_bits_of(values[:0], values[:0].clone())
    for at, value in (((0, 1), 0.0), ((0, 2), 1.0), ((1, 2), 1e3)):
        other = values.clone()
        other[at] = value
        assert not _compat.has_bits_of(values, other)
        assert not _compat.has_bits_of(values.t(), other.t())
