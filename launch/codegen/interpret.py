"""Run code that Inductor wrote for a GPU on the host, by Triton's interpreter.

    TRITON_INTERPRET=1 python launch/codegen/interpret.py FOLDER

The switch is read when Triton is imported, so this is a process of its own; :mod:`codegen.values`
starts it. ``FOLDER`` has ``cases.pt``, a list of :class:`Case` as dictionaries; ``results.pt``
becomes a list of the cases' tensors after the call, in the same order.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypedDict
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

HEADER = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import math as tl_math
from __main__ import Libdevice

libdevice = Libdevice()
"""
LARGEST = 1 << 16  # elements of one program, so that its intermediate values stay small


class Case(TypedDict):
    """A call of generated code.

    Attributes:
        source: the module that Inductor wrote.
        args: what its ``call`` gets, sizes and tensors of the host.
    """

    source: str
    args: list[Any]


class Libdevice:
    """Stands for the functions of CUDA's library, which have no body here."""

    NUMPY: ClassVar = {
        "nearbyint": np.rint, "copysign": np.copysign, "sqrt": np.sqrt, "isnan": np.isnan,
        "pow": np.power,
    }  # fmt: skip

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = self.NUMPY[name]

        def call(*values: Any) -> Any:
            (first, *_) = values
            data = function(*(value.handle.data for value in values))
            kind = first.dtype.scalar
            if data.dtype == bool:
                data, kind = data.astype(np.int32), tl.int32
            shape = tl.block_type(kind, first.shape) if first.shape else kind
            return tl.tensor(interpreter.TensorHandle(data, kind), shape)

        return call


class Launcher:
    """Stands for ``AsyncCompile``: interprets a kernel where it would be compiled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def triton(self, name: str, source: str, **_options: Any) -> Launcher:
        path = self.folder / f"{name}.py"
        path.write_text(HEADER + source[source.index("@triton.jit") :])
        self.kernel = getattr(load(path), name)
        block = re.search(r"XBLOCK: tl\.constexpr = (\d+)", source)  # of several ranges
        self.block = None if block is None else int(block.group(1))
        return self

    def run(self, *args: Any, stream: Any) -> None:
        """Launch over the whole range; ``xnumel`` is the last, before it the row of a reduction.

        A kernel of several ranges has one for each, ``xnumel_0`` and so on.
        """
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False))
        row = values.get("r0_numel", 1)
        block = self.block or max(1, LARGEST // triton.next_power_of_2(row))
        blocks = {} if self.block else {"XBLOCK": block}
        if "R0_BLOCK" in names:
            blocks["R0_BLOCK"] = triton.next_power_of_2(row)
        grid = []
        if "YBLOCK" in names:  # a range of two dimensions, as torch 2.11 makes of some
            blocks["YBLOCK"] = 1 << 8
            block = blocks["XBLOCK"] = LARGEST >> 8
            grid = [triton.cdiv(values["ynumel"], blocks["YBLOCK"])]
        lengths = [value for name, value in values.items() if name.startswith("xnumel")]
        programs = sum(triton.cdiv(length, block) for length in lengths)
        self.kernel[(programs, *grid)](*args, **blocks)

    def wait(self, _names: Any) -> None:
        """Nothing is compiled."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nearest(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Conversions between fp32 and bf16 as torch makes them.

    The interpreter truncates, where a GPU rounds to the nearest even value (``cvt.rn`` in the PTX,
    which :mod:`codegen.kernels` looks for).
    """

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (str(source), str(target)) == ("fp32", "bf16"):
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return values.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, rounding)

    return converted


def store(write: Callable[..., Any]) -> Callable[..., Any]:
    """A store casts to what its pointer points to, as the compiler does."""

    def stored(self: Any, ptrs: Any, value: Any, *others: Any) -> Any:
        element = ptrs.get_element_ty()
        if value.dtype.scalar != element and element.is_floating():
            value = self.cast_impl(value, element)
        return write(self, ptrs, value, *others)

    return stored


def run(case: Case, folder: Path) -> list[Any]:
    """The tensors among the arguments of a case after its call."""
    path = folder / "generated.py"
    path.write_text(case["source"])
    tensors = [value for value in case["args"] if isinstance(value, torch.Tensor)]
    with mock.patch("torch._inductor.async_compile.AsyncCompile", lambda: Launcher(folder)):
        module: Any = load(path)
    module.empty_strided_cuda = torch.empty_strided
    module.get_raw_stream = lambda _device: 0
    module.copy_if_misaligned = lambda tensor: tensor
    module.assert_size_stride = module.assert_size_stride_grouped = lambda *_: None
    guards = mock.patch("torch.cuda._DeviceGuard", lambda _: nullcontext())
    with guards, mock.patch("torch.cuda.set_device"):
        module.call(list(case["args"]))
    return tensors


def main() -> None:
    folder = Path(sys.argv[1])
    np.seterr(all="ignore")  # NaN are a part of the cases
    builder = interpreter.InterpreterBuilder
    interpreter._convert_float = nearest(interpreter._convert_float)
    builder.create_masked_store = store(builder.create_masked_store)
    cases = torch.load(folder / "cases.pt", weights_only=False)
    torch.save([run(case, folder) for case in cases], folder / "results.pt")


if __name__ == "__main__":
    main()
