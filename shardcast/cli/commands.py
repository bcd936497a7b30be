"""The ``shardcast`` command: see :data:`COMMANDS`.

A command is one function of its arguments that returns the exit status; the first line of its
docstring is its help.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import shardcast
from shardcast.cli.checkpoints import export, inspect
from shardcast.cli.config import config
from shardcast.cli.env import env
from shardcast.cli.estimate import estimate
from shardcast.cli.launch import launch
from shardcast.cli.selftest import test

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "launch": launch,
    "config": config,
    "env": env,
    "estimate": estimate,
    "inspect": inspect,
    "export": export,
    "test": test,
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; what ``shardcast`` on the command line calls."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    if name == "--version":
        print(f"shardcast {shardcast.__version__}")
        return 0
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        print(f"{_usage()}\n\nerror: unknown command {name!r}", file=sys.stderr)
        return 2
    try:
        status = COMMANDS[name](arguments[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough; the interpreter must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"shardcast {name}: error: {error}", file=sys.stderr)
        return 2


def _usage() -> str:
    lines = [
        f"  {name:8} {(call.__doc__ or '').splitlines()[0]}" for name, call in COMMANDS.items()
    ]
    head = "usage: shardcast COMMAND [arguments], shardcast --version"
    return "\n".join([head, "", "commands:", *lines])
