"""``metrics``: norms of each parameter's gradient, weight and update in the last measured step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase as match
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shardcast.memory.codecs import Codec, Encoded, in_rows
from shardcast.memory.shard import Shard
from shardcast.memory.slices import slices
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.signal import to_device
from shardcast.step.step_hook import StepHook
from shardcast.step.update.epilogues import Epilogue, UpdateValues
from shardcast.step.update.state import RowSums

if TYPE_CHECKING:
    from shardcast.step.update.rules import Numbers

NAMES = ("grad_norm", "weight_norm", "update_norm", "update_to_weight", "swallowed")


@dataclass(frozen=True)
class SquareSums(Epilogue):
    """Sums of squares of gradient, weights and update, and a count of swallowed updates.

    An update is swallowed if the master changed and its published value did not.
    """

    sums: ClassVar[tuple[str, ...]] = ("grad", "weight", "update", "swallowed")
    squares: ClassVar[int] = 3
    compares: ClassVar[bool] = True

    def apply_(
        self, updated: UpdateValues, state: tuple[Tensor, ...], numbers: Numbers
    ) -> tuple[Tensor, ...]:
        norms = [
            torch.linalg.vector_norm(values, dim=-1)
            for values in (updated.grad, updated.master, updated.decrease)
        ]
        if updated.published is None:  # none is swallowed, or Before counts them
            return (*norms, torch.zeros_like(norms[0]))
        # If the published value changed, so did the master. Results have the same dtype as the
        # operands, because a comparison to bool is not vectorized on a CPU.
        old, new = updated.old_published, updated.published
        changed = torch.ne(new, old, out=torch.empty_like(new)).sum(-1, dtype=new.dtype)
        return (*norms, updated.decrease.ne_(0).sum(-1).sub_(changed))


ROWS = len(SquareSums.sums) + 1  # the sums, and the number of elements


class Before:
    """The values of a shard before an update whose blocks are cast afterwards.

    Swallowed updates can be counted only after both. During a measured step this holds a copy of
    masters and published values, 6 bytes per owned element.
    """

    def __init__(self, shard: Shard) -> None:
        shard.absorb()  # values that a script wrote are not updates
        self._shard, self._published = shard, shard.published.clone()
        numel = self._published.numel()
        self._masters = Encoded(Codec(), numel, shard.master.row, shard.home.zeros)
        for part in slices(numel):
            self._masters.write(part, shard.master.read(part))

    def count(self, sums: RowSums) -> None:
        """Add the number of swallowed updates to the sums of rows; none in a skipped step."""
        if not sums.segments.numel():  # nothing was measured yet
            return
        swallowed = sums.values[SquareSums.sums.index("swallowed")]
        for part in slices(self._published.numel()):
            moved = self._shard.master.read(part) != self._masters.read(part)
            # Compares numbers, not bits: coarse forms have many zeros, and a new sign of zero is no
            # change.
            stayed = self._shard.published[part] == self._published[part]
            both = in_rows((moved & stayed).float(), sums.row).sum(-1)
            first = part.start // sums.row
            swallowed[first : first + len(both)] += both


class Metrics(StepHook):
    """Norms of each parameter, summed over all ranks that hold a part of it."""

    name = "metrics"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        if not optimizer.config.metrics:
            raise RuntimeError(
                "metrics: nothing is measured; pass metrics=True to shard(), or a number of steps"
            )
        self._optimizer = optimizer
        self._period, self._is_due = int(optimizer.config.metrics), False
        self._shards: list[Shard] = []  # measured shards
        self._slots: list[str] = []  # parameters of these shards
        self._places = torch.empty(0)  # of this rank's fragments among them
        self._weights = torch.empty(0)  # weight of a fragment: 1, or less for copies
        self._numels = torch.empty(0)
        self._totals: Tensor | None = None
        # By patterns, so that a call in each step uploads nothing.
        self._choices: dict[Hashable, tuple[list[str], Tensor, Tensor]] = {}
        self._before: dict[Shard, Before] = {}

    def before_update(self, decision: Decision) -> None:
        """Measure this step if it is due, which is equal on all ranks."""
        self._is_due = self._optimizer.comm.steps % self._period == 0
        for update in self._optimizer.updates:
            update.measured = self._is_due
        for shard in self._optimizer.shards if self._is_due else ():
            if shard.in_blocks and shard.grads is not None and shard.fragments:
                self._before[shard] = Before(shard)

    def after_update(self, decision: Decision) -> None:
        """Add up the sums of this step."""
        if not self._is_due:
            return
        optimizer, process_groups = self._optimizer, self._optimizer.process_groups
        shards = [shard for shard in optimizer.shards if shard.grads is not None]
        if len(shards) != len(self._shards):
            self._index(shards)
        totals = torch.zeros(ROWS, len(self._slots), dtype=torch.float64, device=optimizer.device)
        owned = [shard for shard in shards if shard.fragments]
        for shard, before in self._before.items():
            before.count(optimizer.update_of(shard).sums(shard))
        self._before.clear()
        sums = [_of_fragments(optimizer.update_of(s).sums(s), len(s.fragments)) for s in owned]
        if sums:
            own = torch.cat([torch.cat(sums, dim=1).to(self._numels.device), self._numels])
            own *= self._weights
            totals.index_copy_(1, self._places, own)
        for comm in (
            process_groups.dp,
            *process_groups.comms(process_groups.parallel_dims.replicating),
        ):
            comm.all_reduce(totals, "metrics")
        self._totals = totals

    def _index(self, shards: list[Shard]) -> None:
        """Find the place of each fragment of this rank."""
        parallel_dims, device = self._optimizer.process_groups.parallel_dims, self._optimizer.device
        places: list[int] = []
        weights: list[float] = []
        numels: list[float] = []
        self._slots = []
        self._choices.clear()
        for shard in shards:
            slots, groups = shard.pack.layout.slots, shard.pack.layout.pack_groups
            first = len(self._slots)
            place_of = {slot.name: first + n for n, slot in enumerate(slots)}
            self._slots += place_of
            # All copies are summed, so each has a fraction as its weight.
            copying = [dim for dim in parallel_dims.replicating if dim in groups.replicate]
            copying += [dim for dim in (parallel_dims.replicas,) if dim and dim in groups.reduce]
            share = 1 / math.prod(parallel_dims.sizes[dim] for dim in copying)
            for fragment in shard.fragments:
                places.append(place_of[fragment.slot.name])
                weights.append(share)
                numels.append(float(fragment.numel))
        self._shards = shards
        self._places = to_device(places, torch.int64, device)
        self._weights = to_device(weights, torch.float64, device)
        self._numels = to_device([numels], torch.float64, device)

    def metrics(self, patterns: str | Mapping[str, str] = "*") -> dict[str, dict[str, Tensor]]:
        """Return norms of the last step that was measured and not skipped. Local.

        Args:
            patterns: glob pattern of parameter names, ``"*.attn.*"``; or a mapping from labels to
                patterns, which treats all parameters of a pattern as one tensor.

        Returns:
            By parameter or label, 0-dim fp32 tensors on the device, for the whole parameter and
                equal on all ranks that hold it: ``grad_norm`` (unscaled and clipped),
                ``weight_norm`` (of the new masters), ``update_norm`` (of their change),
                ``update_to_weight`` (ratio of the two), ``swallowed`` (share of elements whose
                master changed but whose low-precision value did not). Empty before the first
                measured step. If all measured steps were skipped, zeros, and NaN for ratios.

        Raises:
            RuntimeError: without the option ``metrics``.
            ValueError: a label's pattern matches no parameter.

        Example::

            norms = optimizer.metrics({"attention": "*.attn.*"})
            writer.add_scalar("attention/grad", norms["attention"]["grad_norm"], step)
        """
        if self._totals is None:
            return {}
        labels, slots, rows = self._chosen(patterns)
        chosen = self._totals.new_zeros(ROWS, len(labels))
        chosen.index_add_(1, rows, self._totals[:, slots])
        grad, weight, update = (row.sqrt() for row in chosen[:3].unbind())
        swallowed, numel = chosen[3:].unbind()
        values = (grad, weight, update, update / weight, swallowed / numel)
        columns = torch.stack(values, dim=1).float().unbind()
        return {
            label: dict(zip(NAMES, numbers.unbind(), strict=True))
            for label, numbers in zip(labels, columns, strict=True)
        }

    def _chosen(self, patterns: str | Mapping[str, str]) -> tuple[list[str], Tensor, Tensor]:
        """Return labels, and on the device slots with the rows of their labels."""
        key = patterns if isinstance(patterns, str) else tuple(patterns.items())
        if (known := self._choices.get(key)) is not None:
            return known
        slots = [*enumerate(self._slots)]
        if isinstance(patterns, str):
            chosen = {name: [n] for n, name in slots if match(name, patterns)}
        else:
            chosen = {
                label: [n for n, name in slots if match(name, pattern)]
                for label, pattern in patterns.items()
            }
        if unmatched := sorted(label for label, those in chosen.items() if not those):
            raise ValueError(
                f"metrics: expected patterns of parameter names, got none that match for "
                f"{', '.join(map(repr, unmatched))}"
            )
        pairs = [(n, row) for row, those in enumerate(chosen.values()) for n in those]
        both = to_device([*zip(*pairs, strict=True)], torch.int64, self._optimizer.device)
        places, rows = both.view(2, len(pairs))
        return self._choices.setdefault(key, ([*chosen], places, rows))


def _of_fragments(row_sums: RowSums, count: int) -> Tensor:
    """Sum per fragment, fp64 (sums, fragments), in three launches for any number of fragments.

    Padding after a fragment is zero. All sums are 0 if every step of the shard was skipped.
    """
    segments = row_sums.segments
    if not segments.numel():
        return segments.new_zeros(len(SquareSums.sums), count, dtype=torch.float64)
    rows = row_sums.values.double()
    rows[: SquareSums.squares].square_()
    # Not checked, because checking would wait for the device.
    sums = torch.segment_reduce(rows.view(-1), "sum", offsets=segments, axis=0, unsafe=True)
    return sums.view(len(rows), -1)


OPTION = Option(
    help="measure norms of gradient, weight and update of each parameter for optimizer.metrics(): "
    "true: in every step; n: in every n-th step",
    within=("a number of steps >= 0", lambda steps: steps >= 0),
    epilogues=lambda _config: (SquareSums(),),
    hook=Metrics,
)
