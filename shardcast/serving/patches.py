"""Patches of weights: new values at indices of whole parameters, from all ranks."""

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

    ``CheckpointWeightPatch(*patch)`` converts it. That class refuses NaN.

    Attributes:
        name: name of the parameter in ``model.state_dict()``.
        shape: shape of the whole parameter.
        dtype: dtype of the parameter and of ``values``.
        values: new values (not differences), 1-d.
        indices: indices of ``values`` in the flattened whole parameter, 1-d, each once. int32, or
            int64 for 2**31 elements and more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor


def in_32_bits(indices: Tensor, whole: Tensor) -> Tensor:
    """Return indices as int32 if that is wide enough for the tensor."""
    return indices.to(torch.int32) if whole.numel() < 1 << 31 else indices


def step_of(version: str) -> int:
    """Return how many steps the run had made at a version, skipped ones included. Local."""
    return int(version.rsplit("-", 1)[1])


@dataclass(frozen=True, eq=False)
class Changes(Sequence[WeightPatch]):
    """The changes of one rank's elements: one part of a version.

    A sequence of :class:`WeightPatch`. The parts of all ranks cover the whole model, and no element
    is in two parts.

    Attributes:
        patches: one per changed parameter; all elements if ``since`` is ``None``.
        version: the version after these changes; pass it as ``since`` next time.
        since: the version that these changes apply to; ``None``: any version.
        part, parts: index of this part, and number of parts; every version has all parts.
        aliases: other names of tied parameters, each with the name that patches use.
        checksum: hexadecimal checksum of all of the above. It detects errors, not attacks.
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
        """Whether the changes apply to a reader of any version."""
        return self.since is None

    @property
    def numel(self) -> int:
        """Number of values."""
        return sum(patch.values.numel() for patch in self.patches)

    @property
    def nbytes(self) -> int:
        """Bytes of values and indices."""
        return sum(patch.values.nbytes + patch.indices.nbytes for patch in self.patches)

    def computed_checksum(self) -> str:
        """Compute the expected :attr:`checksum`; copies values and indices to the host."""
        facts = {
            "version": self.version,
            "since": self.since,
            "part": [self.part, self.parts],
            "aliases": dict(self.aliases),
            "patches": [
                [
                    *(p.name, [*p.shape], str(p.dtype), str(p.values.dtype), p.values.numel()),
                    *(str(p.indices.dtype), p.indices.numel()),
                ]
                for p in self.patches
            ],
        }
        digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
        for patch in self.patches:
            for tensor in (patch.values, patch.indices):
                if tensor.numel():
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
