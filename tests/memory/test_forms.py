"""Masters and moments that are decoded, updated and encoded in one pass, bit for bit."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from shardcast.memory import forms
from shardcast.memory.forms import Bytes, Exact, Form, Rounded, Split
from shardcast.step.update import execute, native, rules
from shardcast.step.update.execute import ChunkedKernel, NativeKernel, WholeKernel
from shardcast.step.update.operands import Draw, Flat, Forms

pytestmark = pytest.mark.timeout(120)
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
BF16, FP32 = torch.bfloat16, torch.float32
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (ADAMW, {"weight_decay": 0.1}),
    "adam_all": (
        torch.optim.Adam,
        {"weight_decay": 0.1, "amsgrad": True, "maximize": True, "betas": (0.4, 0.9)},
    ),
    "sgd": (SGD, {}),
    "sgd_momentum": (SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "sgd_nesterov": (SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
}
MOMENTS = {"fp32": (Exact(), Exact()), "bf16": (Rounded(), Rounded()),
           "int8": (Bytes(True), Bytes(False))}  # fmt: skip
NUMEL = 64 * 21 + 13


class Range:
    """Masters and state of one range in given forms, and an update of it by a kernel."""

    def __init__(self, optimizer: str, master: Form, moments: str, row: int = 64) -> None:
        kind, options = OPTIMIZERS[optimizer]
        param = torch.nn.Parameter(torch.zeros(1))
        self.group = kind([param], lr=1e-2, **options).param_groups[0]
        self.rule = rules.rule_of(kind, self.group)
        signed, unsigned = MOMENTS[moments]
        state = (signed, unsigned, unsigned)[: len(self.rule.state)]
        self.forms = Forms(master, state, row)
        torch.manual_seed(0)
        exact = torch.randn(NUMEL)
        exact[:640] = (exact[:640].view(torch.int32) & -65536 | 0x8000).view(FP32)  # ties
        self.master = tuple(p.clone() for p in forms.encode_flat(master, exact, row))
        self.state = tuple(
            tuple(p.clone() for p in forms.encode_flat(form, torch.zeros(NUMEL), row))
            for form in state
        )
        self.published = None if isinstance(master, Split) else exact.to(BF16)

    def flat(self, grad: Tensor, step: int) -> Flat:
        drawn = any(isinstance(form, Rounded) for form in self.forms.state)
        origin = torch.tensor([12345, 678], dtype=torch.int32)
        draw = Draw(origin, torch.tensor(float(step))) if drawn else None
        return Flat(self.master, grad, self.state, self.published, self.forms, draw)

    def run(self, kernel: Any, grad: Tensor, step: int, skip: bool = False) -> None:
        self._call(kernel, self.flat(grad, step), step, skip)

    def run_in_windows(self, kernel: Any, grad: Tensor, step: int) -> None:
        """The reference: to fp32, an update of that, and back."""
        flat, row = self.flat(grad, step), self.forms.row
        master = forms.decode_flat(self.forms.master, self.master, row)
        pairs = list(zip(self.forms.state, self.state, strict=True))
        state = [forms.decode_flat(form, raw, row) for form, raw in pairs]
        exact = Forms(Exact(), (Exact(),) * len(state))
        singles = tuple((values,) for values in state)
        self._call(kernel, Flat((master,), grad, singles, self.published, exact), step, False)
        drawn: list[Tensor] = []
        kept = [(self.master, forms.encode_flat(self.forms.master, master, row))]
        for number, ((form, raw), values) in enumerate(zip(pairs, state, strict=True)):
            if flat.draw is not None and not drawn:
                drawn += flat.draw.chances(number, values.shape)
            chance = drawn.pop() if drawn else None
            kept.append((raw, forms.encode_flat(form, values, row, chance)))
        for raw, pieces in kept:
            for old, new in zip(raw, pieces, strict=True):
                old.copy_(new)

    def _call(self, kernel: Any, flat: Flat, step: int, skip: bool) -> None:
        decision = torch.tensor(skip)
        if kernel.on_host:
            numbers = self.rule.numbers(self.group, float(step))
        else:
            as_double = torch.tensor(float(step), dtype=torch.float64)
            numbers = rules.as_tensors(self.rule.numbers(self.group, as_double), decision)
        kernel(self.rule, flat, numbers, torch.tensor(0.37), decision)

    def bits(self) -> list[Tensor]:
        kept = [*self.master, *(piece for raw in self.state for piece in raw)]
        return [p.clone() for p in (*kept, *([] if self.published is None else [self.published]))]


def gradients(steps: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(NUMEL).mul(10.0 ** (step % 3 - 1)).to(dtype) for step in range(steps)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


ALL = [(o, m, s) for o in OPTIMIZERS for m in (Exact(), Split()) for s in MOMENTS]


@pytest.mark.parametrize(("optimizer", "master", "moments"), ALL, ids=str)
def test_one_pass_has_the_bits_of_windows_without_a_compiler(
    optimizer: str, master: Form, moments: str
):
    one, windows = (Range(optimizer, master, moments) for _ in range(2))
    for step, grad in enumerate(gradients(4), 1):
        one.run(WholeKernel(compile=False), grad, step)
        windows.run_in_windows(WholeKernel(compile=False), grad, step)
        assert same(one.bits(), windows.bits()), step


@pytest.mark.parametrize(("optimizer", "master", "moments"), ALL, ids=str)
def test_eager_windows_have_the_bits_of_the_forms(
    optimizer: str, master: Form, moments: str, monkeypatch: pytest.MonkeyPatch
):
    """Several windows, a shorter one and a part of a row; some weights are set to zero by hand."""
    monkeypatch.setattr(execute, "WINDOW", 256)
    eager, reference = (Range(optimizer, master, moments) for _ in range(2))
    for step, grad in enumerate(gradients(4), 1):
        for found in (eager, reference):
            found.master[0][600:700] *= step != 3
        grad[::7] *= 1e-9  # a second moment far below the largest one of its row
        eager.run(ChunkedKernel(), grad, step)
        reference.run_in_windows(ChunkedKernel(), grad, step)
        assert same(eager.bits(), reference.bits()), step


@needs_compiler
@pytest.mark.parametrize(  # each combination is compiled by itself
    ("optimizer", "master", "moments"),
    [case for case in ALL if case[0] == "adamw" or case[1:] == (Split(), "bf16")],
    ids=str,
)
def test_one_pass_has_the_bits_of_windows_in_cpp(optimizer: str, master: Form, moments: str):
    one, windows = (Range(optimizer, master, moments) for _ in range(2))
    for step, grad in enumerate(gradients(4), 1):
        one.run(NativeKernel(), grad, step)
        windows.run_in_windows(NativeKernel(), grad, step)
        assert same(one.bits(), windows.bits()), step


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs_compiler
@pytest.mark.parametrize(("master", "moments"), [(Exact(), "fp32"), (Split(), "bf16"),
                                                 (Exact(), "int8")], ids=str)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["adamw", "sgd_nesterov"])
def test_cpp_has_the_bits_of_torch_compile(optimizer: str, master: Form, moments: str):
    """And that the bits of windows, compiled."""
    cpp, compiled, windows = (Range(optimizer, master, moments) for _ in range(3))
    for step, grad in enumerate(gradients(3), 1):
        cpp.run(NativeKernel(), grad, step)
        compiled.run(WholeKernel(compile=True), grad, step)
        windows.run_in_windows(WholeKernel(compile=True), grad, step)
        assert same(cpp.bits(), compiled.bits()), step
        assert same(windows.bits(), compiled.bits()), step


@pytest.mark.parametrize("row", [4, 16, 32])
@needs_compiler
def test_short_rows_and_fp32_gradients_have_the_same_bits(row: int):
    one, windows = (Range("adamw", Split(), "int8", row) for _ in range(2))
    for step, grad in enumerate(gradients(3, FP32), 1):
        one.run(NativeKernel(), grad, step)
        windows.run_in_windows(NativeKernel(), grad, step)
        assert same(one.bits(), windows.bits()), step


@pytest.mark.parametrize(
    "kernel",
    [
        WholeKernel(compile=False),
        ChunkedKernel(),
        pytest.param(NativeKernel(), marks=needs_compiler),
    ],
)
@pytest.mark.parametrize("moments", MOMENTS)
def test_where_an_update_is_cut_does_not_show(kernel: Any, moments: str):
    """Neither in the bits of ties nor in what is drawn."""
    whole, cut = (Range("adamw", Split(), moments) for _ in range(2))
    for step, grad in enumerate(gradients(3), 1):
        whole.run(kernel, grad, step)
        flat = cut.flat(grad, step)
        for start, stop in ((0, 64), (64, 640), (640, 1216), (1216, NUMEL)):
            cut._call(kernel, flat.cut(start, stop), step, False)
        assert same(whole.bits(), cut.bits()), step


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_skipped_pass_changes_no_bit_of_any_form(moments: str):
    found = Range("adamw", Split(), moments)
    found.run(WholeKernel(compile=False), gradients(1)[0], 1)
    before = found.bits()
    found.run(WholeKernel(compile=False), torch.full((NUMEL,), torch.nan), 2, skip=True)
    assert same(found.bits(), before)
    found.run(WholeKernel(compile=False), gradients(1)[0], 2)
    assert not same(found.bits(), before), "the control: a step that is not skipped does"


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_where_nothing_can_be_compiled_the_update_is_eager(
    moments: str, monkeypatch: pytest.MonkeyPatch
):
    """A compiler that fails, or a cache directory that is read-only, on one rank perhaps."""

    def fails(_source: str) -> Any:
        raise OSError("read-only file system")

    monkeypatch.setattr(native._compat, "native_library", fails)
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    monkeypatch.setattr("shardcast.step.compiling.failed", threading.Event())
    tried, eager = (Range("adamw", Split(), moments) for _ in range(2))
    kernel = NativeKernel()
    with pytest.warns(UserWarning, match="compiling failed .read-only file system") as told:
        for step, grad in enumerate(gradients(3), 1):
            tried.run(kernel, grad, step)
            eager.run(ChunkedKernel(), grad, step)
            assert same(tried.bits(), eager.bits())
    assert len(told) == 1


def test_parameters_in_fp16_are_for_the_other_kernel():
    flat = Range("adamw", Exact(), "fp32").flat(gradients(1, torch.float16)[0], 1)
    assert not native.supports(flat)


@pytest.mark.parametrize(
    "kernel",
    [
        WholeKernel(compile=False),
        ChunkedKernel(),
        pytest.param(NativeKernel(), marks=needs_compiler),
    ],
)
def test_ties_survive_an_update_that_changes_no_weight(kernel: Any):
    found = Range("sgd", Split(), "fp32")
    before = found.bits()
    assert found.master[2].any(), "there are ties"
    found._call(kernel, found.flat(torch.zeros(NUMEL, dtype=BF16), 1).cut(0, 1344), 1, False)
    assert same(found.bits(), before)
