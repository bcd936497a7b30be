"""The operations that a step calls, as a dispatch mode sees them."""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveError(RuntimeError):
    """A collective was called where none may be."""


# Operations on every element by itself, or on none, to which torch gives no such tag.
POINTWISE = re.compile(
    r"aten::(_foreach_(?!norm|max\b|powsum)|_fused_|new_|(zeros|ones|full|empty)_like|copy_|_to_copy|"
    r"detach_|fill_|zero_|abs_|neg_|masked_fill_)"
).match


# Products and factors of matrices, of which several at once are rounded differently.
BATCHED = re.compile(r"aten::.*(mm|matmul|linalg_(?!vector_norm)|svd|qr|eig|cholesky|solve)").match


class StepObserver(TorchDispatchMode):
    """Sees the operations that this thread calls within, and refuses collectives.

    ``torch.compile`` gives up for good on what it first meets within: use ``force_eager`` around.

    Attributes:
        mixing: operations in which elements of a tensor may meet, such as norms and products.

    Raises:
        CollectiveError: in place of a collective; at the end, too, where it was caught.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixing: set[str] = set()
        self._collective = ""

    @property
    def batches(self) -> bool:
        """Return whether matrices were multiplied or factored, maybe several of them at once."""
        return any(map(BATCHED, self.mixing))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective = name
            raise CollectiveError(name)
        kwargs = kwargs or {}
        if not (torch.Tag.pointwise in func.tags or func.is_view or POINTWISE(name)):
            for value in (*args, *kwargs.values()):
                tensors = value if isinstance(value, (list, tuple)) else [value]
                if any(isinstance(value, Tensor) and value.numel() > 1 for value in tensors):
                    self.mixing.add(name)
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._collective and error[0] is None:
            raise CollectiveError(self._collective)


def raised_in_distributed(error: BaseException) -> bool:
    """Return whether ``torch.distributed`` raised it, as it does without a process group."""
    frames = traceback.walk_tb(error.__traceback__)
    names = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    return names[-1].startswith("torch.distributed.")
