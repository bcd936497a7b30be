"""``digest()``: one short hash of all masters and optimizer state, for any ranks, packs and spans.

It is the sum, modulo ``2**64``, over all elements of a hash of the element's bits, its index in the
parameter, and the names of the parameter and state tensor. So each rank adds up the elements that
it owns. The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). It finds errors, not
attacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardcast.extensions.chance import global_index
from shardcast.memory.hashing import bits_of
from shardcast.memory.shard import Shard
from shardcast.memory.slices import slices
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option
from shardcast.plan.layout import Fragment
from shardcast.step.step_hook import StepHook

HASHED = 1 << 18  # elements that are hashed at a time
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed 64-bit number
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


class Digest(StepHook):
    """Hash of the masters and state of one optimizer."""

    name = "digest"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def digest(self) -> str:
        """Return a hash of all masters and optimizer state: 16 hexadecimal digits.

        It does not depend on the number of ranks, packs or partition. So it tells whether two runs
        are bitwise equal, or whether a checkpoint was loaded as it was saved. It takes one pass
        over this rank's masters and state, and waits for the device.

        Collective: every rank.
        """
        optimizer = self._optimizer
        optimizer.together(optimizer.ready_to_read, "digest")
        total = torch.zeros((), dtype=torch.int64, device=optimizer.device)
        for shard in optimizer.shards:
            if shard.pack.layout.pack_groups.is_primary:  # copies count once
                for part in _hashes(optimizer, shard):
                    total += part.to(total.device)
        optimizer.process_groups.everyone.all_reduce(total, "the digest")
        return f"{int(total) % (1 << 64):016x}"


OPTION = Option("a hash of masters and state", hook=Digest)  # not listed in the table of options


def values_of(
    optimizer: PackedOptimizer, shard: Shard
) -> Iterator[tuple[Fragment, nn.Parameter, str, object]]:
    """Return this rank's master and state of each parameter in ``shard``, by kind."""
    update = optimizer.update_of(shard)
    for number, fragment, param in shard.owned():
        yield fragment, param, "master", shard.exact(fragment)
        for kind, value in update.fragment_state(shard, number).items():
            yield fragment, param, kind, value


def _hashes(optimizer: PackedOptimizer, shard: Shard) -> Iterator[Tensor]:
    for fragment, param, kind, value in values_of(optimizer, shard):
        start, stop = fragment.param_range
        key = _key(f"{fragment.slot.name}/{kind}")
        if isinstance(value, Tensor) and value.numel() == stop - start and value.dim():
            index = global_index(param, torch.arange(start, stop))
            yield hash_of(value, index, key)
        elif start == 0:  # a count, or the state of a parameter with one owner
            tensor = value if isinstance(value, Tensor) else torch.tensor([_key(repr(value))])
            yield hash_of(tensor, torch.arange(tensor.numel()), key)


def hash_of(values: Tensor, index: Tensor, key: int) -> Tensor:
    """Return the hash of ``values`` of any dtype at their ``index``: 0-dim int64."""
    bits = bits_of(values)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in slices(bits.numel(), HASHED):
        places = _mixed(index[part].to(bits.device) * GOLDEN + key)
        total += _mixed(places ^ (bits[part].long() * GOLDEN)).sum()
    return total


def _mixed(numbers: Tensor) -> Tensor:
    for shift, factor in ROUNDS:
        # An unsigned shift.
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return numbers


def _key(name: str) -> int:
    """Return a signed 64-bit number for a name."""
    key = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(key, "little", signed=True)
