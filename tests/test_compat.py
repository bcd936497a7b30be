"""Private or changing interfaces of torch that no test of their callers would check."""

from __future__ import annotations

import ast
import math
import platform
import re
from pathlib import Path

import pytest
import torch
from commands import ROOT, python
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardcast import _compat
from shardcast._compat import inductor


def private_names() -> set[str]:
    """Return the private names below ``torch`` that the package uses, up to the private part."""
    aliases = {
        "dist": "torch.distributed",
        "nn": "torch.nn",
        "Tensor": "torch.Tensor",
        "Variable": "torch.autograd.Variable",
        "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    }
    found = set()
    for path in (ROOT / "shardcast").rglob("*.py"):
        if path.parts[-2:] == ("testing", "_compat.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            first, _, rest = (
                ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else ("",) * 3
            )
            name = f"{aliases.get(first, first)}.{rest}"
            if re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", name) and "__" not in name:
                found.add(name.removeprefix("torch."))
    return found


def test_every_private_name_of_torch_is_asked_for_at_import():
    needed = _compat.NEEDED + _compat.NEEDED_BY_GROUPS
    late = ("_dynamo", "_inductor")
    asked = [name for name in private_names() if not name.startswith(late)]
    assert len(asked) > 20
    # either is a part of the other: torch._C, and members of _world
    assert [
        a
        for a in asked
        if not any(f"{n}.".startswith(f"{a}.") or f"{a}.".startswith(f"{n}.") for n in needed)
    ] == []


def test_a_torch_that_lacks_a_private_name_is_refused_at_import():
    code = "import torch; del torch._C._storage_Use_Count; import shardcast; shardcast.shard"
    lines = python("-c", code).stderr.splitlines()  # torch 2.15 adds some at the end
    told = next((line for line in lines if line.startswith("ImportError: ")), "")
    assert f"shardcast: expected torch {_compat.SUPPORTED}, got torch " in told
    assert f"{torch.__version__}, which lacks torch._C._storage_Use_Count; install" in told


def test_the_supported_versions_are_those_of_the_readme():
    rows = (ROOT / "README.md").read_text().splitlines()
    oldest, newest = _compat.SUPPORTED.split(" to ")
    assert any(re.match(rf"\| {oldest}, .*{newest} \|", row) for row in rows)


def test_compiled_models_are_unwrapped_and_an_attribute_called_module_is_no_wrapper():
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert _compat.unwrapped(model) is model
    assert _compat.unwrapped(torch.compile(model)) is model
    assert not _compat.is_ddp(torch.compile(model))


def test_what_multiplies_in_low_precision_is_what_onednn_says_of_the_cpu():
    """Limit oneDNN's instruction set to simulate a CPU without a bf16 kernel."""
    code = "import torch; from shardcast._compat import has_products as h; print(h(torch.bfloat16))"
    found = python("-c", code, ONEDNN_MAX_CPU_ISA="AVX2").stdout.split()
    assert found == ["False"] or (platform.machine() != "x86_64" and len(found) == 1)
    assert _compat.has_products(torch.float32)


def test_only_a_cuda_stream_is_ever_captured(monkeypatch: pytest.MonkeyPatch):
    answers = [True, False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answers.pop(0))
    assert _compat.is_capturing(torch.device("cuda"))
    assert not _compat.is_capturing(torch.device("cuda"))
    assert not _compat.is_capturing(torch.device("cpu"))


class PretendedStream:
    """Records which streams it waits for."""

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


def test_under_a_dispatch_mode_a_compiled_function_runs_as_it_is():
    tensor = torch.ones(8)
    with FlopCounterMode(display=False):
        inductor.compiled(_double_)(tensor)  # torch.compile(fullgraph=True) raises here
    assert bool((tensor == 2).all())


def _double_(tensor: Tensor) -> None:
    tensor.mul_(2)


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
