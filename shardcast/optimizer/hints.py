"""What to use instead of attributes that a model has inside DistributedDataParallel only.

A sharded model stays the module that it was, so ``model.no_sync`` and ``model.module`` raise its
own AttributeError, and code that asks ``hasattr`` gets the right answer. Where such an error ends
the script, or one of its threads, a note says what to use; the model and its class are left alone.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardcast.messages import page
from shardcast.optimizer.model_hooks import is_marked

WRAPPER = "`model` stays a plain module under shardcast, without a wrapper: "
INSTEAD = {
    "module": "use the model itself for `model.module`",
    "no_sync": "use `with optimizer.no_sync():` for all micro-batches but a step's last",
    "require_backward_grad_sync": (
        "use `with optimizer.no_sync():` around the micro-batches that it was False for"
    ),
}
_installed = False


def install() -> None:
    """Add the notes before what prints errors that nobody catches; once in a process."""
    global _installed
    if _installed:
        return
    _installed = True
    of_main, of_threads = sys.excepthook, threading.excepthook

    def ends_script(kind: Any, error: BaseException, trace: Any) -> None:
        explain(error)
        of_main(kind, error, trace)

    def ends_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            explain(args.exc_value)
        of_threads(args)

    sys.excepthook, threading.excepthook = ends_script, ends_thread


def explain(error: BaseException | None) -> None:
    """Add a note to an error of a name that DDP has and a sharded model has not, or its causes."""
    while error is not None:
        if isinstance(error, AttributeError) and (note := _note(error.obj, error.name)):
            error.add_note(note)
            return
        error = error.__cause__ or error.__context__


def _note(owner: object, name: str | None) -> str:
    if name is None or not isinstance(owner, nn.Module) or not is_marked(owner):
        return ""
    if name in INSTEAD:
        return WRAPPER + INSTEAD[name]
    if hasattr(DistributedDataParallel, name):
        return f"{WRAPPER}`{name}` is DistributedDataParallel's; see {page('coming-from')}"
    return ""
