"""``shardcast env``: facts for a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping

import torch
import torch.distributed as dist

import shardcast
from shardcast.cli.commands import parser_of
from shardcast.config import ShardcastConfig
from shardcast.messages import namesake
from shardcast.option_files import CONFIG_VARIABLE

PACKAGES = ("accelerate", "transformers", "lightning", "safetensors", "triton", "numpy", "PyYAML")
PREFIXES = ("SHARDCAST_", "ACCELERATE_", "NCCL_", "GLOO_", "TORCH", "OMP_", "CUDA_")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def env(arguments: list[str]) -> int:
    """Print what a bug report needs: versions, devices, variables, resolved configuration."""
    parser_of("env").parse_args(arguments)
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
    """Return every option as this environment resolves it, or the error."""
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
