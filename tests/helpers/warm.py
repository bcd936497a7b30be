"""Fast Python starts: fork a process that has already imported torch, which takes 4 s.

Use :func:`executable` in place of ``sys.executable``; child processes use it too, for example
workers of the torchrun next to it. A program gets its own arguments, environment, working directory
and stdio, and imports shardcast itself. A client process forwards signals and its exit status; if
the client is killed, so is the program. One limit: environment variables that torch reads at import
have no effect.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shlex
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = (
    *("torch._dynamo", "torch.distributed.run", "torch.distributed.checkpoint"),
    *("accelerate", "matplotlib.figure", "matplotlib.backends.backend_agg", "tqdm", "yaml"),
)
CLIENT = """
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
call = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(link, [len(call).to_bytes(8, "big")], [0, 1, 2])
link.sendall(call)
pid = int.from_bytes(link.recv(8), "big")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
if not (answer := link.recv(8)):
    sys.exit("the warm Python has ended")
status = int.from_bytes(answer, "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


SERVERS: list[int] = []
"""The pid of this process's fork server, if it has started one."""


@functools.cache
def executable() -> str:
    """Return the path of a warm Python, in a folder like that of a virtual environment."""
    if not hasattr(os, "pidfd_open"):  # not on Linux
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    (folder / "bin").mkdir()
    path = str(folder / "socket")
    (folder / "client.py").write_text(CLIENT.format(path=path))
    python = folder / "bin" / "python"
    words = shlex.join([sys.executable, "-IS", str(folder / "client.py")])
    python.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    python.chmod(0o755)
    (torchrun := folder / "bin" / "torchrun").write_text(
        f'#!/bin/sh\nexec {shlex.quote(str(python))} -m torch.distributed.run "$@"\n'
    )
    torchrun.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    server = subprocess.Popen(
        [sys.executable, __file__, path, str(python)],
        env=kept | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # the server ends when this closes, also if this process is killed
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdin is not None and server.stdout is not None
    SERVERS.append(server.pid)

    @atexit.register
    def end() -> None:
        server.communicate()

    if not server.stdout.readline():
        raise RuntimeError("no warm Python has started")
    return str(python)


# -- in the process that is forked ---------------------------------------------------------------


def next_call(path: str) -> tuple[list[str], dict[str, str], str]:
    """Return the call to run, in each forked process; the server itself never returns."""
    from commands import kill_tree

    calls = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    calls.register(listener, selectors.EVENT_READ)
    calls.register(0, selectors.EVENT_READ)
    print("ready", flush=True)
    running: dict[int, tuple[socket.socket, int]] = {}  # by pid: the client's socket, the pidfd
    while True:
        for key, _ in calls.select():
            if key.fileobj is listener:
                link, _ = listener.accept()
                head, files, *_ = socket.recv_fds(link, 8, 3)
                call, length = b"", int.from_bytes(head, "big")
                while len(call) < length and (part := link.recv(1 << 16)):
                    call += part
                if not head or len(call) < length:  # the client was killed during its call
                    for file in files:
                        os.close(file)
                    link.close()
                    continue
                if not (pid := os.fork()):
                    calls.close()
                    listener.close()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    for waiting, ended in [*running.values(), (link, -1)]:
                        waiting.close()
                        if ended >= 0:
                            os.close(ended)
                    os.setsid()
                    return tuple(json.loads(call))  # type: ignore[return-value]
                for file in files:
                    os.close(file)
                with suppress(OSError):  # client killed; select() reports it next
                    link.sendall(pid.to_bytes(8, "big"))
                running[pid] = link, os.pidfd_open(pid)
                calls.register(running[pid][1], selectors.EVENT_READ, pid)
                calls.register(link, selectors.EVENT_READ, -pid)
            elif key.data is None or key.data < 0:  # the parent process or a client has ended
                for pid in [*running] if key.data is None else [-key.data]:
                    kill_tree(pid)
                if key.data is None:
                    os._exit(0)
                if -key.data in running:  # else the program has ended too and is unregistered
                    calls.unregister(key.fileobj)
            else:
                link, pidfd = running.pop(key.data)
                status = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                calls.unregister(pidfd)
                os.close(pidfd)
                if link.fileno() in calls.get_map():
                    calls.unregister(link)
                with suppress(OSError):  # the client was killed
                    link.sendall(status.to_bytes(8, "big", signed=True))
                link.close()


def become(python: str, words: list[str], variables: dict[str, str], folder: str) -> Any:
    """Set this process up like ``python words``; return a function that runs it."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.executable = python
    if words[:1] == ["-u"]:
        words = words[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    added = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    option, rest = words[0], words[1:]
    if option == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], ["", *added]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        return lambda: exec(compile(rest[0], "<string>", "exec"), vars(main))
    if option == "-m":
        sys.argv, sys.path[:0] = rest, [folder, *added]
        sys.modules.pop(rest[0], None)  # else runpy would warn
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if option.startswith("-"):
        raise SystemExit(f"a warm Python knows no {option}")
    sys.argv, sys.path[:0] = words, [str(Path(option).resolve().parent), *added]
    return lambda: runpy.run_path(option, run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("commands")
    sys.path.pop(0)  # tests/helpers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
    gc.freeze()  # else each fork's garbage collector would copy all imported objects
    _run = become(sys.argv[2], *next_call(sys.argv[1]))
    _run()
