"""Ordinary ``torch.distributed.checkpoint`` files, written and read.

The only place that touches DCP's interfaces, the private one among them: ``_StorageInfo``, the
entry that says where in which file a chunk lies. A test reads what is written here with torch's
own functions, and so notices when a release changes the format.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardcast.checkpoint.files import HashingFile
from shardcast.checkpoint.shards import Part

METADATA = ".metadata"  # the name that DCP gives it
Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """One chunk, or one object, as it lies in a file; ``dtype`` is ``None`` for an object."""

    path: Path_
    file: str
    offset: int
    length: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def data_file(rank: int) -> str:
    """Name of the file that ``rank`` writes."""
    return f"__{rank}_0.distcp"


def write_part(file: HashingFile, name: str, part: Part) -> list[Record]:
    """Append the chunks of ``part``; at most one of them is held twice at a time."""
    records = []
    for box, piece in part.pieces():
        begin = file.tell()
        # A clone, for torch.save stores the whole storage that a view belongs to.
        file.save(piece.detach().to("cpu", copy=True))
        length = file.tell() - begin
        records.append(
            Record(
                part.path, name, begin, length, part.flat.dtype, part.shape, box.offsets, box.sizes
            )
        )
    return records


def write_object(file: HashingFile, name: str, path: Path_, value: Any) -> Record:
    """Append an object."""
    begin = file.tell()
    file.save(value)
    return Record(path, name, begin, file.tell() - begin)


def metadata_of(records: Iterable[Record]) -> bytes:
    """The contents of ``.metadata``.

    Raises:
        RuntimeError: the chunks of a tensor do not tile it: a rank is missing or lied.
    """
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path_] = {}
    for record in records:
        key = ".".join(record.path)
        paths[key] = record.path
        place = _StorageInfo(record.file, record.offset, record.length)
        if record.dtype is None:
            tensors[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = place
            continue
        entry = tensors.setdefault(
            key,
            TensorStorageMetadata(TensorProperties(record.dtype), torch.Size(record.shape), []),
        )
        offsets, sizes = torch.Size(record.offsets), torch.Size(record.sizes)
        entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
        places[MetadataIndex(key, offsets)] = place
    for key, entry in tensors.items():
        if isinstance(entry, TensorStorageMetadata):
            covered = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if covered != entry.size.numel():
                raise RuntimeError(
                    f"checkpoint: {key!r} has {entry.size.numel()} elements, but the ranks wrote "
                    f"{covered}; every rank of the optimizer's group must call save()"
                )
    return pickle.dumps(Metadata(tensors, planner_data=paths, storage_data=places))


class Reader:
    """A checkpoint's metadata, and its data on demand. Local."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with open(folder / METADATA, "rb") as file:
            self._metadata: Metadata = _Unpickler(file).load()
        self._entries = self._metadata.state_dict_metadata
        paths = self._metadata.planner_data or {}
        self.paths: dict[Path_, str] = {tuple(paths[key]): key for key in self._entries}
        """Each stored thing's path in the nested state dict, and its key."""

    def shape(self, path: Path_) -> tuple[int, ...] | None:
        """Of a stored tensor; ``None`` if there is none of this path, or it is an object."""
        entry = self._entry(path)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def dtype(self, path: Path_) -> torch.dtype:
        """Of a stored tensor."""
        entry = self._entry(path)
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def _entry(self, path: Path_) -> Any:
        return self._entries.get(self.paths.get(path, ""))

    def names_in(self, file: str, beyond: int = 0) -> list[str]:
        """Keys with data in ``file`` at or beyond the byte ``beyond``."""
        places = self._metadata.storage_data.items()
        return sorted(
            {
                index.fqn
                for index, place in places
                if place.relative_path == file and place.offset + place.length > beyond
            }
        )

    def object(self, path: Path_) -> Any:
        """A stored object; tensors, containers and plain values only."""
        place = self._metadata.storage_data[MetadataIndex(self.paths[path])]
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        return torch.load(data, map_location="cpu", weights_only=True)

    def read(self, parts: Sequence[Part]) -> None:
        """Fill the memory of ``parts`` from whichever chunks overlap them, cast if need be."""
        planner = _Targets()
        items: list[ReadItem] = []
        for part in parts:
            chunks = []
            for box, piece in part.pieces():
                offsets = torch.Size(box.offsets)
                planner.targets[MetadataIndex(part.key, offsets)] = piece
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
            if math.prod(part.shape):
                entry = self._entries[part.key]
                items += create_read_items_for_chunk_list(part.key, entry, chunks)
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self._metadata, False)
        reader.read_data(LoadPlan(items), planner).wait()

    def tensor(self, path: Path_) -> Tensor:
        """A whole stored tensor, on the host."""
        shape = self.shape(path)
        assert shape is not None
        part = Part(path, shape, 0, torch.empty(math.prod(shape), dtype=self.dtype(path)))
        self.read([part])
        return part.flat.view(shape)


class _Targets(LoadPlanner):
    """Hands DCP's reader the memory to write to."""

    def __init__(self) -> None:
        self.targets: dict[MetadataIndex, Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.targets[read_item.dest_index]
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the target is a view."""

    def set_up_planner(self, *_args: Any, **_options: Any) -> None:
        """Not called: plans are made here."""

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError


class _Unpickler(pickle.Unpickler):
    """Reads ``.metadata`` without being able to run what a stranger put into it."""

    def find_class(self, module: str, name: str) -> Any:
        ours = {
            cls.__qualname__: cls
            for cls in (
                BytesStorageMetadata,
                ChunkStorageMetadata,
                Metadata,
                MetadataIndex,
                TensorProperties,
                TensorStorageMetadata,
                _StorageInfo,
            )
        }
        if module.startswith("torch.distributed.checkpoint") and (
            name in ours or name == "_MEM_FORMAT_ENCODING"
        ):
            return super().find_class(module, name)
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA}: unexpected {module}.{name}")
