"""Patches of weights: new values at places of whole parameters, from all ranks together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import torch
from torch import Tensor


class WeightPatch(NamedTuple):
    """New values of one parameter, with the fields of vLLM's ``CheckpointWeightPatch``.

    That class takes them in this order: ``CheckpointWeightPatch(*patch)``. It refuses NaN.

    Attributes:
        name: of the parameter, as in ``model.state_dict()``.
        shape: of the whole parameter.
        dtype: of the parameter, which ``values`` have.
        values: 1-d, absolute.
        indices: 1-d int32, or int64 for 2**31 elements and more: of ``values`` in the flat whole
            parameter, each once. They are always given; vLLM's class may have ``None``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None = None


def in_32_bits(indices: Tensor, whole: Tensor) -> Tensor:
    """Return the indices of elements of a tensor in the shorter dtype, where that has them all."""
    return indices.to(torch.int32) if whole.numel() < 1 << 31 else indices


def step_of(version: str) -> int:
    """After how many steps of its run a version was told, skipped ones among them."""
    return int(version.rsplit("-", 1)[1])


@dataclass(frozen=True, eq=False)
class Changes(Sequence[WeightPatch]):
    """The changes of the elements that one rank owns: one part of a version.

    A sequence of :class:`WeightPatch`. All ranks' parts together are the whole model, of which no
    element is in two of them.

    Attributes:
        patches: one for each parameter with a change; where ``since`` is ``None`` all elements.
        version: what is there once they are applied; ask for changes since it next time.
        since: the version that they apply to; ``None``: to any.
        part, parts: which rank's this is, of how many; every version has all.
        aliases: names of tied parameters, which no patch has, with the names that patches have.
        checksum: hexadecimal, of all of the above. It finds errors, not attacks.
    """

    patches: tuple[WeightPatch, ...]
    version: str
    since: str | None
    part: int = 0
    parts: int = 1
    aliases: Mapping[str, str] = field(default_factory=dict)
    checksum: str = ""

    def __post_init__(self) -> None:
        if not self.checksum:
            object.__setattr__(self, "checksum", self.computed_checksum())

    @property
    def is_full(self) -> bool:
        """Return whether they apply to whatever a reader has."""
        return self.since is None

    @property
    def numel(self) -> int:
        """The number of values."""
        return sum(patch.values.numel() for patch in self.patches)

    @property
    def nbytes(self) -> int:
        """The bytes of values and indices."""
        tensors = (t for patch in self.patches for t in (patch.values, patch.indices))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def computed_checksum(self) -> str:
        """Compute what :attr:`checksum` has to be; copies values and indices to the host."""
        facts = {
            "version": self.version,
            "since": self.since,
            "part": [self.part, self.parts],
            "aliases": dict(self.aliases),
            "patches": [
                [p.name, [*p.shape], str(p.dtype), str(p.values.dtype), p.values.numel()]
                + ([str(p.indices.dtype), p.indices.numel()] if p.indices is not None else [])
                for p in self.patches
            ],
        }
        digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
        for patch in self.patches:
            for tensor in (patch.values, patch.indices):
                if tensor is not None and tensor.numel():
                    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    digest.update(flat.numpy().data)
        return digest.hexdigest()

    @overload
    def __getitem__(self, index: int) -> WeightPatch: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[WeightPatch, ...]: ...
    def __getitem__(self, index: int | slice) -> WeightPatch | tuple[WeightPatch, ...]:
        return self.patches[index]

    def __iter__(self) -> Iterator[WeightPatch]:
        return iter(self.patches)

    def __len__(self) -> int:
        return len(self.patches)

    def __repr__(self) -> str:
        whole = "all of" if self.is_full else f"since {self.since},"
        return (
            f"Changes({whole} version {self.version}, part {self.part} of {self.parts}: "
            f"{self.numel} values of {len(self)} parameters)"
        )
