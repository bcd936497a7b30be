"""Bytes of real text with a held-out part, and batches that depend only on the seed."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 20  # one file in 20, or 1/20 of each file if there are fewer files
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "__pycache__"}


class Corpus:
    """Training and held-out bytes (1-d uint8), cut into sequences of `context` tokens."""

    def __init__(self, train: Tensor, held_out: Tensor, context: int) -> None:
        for name, part in (("training", train), ("held-out", held_out)):
            if part.numel() <= context:
                raise ValueError(
                    f"the {name} text has {part.numel()} bytes: not one sequence of {context} + 1"
                )
        self.train, self.held_out, self.context = train, held_out, context
        digest = hashlib.sha256(train.numpy().tobytes())
        digest.update(held_out.numpy().tobytes())
        self.digest = digest.hexdigest()[:16]

    @classmethod
    def load(cls, paths: Sequence[Path], context: int, max_bytes: int = 20 << 20) -> Corpus:
        """Text of the files (and of the files under the directories) in `paths`.

        Without paths, this is the standard library of the running Python. Files are read in the
        order of their names until `max_bytes`. One file in twenty, chosen by a hash of its name,
        is held out, or the end of each file if there are fewer than twenty.
        """
        texts, remaining = [], max_bytes
        for name, path in _files(paths) if paths else _standard_library():
            if remaining == 0:
                break
            with path.open("rb") as file:
                texts.append((name, file.read(remaining)))
            remaining -= len(texts[-1][1])
        if len(texts) < HELD_OUT:
            cuts = [len(text) - len(text) // HELD_OUT for _, text in texts]
            train = [text[:cut] for (_, text), cut in zip(texts, cuts, strict=True)]
            held_out = [text[cut:] for (_, text), cut in zip(texts, cuts, strict=True)]
        else:
            by_hash = sorted((name for name, _ in texts), key=_number)
            chosen = set(by_hash[: len(texts) // HELD_OUT])
            train = [text for name, text in texts if name not in chosen]
            held_out = [text for name, text in texts if name in chosen]
        return cls(_tensor(train), _tensor(held_out), context)

    def train_batch(self, seed: int, step: int, index: int, size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (size, context) int64 of batch `index` of a step.

        A pure function of its arguments. Callers number the batches of a step over micro-batches
        and ranks, so W ranks with 1 micro-batch see the same data as 1 rank with W micro-batches.
        """
        generator = torch.Generator().manual_seed(_number(f"{seed} {step} {index}"))
        last = self.train.numel() - self.context
        starts = torch.randint(last, (size,), generator=generator)
        return self._sequences(self.train, starts)

    def held_out_batches(
        self, sequences: int, size: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of `sequences` held-out sequences, at most `size` per batch.

        They are evenly spread, and all ranks together see the same ones at any world size.
        """
        available = (self.held_out.numel() - 1) // self.context
        chosen = torch.arange(min(sequences, available)) * available // min(sequences, available)
        for starts in (chosen[rank::world] * self.context).split(size):
            if starts.numel():
                yield self._sequences(self.held_out, starts)

    def _sequences(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        window = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return window[:, :-1], window[:, 1:]


def _standard_library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    return ((name, path) for name, path in _walk(root) if path.suffix == ".py")


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of every file; the name does not depend on the directory's location."""
    for path in paths:
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path.name, path
        else:
            raise FileNotFoundError(f"--data {path}: no such file or directory")


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield files below `root` in a fixed order, without tests, caches and hidden files."""
    for directory, below, files in os.walk(root):
        below[:] = sorted(d for d in below if d not in SKIPPED_DIRECTORIES and d[0] != ".")
        for file in sorted(files):
            path = Path(directory, file)
            if file[0] != "." and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _number(text: str) -> int:
    """Return a number from 0 to 2**63 - 1 that depends only on the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _tensor(parts: Iterable[bytes]) -> Tensor:
    joined = b"".join(parts)
    # frombuffer refuses an empty buffer and shares the buffer's memory, hence the copy
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.empty(0)
