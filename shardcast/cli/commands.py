"""The ``shardcast`` command: see :data:`COMMANDS`.

A command is one function of its arguments that returns the exit status, listed in
:data:`COMMANDS`; the first line of its docstring is its help.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

import shardcast
from shardcast.config import CONFIG_VARIABLE, ShardcastConfig

SECTION = "shardcast_config"
PACKAGES = ("accelerate", "transformers", "lightning", "safetensors", "triton", "numpy")
PREFIXES = ("SHARDCAST_", "ACCELERATE_", "NCCL_", "TORCH_", "OMP_", "CUDA_")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; what ``shardcast`` on the command line calls."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        print(f"{_usage()}\n\nerror: unknown command {name!r}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name](arguments[1:])
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"shardcast {name}: error: {error}", file=sys.stderr)
        return 2


def _usage() -> str:
    lines = [
        f"  {name:8} {(call.__doc__ or '').splitlines()[0]}" for name, call in COMMANDS.items()
    ]
    return "\n".join(["usage: shardcast COMMAND [arguments]", "", "commands:", *lines])


# -- launch -----------------------------------------------------------------------------------


def launch(arguments: list[str]) -> int:
    """Start a script as `accelerate launch` does, from one file that also configures shardcast.

    The section ``shardcast_config:`` of ``--config_file`` is checked before any process starts
    and reaches the processes through ``SHARDCAST_CONFIG``; everything else, flags and file, is
    Accelerate's.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    parsed = launch_command_parser().parse_args(arguments)
    ours, rest = split_config(parsed.config_file)
    _check_launch(parsed, ours, rest)
    with tempfile.TemporaryDirectory(prefix="shardcast-launch-") as directory:
        if ours is not None:
            path = Path(directory, "shardcast.yaml")
            path.write_text(yaml.safe_dump(ours))
            os.environ[CONFIG_VARIABLE] = str(path)
            parsed.config_file = os.fspath(Path(directory, "accelerate.yaml"))
            Path(parsed.config_file).write_text(yaml.safe_dump(rest))
        launch_command(parsed)
    return 0


def split_config(path: str | None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The ``shardcast_config`` section of a launch file (``None``: there is none), and the rest.

    Raises:
        ValueError: the section or the file is no mapping, or there are two configurations.
    """
    if path is None:
        return None, {}
    content = yaml.safe_load(Path(path).read_text()) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping, got {type(content).__name__}")
    if SECTION not in content:
        return None, content
    ours = content.pop(SECTION) or {}
    if not isinstance(ours, dict):
        raise ValueError(
            f"{path}: {SECTION}: expected a mapping of options, got {type(ours).__name__}"
        )
    if os.environ.get(CONFIG_VARIABLE):
        raise ValueError(
            f"two configurations: {path} has a section {SECTION}, and {CONFIG_VARIABLE} names "
            f"{os.environ[CONFIG_VARIABLE]}; unset one (single options: SHARDCAST_<FIELD>)"
        )
    return ours, content


def _check_launch(parsed: Any, ours: Mapping[str, Any] | None, rest: Mapping[str, Any]) -> None:
    """What would fail, or silently do something else, in every process that is started."""
    from shardcast.accelerate.details import resolve_config

    precision = str(parsed.mixed_precision or rest.get("mixed_precision") or "no").lower()
    if precision == "fp8":
        raise ValueError(
            "mixed_precision: expected no, bf16 or fp16, got fp8; shardcast has no fp8"
        )
    resolve_config(precision, ours, {})
    kind = str(rest.get("distributed_type", "")).upper()
    for flag, name in (
        ("use_deepspeed", "DEEPSPEED"),
        ("use_fsdp", "FSDP"),
        ("use_megatron_lm", "MEGATRON_LM"),
        ("tpu", "XLA"),
    ):
        if getattr(parsed, flag) or kind == name:
            raise ValueError(
                f"distributed_type: expected MULTI_GPU or NO, got {name}; it shards or distributes "
                "by itself and cannot be combined with shardcast"
            )
    processes = parsed.num_processes or rest.get("num_processes") or 1
    several = parsed.multi_gpu or kind == "MULTI_GPU"
    if int(processes) > 1 and (parsed.cpu or kind == "MULTI_CPU"):
        raise ValueError(
            f"num_processes: {processes} asked for, but Accelerate starts one process with --cpu "
            "or MULTI_CPU; use distributed_type: MULTI_GPU (or --multi_gpu) with use_cpu: true"
        )
    if several and rest.get("use_cpu"):  # Accelerate's launcher forgets it for several processes
        os.environ["ACCELERATE_USE_CPU"] = "true"


# -- config -----------------------------------------------------------------------------------


def config(arguments: list[str]) -> int:
    """Write an annotated configuration file with every option and its default."""
    parser = argparse.ArgumentParser(prog="shardcast config", allow_abbrev=False)
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: print it")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parsed = parser.parse_args(arguments)
    text = annotated_config()
    if parsed.output is None:
        print(text, end="")
    elif parsed.output.exists() and not parsed.overwrite:
        raise FileExistsError(f"{parsed.output} exists; pass --overwrite to replace it")
    else:
        parsed.output.write_text(text)
    return 0


def annotated_config() -> str:
    """YAML with the help of every field; options stand there commented out, with the default."""
    lines = [
        "# shardcast configuration. Name it in SHARDCAST_CONFIG, or pass it to shardcast.shard().",
        "# Remove the '# ' before an option to change it; every value shown is the default.",
        "# A keyword in code and a variable SHARDCAST_<FIELD> win over this file.",
    ]
    defaults = ShardcastConfig().to_dict()
    for option in dataclasses.fields(ShardcastConfig):
        lines += ["", *(f"## {line}" for line in textwrap.wrap(option.metadata["help"], 90))]
        if option.metadata["choices"]:
            lines.append(f"## one of: {', '.join(option.metadata['choices'])}")
        if option.name == "group_fn":
            lines.append("## (a function: in code only)")
            continue
        value = yaml.safe_dump({option.name: defaults[option.name]}, default_flow_style=True)
        lines.append(f"# {value.strip().strip('{}')}")
    return "\n".join(lines) + "\n"


# -- env --------------------------------------------------------------------------------------


def env(arguments: list[str]) -> int:
    """Print what a bug report needs: versions, devices, variables, resolved configuration."""
    argparse.ArgumentParser(prog="shardcast env", allow_abbrev=False).parse_args(arguments)
    for name, value in environment().items():
        print(f"{name}: {value}")
    return 0


def environment() -> dict[str, str]:
    """The facts that :func:`env` prints; nothing here may fail."""
    found = {
        "shardcast": shardcast.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda}, debug {torch.version.debug})",
        "processors": f"{os.cpu_count()} ({torch.get_num_threads()} torch threads)",
        "backends": ", ".join(_backends()) or "none",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
    for variable in sorted(os.environ):
        if variable.startswith(PREFIXES) or variable in LAUNCHER:
            found[variable] = os.environ[variable]
    try:
        found["configuration"] = str(ShardcastConfig.load().to_dict())
    except (ValueError, TypeError, OSError) as error:
        found["configuration"] = f"error: {error}"
    return found


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    checks = {"gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    names = [name for name, available in checks.items() if available()]
    if dist.is_nccl_available() and torch.cuda.is_available():
        names.append("nccl " + ".".join(str(part) for part in torch.cuda.nccl.version()))
    return names


# -- test -------------------------------------------------------------------------------------


def export(arguments: list[str]) -> int:
    """Write a checkpoint's model as safetensors and its plain torch optimizer state."""
    from shardcast.checkpoint import export as write

    parser = argparse.ArgumentParser(prog="shardcast export", allow_abbrev=False)
    parser.add_argument("directory", help="a checkpoint, or the newest one of a directory")
    parser.add_argument("out", help="a new or an empty directory")
    parser.add_argument("--max_shard_mb", type=float, default=5000.0, help="cut the model at this")
    parser.add_argument("--model_only", action="store_true", help="leave the optimizer state out")
    parsed = parser.parse_args(arguments)
    for path in write(
        parsed.directory,
        parsed.out,
        max_shard_mb=parsed.max_shard_mb,
        optimizer=not parsed.model_only,
    ):
        print(path)
    return 0


def estimate(arguments: list[str]) -> int:
    """Print what each rank will hold and send, for a model that is built without memory."""
    from shardcast.cli import estimate_command as _estimate_command

    return _estimate_command.run(arguments)


def test(arguments: list[str]) -> int:
    """Try this installation: one process, two over gloo, and NCCL where there are GPUs."""
    from shardcast.cli import selftest

    parser = argparse.ArgumentParser(prog="shardcast test", allow_abbrev=False)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each check")
    return selftest.run(parser.parse_args(arguments).timeout)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "launch": launch,
    "config": config,
    "env": env,
    "estimate": estimate,
    "export": export,
    "test": test,
}

if __name__ == "__main__":
    sys.exit(main())
