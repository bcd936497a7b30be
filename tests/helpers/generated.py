"""Kernels that Inductor would run on an H100, generated and compiled without one.

Needs no GPU, but Triton, whose wheel has ptxas: ``pip install triton`` next to torch for CPUs.
Uses internals of torch and Triton, which change. Tried with torch 2.13 and Triton 3.6 and 3.8.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda:0")
SIZES = {"i1": 1, "u8": 1, "i8": 1, "bf16": 2, "fp16": 2, "i32": 4, "fp32": 4, "fp64": 8}
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''\n(.*?)\n''', device_str", re.S)
ACCESS = re.compile(r"tl\.(?:load|store)\((\w+) \+ \(((?:[^()]|\([^()]*\))*)\)")
PROPERTIES = types.SimpleNamespace(
    name="sm_90",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


@dataclass(frozen=True)
class Kernel:
    """Bytes that a kernel moves per element; registers and spilled bytes per thread."""

    bytes: float
    registers: int
    spills: int


def kernels(function: Callable[..., None], args: tuple[Any, ...], folder: Path) -> list[Kernel]:
    """Return the GPU kernels of ``torch.compile(function)``; ``args`` are tensors on the host."""
    found: list[Kernel] = []

    def compiler(graph: GraphModule, _inputs: list[Any]) -> Any:
        found.extend(
            _examined(source, folder / f"{name}.py")
            for name, source in KERNEL.findall(_written(copy.deepcopy(graph)))
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compiler, inference_compiler=compiler, decompositions=select_decomp_table()
    )
    torch.compiler.reset()
    torch.compile(function, dynamic=True, fullgraph=True, backend=backend)(*args)
    torch.compiler.reset()
    return found


class _WrittenError(Exception):
    """Stops Inductor after it has generated the code."""


def _written(graph: GraphModule) -> str:
    """Return Inductor's code for a graph of ATen operations on the host, moved to a GPU."""
    mode = detect_fake_mode([node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
    assert mode is not None

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return CUDA if isinstance(value, torch.device) else value
        strides = value.shape, value.stride()
        return torch.empty_strided(*strides, dtype=value.dtype, device=CUDA)

    with mode:
        for node in graph.graph.nodes:
            node.kwargs = tree_map(moved, node.kwargs)
            if "val" in node.meta:
                node.meta["val"] = tree_map(moved, node.meta["val"])
    graph.recompile()
    written: list[str] = []
    codegen = GraphLowering.codegen

    def stop(self: GraphLowering) -> None:
        code, _ = codegen(self)
        written.append(getattr(code, "value", code))
        raise _WrittenError

    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with _gpu(), mock.patch.object(GraphLowering, "codegen", stop):
        try:
            compile_fx.compile_fx_inner(graph, inputs, is_inference=True)
        except Exception:  # _WrittenError, wrapped in other errors
            if not written:
                raise
    return written[0]


def _examined(source: str, path: Path) -> Kernel:
    """Compile a kernel for sm_90 in each configuration that Inductor tries; return the best."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _gpu():
        spec.loader.exec_module(module)
        tuner: Any = next(v for v in vars(module).values() if isinstance(v, CachingAutotuner))
        texts = [tuner._precompile_config(config).kernel.asm["ptx"] for config in tuner.configs]
    signature, body = tuner.triton_meta["signature"], source[source.index("@triton.jit") :]
    accessed = [pointer for pointer, index in ACCESS.findall(body) if re.search(r"\bx\d", index)]
    moved = sum(SIZES[signature[pointer].lstrip("*")] for pointer in accessed)
    resources = [_resources(text, path.with_suffix(".ptx")) for text in texts]
    registers, spills = min(resources, key=lambda used: used[::-1])
    return Kernel(moved, registers, spills)


def _resources(ptx: str, path: Path) -> tuple[int, int]:
    """Return registers per thread and spilled bytes, as reported by ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas

    path.write_text(ptx)
    (target,) = re.findall(r"\.target (\w+)", ptx)
    command = [get_ptxas(90).path, "-v", f"--gpu-name={target}", path, "-o", path.with_suffix(".o")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", told)
    return int(registers), sum(int(number) for number in re.findall(r"(\d+) bytes spill", told))


class _Driver:
    """Replaces Triton's driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_options: None


@contextmanager
def _gpu() -> Iterator[None]:
    """Make Inductor and Triton generate code for sm_90."""
    import torch._inductor.runtime.triton_helpers
    import triton

    def of(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_options: value

    values = {
        "torch.cuda.get_device_properties": PROPERTIES,
        "torch.cuda.current_device": 0,
        "torch.cuda.device_count": 1,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda._lazy_init": None,
        "torch.cuda.is_available": True,
        "torch.cuda._exchange_device": 0,
        "torch.cuda._maybe_exchange_device": 0,
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": None,
        "torch._inductor.scheduler.has_triton": True,  # it caches its first answer
        # Both search for attention patterns by tracing examples on the device.
        "torch._inductor.fx_passes.joint_graph.lazy_init": None,
        "torch._inductor.fx_passes.post_grad.lazy_init": None,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": None,
    }
    settings = {"compile_threads": 1, "fx_graph_cache": False, "use_static_cuda_launcher": False}
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch(name, of(value)))
        for place in (CudaInterface, CudaInterface.Worker):
            patch = mock.patch.object(place, "get_device_properties", staticmethod(of(PROPERTIES)))
            stack.enter_context(patch)
        patch = mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(of(0)))
        stack.enter_context(patch)
        stack.enter_context(torch._inductor.config.patch(settings))
        driver = triton.runtime.driver
        before = driver._active
        driver.set_active(_Driver())
        try:
            yield
        finally:
            driver._active = before
