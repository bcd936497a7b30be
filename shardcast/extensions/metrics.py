"""``metrics``: norms of each parameter's gradient, weight and update in the last measured step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from fnmatch import fnmatchcase as match

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.shard import Shard
from shardcast.memory.slices import CHUNK, PIECE, slices
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option
from shardcast.plan.layout import Fragment
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.signal import to_device
from shardcast.step.step_hook import StepHook

NAMES = ("grad_norm", "weight_norm", "update_norm", "update_to_weight", "swallowed")
SUMS = 4  # squares of gradient, weight and update; swallowed updates


class Before:
    """The values of a shard before an update, 6 bytes per owned element, or 4 if it has no cast."""

    def __init__(self, shard: Shard, decision: Decision) -> None:
        self._shard, numel = shard, shard.pack.own.numel
        self._masters = torch.empty(numel, dtype=MASTER_DTYPE, device=shard.home.device)
        for part in slices(numel):
            self._masters[part] = shard.shown(part)  # what a script wrote is not an update
        self._published = None if shard.in_place else shard.published.clone()
        shard.home.arrive()
        self._grads: list[Tensor] = []  # now, because some classes write to gradients
        for fragment in shard.fragments:
            mean = shard.mean
            squares = [_square(mean[piece]) for piece in _pieces(shard, fragment)]
            grad = torch.stack(squares).sum() if squares else _square(mean[:0])
            factor = decision.factors[fragment.slot.group]
            of_factor = 1.0 if factor is None else factor.double().square()
            self._grads.append(grad.to(decision.norm.device) * of_factor)

    def sums(self) -> Tensor:
        """Return the sums of each fragment after the update, fp64 (sums, fragments).

        An update is swallowed if the master changed and its published value did not, as numbers:
        coarse forms have many zeros, and a new sign of zero is no change.
        """
        shard, device = self._shard, self._grads[0].device
        columns = []
        for fragment, grad in zip(shard.fragments, self._grads, strict=True):
            rest = torch.zeros(3, dtype=torch.float64, device=shard.home.device)
            for piece in _pieces(shard, fragment):
                new = shard.master.read(piece)
                change = new - self._masters[piece]
                rest[0] += _square(new)
                rest[1] += _square(change)
                if self._published is not None:
                    old = self._published[piece]
                    # Not to bool, because that is not vectorized on a CPU.
                    stays = torch.eq(shard.published[piece], old, out=torch.empty_like(old))
                    rest[2] += change.mul_(stays).ne_(0).sum()
            columns.append(torch.cat([grad.view(1), rest.to(device)]))
        return torch.stack(columns, dim=1)


def _pieces(shard: Shard, fragment: Fragment) -> Iterator[slice]:
    part = shard.local(fragment.start, fragment.stop)
    size = CHUNK if _compat.is_host(shard.home.device) else PIECE
    return slices(part.stop, size, part.start)


def _square(values: Tensor) -> Tensor:
    doubles = values.double()
    return torch.dot(doubles, doubles)


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
        # By shard: the sums of its last measured step that was not skipped.
        self._sums: dict[Shard, Tensor] = {}

    def before_update(self, decision: Decision) -> None:
        """Copy masters and published values if the step is due, which is equal on all ranks."""
        self._before.clear()
        self._is_due = self._optimizer.comm.steps % self._period == 0
        for shard in self._optimizer.shards if self._is_due else ():
            if shard.grads is not None and shard.fragments:
                self._before[shard] = Before(shard, decision)

    def after_update(self, decision: Decision) -> None:
        """Sum what the update did, over the ranks."""
        if not self._is_due:
            return
        optimizer, process_groups = self._optimizer, self._optimizer.process_groups
        shards = [shard for shard in optimizer.shards if shard.grads is not None]
        if len(shards) != len(self._shards):
            self._index(shards)
        totals = torch.zeros(
            SUMS + 1, len(self._slots), dtype=torch.float64, device=optimizer.device
        )
        for shard, before in self._before.items():
            new = before.sums()
            sums = self._sums.setdefault(shard, torch.zeros_like(new))
            sums.copy_(torch.where(decision.skip, sums, new))  # in place, for captured steps
        if self._before:
            own = torch.cat([self._sums[shard] for shard in self._before], dim=1)
            own = torch.cat([own, self._numels]) * self._weights
            totals.index_copy_(1, self._places, own)
        self._before.clear()
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
                measured step. If all measured steps were skipped, norms are 0 and ratios NaN.

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
        chosen = self._totals.new_zeros(SUMS + 1, len(labels))
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


OPTION = Option(
    help="measure norms of gradient, weight and update of each parameter for optimizer.metrics(). "
    "true: in every step; n: in every n-th step",
    within=("a number of steps >= 0", lambda steps: steps >= 0),
    hook=Metrics,
)
