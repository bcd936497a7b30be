"""A fallback for kernels that cannot be compiled: what they compile runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shardcast._compat import inductor
from shardcast.comm import warn_first

T = TypeVar("T")
ATTEMPTS = 2  # at compiling a kernel: what other processes do to the cache passes


def or_eager(compiled: Callable[..., T], eager: Callable[..., T], kernel: str) -> Callable[..., T]:
    """Return ``compiled``, which becomes ``eager`` once compiling it has failed twice in a row.

    An error on one rank alone would leave the others waiting in their next collective, so there
    is a warning, on this rank. The mean has the same bits either way. An update may differ in the
    last one, which only ranks notice that own the same elements: replicas and tied stages.

    Args:
        compiled: one kernel, of one graph, that is compiled when it is called.
        kernel: what the warning calls it.
    """
    attempts = ATTEMPTS

    def run(*args: Any) -> T:
        nonlocal attempts
        while attempts:
            try:
                results = compiled(*args)
                attempts = ATTEMPTS
                return results
            except inductor.compile_errors() as error:  # nothing has run yet
                attempts -= 1
                if not attempts:
                    warn_first(
                        f"fuse: compiling failed for {kernel} ({type(error).__name__}: {error}); "
                        "it runs eagerly on this rank from now on. Replicas or tied pipeline "
                        "stages of which one does may come to differ in last bits. See that the "
                        "compiler works and that the cache directory of torch.compile "
                        "(TORCHINDUCTOR_CACHE_DIR) can be written, or use fuse 'eager'"
                    )
        return eager(*args)

    return run
