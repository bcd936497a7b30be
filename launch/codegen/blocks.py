"""The kernel of 128 x 128 blocks, which is written by hand: what it does, and its values.

    TRITON_INTERPRET=1 python launch/codegen/blocks.py FOLDER

runs the cases in ``FOLDER`` by Triton's interpreter; :func:`interpreted` starts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from shardcast.extensions.published_forms import blocks

FP32, BF16, BYTE = "*fp32", "*i16", "*u8"
OPERANDS = {"round": (FP32, BF16), "codes of masters": (FP32, BYTE), "collapse": (BF16, BYTE)}


def examine(stage: str) -> Any:
    """What the kernel does for a stage, compiled for sm_90."""
    from codegen.kernels import Access, Kernel, resources, widths
    from codegen.pretend import SM90, gpu

    source, target = OPERANDS[stage]
    rounds = stage == "round"
    names = dict.fromkeys(("rounds", "twice", "side"), "constexpr")
    signature = {"values": source, "first": target, "second": target, "scales": target,
                 "width": "i32", **names}  # fmt: skip
    constants = {"rounds": rounds, "twice": rounds, "side": blocks.SIDE}
    of_16: Any = {(number,): [["tt.divisibility", 16]] for number in range(5)}
    with gpu(), tempfile.TemporaryDirectory() as folder:
        made = ASTSource(blocks._block, signature, constants, of_16)
        text = triton.compile(made, target=SM90, options={"num_warps": blocks.WARPS}).asm["ptx"]
        used = resources(text, Path(folder))
    counts = Counter(widths(text))
    moved = sum(width * count for width, count in counts.items() if width > 1)
    each = moved * blocks.WARPS * 32 / blocks.SIDE**2 + (0 if rounds else blocks.SIDE**-2)
    return Kernel("block", (Access(False, "values", each),), counts, 0, *used, False)


def interpreted(stage: str, values: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """What Triton's interpreter leaves in the outputs of a stage."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save((stage, values, [*outputs]), Path(folder) / "case.pt")
        command = [sys.executable, __file__, folder]
        subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
        found: list[Tensor] = torch.load(Path(folder) / "result.pt")
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    stage, values, outputs = torch.load(folder / "case.pt")
    np.seterr(all="ignore")  # NaN are a part of the cases
    if stage == "round":
        blocks.round_(values, outputs)
    else:
        blocks.collapse_(values, *outputs)
    torch.save(outputs, folder / "result.pt")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # its own folder has a forms, too
    main()
