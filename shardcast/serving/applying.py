"""Check the changes of all ranks as a whole, then write them into a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.memory.hashing import bits_of
from shardcast.serving.patches import Changes, WeightPatch


class DamagedChangesError(RuntimeError):
    """Changes differ from what was sent: a checksum, a form or an index is wrong."""


class IncompleteChangesError(ValueError):
    """Parts of a version are missing, or belong to several versions."""


class WrongVersionError(ValueError):
    """The changes follow another version than the reader has."""


class WrongModelError(ValueError):
    """The model lacks a changed parameter, or has it with another shape or dtype."""


@torch.no_grad()
def apply(
    target: nn.Module | Mapping[str, Tensor],
    changes: Changes | Iterable[Changes],
    version: str | None = None,
) -> str:
    """Write changes into a model that follows a training run.

    Everything is checked before anything is written. Afterwards the parameters have the bits of the
    training run; after an error they are unchanged. Only parameters that the optimizer holds are
    written, and no buffers.

    Local: any process may call it, without a process group.

    Args:
        target: a model, or tensors by the keys of its ``state_dict()``, in the dtypes of the
            training run. They are written in place. An empty dictionary gets all tensors, and one
            that has a version gets parameters that were added since.
        changes: the parts of all ranks, in any order; for one rank, its part.
        version: version of the target, as the last call returned it. ``None``: it has none yet and
            needs full changes.

    Returns:
        The version that the target has now.

    Raises:
        WrongVersionError: the changes follow another version; ask for full ones.
        IncompleteChangesError: a part is missing or belongs to another version.
        DamagedChangesError: a part differs from what was sent.
        WrongModelError: a parameter is missing, or has another shape or dtype.
    """
    parts = [changes] if isinstance(changes, Changes) else [*changes]
    _check_parts(parts)
    since = {part.since for part in parts if part.since is not None}
    if since and since != {version}:
        has = "no version" if version is None else f"version {version}"
        raise WrongVersionError(
            f"changes: expected changes since the reader's version, {has}, got changes since "
            f"{', '.join(sorted(since))}; request all values: optimizer.changes(since=None)"
        )
    for part in parts:
        check_sum(part)
    tensors = _tensors(target)
    is_full = all(part.is_full for part in parts)
    patches = [patch for part in parts for patch in part]
    for patch in patches:
        check_values(patch)
    lacking: dict[str, WeightPatch] = {}
    if isinstance(target, dict) and (version is not None or (is_full and not target)):
        # Tensors that it lacks were added to the training after that version.
        lacking = {patch.name: patch for patch in patches if patch.name not in tensors}
    _check_whole(patches, None if is_full else lacking)
    added = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in lacking.items()}
    tensors |= added
    aliases = {alias: name for part in parts for alias, name in part.aliases.items()}  # of ties
    writes = []
    for patch in patches:
        also = [alias for alias, name in aliases.items() if name == patch.name and alias in tensors]
        names = [patch.name, *also]
        writes += [(_fitting(tensors, name, patch), patch) for name in names]
    for tensor, patch in writes:
        _write(tensor, patch)
    if added:
        assert isinstance(target, dict)
        target.update(added)
        for alias, name in aliases.items():
            if name in added and alias not in tensors:
                target[alias] = added[name]
    return parts[0].version


def check_sum(part: Changes) -> None:
    """Raise DamagedChangesError if a part's checksum does not match its contents."""
    if part.computed_checksum() != part.checksum:
        raise DamagedChangesError(
            f"changes: part {part.part} of version {part.version} is damaged: its checksum is "
            "wrong; nothing was written. Fetch it again, or fetch a full version"
        )


def _check_parts(parts: Sequence[Changes]) -> None:
    versions = sorted({part.version for part in parts})
    if len(versions) != 1:
        raise IncompleteChangesError(
            f"changes: expected parts of one version, got {', '.join(versions) or 'none'}; ranks "
            "must ask for changes at the same points of the script"
        )
    numbers = sorted(part.part for part in parts)
    if numbers != [*range(parts[0].parts)] or len({part.parts for part in parts}) != 1:
        raise IncompleteChangesError(
            f"changes: expected parts 0 to {parts[0].parts - 1} of version {versions[0]}, one of "
            f"each rank of the training run, got {', '.join(map(str, numbers))}"
        )


def _tensors(target: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(target, nn.Module):
        named = target.named_parameters(remove_duplicate=False)
        return {_compat.state_key(name): param.detach() for name, param in named}
    return {name: tensor.detach() for name, tensor in target.items()}


def _fitting(tensors: Mapping[str, Tensor], name: str, patch: WeightPatch) -> Tensor:
    """Return the tensor of that name, checked against the training's shape and dtype."""
    tensor = tensors.get(name)
    if tensor is None:
        raise WrongModelError(
            f"target: expected a parameter {name!r}, as in the training run, found none; build the "
            "same model"
        )
    if (tuple(tensor.shape), tensor.dtype) != (tuple(patch.shape), patch.dtype):
        raise WrongModelError(
            f"target: expected {name!r} in {patch.dtype} of {tuple(patch.shape)}, as in the "
            f"training run, got {tensor.dtype} of {tuple(tensor.shape)}; build the same model, and "
            "convert it to these dtypes"
        )
    if _compat.is_dtensor(tensor):
        raise WrongModelError(
            f"target: expected a plain tensor as {name!r}, got a DTensor; pass a model without them"
        )
    return tensor


def check_values(patch: WeightPatch) -> None:
    """Raise DamagedChangesError if values or indices do not fit their parameter."""
    numel, count, places = math.prod(patch.shape), patch.values.numel(), patch.indices
    wrong = patch.values.dtype != patch.dtype or patch.values.dim() != 1
    wrong = wrong or places.dtype not in (torch.int32, torch.int64) or places.shape != (count,)
    if wrong or (count > 0 and (int(places.min()) < 0 or int(places.max()) >= numel)):
        raise DamagedChangesError(
            f"changes: values or indices of {patch.name!r} do not fit {numel} elements of "
            f"{patch.dtype}; nothing was written"
        )


def _check_whole(patches: Sequence[WeightPatch], names: Container[str] | None) -> None:
    """Raise unless all elements of each parameter are there; ``None`` means every name."""
    counts: dict[str, int] = {}
    for patch in patches:
        counts[patch.name] = counts.get(patch.name, 0) + patch.values.numel()
    for patch in patches:
        if (names is None or patch.name in names) and counts[patch.name] != math.prod(patch.shape):
            raise IncompleteChangesError(
                f"changes: expected all {math.prod(patch.shape)} elements of {patch.name!r}, got "
                f"{counts[patch.name]}, in changes that {'are full' if names is None else 'add it'}"
            )


def _write(tensor: Tensor, patch: WeightPatch) -> None:
    """Write by bits, because torch cannot write all dtypes of codes at indices."""
    values = bits_of(patch.values.to(tensor.device))
    flat = bits_of(tensor)  # of a copy, where the tensor is not contiguous
    begin = begin_of_run(patch.indices)
    if begin is not None:
        flat[begin : begin + values.numel()].copy_(values)
    else:
        flat[patch.indices.to(tensor.device, torch.int64)] = values
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def begin_of_run(indices: Tensor) -> int | None:
    """Return the first of consecutive indices; ``None`` if they have gaps."""
    if not indices.numel():
        return None
    first, last = int(indices[0]), int(indices[-1])
    if last - first != indices.numel() - 1 or bool((indices.diff() != 1).any()):
        return None
    return first


def joined(chain: Sequence[Changes]) -> Changes:
    """Join consecutive answers into one with the same effect.

    Raises:
        DamagedChangesError: an answer differs from what was sent, or does not follow the previous
            one.
    """
    first, last = chain[0], chain[-1]
    if len(chain) == 1:
        return first
    for changes in chain:
        check_sum(changes)
    for before, after in itertools.pairwise(chain):
        if (after.since, after.part) != (before.version, before.part):
            raise DamagedChangesError(
                f"changes: part {after.part} of version {after.version} has changes since "
                f"{after.since}, expected changes since {before.version}; nothing was written"
            )
    by_name: dict[str, list[WeightPatch]] = {}
    for patch in (patch for changes in chain for patch in changes):
        check_values(patch)
        by_name.setdefault(patch.name, []).append(patch)
    patches = tuple(_latest(several) for several in by_name.values())
    return Changes(patches, last.version, first.since, last.part, last.parts, last.aliases)


def _latest(patches: Sequence[WeightPatch]) -> WeightPatch:
    """Return one patch with the last value at each index."""
    last = patches[-1]
    if len(patches) == 1:
        return last
    if len({(patch.shape, patch.dtype) for patch in patches}) > 1:
        raise DamagedChangesError(
            f"changes: {last.name!r} has several shapes or dtypes; nothing was written"
        )
    places = torch.cat([patch.indices.long() for patch in patches])
    # by bits, because torch does not index values of all dtypes of codes
    values = torch.cat([bits_of(patch.values) for patch in patches])
    places, order = places.sort(stable=True)
    is_last = torch.ones_like(places, dtype=torch.bool)
    torch.ne(places[1:], places[:-1], out=is_last[:-1])
    return last._replace(values=values[order[is_last]].view(last.dtype), indices=places[is_last])
