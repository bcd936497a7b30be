"""What a rank was waiting for when the backend gave up: named in its error."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from shardcast.comm.group import Comm


class Waiting:
    """A context within which an error of the backend says what this rank was waiting for.

    Args:
        op: the collective.
        about: whose it is; turned into text only for an error.
    """

    __slots__ = ("_about", "_comm", "_op")

    def __init__(self, comm: Comm, op: str, about: object) -> None:
        self._comm, self._op, self._about = comm, op, about

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # Subclasses, such as one for a lack of memory, say themselves what is the matter.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            return
        comm = self._comm
        of = f" of {self._about}" if self._about else ""
        raise RuntimeError(
            f"rank {comm.rank} of {comm.size} waited for the other ranks in {self._op}{of}, "
            f"after {comm.steps} steps, and the process group gave up: {error}. Usually another "
            "rank made other calls (one more batch, two steps, or clip_grad_norm_, "
            "full_state_dict, save or the like on some ranks only), raised an error of its own, or "
            "ended: look at what the others were doing. See 'waited for the other ranks' in "
            "docs/troubleshooting.md"
        ) from error


class Works:
    """Several pieces of asynchronous work, waited for as one."""

    __slots__ = ("_waiting", "_works")

    def __init__(self, works: Sequence[Any], waiting: Waiting) -> None:
        self._works, self._waiting = works, waiting

    def wait(self) -> None:
        """Return when all are done; on an accelerator it is the current stream that waits."""
        with self._waiting:
            for work in self._works:
                work.wait()
