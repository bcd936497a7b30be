"""The update on a processor by a C++ compiler: ``native.cpp``, a library per kind of update."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.forms import Bytes, Exact, Rounded, Split
from shardcast.step.update.operands import Flat
from shardcast.step.update.rules import AdamRule, Rule

LOW = torch.bfloat16


class _Operands(ctypes.Structure):
    _fields_ = (
        ("grad", ctypes.c_void_p), ("published", ctypes.c_void_p), ("master", ctypes.c_void_p),
        ("rest", ctypes.c_void_p), ("ties", ctypes.c_void_p), ("state", ctypes.c_void_p * 3),
        ("scale", ctypes.c_void_p * 3),
    )  # fmt: skip


class _Draw(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint32), ("seed", ctypes.c_uint32 * 2))


def supports(flat: Flat) -> bool:
    """Whether there is code for these dtypes; for fp16 there is none."""
    others = [flat.grad, *([] if flat.published is None else [flat.published])]
    return all(tensor.dtype in (LOW, torch.float32) for tensor in others)


def update(rule: Rule, flat: Flat, numbers: tuple[Any, ...], factor: Tensor | None) -> None:
    """:func:`.rules.update_` on CPU of a step that is not skipped; the same bits as compiled.

    Args:
        flat: 1-d.
        rule: not one of torch's own kernels.
        numbers: from ``rule.numbers``, of a step as a float.
    """
    operands, draw = _Operands(grad=_address(flat.grad)), _Draw()
    if isinstance(flat.forms.master, Split):
        published, rest, ties = map(_address, flat.master)
        operands.published, operands.rest, operands.ties = published, rest, ties
    else:
        operands.master = _address(flat.master[0])
        if flat.published is not None:
            operands.published = _address(flat.published)
    for number, raw in enumerate(flat.state):
        operands.state[number] = _address(raw[0])
        operands.scale[number] = _address(raw[-1])
    if flat.draw is not None:
        draw.first, _ = flat.draw.origin.tolist()
        draw.seed[0], draw.seed[1] = (int(flat.draw.seed(number)) for number in (0, 2))
    library = _library(_definitions(rule, flat))
    library.update(
        ctypes.byref(operands), (ctypes.c_float * len(numbers))(*map(float, numbers)),
        ctypes.c_float(1.0 if factor is None else float(factor)), ctypes.byref(draw),
        ctypes.c_int64(flat.grad.numel()), ctypes.c_int(torch.get_num_threads()),
    )  # fmt: skip


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()


def _definitions(rule: Rule, flat: Flat) -> str:
    adam = isinstance(rule, AdamRule)
    form = flat.forms.state[0] if flat.forms.state else Exact()
    split = isinstance(flat.forms.master, Split)
    flags = {
        "ROW": flat.forms.row,
        "ADAM": adam,
        "STATES": len(rule.state),
        "FORM": 1 if isinstance(form, Rounded) else 2 if isinstance(form, Bytes) else 0,
        "LOW_GRAD": flat.grad.dtype == LOW,
        "SPLIT": split,
        "CASTS": flat.published is not None and not split,
        **{
            name.upper(): getattr(rule, name, False)
            for name in ("coupled", "decays", "amsgrad", "maximize", "momentum", "nesterov")
        },
    }
    return "".join(f"#define {name} {int(value)}\n" for name, value in flags.items())


@functools.cache  # one library, so that models of one process share it
def _library(definitions: str) -> ctypes.CDLL:
    source = Path(__file__).with_name("native.cpp").read_text()
    return _compat.native_library(definitions + source)
