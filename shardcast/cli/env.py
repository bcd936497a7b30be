"""``shardcast env``: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform

import torch

import shardcast
from shardcast.config import CONFIG_VARIABLE, ShardcastConfig

PACKAGES = ("accelerate", "transformers", "lightning", "safetensors", "triton", "numpy")
PREFIXES = ("SHARDCAST_", "ACCELERATE_", "NCCL_", "GLOO_", "TORCH", "OMP_", "CUDA_")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def env(arguments: list[str]) -> int:
    """Print what a bug report needs: versions, devices, variables, resolved configuration."""
    argparse.ArgumentParser(prog="shardcast env", allow_abbrev=False).parse_args(arguments)
    sections = {
        "versions": versions(),
        "machine": machine(),
        "environment": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(PREFIXES) or name in LAUNCHER
        },
        "configuration (* changed)": configuration(),
    }
    for title, facts in sections.items():
        print(f"{title}:")
        width = max(map(len, facts), default=0)
        for name, value in facts.items() or [("none", "")]:
            print(f"  {name:{width}}  {value}".rstrip())
    return 0


def versions() -> dict[str, str]:
    """Of Python and of every package that has to do with it."""
    found = {
        "shardcast": shardcast.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda}, debug {torch.version.debug})",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, str]:
    """The system, its processors and GPUs, and the backends of ``torch.distributed``."""
    found = {
        "system": platform.platform(),
        "processors": f"{os.cpu_count()} ({torch.get_num_threads()} torch threads)",
        "backends": ", ".join(_backends()) or "none",
    }
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
    return found


def configuration() -> dict[str, str]:
    """Every option as this environment resolves it; an error where it cannot be."""
    source = os.environ.get(CONFIG_VARIABLE) or "none"
    try:
        options = ShardcastConfig.load().to_dict()
    except (ValueError, TypeError, OSError) as error:
        return {"file": source, "error": str(error)}
    default = ShardcastConfig().to_dict()
    return {"file": source} | {
        f"{name}{'*' if value != default[name] else ''}": _shown(value)
        for name, value in options.items()
    }


def _shown(value: object) -> str:
    """As it would stand in YAML."""
    special = {None: "null", True: "true", False: "false"}
    return special[value] if value is None or isinstance(value, bool) else str(value)


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    checks = {"gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    names = [name for name, available in checks.items() if available()]
    if dist.is_nccl_available() and torch.cuda.is_available():
        names.append("nccl " + ".".join(str(part) for part in torch.cuda.nccl.version()))
    return names
