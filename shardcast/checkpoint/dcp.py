"""``torch.distributed.checkpoint`` on its public planner and storage hooks.

A rank plans, writes, and leaves its plan for rank 0 in a file. ``dcp.save`` would gather all plans
in collectives, which grow with the model and the ranks, and which a thread could not use during
training. The files are ordinary DCP files. A test reads them with torch's own functions.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from shardcast import _compat
from shardcast.checkpoint.region import KeyPath, ShardView
from shardcast.checkpoint.storage import Files, is_plain_name
from shardcast.checkpoint.unpickling import VERSIONS, unpickled
from shardcast.plan.precision import MASTER_DTYPE

METADATA = ".metadata"  # the name that DCP gives it
ONCE = "once"  # replaces the rank in the name of the file with values that are stored once
PLAN = 1 << 20  # bytes of small tensors that are planned and written together
Value = ShardView | tuple[KeyPath, object]  # an object has its path with it


@dataclasses.dataclass(frozen=True)
class Stored:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass
class Written:
    """The contents of one rank's file: planned items, their places, size and SHA-256 by file."""

    plan: SavePlan
    results: list[WriteResult]
    sums: dict[str, tuple[int, str]]


class Writer(FileSystemWriter):
    """Writes one rank's file of a checkpoint, tensor by tensor."""

    def __init__(self, folder: Path, owner: int | str) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)  # Files flushes
        self.fs: Files = Files()
        self._prefix = SimpleNamespace(prefix=f"__{owner}_")

    def write(self, values: Iterable[Value]) -> Written:
        """Write shards of tensors, and objects with their paths, and flush them.

        It makes many plans, because DCP holds all tensors of a plan until its end.
        """
        written = Written(SavePlan([], planner_data={}), [], {})
        planner = _SavePlanner()
        for value in values:
            written.plan.planner_data.update(planner.add(value))
            if planner.nbytes >= PLAN:
                self._write_plan(planner, written)
                planner = _SavePlanner()
        self._write_plan(planner, written)
        written.sums = self.fs.flush()
        return written

    def _write_plan(self, planner: _SavePlanner, written: Written) -> None:
        plan = SavePlan(planner.items, storage_data=self._prefix)
        written.results += self.write_data(plan, planner).wait()
        written.plan.items.extend(plan.items)

    def write_metadata(self, written: Sequence[Written]) -> dict[str, tuple[int, str]]:
        """Write ``.metadata`` for all ranks' files; return its size and SHA-256 by name.

        Raises:
            ValueError: the chunks of a tensor do not tile it, because a rank's are missing or
                wrong.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False)
        _, metadata = planner.create_global_plan([rank.plan for rank in written])
        metadata.planner_data = {
            k: v for rank in written for k, v in rank.plan.planner_data.items()
        }
        self.finish(metadata, [rank.results for rank in written])
        return self.fs.flush()

    def storage_meta(self) -> None:
        """Return nothing, because the directory is renamed later."""


class _SavePlanner(DefaultSavePlanner):
    """Plans the chunks of tensors, and objects.

    Attributes:
        nbytes: of the tensors among the items.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.items, self.nbytes = list[WriteItem](), 0
        self._values: dict[MetadataIndex, object] = {}

    def add(self, value: Value) -> dict[str, KeyPath]:
        """Plan a shard or an object; return its path by its key in the files."""
        path = value.path if isinstance(value, ShardView) else value[0]
        key = ".".join(path)
        planned: list[tuple[WriteItem, object]]
        if isinstance(value, ShardView):
            planned = [*value.write_items(key)]
            self.nbytes += value.flat.nbytes
        else:
            planned = [(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), value[1])]
        for item, data in planned:
            self.items.append(item)
            self._values[item.index] = _as_written(data)
        return {key: path}

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._values[index]


def _as_written(data: object) -> object:
    """Give a view its own storage; otherwise DCP would copy it."""
    if isinstance(data, Tensor) and data.dtype == MASTER_DTYPE and data.device.type == "cpu":
        return _compat.own_storage(data.detach()) if data.is_contiguous() else data
    return data


class DamagedCheckpointError(RuntimeError):
    """The files of a committed checkpoint differ from what was written."""


class UnreadableError(RuntimeError):
    """The metadata is damaged, or was written by an unknown version."""


UNFIT: tuple[type[Exception], ...] = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, TypeError),
    *(UnicodeError, UnpicklingError, RecursionError),
)  # what comes of facts of another form than a save writes


@contextmanager
def fitting(folder: Path, *more: type[Exception]) -> Iterator[None]:
    """Raise DamagedCheckpointError if files contradict each other.

    Their checksums may hold if someone rewrote them.
    """
    kinds: tuple[type[Exception], ...] = (*UNFIT, *more)
    try:
        yield
    except kinds as error:
        if isinstance(error, (DamagedCheckpointError, UnreadableError)):
            raise
        raise DamagedCheckpointError(
            f"checkpoint {str(folder)!r}: its files contradict each other "
            f"({type(error).__name__}: {str(error)[:200]}), although their checksums are right; "
            "use an earlier checkpoint"
        ) from error


class Reader(FileSystemReader):
    """A checkpoint's metadata, and its data on demand. Local.

    Attributes:
        paths: each stored thing's path in the nested state dict, and its key.
        stored: shapes and dtypes of the tensors among them.
        sizes: the files that are referred to, and how many bytes of them.

    Raises:
        UnreadableError: the metadata cannot be read.
        RuntimeError: it refers to files elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder, file = folder, folder / METADATA
        self.sizes: dict[str, int] = {}
        try:
            self._metadata = self.read_metadata()
            entries, paths = self._metadata.state_dict_metadata, self._metadata.planner_data or {}
            self.paths: dict[KeyPath, str] = {tuple(paths.get(key, (key,))): key for key in entries}
            self.stored: dict[KeyPath, Stored] = {
                path: Stored(tuple(entry.size), entry.properties.dtype)
                for path, key in self.paths.items()
                if isinstance(entry := entries[key], TensorStorageMetadata)
            }
            self.set_up_storage_reader(self._metadata, False)
            for place in self.storage_data.values():
                name, end = place.relative_path, place.offset + place.length
                if place.offset < 0 or place.length < 0:
                    raise ValueError(f"{name!r} has no byte {place.offset}")
                self.sizes[name] = max(end, self.sizes.get(name, 0))
            self._check_forms()
        except Exception as error:  # anything may be in there
            raise UnreadableError(
                f"{str(file)!r} cannot be read as DCP metadata by {VERSIONS}: {error}"
            ) from error
        for name in self.sizes:
            if not is_plain_name(name):
                raise RuntimeError(
                    f"{str(file)!r} refers to {name!r}, outside of its directory; this "
                    "checkpoint was changed after it was written"
                )

    def _check_forms(self) -> None:
        """Raise ValueError for facts that DCP does not write."""
        for path in self.paths:
            if not path or not all(isinstance(part, (str, int)) for part in path):
                raise ValueError(f"{path!r} is no path of a state dict")
        for path, stored in self.stored.items():
            entry: Any = self._metadata.state_dict_metadata[self.paths[path]]
            chunks = [(*chunk.offsets, *chunk.sizes) for chunk in entry.chunks]
            numbers = [*stored.shape, *itertools.chain(*chunks)]
            dims = {len(chunk) for chunk in chunks} - {2 * len(stored.shape)}
            counts = all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
            if dims or not counts or not isinstance(stored.dtype, torch.dtype):
                raise ValueError(f"{path!r} has no shape, chunks or dtype of a tensor")

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Read ``.metadata`` without running code, unlike DCP's own reader."""
        metadata: Metadata = unpickled((self.folder / METADATA).read_bytes())
        return metadata

    def object(self, path: KeyPath) -> Any:
        """Return a stored object: tensors, containers and plain values only.

        Raises:
            RuntimeError: there is no object at this path.
        """
        index, nowhere = MetadataIndex(self.paths.get(path, "")), torch.Size((0,))
        if index not in self.storage_data:
            raise RuntimeError(
                f"checkpoint {str(self.folder)!r}: it has no {'.'.join(map(str, path))!r}; "
                "shardcast did not write it, see import_dcp()"
            )
        planner = _LoadPlanner()
        item = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
        with fitting(self.folder, ValueError, RuntimeError):
            self.read_data(LoadPlan([item]), planner).wait()
        return planner.value

    def read(self, views: Sequence[ShardView]) -> None:
        """Fill the memory of ``views`` from the chunks that overlap them, with casts if needed."""
        with fitting(self.folder, ValueError):
            self._read(views)

    def _read(self, views: Sequence[ShardView]) -> None:
        planner, items = _LoadPlanner(), list[ReadItem]()
        for view in views:
            key, chunks = self.paths[view.path], list[ChunkStorageMetadata]()
            for chunk, target in view.chunks():
                planner.targets[MetadataIndex(key, chunk.offsets)] = target
                chunks.append(chunk)
            if math.prod(view.region.shape):
                entry: Any = self._metadata.state_dict_metadata[key]
                items += create_read_items_for_chunk_list(key, entry, chunks)
        self.read_data(LoadPlan(items), planner).wait()

    def tensor(self, path: KeyPath) -> Tensor:
        """Return a whole stored tensor on the host."""
        value = torch.empty(self.stored[path].shape, dtype=self.stored[path].dtype)
        self.read([ShardView.whole(path, value)])
        return value


class _LoadPlanner(DefaultLoadPlanner):
    """Hands DCP's reader the memory to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[MetadataIndex, Tensor] = {}
        self.value: object = None

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.targets[index]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = torch.load(value, map_location="cpu", weights_only=True)
