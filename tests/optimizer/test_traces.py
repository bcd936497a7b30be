"""Sharding changes nothing in a process outside the objects of the model and the optimizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import python

pytestmark = pytest.mark.timeout(120)

# Run in a new process, since other tests and worlds of shardcast.testing leave traces.
BEFORE = """
import atexit, gc, signal, sys, threading, types, warnings
warnings.simplefilter("ignore")
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed.nn  # has the default group, if there is one, as a default argument
from torch import nn
from torch.nn.modules import module
from torch.optim import optimizer as optim

def owners():
    for name, imported in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(imported, types.ModuleType):
            yield name, imported
            for key, value in list(vars(imported).items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{key}", value

def seen():
    found = {f"thread {thread.name}": thread.ident for thread in threading.enumerate()}
    found |= {name: getattr(sys, name) for name in ("excepthook", "unraisablehook", "displayhook")}
    found |= {"threading.excepthook": threading.excepthook, "atexit": atexit._ncallbacks()}
    found |= {"meta_path": [*sys.meta_path], "gc": [*gc.callbacks], "profile": sys.getprofile()}
    found |= {"filters": [*warnings.filters], "showwarning": warnings.showwarning}
    found["signals"] = [signal.getsignal(number) for number in signal.valid_signals()]
    for place in (module, optim):
        for name, hooks in vars(place).items():
            if name.startswith("_global") and hasattr(hooks, "__len__"):
                found[name] = [*hooks]
    found["modes"] = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    for name, owner in owners():
        for key, value in list(vars(owner).items()):
            if isinstance(value, types.FunctionType | staticmethod | classmethod | property):
                found[f"{name}.{key}"] = value
    return found

def changed():
    after = seen()
    known = {name.rpartition(".")[0] for name in untouched}
    new = {n for n in after if n not in untouched and n.rpartition(".")[0] in known}
    return sorted(new | {n for n, was in untouched.items() if n in after and after[n] != was})

def train(model, optimizer):
    for _ in range(3):
        model(torch.randn(4, 8)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model[:3].parameters(), lr=1e-2)  # the head is not trained

if len(sys.argv) > 1:
    store = dist.FileStore(sys.argv[1], 2)
    dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
train(*plain())  # what torch leaves by itself
untouched = seen()
import shardcast
model, optimizer = plain()
"""
ONE = """
sharded = shardcast.shard(model, optimizer, param_dtype="bf16", max_grad_norm=1.0)
train(model, sharded)
print("open:", *changed())
sharded.close()
print("closed:", *changed())
"""
SEVERAL = (
    ONE
    + """
import time

def ended():
    for _ in range(2000):
        if any(thread.name == "shardcast waiting" for thread in threading.enumerate()):
            time.sleep(0.05)
    return changed()

for _ in range(2):
    model, optimizer = plain()
    sharded = shardcast.shard(model, optimizer, param_dtype="bf16")
    train(model, sharded)
del model, optimizer, sharded
gc.collect()
print("forgotten:", *ended())
model, optimizer = plain()
try:
    shardcast.shard(model, optimizer, max_grad_norm=-1.0)
except ValueError:
    print("refused:", *changed())
sharded = shardcast.shard(model, optimizer)
dist.destroy_process_group()
print("without a group:", *ended())
"""
)
TRACES = {
    "atexit.register(gc.collect)": "atexit",
    "sys.excepthook = print": "excepthook",
    "nn.Linear.forward = lambda *_: 0": "torch.nn.modules.linear.Linear.forward",
    "nn.Module.added = lambda *_: 0": "torch.nn.modules.module.Module.added",
    "optim.register_optimizer_step_pre_hook(print)": "_global_optimizer_pre_hooks",
    "threading.Thread(target=threading.Event().wait, name='r', daemon=True).start()": "thread r",
}


def told(script: str, *arguments: str) -> list[str]:
    done = python("-c", BEFORE + script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_plain_sharded_optimizer_of_one_rank_leaves_no_trace_in_the_process():
    assert told(ONE) == ["open:", "closed:"]


def test_several_ranks_have_one_thread_until_the_last_optimizer_or_group_ends(tmp_path: Path):
    store = str(tmp_path / "store")
    with ThreadPoolExecutor(2) as pool:
        ranks = pool.map(lambda rank: told(SEVERAL, store, rank), "01")
        for lines in ranks:
            assert lines == [
                "open: thread shardcast waiting",
                "closed:",
                "forgotten:",
                "refused:",
                "without a group:",
            ]


def test_a_process_ends_by_itself_while_its_thread_writes_into_the_store(tmp_path: Path):
    script = """
from shardcast.extensions import waiting
waiting.PATIENCE = 0.02
sharded = shardcast.shard(model, optimizer, param_dtype="bf16")
train(model, sharded)
print(*changed())
threading.Event().wait(0.5)  # silent for long: the thread writes where this rank is
"""
    store = str(tmp_path / "store")
    with ThreadPoolExecutor(2) as pool:
        ranks = [*pool.map(lambda rank: told(script, store, rank), "01")]
    assert ranks == [["thread shardcast waiting"]] * 2


def test_the_check_sees_traces():
    lines = told("".join(f"{trace}\nprint(changed())\n" for trace in TRACES))
    before = ["[]", *lines[:-1]]
    for seen, line, earlier in zip(TRACES.values(), lines, before, strict=True):
        assert repr(seen) in line and repr(seen) not in earlier
