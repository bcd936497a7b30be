"""Read pickles of checkpoints, which a stranger may have written, without running code.

Their contents depend on the versions of Python and torch that wrote them. This module knows all of
these, so that each version reads what any other wrote.
"""

from __future__ import annotations

import enum
import io
import pickle
import platform
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

VERSIONS = f"torch {torch.__version__} and Python {platform.python_version()}"
# Classes in metadata and plans, besides dtypes, including files of other writers.
CLASSES = {
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_StorageInfo", "_MEM_FORMAT_ENCODING"),
    *("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType", "WriteResult"),
}
HARMLESS = {
    ("shardcast.checkpoint.dcp", "Written"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}


class _Properties(TensorProperties):
    """``TensorProperties`` of any torch, pickled as a tuple that has grown at its end."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):
            defaults = TensorProperties().__getstate__()
            state = (*state[: len(defaults)], *defaults[len(state) :])
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]  # for torch to read again


def _member(kind: object, name: str) -> enum.Enum:
    """Replace ``getattr``: Python 3.11.0 to 3.11.3 pickle members of enums by their names."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"unexpected getattr of {kind!r}, which is not an enum")
    return kind[name]


INSTEAD: dict[tuple[str, str], object] = {
    ("builtins", "getattr"): _member,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Properties,
    # Paths of any system, because names of their classes and modules differ between versions.
    **{
        (module, f"{system}Path"): PurePath
        for module in ("pathlib", "pathlib._local")
        for system in ("", "Posix", "Windows")
    },
}


def unpickled(data: bytes) -> Any:
    """Unpickle metadata, or a message from rank to rank.

    Raises:
        UnpicklingError, Exception: it is damaged, or names an unknown class.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in INSTEAD:
            return INSTEAD[module, name]
        if (
            (module.startswith("torch.distributed.checkpoint") and name in CLASSES)
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
            or (module, name) in HARMLESS
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"unexpected {module}.{name}")
