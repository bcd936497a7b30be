"""Part 1: the machine, its driver, and all relevant versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess

import torch
import torch.distributed as dist

from gpu.bench import Bench
from gpu.initial import LENGTH, PLACE

PACKAGES = (
    "torch",
    "triton",
    "accelerate",
    "transformers",
    "lightning",
    "apex",
    "deepspeed",
    "megatron-fsdp",
    "flashoptim",
    "matplotlib",
    "pytest",
)


def run(bench: Bench) -> None:
    bench.note(what="python", value=platform.python_version())
    bench.note(what="system", value=f"{platform.platform()}, {os.cpu_count()} cores")
    for name in PACKAGES:
        try:
            bench.note(what=name, value=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            bench.note(what=name, value="not installed")
    bench.note(what="CUDA of torch", value=torch.version.cuda)
    if not bench.dry:
        torch.manual_seed(0)
        numbers = torch.randn(LENGTH, device=bench.device)[PLACE : PLACE + 8].tolist()
        bench.note(what="normal numbers", value=" ".join(f"{number:.6f}" for number in numbers))
    compilers = [name for name in ("cc", "gcc", "clang", "g++") if shutil.which(name)]
    bench.note(what="compilers", value=", ".join(compilers) or "none: no fused kernels")
    bench.note(what="process groups", value=", ".join(backends()))
    if bench.dry:
        return
    bench.note(what="NCCL", value=".".join(map(str, torch.cuda.nccl.version())))
    for number in range(torch.cuda.device_count()):
        with bench.row(what=f"card {number}") as found:
            has = torch.cuda.get_device_properties(number)
            found["value"] = (
                f"{has.name}, sm_{has.major}{has.minor}, {has.total_memory / 2**30:.1f} GiB, "
                f"{has.multi_processor_count} multiprocessors"
            )
    with bench.row(what="nvidia-smi") as found:
        fields = "driver_version,clocks.max.memory,clocks.sm,power.limit,persistence_mode"
        found["value"] = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()


def backends() -> list[str]:
    """Return the backends that this torch was built with."""
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, there in found.items() if there]
