"""Fixtures of all tests and of tools/conformance/: a clean environment, and one gloo world."""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
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
from shardcast.testing import SpawnedWorld, spawn_world

WORLDS: dict[SpawnedWorld, float] = {}  # those that are shared, and the time limits of their runs
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of a run one temporary folder, which goes when this process has ended.

    It goes even if this one is killed: a shell waits for the end of a pipe. Folders of ``tmp_path``
    stay, of which pytest keeps three runs, and so do compiled kernels.
    """
    if hasattr(config, "workerinput"):  # of pytest-xdist: the folder is in its variables
        return
    outer = Path(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="sc-")  # short, for the paths of sockets
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(outer))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(outer / f"torchinductor_{os.getuid()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    remover = subprocess.Popen(
        ["sh", "-c", 'cat; rm -rf "$0" || { sleep 3; rm -rf "$0"; }', folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(remover.communicate)


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """No option, launcher's variable or process group reaches a test, or the one after it."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("SHARDCAST_") or name in LAUNCHER:
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)
    if dist.is_initialized():  # by Lightning, which leaves it to the end of the process
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One intra-op thread: small tensors, and several tests side by side on few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of ``offload`` on a CPU are as late as permitted, or at any random time before."""
    bus, of_device = Late(random.Random(0)), offload.copies_of
    monkeypatch.setattr(
        offload, "copies_of", lambda device: bus if device.type == "cpu" else of_device(device)
    )


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What ``shardcast``, or another program, prints in this process; with status 2, on stderr."""
    from shardcast.cli import main

    def printed(*words: str, status: int = 0, program: Callable[[list[str]], Any] = main) -> str:
        try:
            ended = program(list(words))
        except SystemExit as end:  # of a parser of arguments
            ended = end.code
        captured = capsys.readouterr()
        assert ended == status, captured.err
        return captured.err if status == 2 else captured.out

    return printed


@functools.cache
def why_nothing_compiles() -> str:
    """What torch says when it compiles a function of one line; empty where it can.

    It cannot without a C++ compiler, nor where the path of its own headers has a space.
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
    """One more than cores: tests of processes wait, which left a quarter of two cores idle."""
    return 1 + cores()


def give_time(item: pytest.Item) -> None:
    """Longer time limits where more runs than these tests: other programs are no failure."""
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
    """Refuse names that differ between processes; import once what takes seconds in each.

    The latter for worlds with ``start_method="forkserver"``. They are not forked from the tests'
    own process, since gloo, once it has been used, hangs in a fork.
    """
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:  # they differ between the workers of pytest-xdist, which then run nothing
        raise pytest.UsageError(f"names of tests with an address in them: {addresses}")
    setup.told.update((torch.bfloat16, torch.float16))  # of slow products: true, and noise here
    modules = ["shardcast.testing", "torch._dynamo", "pytest"]  # the second: torch.optim
    if any("adapters" in item.path.parts or "framework" in item.name for item in items):
        modules += ["shardcast.transformers", "shardcast.lightning"]
    multiprocessing.set_forkserver_preload(modules)


def pytest_collection_finish() -> None:
    """Have the collector pass over what was imported: a million objects, in each of its rounds."""
    gc.collect()
    gc.freeze()


@contextmanager
def started(world_size: int, timeout: float = 100.0) -> Iterator[SpawnedWorld]:
    """Real processes that are there before a test, whose time limit does not count set-up.

    To start them takes a second, and nearly a minute on a busy machine.
    """
    forkserver.ensure_running()  # now: it passes on the environment that it begins with
    with spawn_world(world_size, timeout=patience(timeout), start_method="forkserver") as world:
        world.run(settle, timeout=300.0)
        WORLDS[world] = timeout
        yield world
        del WORLDS[world]


@pytest.fixture(scope="session")
def gloo() -> Iterator[SpawnedWorld]:
    """Two real processes, for all tests that ask for them."""
    with started(2) as world:
        yield world


@pytest.fixture(scope="module")
def four() -> Iterator[SpawnedWorld]:
    """Four of them, for the tests of a file."""
    with started(4, timeout=240.0) as world:
        yield world


def pytest_sessionfinish() -> None:
    """End the process that worlds were forked from; so its processor time is counted."""
    forkserver._forkserver._stop()
