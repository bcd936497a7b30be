"""Notes to errors that end a script which trained under DistributedDataParallel.

A sharded model stays the module that it was, so ``model.no_sync`` and ``model.module`` raise its
own AttributeError, and code that asks ``hasattr`` gets the right answer. Where such an error ends
the script, or one of its threads, a note says what to use; the model and its class are left alone.
So does one to torch's errors of dtypes: under autocast alone the parameters would be fp32.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Set
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardcast.messages import page
from shardcast.optimizer.model_hooks import is_marked
from shardcast.plan.precision import MASTER_DTYPE

WRAPPER = "`model` stays a plain module under shardcast, without a wrapper: "
INSTEAD = {
    "module": "use the model itself for `model.module`",
    "no_sync": "use `with optimizer.no_sync():` for all micro-batches but a step's last",
    "require_backward_grad_sync": (
        "use `with optimizer.no_sync():` around the micro-batches that it was False for"
    ),
}
OF_DTYPES = re.compile("dtype|scalar type|BFloat16|Half")  # in torch's errors
_installed = False
_low: weakref.WeakKeyDictionary[nn.Module, torch.dtype] = weakref.WeakKeyDictionary()


def install(model: nn.Module, dtypes: Set[torch.dtype]) -> None:
    """Add the notes before what prints errors that nobody catches; once in a process.

    Args:
        model: one that is sharded.
        dtypes: of its parameters.
    """
    global _installed
    if low := dtypes - {MASTER_DTYPE}:
        _low[model] = min(low, key=str)
    if _installed:
        return
    _installed = True
    in_main, in_thread = sys.excepthook, threading.excepthook

    def ends_script(kind: Any, error: BaseException, trace: Any) -> None:
        explain(error)
        in_main(kind, error, trace)

    def ends_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            explain(args.exc_value)
        in_thread(args)

    sys.excepthook, threading.excepthook = ends_script, ends_thread


def explain(error: BaseException | None) -> None:
    """Add a note to an error of a name that DDP has and a sharded model has not, or its causes,
    and to one of dtypes.
    """
    last = error
    while error is not None:
        if isinstance(error, AttributeError) and (note := _note(error.obj, error.name)):
            error.add_note(note)
            return
        error = error.__cause__ or error.__context__
    low = next((dtype for model, dtype in _low.items() if is_marked(model)), None)
    if low is not None and isinstance(last, RuntimeError) and OF_DTYPES.search(str(last)):
        last.add_note(
            f"shardcast: parameters of a sharded model are {low} (param_dtype), where autocast "
            "alone leaves them fp32; code outside of a forward casts those that it computes with "
            "(param.float()), or keep_fp32=[patterns] keeps them"
        )


def _note(owner: object, name: str | None) -> str:
    if name is None or not isinstance(owner, nn.Module) or not is_marked(owner):
        return ""
    if name in INSTEAD:
        return WRAPPER + INSTEAD[name]
    if hasattr(DistributedDataParallel, name):
        return f"{WRAPPER}`{name}` is DistributedDataParallel's; see {page('coming-from')}"
    return ""
