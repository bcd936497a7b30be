"""Masters that are updated on the host: same bits as on the device, and order of the copies.

All tests with ``offload``, including random ones of other options, use the copies of ``late.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from late import Late
from models import Tensors, assert_same_bits, values
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardcast
from shardcast import _compat
from shardcast.estimate import estimate
from shardcast.extensions import offload
from shardcast.extensions.any_optimizer import probe
from shardcast.optimizer.sharded import packed_of
from shardcast.step.sync.sync import Sync
from shardcast.testing import threaded_world

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


Kind = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Kind] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "Signs": lambda params: foreign.Signs(params, lr=0.01),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.norm = nn.LayerNorm(96)
        self.down = nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x.to(self.up.weight.dtype)).float()).to(x.dtype))


def built(group: Any, kind: Kind, **fields: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model()
    fields = {"pack_params": 1, "fuse": "eager", "process_group": group, **fields}
    return model, shardcast.shard(model, kind(model.parameters()), **fields)


def backward(model: Model, optimizer: Any, rank: int, number: int) -> None:
    drawn = torch.Generator().manual_seed(1000 * number + rank)
    dtype = model.up.weight.dtype
    x = torch.randn(4, 64, generator=drawn).to(dtype)
    with torch.autocast("cpu", enabled=False):
        loss = model(x).float().square().mean()
    optimizer.scale_loss(loss).backward()


# -- order and lifetime -------------------------------------------------------------------------


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Late:
    late = Late()
    monkeypatch.setattr(offload, "copies_of", lambda _device: late)
    return late


def trained(group: Any, kind: str, **fields: Any) -> Tensors:
    model, optimizer = built(group, KINDS[kind], **fields)
    for number in range(3):
        backward(model, optimizer, group.rank(), number)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
def test_copies_that_are_as_late_as_permitted_change_no_bit(bus: Late, kind: str):
    found = threaded_world(2, lambda group: trained(group, kind, offload=True))
    for one, other in zip(found, threaded_world(2, trained, kind), strict=True):
        assert_same_bits(one, other)


def test_each_own_element_goes_down_once_and_up_once_in_a_step(bus: Late):
    model, optimizer = built(None, KINDS["AdamW"], offload=True)
    weights = sum(param.nbytes for param in model.parameters())

    def moved(*edits: Callable[[], Any]) -> tuple[int, int]:
        bus.went_down = bus.went_up = 0
        backward(model, optimizer, 0, 0)
        before = bus.went_down
        for edit in edits:
            edit()
        optimizer.step()
        optimizer.zero_grad()
        assert before >= weights, "in the backward, not in the step"
        return bus.went_down, bus.went_up

    whole = sum(shard.pack.data.nbytes for shard in packed_of(optimizer).shards)
    moved()  # the initial weights are copied down once more
    assert moved() == (whole, whole)
    edited = model.up.weight.nbytes
    with torch.no_grad():
        model.up.weight[0, 0] += 1.0
    assert moved() == (whole + edited, whole)
    assert moved() == (whole, whole)
    assert moved(lambda: model.up.weight.grad.mul_(2.0)) == (whole + edited, whole)
    assert moved(lambda: model.up.weight.grad.data.mul_(2.0)) == (whole + edited, whole)
    infinite = torch.full_like(model.down.weight, torch.inf)
    down, up = moved(lambda: setattr(model.down.weight, "grad", infinite))
    assert down > whole and up == 0, "a skipped step publishes nothing"


def test_a_mean_that_another_reduction_adds_to_goes_down_again(bus: Late):
    def run(group: Any) -> tuple[int, int]:
        model, optimizer = built(group, KINDS["AdamW"], offload=True, accumulate="sharded")
        own = sum(shard.pack.own.numel for shard in packed_of(optimizer).shards)
        backward(model, optimizer, group.rank(), 0)
        first = bus.went_down
        backward(model, optimizer, group.rank(), 1)
        return bus.went_down - first, own

    ((down, own),) = threaded_world(2, run)[:1]
    assert down >= 4 * own, "fp32 means of this rank, perhaps of both"


def test_each_part_is_cast_copied_up_and_synced_before_the_next_one_is_updated(
    bus: Late, monkeypatch: pytest.MonkeyPatch
):
    events: dict[int, list[tuple[str, int]]] = {}
    later: dict[int, Callable[[int], bool]] = {}  # whether later parts have their old masters
    begin, up = Sync.begin, bus.up

    def syncs(self: Sync, packs: Any) -> None:
        packs = list(packs)
        events[threading.get_ident()].extend(("sync", pack.own_data.data_ptr()) for pack in packs)
        begin(self, packs)

    def goes_up(values: Tensor, host: Tensor) -> Any:
        if threading.get_ident() in events:
            events[threading.get_ident()].append(("up", values.data_ptr()))
            assert later[threading.get_ident()](values.data_ptr())
        return up(values, host)

    monkeypatch.setattr(Sync, "begin", syncs)
    monkeypatch.setattr(bus, "up", goes_up)

    def run(group: Any) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        model, optimizer = built(group, KINDS["AdamW"], offload=True)
        backward(model, optimizer, group.rank(), 0)
        shards = packed_of(optimizer).shards
        before = [shard.master.read(slice(None)).clone() for shard in shards]
        places = [shard.pack.own_data.data_ptr() for shard in shards]

        def are_old(at: int) -> bool:
            after = slice(places.index(at) + 1, None)
            pairs = zip(shards[after], before[after], strict=True)
            return all(torch.equal(shard.master.read(slice(None)), old) for shard, old in pairs)

        later[threading.get_ident()], events[threading.get_ident()] = are_old, []
        optimizer.step()
        after = [shard.master.read(slice(None)) for shard in shards]
        assert any(not torch.equal(new, old) for new, old in zip(after, before, strict=True))
        for shard, new in zip(shards, after, strict=True):
            own = shard.pack.own_data
            assert_same_bits({"of this step": own}, {"of this step": new.to(own.dtype)})
        found = events.pop(threading.get_ident())
        expected = []
        for shard in shards:
            at = shard.pack.own_data.data_ptr()
            # A part with only padding is synced but not updated.
            expected += [("up", at)] * bool(shard.fragments) + [("sync", at)]
        return found, expected

    for found, expected in threaded_world(2, run):
        assert len(expected) > 4
        assert found == expected


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
def test_a_rank_that_owns_nothing_syncs_as_the_others_do(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    begun: list[str] = []
    before = Sync.begin

    def begin(self: Sync, packs: Any) -> None:
        begun.extend(pack.layout.slots[0].name for pack in packs)
        before(self, packs)

    monkeypatch.setattr(Sync, "begin", begin)

    def run(group: Any, offload: bool) -> Tensors:
        torch.manual_seed(0)
        model = nn.Linear(64, 8, bias=False)
        optimizer = shardcast.shard(
            model,
            KINDS[kind](model.parameters()),
            process_group=group,
            partition="whole",
            offload=offload,
        )
        for scale in (1.0, torch.inf, 2.0):  # the second step is skipped
            model.weight.grad = torch.full_like(model.weight, scale)
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    found = threaded_world(2, run, True)
    assert begun == ["weight"] * 4, "in each of two steps, on both ranks"
    for one, other in zip(found, threaded_world(2, run, False), strict=True):
        assert_same_bits(one, other)


class Sides(TorchDispatchMode):
    """Raises if an operation mixes values of the pretended device and of the host."""

    def __init__(self, device: list[Tensor], host: list[Tensor]) -> None:
        super().__init__()
        self.sides: dict[int, tuple[str, Any]] = {}
        for side, tensors in (("device", device), ("host", host)):
            for tensor in tensors:
                self.put(tensor, side)

    def put(self, tensor: Tensor, side: str) -> None:
        storage = tensor.untyped_storage()  # kept, so that its address is not reused
        if storage.nbytes():
            self.sides.setdefault(storage.data_ptr(), (side, storage))

    def side(self, tensor: Tensor) -> str | None:
        known = self.sides.get(tensor.untyped_storage().data_ptr())
        return known[0] if known and tensor.dim() else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [
            tensor
            for arg in (*args, *(kwargs or {}).values())
            for tensor in (arg if isinstance(arg, (list, tuple)) else (arg,))
            if isinstance(tensor, Tensor)
        ]
        sides = {side for tensor in given if (side := self.side(tensor))}
        assert len(sides) < 2, f"{func} of values of both sides: {[t.shape for t in given]}"
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(made, Tensor) and sides:
                self.put(made, next(iter(sides)))
        return result


class Across(offload.Copies):
    """Copies, which may use both sides."""

    def down(self, host: Tensor, values: Tensor) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return super().down(host, values)

    def up(self, values: Tensor, host: Tensor) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return super().up(values, host)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("AdamW", {}),
        ("AdamW", {"param_dtype": "fp32"}),
        ("AdamW", {"master": "split16", "moments": "int8"}),
        ("AdamW", {"averages": {"ema": 0.5}, "max_grad_norm": 0.1, "changes": True}),
        ("AdamW", {"published": {"mxfp8": "up.weight"}}),
        ("RMSprop", {"averages": {"ema": 0.5}}),
        ("Signs", {}),
    ],
)
def test_a_step_mixes_no_values_of_host_and_device_but_in_copies(
    kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    across = Across()
    monkeypatch.setattr(offload, "copies_of", lambda _device: across)
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    model, optimizer = built(None, KINDS[kind], offload=True, **fields)
    for number in range(3):
        backward(model, optimizer, 0, number)
        packed = packed_of(optimizer)
        device = [shard.pack.data for shard in packed.shards]
        device += [shard.grads.own for shard in packed.shards if shard.grads is not None]
        host = [piece for shard in packed.shards for piece in shard.master.pieces]
        host += [shard.published for shard in packed.shards]
        host += [shard.mean for shard in packed.shards]
        for update in packed.updates:
            host += [*update.memory()]
        with Sides(device, host) as sides:
            optimizer.step()
        optimizer.zero_grad()
    values, own = packed.shards[0].mean, packed.shards[0].grads
    assert own is not None
    with sides, pytest.raises(AssertionError, match="both sides"):  # a negative control
        values + own.own


# -- errors -------------------------------------------------------------------------------------


def noisy(params: Any) -> torch.optim.Optimizer:
    return foreign.Noisy(params, draw=torch.randn_like)


@pytest.mark.parametrize(
    "kind", [torch.optim.Muon, torch.optim.Adafactor, foreign.Normalized, noisy]
)
def test_an_update_that_needs_more_than_its_element_is_refused_by_name_on_all_ranks(kind: Any):
    def run(group: Any) -> str:
        model = nn.Linear(8, 8, bias=False)
        before, inner = model.weight.detach().clone(), kind(model.parameters())
        with pytest.raises(ValueError, match=f"offload: .* got {type(inner).__name__}: ") as error:
            shardcast.shard(model, inner, process_group=group, offload=True)
        assert torch.equal(model.weight, before)
        return str(error.value)

    assert len({*threaded_world(2, run)}) == 1


def test_a_class_is_found_to_be_elementwise_by_a_twin_or_declared():
    params, kinds = [nn.Parameter(torch.ones(4, 4))], (foreign.Signs, foreign.Normalized, noisy)
    assert [probe.is_elementwise(kind(params)) for kind in kinds] == [True, False, False]
    assert probe.is_elementwise(torch.optim.RMSprop(params))
    model = nn.Linear(8, 8)
    shardcast.shard(model, noisy(model.parameters()), offload=True, elementwise=True)


def test_a_host_with_too_little_memory_is_named_with_both_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def run(group: Any) -> str:
        with pytest.raises(ValueError, match="offload: expected") as error:
            model = nn.Linear(1000, 1000, bias=False)
            shardcast.shard(
                model, torch.optim.AdamW(model.parameters()), process_group=group, offload=True
            )
        return str(error.value)

    monkeypatch.setattr(offload, "available_bytes", lambda: 10_000_000)
    messages = threaded_world(2, run)
    # Masters and two moments, mean and cast: 16 bytes for each of a million elements, two ranks.
    assert all("expected 0.02 GB" in m and "of 2 ranks" in m for m in messages)
    assert all("got 0.01 GB" in m for m in messages)


def test_files_that_a_container_has_read_count_as_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(offload, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("95000\n")
    stat = "anon 15000\nfile 80000\nshmem 7000\ninactive_file 60000\nactive_file 13000\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert offload.available_bytes() == 78_000
    (tmp_path / "memory.max").write_text("max\n")
    free = offload.available_bytes()  # of the host
    total = Path("/proc/meminfo").read_text().split()[1]
    assert free is not None and 78_000 < free <= 1024 * int(total)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_capturable_and_a_capture_are_refused_by_name(kind: Any, monkeypatch: pytest.MonkeyPatch):
    model = Model()
    with pytest.raises(ValueError, match=r"capturable: expected False with offload, got True"):
        shardcast.shard(model, kind(model.parameters(), capturable=True), offload=True)
    model, optimizer = built(None, kind, offload=True)
    backward(model, optimizer, 0, 0)
    monkeypatch.setattr(_compat, "is_capturing", lambda _device: True)
    with pytest.raises(RuntimeError, match="offload: a step cannot be captured"):
        optimizer.step()


# -- bytes --------------------------------------------------------------------------------------

HELD: list[dict[str, Any]] = [
    {},
    {"param_dtype": "fp32"},
    {"keep_fp32": "norms", "averages": {"ema": 0.5}},
    {"master": "split16", "moments": "int8"},
    {"accumulate": "sharded"},
]


@pytest.mark.parametrize("fields", HELD)
@pytest.mark.parametrize("size", [1, 2])
def test_report_estimate_and_check_tell_host_and_device_apart_to_the_byte(
    fields: dict[str, Any], size: int
):
    micro_batches = 1 + ("accumulate" in fields)

    def run(group: Any) -> tuple[Any, int]:
        model, optimizer = built(group, KINDS["AdamW"], offload=True, **fields)
        packed = packed_of(optimizer)
        for number in range(2):
            for micro_batch in range(micro_batches):
                backward(model, optimizer, group.rank(), micro_batch)
            optimizer.step()
            report = optimizer.memory_report()
            if number == 0:
                optimizer.zero_grad()
        host = {}
        for shard in packed.shards:
            home = shard.home
            assert isinstance(home, offload.HostHome)
            for tensor in (*shard.master.pieces, shard.published, shard.mean):
                host[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        for update in packed.updates:
            for tensor in update.memory():
                host[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return report, sum(host.values())

    with torch.device("meta"):
        shape = Model()
    config = {"pack_params": 1, "offload": True, **fields}
    promised = estimate(
        shape, KINDS["AdamW"](shape.parameters()), size, config, "gloo", micro_batches=micro_batches
    )
    reports = threaded_world(size, run)
    for report, host in reports:
        assert report.host == host
        assert str(report).endswith(f"of it in host memory {host / 1e6:.3f} MB")
    assert promised.host == max(report.host for report, _ in reports)
    assert promised.total == max(report.total for report, _ in reports)


class Cudart:
    """Fakes CUDA's functions for pinned host memory."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.registered = error, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error}"


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    yield made
    assert made.registered == {}, "freed memory must be unpinned"


def test_pinned_memory_is_as_long_as_it_is_and_unpinned_when_its_last_view_goes(cudart: Cudart):
    memory = offload.pinned(1_000_003)
    assert [*cudart.registered.values()] == [1_000_003] and not memory.any()
    assert memory.data_ptr() in cudart.registered
    view = memory[10:20].view(torch.int8)
    del memory
    assert cudart.registered
    del view


def test_memory_that_cannot_be_pinned_is_an_error_with_its_remedy(cudart: Cudart):
    cudart.error = 2
    with pytest.raises(RuntimeError, match=r"could not pin 4096 bytes .*error 2.*ulimit -l"):
        offload.pinned(4096)
