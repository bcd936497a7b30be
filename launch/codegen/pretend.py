"""A GPU that is not there: as much of one as Inductor and Triton ask for to generate code.

Tried with torch 2.11 and 2.15, with Triton 3.6 and 3.9; these are internals, and they move. Nothing
is run: device properties are those of an H100, Triton compiles for sm_90, and tensors on "cuda" are
fake ones.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch._inductor.runtime.triton_helpers
import triton
from torch._dynamo.device_interface import CudaInterface
from triton.backends.compiler import GPUTarget

SM90 = GPUTarget("cuda", 90, 32)
PROPERTIES = types.SimpleNamespace(
    name="sm_90", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
    gcnArchName="",
)  # fmt: skip


class Driver:
    """Stands for Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return SM90

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Does nothing."""


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


def _properties(*_args: Any, **_kwargs: Any) -> Any:
    return PROPERTIES


@contextmanager
def gpu() -> Iterator[None]:
    """Within it Inductor and Triton generate code for sm_90."""
    values: dict[str, Any] = {
        "torch.cuda.get_device_properties": _properties,
        "torch.cuda.current_device": _zero,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda._lazy_init": _nothing,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda._exchange_device": _zero,
        "torch.cuda._maybe_exchange_device": _zero,
        "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": _nothing,
        "torch._inductor.scheduler.has_triton": lambda: True,  # torch 2.11 keeps an earlier answer
        # They look for patterns of attention, by tracing some on the device.
        "torch._inductor.fx_passes.joint_graph.lazy_init": _nothing,
        "torch._inductor.fx_passes.post_grad.lazy_init": _nothing,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": _nothing,
    }
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch(name, value))
        for place in (CudaInterface, CudaInterface.Worker):
            stack.enter_context(
                mock.patch.object(place, "get_device_properties", staticmethod(_properties))
            )
        stack.enter_context(
            mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(_zero))
        )
        stack.enter_context(
            torch._inductor.config.patch(
                compile_threads=1,
                fx_graph_cache=False,
                use_static_cuda_launcher=False,
                joint_graph_constant_folding=False,  # it computes on the device
            )
        )
        triton.runtime.driver.set_active(Driver())
        yield
