"""Prove the kernels of a step without a GPU: what an H100 would run is generated and counted.

    bash launch/test.sh --codegen                # with a virtual environment of its own
    python launch/codegen [PART ...] [--markdown] [--source]

Needs the CUDA wheel of torch (its Triton has ptxas), no GPU. Every row is a stage of one step of
the library on fake CUDA tensors (``trace``), compiled for sm_90 as Inductor would (``lower``,
``kernels``). Exits with 1 where a goal is missed:

* one kernel, which reads each operand once and writes it once: at most so many bytes per element,
* in accesses of 16 bytes, without arithmetic in fp64 and without spilled registers,
* casts to low precision round to the nearest value (``cvt.rn``),
* the host waits for nothing,
* and the values are those of the eager update, in a step that is skipped for a NaN too: Triton's
  interpreter runs the kernel on the host. ``ulps`` is the greatest difference in fp32, ``rounded``
  the share of other values that differ. A kernel that is off by one part in a thousand is tried
  last, which must be noticed. Those of published forms have equal bits.

``small`` counts operations on scalars and other small tensors, of the whole step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from benchmarks.report import table
from codegen import blocks, forms
from codegen.kernels import Kernel, examine
from codegen.trace import SMALL, Pass, Step, trace
from codegen.values import Difference, Recorded, compare, interpret, record, slip
from torch.optim import SGD, Adam, AdamW

from shardcast.extensions.averages import Average, AverageOptions
from shardcast.extensions.metrics import SquareSums
from shardcast.step.update.batches import BATCH
from shardcast.step.update.epilogues import Epilogue

COLUMNS = (
    "what", "stage", "kernels", "bytes", "goal", "access", "registers", "spills", "fp64",
    "small", "ulps", "rounded", "verdict",
)  # fmt: skip
LEAN = {"master": "split16", "moments": "bf16"}
LEANEST = {"master": "split16", "moments": "int8"}


@dataclass(frozen=True)
class Variant:
    """A step, the stage of it that a row is about, and the most bytes per element it may move."""

    title: str
    goal: float
    kind: type[torch.optim.Optimizer] = AdamW
    options: tuple[tuple[str, float | bool], ...] = ()
    fields: tuple[tuple[str, str | int], ...] = ()
    ranks: int = 1
    stage: str = "update"
    epilogues: tuple[Epilogue, ...] = ()
    form: str = ""
    packs: int = 0  # of one parameter each, alike, whose ranges are updated in batches

    @property
    def kernels(self) -> int:
        """How many it may launch."""
        return self.packs // BATCH or 1

    def shapes(self, numel: int, step: int = 0) -> dict[str, Any]:
        """Of its parameters, where they are not the usual ones; each has ``step`` more elements."""
        if not self.packs:
            return {}
        shapes = tuple((numel + step * number,) for number in range(self.packs))
        return {"shapes": shapes, "pack_params": 1}


def variants() -> list[Variant]:
    """What is looked at. Bytes of AdamW in bf16: gradient 2, master and moments 24, parameter 4."""
    decay, momentum = ("weight_decay", 0.1), ("momentum", 0.9)
    bf16, int8 = ("moments", "bf16"), ("moments", "int8")
    rows = [
        Variant("AdamW", 30),
        Variant("AdamW, fp16", 30, fields=(("param_dtype", "fp16"), ("loss_scale", "1024"))),
        Variant("AdamW, fp32", 28, fields=(("param_dtype", "fp32"),)),
        Variant("AdamW, amsgrad", 38, options=(("amsgrad", True),)),
        Variant("AdamW, 40 packs", 30, packs=40),
        Variant("Adam with L2", 30, Adam, (decay,)),
        Variant("SGD", 14, SGD),
        Variant("SGD, momentum", 22, SGD, (momentum, decay, ("nesterov", True))),
        Variant("split16", 26.5, fields=(("master", "split16"),)),
        Variant("bf16 moments", 22.1, fields=(bf16,)),  # a key per row
        Variant("int8 moments", 19, fields=(int8,)),
        Variant("split16, bf16 moments", 20, fields=tuple(LEAN.items())),
        Variant("split16, int8 moments", 15, fields=tuple(LEANEST.items())),
        Variant("AdamW, an average", 38, epilogues=(Average(AverageOptions("ema", 0.999)),)),
        Variant(
            "AdamW, a bf16 average",
            34.1,
            epilogues=(Average(AverageOptions("ema", 0.999, warmup=True, stored="bf16")),),
        ),
        # Four numbers per row of 64 are read and written.
        Variant("AdamW, metrics", 30.6, epilogues=(SquareSums(),), fields=(("metrics", 1),)),
    ]
    rows += [Variant(f"mean of {n} ranks", 2 * n + 2, ranks=n, stage="reduce") for n in range(2, 9)]
    rows.append(Variant("norm", 2, stage="decide"))
    # fp32 to two copies of bf16; fp32, or bf16, to codes and scales; codes and scales to bf16.
    for name in forms.FORMS:
        code = forms.FORMS[name].bits / 8
        traffic = 8, 4.04 + code, 2.04 + code, 3.04
        rows += [
            Variant(name, goal, stage=stage, form=name)
            for stage, goal in zip(forms.STAGES, traffic, strict=True)
            if forms.FORMS[name].block_rows == 1 or stage in blocks.OPERANDS
        ]
    return rows


@dataclass(frozen=True)
class Row:
    """What one step does in a stage.

    Attributes:
        launches: of compiled kernels on many elements, with the share of the span that it covers.
        passes: eager operations on many elements; each is a kernel, or several.
        small: launches on few elements.
        values: how far they are from those of the eager functions.
    """

    variant: Variant
    step: Step
    launches: list[tuple[Kernel, float]]
    passes: list[Pass]
    small: int
    values: Difference

    @property
    def kernels(self) -> list[Kernel]:
        return [kernel for kernel, _ in self.launches]

    @property
    def launched(self) -> int:
        return len(self.kernels) + len(self.passes)

    @property
    def bytes(self) -> float:
        """Per element of the span."""
        eager = sum(one.bytes for one in self.passes) / self.step.elements
        return eager + sum(kernel.bytes * share for kernel, share in self.launches)

    @property
    def width(self) -> int:
        """Bytes of an access; 0 where none is known."""
        return min((kernel.width for kernel in self.kernels), default=0)

    def missed(self) -> list[str]:
        """The goals that are missed."""
        doubles = sum(k.doubles for k in self.kernels) + sum(p.double for p in self.passes)
        checks = {
            f"{self.launched} kernels": self.launched != self.variant.kernels,
            "an extern kernel or copy": any(graph.others for graph in self.step.graphs),
            "more bytes": self.bytes > self.variant.goal + 0.01,
            "operands twice": any(kernel.repeated for kernel in self.kernels),
            "narrow accesses": any(kernel.width < 16 for kernel in self.kernels),
            "fp64 arithmetic": doubles > 0,
            "spills": any(kernel.spills for kernel in self.kernels),
            "truncated casts": any(kernel.truncates for kernel in self.kernels),
            "other values": not self.values.good,
            f"host waits ({', '.join(self.step.waits)})": bool(self.step.waits),
        }
        return [name for name, failed in checks.items() if failed]

    def cells(self) -> tuple[str, ...]:
        eager = f" ({len(self.passes)} eager)" if self.passes else ""
        registers = max((kernel.registers for kernel in self.kernels), default=0)
        doubles = sum(k.doubles for k in self.kernels) + sum(p.double for p in self.passes)
        return (
            self.variant.title, self.variant.stage, f"{self.launched}{eager}", f"{self.bytes:.1f}",
            f"{self.variant.goal:g}", f"{self.width or '?'}", f"{registers or '?'}",
            f"{sum(kernel.spills for kernel in self.kernels)}", f"{doubles}",
            f"{self.small}", f"{self.values.ulps:.1f}" if self.kernels else "?",
            f"{self.values.rounded:.2%}" if self.kernels else "?",
            "; ".join(self.missed()) or "good",
        )  # fmt: skip


def measure(variant: Variant, source: bool = False) -> Row:
    """Trace one variant, and compile what it compiles."""
    if variant.form:
        return measure_form(variant, source)
    step = trace(variant.kind, dict(variant.options), variant.ranks, variant.epilogues,
                 **dict(variant.fields), **variant.shapes(1 << 20))  # fmt: skip
    # Gradients go into their packs in one pass of their own, before the mean; marks are few.
    others = "_foreach_copy_", "index_fill_"
    passes = [p for p in step.passes if p.stage == variant.stage and p.name not in others]
    launches, small = [], step.scalars
    for graph in step.graphs:
        for name, text in graph.kernels.items():
            for elements in graph.calls:
                if elements < step.elements // SMALL:
                    small += 1
                elif graph.stage == variant.stage:
                    print(text if source else "", end="")
                    launches.append((examine(name, text), elements / step.elements))
    return Row(variant, step, launches, passes, small, values(variant))


def measure_form(variant: Variant, source: bool) -> Row:
    """What is launched of a kernel of a published form; no step is around it."""
    form, elements = forms.FORMS[variant.form], forms.ROWS * forms.COLUMNS
    if form.block_rows > 1 and variant.stage in blocks.OPERANDS:
        launched = [(blocks.examine(variant.stage), 1.0)]
        return Row(variant, Step(elements), launched, [], 0, values(variant))
    graphs = forms.graphs(form, variant.stage)
    launches = []
    for graph in graphs:
        for name, text in graph.kernels.items():
            print(text if source else "", end="")
            launches.append((examine(name, text), 1.0))
    return Row(variant, Step(elements, graphs), launches, [], 0, values(variant))


def values(variant: Variant, edit: Callable[[str], str] = str) -> Difference:
    """How far the values of a variant's kernels are from eager ones; ``edit`` may break them."""
    if variant.form:
        return forms.values(forms.FORMS[variant.form], variant.stage, slips=edit is slip)
    calls = [
        call
        for nan in ((False, True) if variant.stage == "update" else (False,))
        for call in recorded(variant, variant.stage, nan)
    ]
    interpret(calls, edit)
    return compare(calls)


def recorded(variant: Variant, stage: str, nan: bool = False) -> list[Recorded]:
    """What a step of a variant compiles in a stage."""
    return record(
        variant.kind, dict(variant.options), variant.ranks, stage, variant.epilogues, nan,
        **dict(variant.fields), **variant.shapes(1 << 10, 100),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="only titles with a PART in them")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--source", action="store_true", help="print the Triton source too")
    args = parser.parse_args()
    chosen = [v for v in variants() if not args.parts or any(p in v.title for p in args.parts)]
    rows = [measure(variant, args.source) for variant in chosen]
    print(f"torch {torch.__version__}, sm_90; bytes per element of the own span")
    print(table(COLUMNS, [row.cells() for row in rows], args.markdown))
    failed = [row.variant.title for row in rows if row.missed()]
    print(f"{len(rows) - len(failed)} of {len(rows)} meet their goals")
    unnoticed = [
        row.variant.title for row in rows if row.kernels and values(row.variant, slip).good
    ]
    print(f"kernels with a slip that are not noticed: {', '.join(unnoticed) or 'none'}")
    sys.exit(1 if failed or unnoticed or not rows else 0)


if __name__ == "__main__":
    main()
