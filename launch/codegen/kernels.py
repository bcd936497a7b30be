"""What a Triton kernel does: bytes per element from its source, instructions from its PTX."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.pretend import SM90, gpu
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.nvidia.compiler import get_ptxas

SIZES = {"i1": 1, "u1": 1, "fp8e4nv": 1, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
ACCESS = re.compile(r"tl\.(load|store)\((\w+) \+ \(((?:[^()]|\([^()]*\))*)\)")
GLOBAL = re.compile(r"(ld|st)\.global[\w:.]*?(?:\.v(\d))?\.b(\d+)[^;\[]*\[([^\]]+)\]")
CAST = re.compile(r"\bcvt\.(\w+)\.(?:satfinite\.)?(?:bf16|f16)(?:x2)?\.f32")
REDUCED = re.compile(r"r0_numel = (\d+)")


@dataclass(frozen=True)
class Access:
    """One load or store of a kernel's source.

    Attributes:
        pointer: the kernel's argument.
        bytes: per element of the range that the kernel goes through; 0 for a scalar.
    """

    store: bool
    pointer: str
    bytes: float


@dataclass(frozen=True)
class Kernel:
    """Figures of one kernel.

    Attributes:
        widths: bytes of each access to global memory in PTX, and how many there are.
        doubles: arithmetic instructions on fp64, conversions included.
        registers, spills: per thread; spills in bytes.
        truncates: whether a cast to low precision does not round to the nearest even value.
    """

    name: str
    accesses: tuple[Access, ...]
    widths: Counter[int]
    doubles: int
    registers: int
    spills: int
    truncates: bool

    @property
    def bytes(self) -> float:
        """Read and written per element."""
        return sum(access.bytes for access in self.accesses)

    @property
    def repeated(self) -> list[str]:
        """Operands that are read or written more than once; one number per row may be."""
        counts = Counter((a.store, a.pointer) for a in self.accesses if a.bytes >= 1)
        return [f"{'st' if s else 'ld'} {name} x{n}" for (s, name), n in counts.items() if n > 1]

    @property
    def width(self) -> int:
        """Bytes of the most frequent access of more than a scalar's frequency."""
        return max(self.widths, key=lambda width: (self.widths[width] * width, width), default=0)


def examine(name: str, source: str) -> Kernel:
    """Compile a kernel for sm_90, in every configuration that Inductor would try; the best one."""
    with gpu(), tempfile.TemporaryDirectory() as folder:
        autotuner = _loaded(source, Path(folder) / f"{name}.py")
        compiled = [autotuner._precompile_config(config).kernel for config in autotuner.configs]
        texts = [kernel.asm["ptx"] for kernel in compiled]
        found = [
            Kernel(
                name,
                tuple(accesses(source, autotuner.triton_meta["signature"])),
                Counter(widths(text)),
                len(re.findall(r"\b(?:add|sub|mul|fma|div|sqrt|cvt)\.[\w.]*f64", text)),
                *resources(text, Path(folder)),
                any(mode != "rn" for mode in CAST.findall(text)),
            )
            for text in texts
        ]
    return min(found, key=lambda kernel: (kernel.spills, -kernel.width, kernel.registers))


def _loaded(source: str, path: Path) -> CachingAutotuner:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Any = next(v for v in vars(module).values() if isinstance(v, CachingAutotuner))
    return found


def accesses(source: str, signature: dict[str, str]) -> list[Access]:
    """The loads and stores of a kernel's source.

    Of an operand that is indexed by the rows of a reduction alone, an access counts once per row.
    """
    row = REDUCED.search(source)
    rows = 1 / int(row.group(1)) if row else 1.0
    body = source[source.index("@triton.jit") :]
    # r0_1 = r0_index, x2 = xindex // 64: what an index stands for, in elements per element
    fractions = {"xindex": rows, "r0_index": 1.0}
    for variable, expression in re.findall(r"^    +(\w+) = (.*)$", body, re.M):
        if (whole := re.fullmatch(r"(\w+)", expression)) and whole.group(1) in fractions:
            fractions[variable] = fractions[whole.group(1)]
        elif part := re.fullmatch(r"\(?(\w+) ?// ?(\d+)\)?", expression):
            fractions[variable] = fractions.get(part.group(1), 0.0) / int(part.group(2))
        elif (rest := re.fullmatch(r"\(?(\w+) % .*", expression)) and rest.group(1) in fractions:
            fractions[variable] = fractions[rest.group(1)]
    found = []
    for kind, pointer, index in ACCESS.findall(body):
        share = max(
            (fractions.get(word, 0.0) for word in re.findall(r"[a-z]\w*", index)), default=0
        )
        size = SIZES.get(signature[pointer].lstrip("*"))
        size = size or int(signature[pointer].lstrip("*iu")) // 8
        found.append(Access(kind == "store", pointer, share * size))
    return found


def widths(ptx: str) -> list[int]:
    """Bytes of every access of a thread to global memory.

    What it reads again at one address comes from a cache: Triton 3.6 (torch 2.11) loads the number
    of a row once for each element of a thread.
    """
    found = dict.fromkeys(GLOBAL.findall(ptx))
    return [int(vector or 1) * int(bits) // 8 for _, vector, bits, _address in found]


def resources(ptx: str, folder: Path) -> tuple[int, int]:
    """Registers per thread and spilled bytes, as ptxas says."""
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    architecture = re.search(r"\.target (\w+)", ptx)
    assert architecture is not None
    tool, output = get_ptxas(SM90.arch).path, folder / "kernel.cubin"
    command = [tool, "-v", f"--gpu-name={architecture.group(1)}", path, "-o", output]
    told = subprocess.run(command, capture_output=True, text=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", told))
    used = re.search(r"Used (\d+) registers", told)
    assert used is not None, told
    return int(used.group(1)), spilled
