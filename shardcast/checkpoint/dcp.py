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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardcast.checkpoint.parts import Part, Stored, whole
from shardcast.checkpoint.storage import HashingFile, is_plain_name

METADATA = ".metadata"  # the name that DCP gives it
Path_ = tuple[str, ...]
# What metadata is made of, besides dtypes; in files of other writers too.
CLASSES = {
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_StorageInfo", "_MEM_FORMAT_ENCODING"),
}
HARMLESS = {
    (__name__, "Record"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


class Record(NamedTuple):
    """One chunk, or one object, as it lies in a file; ``dtype`` is ``None`` for an object."""

    path: Path_
    file: str
    offset: int
    length: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def data_file(rank: int, number: int = 0) -> str:
    """Name of a file that ``rank`` writes."""
    return f"__{rank}_{number}.distcp"


def unpickled(data: bytes) -> Any:
    """What metadata, or a message from rank to rank, says; unable to run code."""
    return _Unpickler(io.BytesIO(data)).load()


def write_part(file: HashingFile, name: str, part: Part) -> list[Record]:
    """Append the chunks of ``part``; at most one of them is held twice at a time."""
    records = []
    for box, piece in part.pieces():
        begin = file.tell()
        # A clone, for torch.save stores the whole storage that a view belongs to.
        file.save(piece.detach().to("cpu", copy=True))
        place = part.path, name, begin, file.tell() - begin
        records.append(Record(*place, part.flat.dtype, part.shape, box.offsets, box.sizes))
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
    """A checkpoint's metadata, and its data on demand. Local.

    Raises:
        RuntimeError: the metadata cannot be read, or refers to files elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, file_path = folder, folder / METADATA
        self.sizes: dict[str, int] = {}
        """The files that are referred to, and how many bytes of them."""
        try:
            self._metadata: Metadata = unpickled(file_path.read_bytes())
            entries, paths = self._metadata.state_dict_metadata, self._metadata.planner_data or {}
            self.paths: dict[Path_, str] = {tuple(paths.get(key, (key,))): key for key in entries}
            """Each stored thing's path in the nested state dict, and its key."""
            self.stored: dict[Path_, Stored] = {
                path: Stored(tuple(entries[key].size), entries[key].properties.dtype)
                for path, key in self.paths.items()
                if isinstance(entries[key], TensorStorageMetadata)
            }
            self._places = self._metadata.storage_data or {}
            for place in self._places.values():
                end = place.offset + place.length
                name = place.relative_path
                self.sizes[name] = max(end, self.sizes.get(name, 0))
        except Exception as error:  # anything may be in there
            raise RuntimeError(
                f"{str(file_path)!r} cannot be read as DCP metadata: {error}"
            ) from error
        for name in self.sizes:
            if not is_plain_name(name):
                raise RuntimeError(
                    f"{str(file_path)!r} refers to {name!r}, outside of its directory; this is no "
                    "checkpoint as it was written"
                )

    def names_in(self, file: str, beyond: int = 0) -> list[str]:
        """Keys with data in ``file`` at or beyond the byte ``beyond``."""
        return sorted(
            {
                index.fqn
                for index, place in self._places.items()
                if place.relative_path == file and place.offset + place.length > beyond
            }
        )

    def object(self, path: Path_) -> Any:
        """A stored object; tensors, containers and plain values only.

        Raises:
            RuntimeError: there is none of this path.
        """
        place = self._places.get(MetadataIndex(self.paths.get(path, "")))
        if place is None:
            raise RuntimeError(
                f"checkpoint {str(self.folder)!r}: it has no {'.'.join(map(str, path))!r}; "
                "shardcast did not write it, see import_dcp()"
            )
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        return torch.load(data, map_location="cpu", weights_only=True)

    def read(self, parts: Sequence[Part]) -> None:
        """Fill the memory of ``parts`` from whichever chunks overlap them, cast if need be."""
        planner = _Targets()
        items: list[ReadItem] = []
        for part in parts:
            key, chunks = self.paths[part.path], []
            for box, piece in part.pieces():
                offsets = torch.Size(box.offsets)
                planner.targets[MetadataIndex(key, offsets)] = piece
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
            if math.prod(part.shape):
                entry: Any = self._metadata.state_dict_metadata[key]
                items += create_read_items_for_chunk_list(key, entry, chunks)
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self._metadata, False)
        reader.read_data(LoadPlan(items), planner).wait()

    def tensor(self, path: Path_) -> Tensor:
        """A whole stored tensor, on the host."""
        value = torch.empty(self.stored[path].shape, dtype=self.stored[path].dtype)
        self.read([whole(path, value)])
        return value


class _Targets(DefaultLoadPlanner):
    """Hands DCP's reader the memory to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[MetadataIndex, Tensor] = {}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.targets[index]


class _Unpickler(pickle.Unpickler):
    """Reads what is pickled without being able to run what a stranger put into it."""

    def find_class(self, module: str, name: str) -> Any:
        if (
            (module.startswith("torch.distributed.checkpoint") and name in CLASSES)
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
            or (module, name) in HARMLESS
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA}: unexpected {module}.{name}")
