"""The ``shardcast`` command: the table of commands, each a function of its arguments.

A command is imported when it is called, so that ``--help`` and ``--version`` do not wait for torch.
It returns the exit status; the first line of its docstring is its help.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import NamedTuple

import shardcast


class Command(NamedTuple):
    """A command: its help, and the module that has a function of its name."""

    module: str
    help: str


COMMANDS = {
    "launch": Command(
        "launch",
        "Start a script like `accelerate launch`; its file may also configure shardcast.",
    ),
    "config": Command(
        "configuration",
        "Write an annotated configuration file with every option and its default, or a preset.",
    ),
    "env": Command(
        "environment",
        "Print what a bug report needs: versions, devices, variables, resolved configuration.",
    ),
    "estimate": Command(
        "estimate",
        "Print what each rank will hold and send, for a model built on the meta device.",
    ),
    "inspect": Command("checkpoints", "Show a checkpoint: step, ranks, size, and every tensor."),
    "export": Command(
        "checkpoints",
        "Write a checkpoint's model as safetensors and its plain torch optimizer state.",
    ),
    "test": Command(
        "self_test",
        "Check this installation: one process, two over gloo, and NCCL if there are GPUs.",
    ),
}
AT_ONCE = {"test": "importing torch; then one process, two over gloo, and NCCL if there are GPUs"}


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return a parser for the arguments of a command, without any yet."""
    return argparse.ArgumentParser(
        prog=f"shardcast {name}", description=COMMANDS[name].help, allow_abbrev=False
    )


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the entry point of ``shardcast``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    if name not in (*COMMANDS, "--version", "-h", "--help"):
        print(f"{_usage()}\n\nerror: unknown command {name!r}", file=sys.stderr)
        return 2
    status = 0
    try:
        if name == "--version":
            print(f"shardcast {shardcast.__version__}")
        elif name in COMMANDS:
            if name in AT_ONCE and not {"-h", "--help"} & {*arguments[1:]}:
                print(f"shardcast {name}: {AT_ONCE[name]}", flush=True)
            module = importlib.import_module(f"shardcast.cli.{COMMANDS[name].module}")
            status = getattr(module, name)(arguments[1:])
        else:
            print(_usage())
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough; the interpreter must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        print(f"shardcast {name}: error: {error}", file=sys.stderr)
        return 2


def _usage() -> str:
    lines = [f"  {name:8} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: shardcast COMMAND [arguments], shardcast --version", "", "commands:", *lines]
    )
