"""Count what slows a step: waits for the device, passes over buffers, casts, collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, adamw, of, on_each_rank, ranks_of, sharded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardcast.comm import Comm
from shardcast.memory.codecs import ROW
from shardcast.optimizer.sharded import packed_of
from shardcast.plan.algorithms import Topology
from shardcast.testing import SpawnedWorld

META, BF16, FP16 = torch.device("meta"), torch.bfloat16, torch.float16


class Waits(TorchDispatchMode):
    """Raise if the host waits for values of the device.

    The device is ``meta``, on which ``item``, ``tolist`` and ``bool`` raise anyway. Blocking copies
    between it and the host raise here.
    """

    def __init__(self, raises: bool = True) -> None:
        super().__init__()
        self.raises = raises
        self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "copy_" and args[0].device != args[1].device and args[1].dim():
            waits = not (kwargs.get("non_blocking") or args[2:] == (True,))
            assert not (waits and self.raises), (
                f"a copy from {args[1].device} to {args[0].device} waits"
            )
            self.copies += 1
            return args[0]
        crosses = name == "_to_copy" and kwargs.get("device") not in (None, args[0].device)
        if crosses and self.raises:
            raise AssertionError(f"a copy from {args[0].device} to {kwargs['device']} waits")
        return func(*args, **kwargs)


class Odd(nn.Module):
    """Parameters of several sizes; ``forward`` does not use them, since they are on ``meta``."""

    def __init__(self, device: torch.device | str = META, width: int = 5) -> None:
        super().__init__()
        sizes = (3, 7, 64, 1, 130)
        self.params = nn.ParameterList(torch.ones(size, width, device=device) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``shard`` accept models on ``meta``, by removing checks that read values."""
    for name in (
        "plan.validate.check_memory",
        "comm.Comm.check_equal",
        "optimizer.api.convert_rest",
    ):
        monkeypatch.setattr(f"shardcast.{name}", lambda *_: None)
    monkeypatch.setattr(Comm, "topology", lambda *_: Topology("nccl"))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0}])


momentum = of("SGD", lr=0.1, momentum=0.9, dampening=0.1)
WAYS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "bf16": (adamw, {"param_dtype": BF16}),
    "clipped": (adamw, {"param_dtype": BF16, "max_grad_norm": 1.0}),
    "fp16, dynamic scale": (adamw, {"param_dtype": FP16, "loss_scale": "dynamic"}),
    "two groups, several packs": (two_groups, {"max_grad_norm": 1.0, "pack_params": 1}),
    "averages and metrics": (
        adamw,
        {"param_dtype": BF16, "metrics": True, "averages": {"ema": 0.9}},
    ),
    "sgd, norm of infinity": (momentum, {"param_dtype": BF16, "norm_type": float("inf")}),
}


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_part_of_a_step_waits_for_the_device(way: str, absent: bool, on_meta: None):
    build, fields = WAYS[way]
    model = Odd()
    optimizer = sharded(model, optimizer=build, **fields)

    def step() -> None:
        for number, param in enumerate(model.parameters()):
            param.grad = None if absent and number == 1 else torch.ones_like(param)
        optimizer.scale_loss(torch.ones((), device=META))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.config.metrics:
            assert list(optimizer.metrics({"all": "*"})) == ["all"]

    with Waits(raises=False):  # the first step creates state and constants
        step()
    with Waits() as mode:
        step()
    assert mode.copies == 1, "the tally of skipped steps is the one copy to the host"


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: bool(t.any()),
        lambda t: t.cpu(),
        lambda t: torch.zeros(t.shape).copy_(t),
        lambda t: t.copy_(torch.ones(t.shape)),
        lambda t: torch.ones(t.shape).to(t.device),
    ],
)
def test_whatever_waits_is_noticed(wait: Callable[[Tensor], Any]):
    """Check that ``Waits`` works."""
    tensor = torch.ones(3, device=META)
    with Waits(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        wait(tensor)


class Passes(TorchDispatchMode):
    """Counts bytes that operations read and write in ``watched`` memory, without views.

    Operations at single indices count only those elements.
    """

    def __init__(self, watched: Tensor) -> None:
        super().__init__()
        self.start, self.stop = watched.data_ptr(), watched.data_ptr() + watched.nbytes
        self.touched: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace == "aten" and "detach" not in str(func):
            for tensor in tree_leaves((args, kwargs)):
                inside = isinstance(tensor, Tensor) and tensor.device.type == "cpu"
                if inside and self.start <= tensor.data_ptr() < self.stop:
                    name = func.overloadpacket.__name__
                    nbytes = tensor.nbytes
                    if name in ("index_select", "index_fill_"):
                        nbytes = args[2].numel() * tensor.itemsize
                    self.touched[name] = self.touched.get(name, 0) + nbytes
        return result


def passes_of_a_step(group: Any) -> dict[str, Any]:
    """Return a step's reads and writes of gradients and parameters, in units of the own span."""
    model = CASES["gpt"].build()
    options = {"param_dtype": BF16, "autocast": False}  # all packs are in low precision
    optimizer = sharded(model, group, max_grad_norm=1.0, **options)
    (master,) = packed_of(optimizer).shards
    found: dict[str, Any] = {}
    for step in range(3):  # the last one has all buffers
        grads, params = master.grads.own, master.pack.data
        loss = CASES["gpt"].loss(model, CASES["gpt"].batch(step))
        with Passes(grads) as backward:
            loss.backward()
        with Passes(grads) as of_grads, Passes(params) as of_params:
            optimizer.step()
        optimizer.zero_grad()
        own = master.grads.own.nbytes
        found = {
            "backward": sum(backward.touched.values()) / own,
            "gradients": sum(of_grads.touched.values()) / own,
            "parameters": sum(of_params.touched.values()) / own,
            "operations": {*backward.touched, *of_grads.touched, *of_params.touched},
        }
    return found


def test_a_step_passes_over_the_own_span_and_never_over_whole_buffers(gloo: SpawnedWorld):
    for rank in gloo.run(passes_of_a_step):
        # The owner writes the mean, and on a CPU checks whether it is finite.
        assert rank["backward"] == 2
        assert rank["gradients"] == 2, "read for the norm, read for the update"
        # Comparing them with the masters is a memcmp, which is not counted.
        assert rank["parameters"] == 1, "written by the cast"
        assert not rank["operations"] & {"zero_", "fill_", "mul_", "div_", "clone"}


# -- casts of parameters, bytes, collectives ------------------------------------------------------

CASTS = 2  # eager update: one to compare with the model's values, one into the pack

FP32 = torch.float32


class CastCounter(TorchDispatchMode):
    """Counts, per element of ``watched`` memory, conversions to another floating dtype.

    A cast is a ``_to_copy`` or ``copy_`` between dtypes whose source lies in watched memory.
    """

    def __init__(self, watched: list[Tensor]) -> None:
        super().__init__()
        self.watched = watched
        self.counts = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in watched]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("_to_copy", "copy_"):
            source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
            if result.dtype != source.dtype and source.is_floating_point():
                self.note(source)
        return result

    def note(self, source: Tensor) -> None:
        for tensor, counts in zip(self.watched, self.counts, strict=True):
            offset = source.data_ptr() - tensor.data_ptr()
            if source.numel() and 0 <= offset < tensor.nbytes and source.dtype == tensor.dtype:
                first = offset // tensor.element_size()
                counts[first : first + source.numel()] += 1

    @property
    def total(self) -> int:
        return int(sum(counts.sum() for counts in self.counts))


def count_step(
    group: Any, case: str, dtype: torch.dtype, fields: dict[str, Any], micros: int = 3
) -> dict[str, Any]:
    """Count casts in micro-batches under ``no_sync``, in the last micro-batch, and in the step."""
    model = CASES[case].build()
    optimizer = sharded(model, group, param_dtype=dtype, **fields)
    packs = [master.pack.data for master in packed_of(optimizer).shards]
    masters = [m.data for m in packed_of(optimizer).shards if not m.in_place]
    found: dict[str, Any] = {}
    for step in range(2):  # the second one has all buffers
        for micro in range(micros):
            last = micro + 1 == micros
            quiet = contextlib.nullcontext() if last else optimizer.no_sync()
            with quiet, CastCounter(packs + masters) as counter:
                batch = CASES[case].batch(step * 10 + micro)
                optimizer.scale_loss(CASES[case].loss(model, batch)).backward()
            name = "last backward" if last else "no_sync"
            found[name] = found.get(name, 0) + counter.total
        with CastCounter(packs + masters) as counter:
            optimizer.step()
        optimizer.zero_grad()
    rank = 0 if group is None else group.rank()
    found["of packs"] = int(sum(c.sum() for c in counter.counts[: len(packs)]))
    wrong = []  # parameters (without padding) not cast exactly CASTS times
    low = [master for master in packed_of(optimizer).shards if not master.in_place]
    for master, counts in zip(low, counter.counts[len(packs) :], strict=True):
        if group is None:  # the last, incomplete row is cast in a padded copy
            counts[len(counts) // ROW * ROW :] = CASTS
        for fragment in master.pack.layout.fragments(rank):
            part = counts[master.local(fragment.start, fragment.stop)]
            if not bool((part == CASTS).all()):
                wrong.append(fragment.slot.name)
    found["wrong"] = wrong
    found["masters"] = sum(master.pack.own.numel for master in low)
    found["casts"] = int(sum(c.sum() for c in counter.counts[len(packs) :]))
    return found


EVEN: dict[str, Any] = {}
WHOLE, NORMS, PURE = {"partition": "whole"}, {"keep_fp32": "norms"}, {"autocast": False}


FP16_SCALED = {"loss_scale": 64.0}


@pytest.mark.parametrize(
    ("size", "case", "dtype", "fields"),
    [
        (1, "gpt", BF16, EVEN),
        (1, "gpt", FP16, FP16_SCALED),
        (1, "gpt", FP32, EVEN),
        (2, "tiny", BF16, {**WHOLE, **PURE}),
        (2, "gpt", BF16, NORMS),
        (2, "gpt_nonreentrant", BF16, EVEN),
    ],
)
def test_parameters_are_cast_in_the_update_and_never_in_forward_or_backward(
    size: int, case: str, dtype: torch.dtype, fields: dict[str, Any]
):
    ranks = ranks_of(size, count_step, case, dtype, fields)
    for rank in ranks:
        assert rank["no_sync"] == rank["last backward"] == rank["of packs"] == 0
        assert rank["wrong"] == []
        assert rank["casts"] <= CASTS * rank["masters"], "padding is not cast more often"
    assert (sum(rank["casts"] for rank in ranks) > 0) == (dtype != FP32)


@pytest.mark.parametrize("frozen", [False, True])
@on_each_rank(2)
def test_frozen_parameters_in_the_optimizer_cost_two_all_reduces_per_step_on_a_cpu(
    group: Any, frozen: bool
):
    """One of them compares the ranks' calls, so that the next may have another length."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(not frozen)
    optimizer = sharded(model, group)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        begun = len(group.log)
        optimizer.step()
        optimizer.zero_grad()
    assert sum(call.op == "all_reduce" for call in group.log[begun:]) == (3 if frozen else 1)
