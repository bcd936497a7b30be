"""The ``shardcast`` command, see :data:`COMMANDS`; ``estimate`` and ``launch`` have own files.

A command is one function of its arguments that returns the exit status; the first line of its
docstring is its help.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

import shardcast
from shardcast.cli.checkpoints import export, inspect
from shardcast.cli.estimate import estimate
from shardcast.cli.launch import launch
from shardcast.cli.parser import Parser
from shardcast.config import ShardcastConfig
from shardcast.messages import namesake
from shardcast.option_files import CONFIG_VARIABLE, PRESETS, preset
from shardcast.testing import spawn

PACKAGES = ("accelerate", "transformers", "lightning", "safetensors", "triton", "numpy", "PyYAML")
PREFIXES = ("SHARDCAST_", "ACCELERATE_", "NCCL_", "GLOO_", "TORCH", "OMP_", "CUDA_")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TRIED_STEPS = 5


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
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        print(f"shardcast {name}: error: {error}", file=sys.stderr)
        return 2


def _usage() -> str:
    lines = [
        f"  {name:8} {(call.__doc__ or '').splitlines()[0]}" for name, call in COMMANDS.items()
    ]
    return "\n".join(
        ["usage: shardcast COMMAND [arguments], shardcast --version", "", "commands:", *lines]
    )


def _parser(command: str) -> Parser:
    return Parser(prog=f"shardcast {command}")


# -- configuration --------------------------------------------------------------------------------


def config(arguments: list[str]) -> int:
    """Write an annotated configuration file with every option and its default, or a preset."""
    parser = _parser("config")
    parser.add_argument("--preset", choices=PRESETS, help="this one, in place of the defaults")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: print it")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parsed = parser.parse_args(arguments)
    text = preset(parsed.preset).read_text() if parsed.preset else annotated_config()
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
        expected, _ = option.metadata["range"]
        if expected:
            lines.append(f"## {expected}")
        if option.name in ("group_fn", "cost_fn"):
            lines.append("## (a function: in code only)")
            continue
        value = yaml.safe_dump({option.name: defaults[option.name]}, default_flow_style=True)
        lines.append(f"# {value.strip().strip('{}')}")
    return "\n".join(lines) + "\n"


# -- facts for a bug report -----------------------------------------------------------------------


def env(arguments: list[str]) -> int:
    """Print what a bug report needs: versions, devices, variables, resolved configuration."""
    _parser("env").parse_args(arguments)
    names = sorted(os.environ)
    variables = [name for name in names if name.startswith(PREFIXES) or name in LAUNCHER]
    sections: dict[str, Mapping[str, str]] = {
        "versions": {
            "shardcast": f"{shardcast.__version__} ({namesake() or 'shardcast-optim'})",
            "python": platform.python_version(),
            "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
            **{package: _version(package) for package in PACKAGES},
        },
        "machine": {
            "system": platform.platform(),
            "processors": f"{os.cpu_count()} ({torch.get_num_threads()} torch threads)",
            "backends": _backends(),
            **{
                f"GPU {index}": str(torch.cuda.get_device_properties(index))
                for index in range(torch.cuda.device_count())
            },
        },
        "environment": {name: os.environ[name] for name in variables},
        "configuration (* changed)": _configuration(),
    }
    for title, facts in sections.items():
        print(f"{title}:")
        width = max(map(len, facts), default=0)
        for name, value in facts.items() or [("none", "")]:
            print(f"  {name:{width}}  {value}".rstrip())
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> str:
    names = [name for name in ("gloo", "mpi") if dist.is_backend_available(name)]
    if dist.is_nccl_available() and torch.cuda.is_available():
        names.append("nccl " + ".".join(map(str, torch.cuda.nccl.version())))
    return ", ".join(names) or "none"


def _configuration() -> dict[str, str]:
    """Every option as this environment resolves it; an error where it cannot be."""
    facts = {"file": os.environ.get(CONFIG_VARIABLE) or "none"}
    try:
        options = ShardcastConfig.load().to_dict()
    except (ValueError, TypeError, OSError) as error:
        return {**facts, "error": str(error)}
    default = ShardcastConfig().to_dict()
    for name, value in options.items():
        shown = value if isinstance(value, str) else json.dumps(value)  # as in YAML
        facts[f"{name}{'*' * (value != default[name])}"] = shown
    return facts


# -- a try of the installation --------------------------------------------------------------------


def test(arguments: list[str]) -> int:
    """Try this installation: one process, two over gloo, and NCCL where there are GPUs."""
    parser = _parser("test")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each check")
    timeout = parser.parse_args(arguments).timeout
    worlds = [("one process", 1, "gloo", "cpu"), ("two processes over gloo", 2, "gloo", "cpu")]
    gpus = min(2, torch.cuda.device_count())
    if gpus:
        worlds.append((f"{gpus} GPU(s) over NCCL", gpus, "nccl", "cuda"))
    failed = 0
    for name, size, backend, device in worlds:
        started = time.monotonic()
        try:
            reports = spawn(_try, size, device, timeout=timeout, backend=backend)
        except Exception as error:  # whatever is wrong with an installation is to be shown
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"ok     {name}: {reports[0]}, {time.monotonic() - started:.1f} s", flush=True)
    if not gpus:
        print("-      NCCL: no GPU found", flush=True)
    return 1 if failed else 0


def _try(group: Any, device_type: str) -> str:
    """Train next to plain torch; every rank calls it. Raises what is wrong."""
    rank = dist.get_rank(group)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    difference = float((_trained(device, torch.float32) - _trained(device)).abs().max())
    if not difference < 1e-5:
        raise RuntimeError(
            f"fp32 weights: expected those of plain torch.optim.AdamW, got {difference:.1e} off"
        )
    low = _trained(device, torch.bfloat16)
    first = low.clone()  # as on rank 0
    dist.broadcast(first, 0, group=group)
    if not torch.equal(first, low):
        raise RuntimeError("bf16 weights: expected equal ones on all ranks, got different ones")
    return f"fp32 {difference:.0e} from plain torch, bf16 ranks equal"


def _trained(device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The weights after a few steps, 1-d; of plain torch without a ``dtype``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(15, 33), nn.GELU(), nn.Linear(33, 5)).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if dtype is not None:
        optimizer = shardcast.shard(model, optimizer, ShardcastConfig(param_dtype=dtype))
    for step in range(TRIED_STEPS):
        data = torch.randn(8, 15, generator=torch.Generator().manual_seed(step)).to(device)
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "launch": launch,
    "config": config,
    "env": env,
    "estimate": estimate,
    "inspect": inspect,
    "export": export,
    "test": test,
}
