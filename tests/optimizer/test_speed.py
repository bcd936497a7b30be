"""What makes a step slow without a clock: waiting for the device, passes over whole buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, adamw, of, sharded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardcast.comm import Comm
from shardcast.optimizer.sharded import packed_of
from shardcast.plan.algorithms import Topology
from shardcast.testing import SpawnedWorld

META, BF16, FP16 = torch.device("meta"), torch.bfloat16, torch.float16


class Waits(TorchDispatchMode):
    """A device whose values the host cannot see: every attempt to wait for them raises.

    The device is ``meta``, where ``item``, ``tolist`` and ``bool`` raise by themselves. Copies
    between it and the host raise here, but for those that ask not to be waited for.
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
    """Parameters of several sizes; on ``meta`` nothing can be computed with them."""

    def __init__(self, device: torch.device | str = META, width: int = 5) -> None:
        super().__init__()
        sizes = (3, 7, 64, 1, 130)
        self.params = nn.ParameterList(torch.ones(size, width, device=device) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``shard`` take models on ``meta``: its own checks look at values, which are not there."""
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

    with Waits(raises=False):  # the first step makes what is kept: state, constants
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
    """The test's own check."""
    tensor = torch.ones(3, device=META)
    with Waits(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        wait(tensor)


class Passes(TorchDispatchMode):
    """Bytes that operations read and write in ``watched`` memory; views touch nothing.

    Operations at single indices touch those elements alone.
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
    """Reads and writes of the gradients and parameters of one step, in units of the own span."""
    model = CASES["gpt"].build()
    options = {"param_dtype": BF16, "autocast": False}  # all packs are low
    optimizer = sharded(model, group, max_grad_norm=1.0, **options)
    (master,) = packed_of(optimizer).shards
    found: dict[str, Any] = {}
    for step in range(3):  # the last one has its buffers
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
        # The owner writes the mean, and a CPU looks whether it is finite.
        assert rank["backward"] == 2
        assert rank["gradients"] == 2, "read for the norm, read for the update"
        # They are compared with the masters by memcmp, which is no operation.
        assert rank["parameters"] == 1, "written by the cast"
        assert not rank["operations"] & {"zero_", "fill_", "mul_", "div_", "clone"}
