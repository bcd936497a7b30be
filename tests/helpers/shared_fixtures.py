"""Fixtures of tests/ and tools/conformance/: a clean environment, and shared gloo worlds."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from late import Late
from patience import cores, patience
from storages import settle

from shardcast.extensions import offload
from shardcast.optimizer import setup
from shardcast.step.update import fused
from shardcast.step.update.fusion import Executor
from shardcast.testing import SpawnedWorld, spawn_world

WORLDS: dict[SpawnedWorld, float] = {}  # shared worlds, and the time limits of their runs
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of a run one temporary folder, which is removed when this process ends.

    A shell at the end of a pipe removes it, even if this process is killed. Compiled kernels and
    folders of ``tmp_path`` are kept; pytest keeps the latter for three runs.
    """
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist inherits TMPDIR
        return
    outer = Path(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="sc-")  # short, since paths of sockets are limited
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(outer))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(outer / f"torchinductor_{os.getuid()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    remover = subprocess.Popen(
        ["sh", "-c", 'cat; rm -rf "$0" || { sleep 3; rm -rf "$0"; }', folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    # after multiprocessing has removed a folder of its own, at -100
    util.Finalize(None, remover.communicate, exitpriority=-200)


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Hide options, launchers' variables and process groups from a test and from the next one."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("SHARDCAST_") or name in LAUNCHER:
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)
    if dist.is_initialized():  # Lightning does not destroy its process group
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one intra-op thread: tensors are small, and several tests run on few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copies of ``offload`` on a CPU as late as permitted, or at a random earlier time."""
    bus, of_device = Late(random.Random(0)), offload.copies_of
    monkeypatch.setattr(
        offload, "copies_of", lambda device: bus if device.type == "cpu" else of_device(device)
    )


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Update as on an accelerator if a case begins with "device": only it knows of skips."""

    def of(case: str) -> None:
        if case.startswith("device"):
            executor = Executor(on_host=False)
            monkeypatch.setattr(fused, "choose_executor", lambda *_: executor)

    return of


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``shardcast`` or another program in this process; return stdout (status 2: stderr)."""
    from shardcast.cli import main

    def printed(*words: str, status: int = 0, program: Callable[[list[str]], Any] = main) -> str:
        try:
            ended = program(list(words))
        except SystemExit as end:  # raised by argparse
            ended = end.code
        captured = capsys.readouterr()
        assert ended == status, captured.err
        return captured.err if status == 2 else captured.out

    return printed


@functools.cache
def why_nothing_compiles() -> str:
    """Return the error of compiling a one-line function, or "" if it works.

    It fails without a C++ compiler, and if the path of torch's headers has a space.
    """
    try:
        torch.compile(torch.sin, fullgraph=True)(torch.ones(64))
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    finally:
        torch._dynamo.reset()
    return ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return cores + 1: tests with processes wait, which left a quarter of two cores idle."""
    return 1 + cores()


def give_time(item: pytest.Item) -> None:
    """Extend time limits if other programs load the machine."""
    is_timed = item.config.pluginmanager.hasplugin("timeout")
    usual = float(item.config.getini("timeout")) if is_timed else 0.0
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker else usual
    for world, timeout in WORLDS.items():
        world.timeout = patience(max(timeout, limit))
    if patience(1.0) > 1 and is_timed:
        item.add_marker(pytest.mark.timeout(patience(limit)), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    give_time(item)
    if item.get_closest_marker("needs_compiler") and why_nothing_compiles():
        pytest.skip(f"torch compiles nothing here ({why_nothing_compiles()})")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ between processes; preload modules that take seconds to import.

    Worlds with ``start_method="forkserver"`` use them. Worlds are not forked from the tests' own
    process, since gloo hangs in a fork after it has been used.
    """
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:  # with names that differ between its workers, pytest-xdist runs nothing
        raise pytest.UsageError(f"names of tests with an address in them: {addresses}")
    setup.told.update((torch.bfloat16, torch.float16))  # silences warnings of slow matmuls
    modules = ["shardcast.testing", "torch._dynamo", "pytest"]  # torch.optim needs the second
    if any("adapters" in item.path.parts or "framework" in item.name for item in items):
        modules += ["shardcast.transformers", "shardcast.lightning"]
    multiprocessing.set_forkserver_preload(modules)


def pytest_collection_finish() -> None:
    """Exclude imported modules' million objects from all garbage collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def started(world_size: int, timeout: float = 100.0) -> Iterator[SpawnedWorld]:
    """Start real processes in a fixture, since a test's time limit does not include set-up.

    This takes a second, and nearly a minute on a busy machine.
    """
    forkserver.ensure_running()  # now, since processes inherit the server's first environment
    with spawn_world(world_size, timeout=patience(timeout), start_method="forkserver") as world:
        world.run(settle, timeout=300.0)
        WORLDS[world] = timeout
        yield world
        del WORLDS[world]


@pytest.fixture(scope="session")
def gloo() -> Iterator[SpawnedWorld]:
    """Two real processes, shared by all tests."""
    with started(2) as world:
        yield world


@pytest.fixture(scope="module")
def four() -> Iterator[SpawnedWorld]:
    """Four real processes, shared by the tests of a file."""
    with started(4, timeout=240.0) as world:
        yield world


def pytest_sessionfinish() -> None:
    """End the fork server, so that its processor time is counted."""
    forkserver._forkserver._stop()
