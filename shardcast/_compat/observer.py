"""The operations that a step calls, as seen by a dispatch mode."""

from __future__ import annotations

import re
import traceback
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveError(RuntimeError):
    """A collective was called where none is allowed."""


# Matrix products and factorizations, which round differently in batches.
# Whole words, because "sqrt" has "qr" in it.
PRODUCTS = re.compile(
    r"aten::_?(\w*mm|matmul|linalg_(?!vector_norm)\w+|svd|qr|geqrf|cholesky\w*|\w*solve)_?(\.|$)"
).match


class StepObserver(TorchDispatchMode):
    """Sees the operations that this thread calls inside it, and refuses collectives.

    ``torch.compile`` never compiles a function that it first meets inside; use ``force_eager``
    around it.

    Attributes:
        multiplies: matrices were multiplied or factorized, possibly in batches.

    Raises:
        CollectiveError: instead of a collective; also at the end, if the first one was caught.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.multiplies = False
        self._collective = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective = name
            raise CollectiveError(name)
        self.multiplies = self.multiplies or PRODUCTS(name) is not None
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._collective and error[0] is None:
            raise CollectiveError(self._collective)


def raised_in_distributed(error: BaseException) -> bool:
    """Return whether ``torch.distributed`` raised it, as it does without a process group."""
    frames = traceback.walk_tb(error.__traceback__)
    names = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    return names[-1].startswith("torch.distributed.")
