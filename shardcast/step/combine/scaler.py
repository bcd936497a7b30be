"""Scale: one small all-reduce decides how, and whether, the step is made.

The norm, the non-finite flag, the loss scale and the step's factor are scalars on the device; no
method here waits for it. What the host wants to know (skipped steps, the report) is copied to it
without waiting and read when it has arrived: at once on CPU, one step later on an accelerator.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import GradPack
from shardcast.plan.layout import Slot

CHUNK = 1 << 16  # elements whose squares are summed at a time on CPU: stays in cache
CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_
BACKOFF, GROWTH = 0.5, 2.0  # of the dynamic loss scale, as torch.amp.GradScaler


@dataclass(frozen=True)
class Decision:
    """What all ranks agreed on for one step.

    Attributes:
        norm: 0-dim fp64, the global gradient norm before clipping, loss scale removed.
        skip: 0-dim bool, some gradient somewhere is not finite.
        factors: per optimizer group, 0-dim fp32: what its gradients are to be multiplied with
            (unscale and clip), or ``None`` where that is 1 by construction.
        present: per pack and slot, whether any rank has a gradient; exact for the slots that
            this rank owns a part of.
        bad: fp64, per rank 1 + the position of the first non-finite element, 0 for none.
    """

    norm: Tensor
    skip: Tensor
    factors: tuple[Tensor | None, ...]
    present: list[list[bool]]
    bad: Tensor


class Scaler:
    """Loss scale, global norm, clipping factor and the decision to skip.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        device: where the scalars live.
    """

    def __init__(
        self,
        grads: Sequence[GradPack],
        comm: Comm,
        config: ShardcastConfig,
        device: torch.device,
    ) -> None:
        self._grads, self._comm, self._config = grads, comm, config
        self._device = device
        wanted = None if config.loss_scale == 1 else config.loss_scale
        if config.loss_scale is None and config.param_dtype == torch.float16:
            wanted = "dynamic"
        self.dynamic = wanted == "dynamic"
        first = config.loss_scale_init if self.dynamic else wanted
        self.loss_scale: Tensor | None = None
        if first is not None:
            self.loss_scale = torch.tensor(float(first), dtype=torch.float32, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        # skipped so far, skipped in a row, then the first bad element of each rank (-1: none)
        self._tally = torch.zeros(2 + comm.size, dtype=torch.float64, device=device)
        self._host = torch.zeros_like(self._tally, device="cpu", pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None
        self._reported = 0.0
        self._patterns: dict[tuple[float, ...], Tensor] = {}
        self.loss_was_scaled = False

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale; the same tensor where no scale is in use."""
        self.loss_was_scaled = True
        return loss if self.loss_scale is None else loss * self.loss_scale

    @torch.no_grad()
    def combine(
        self,
        max_norm: float | None,
        limits: Sequence[float | None],
        pending: Decision | None = None,
    ) -> Decision:
        """The decision over all ranks' own spans. Every rank must call it, after the reduction.

        One all-reduce of doubles: per rank a row of one norm per group and the first bad element,
        then a number per slot. Each rank adds its own row, so the sum of rows, in rank order, is
        the same on every rank to the bit.

        Args:
            max_norm: bound of the norm of all groups that have none of their own.
            limits: per optimizer group, a bound of its own, by which it is clipped by itself.
            pending: an earlier decision on these gradients: they count as clipped by it, and the
                new factors hold for both.
        """
        size, rank, columns = self._comm.size, self._comm.rank, len(limits) + 1
        pattern = tuple(param.grad is not None for g in self._grads for param in g.pack.params)
        control = torch.zeros(
            size * columns + len(pattern), dtype=torch.float64, device=self._device
        )
        rows = control[: size * columns].view(size, columns)
        if self._grads:
            local = [self._local(grads) for grads in self._grads]
            parts = torch.stack(local)
            for group in range(len(limits)):
                mine = [
                    part
                    for part, grads in zip(local, self._grads, strict=True)
                    if grads.pack.layout.group == group
                ]
                if mine:
                    rows[rank, group] = self._merge(torch.stack(mine))
            rows[rank, -1] = self._first_bad(parts)
        control[size * columns :] = self._on_device(pattern)
        self._comm.all_reduce(control)
        parts = self._merge(rows[:, :-1], dim=0)
        factors = [self._unscale()] * len(limits)
        skip = ~self._norm(parts).isfinite()
        if pending is not None:
            factors = list(pending.factors)
            parts = parts * self._clipped(pending)
        norm = self._norm(parts)
        clips = self._clips(parts, max_norm, limits)
        folded = tuple(_product(old, new) for old, new in zip(factors, clips, strict=True))
        present = self._present(pattern, control[size * columns :])
        return Decision(norm, skip, folded, present, rows[:, -1].clone())

    def _unscale(self) -> Tensor | None:
        return None if self.loss_scale is None else 1.0 / self.loss_scale

    def _clipped(self, pending: Decision) -> Tensor:
        """Per group, what its clipping does to its sum of p-th powers (or maximum)."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.double()
        one = torch.ones((), dtype=torch.float64, device=self._device)
        clips = torch.stack([one if f is None else f * scale for f in pending.factors])
        return clips if math.isinf(self._config.norm_type) else clips.pow(self._config.norm_type)

    def _clips(
        self, parts: Tensor, max_norm: float | None, limits: Sequence[float | None]
    ) -> list[Tensor | None]:
        """Per group, by what it is to be multiplied for its bound; ``None`` without one."""
        rest = [number for number, limit in enumerate(limits) if limit is None]

        def clip(limit: float | None, members: list[int]) -> Tensor | None:
            if limit is None:
                return None
            # Not parts[members]: a list as an index is copied to the device, which waits for it.
            some = torch.stack([parts[member] for member in members])
            return (limit / (self._norm(some) + CLIP_EPS)).clamp(max=1.0).float()

        shared = clip(max_norm, rest) if rest else None
        return [
            shared if limit is None else clip(limit, [number])
            for number, limit in enumerate(limits)
        ]

    def clip_value(self, limit: float, pending: Decision | None) -> None:
        """Clamp the own spans to ``[-limit, limit]``, loss scale considered. Local.

        Infinities stay, so that the step is skipped for them.

        Args:
            pending: the decision by whose factors the gradients are going to be multiplied.
        """
        for grads in self._grads:
            bound = torch.tensor(limit, dtype=torch.float32, device=self._device)
            factor = None if pending is None else pending.factors[grads.pack.layout.group]
            if factor is not None:
                bound = bound / factor
            elif self.loss_scale is not None:
                bound = bound * self.loss_scale
            own = grads.own
            own.copy_(torch.where(own.isfinite(), own.clamp(-bound, bound), own))

    def update(self, decision: Decision) -> None:
        """Count the step; grow or back off the dynamic loss scale as torch.amp.GradScaler does."""
        self._count(decision.skip, decision.bad)
        if self.dynamic:
            assert self.loss_scale is not None
            torch._amp_update_scale_(
                self.loss_scale, self._growth, decision.skip.float(),
                GROWTH, BACKOFF, self._config.loss_scale_growth_interval,
            )  # fmt: skip

    def poll(self) -> None:
        """Report skipped steps that the host has heard of; never waits for the device.

        Raises:
            RuntimeError: ``max_skipped_steps`` steps in a row were skipped; names the first
                non-finite element.
        """
        if self._copied is not None and (
            torch.cuda.is_current_stream_capturing() or not self._copied.query()
        ):
            return
        skipped, in_row, *bad = self._host.tolist()
        if skipped == self._reported:
            return
        self._reported = skipped
        raising = in_row >= self._config.max_skipped_steps
        if self.dynamic and not raising:  # an overflow now and then is its normal work
            return
        where = self._locate([int(position) for position in bad])
        if raising:
            raise RuntimeError(
                f"{int(in_row)} steps in a row were skipped for non-finite gradients "
                f"(max_skipped_steps); first: {where}. Lower the learning rate or the loss scale, "
                "or look at the data of these steps."
            )
        warnings.warn(f"step skipped, non-finite gradient: {where}", stacklevel=3)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far. Reading it waits for the device."""
        return int(self._tally[0].item())

    def state_dict(self) -> dict[str, float | None]:
        """Plain numbers, ``None`` for a scale that is not in use; waits for the device."""
        scale = None if self.loss_scale is None else float(self.loss_scale)
        skipped, in_row = self._tally[:2].tolist()
        return {
            "loss_scale": scale,
            "growth": float(self._growth),
            "skipped": skipped,
            "in_row": in_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; a scale that the saved run did not use stays."""
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.fill_(state["loss_scale"])
            self._growth.fill_(int(state["growth"]))
        self._tally[0], self._tally[1] = state["skipped"], state["in_row"]
        self._reported = state["skipped"]
        self._host.copy_(self._tally)

    def _local(self, grads: GradPack) -> Tensor:
        """Sum of p-th powers (maximum for inf) of the own span, 0-dim fp64.

        fp64 makes the norm independent of how the packs are cut, to fp32 precision, and finite
        for every finite gradient.
        """
        p = self._config.norm_type
        own = grads.own
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        on_cpu = own.device.type == "cpu"
        chunk = CHUNK if on_cpu else max(1, own.numel())
        scratch = torch.empty(chunk if on_cpu else 0, dtype=torch.float64)
        for start in range(0, own.numel(), chunk):
            piece = own[start : start + chunk]
            if p == 2.0 and on_cpu:
                doubles = scratch[: piece.numel()].copy_(piece)
                total += torch.dot(doubles, doubles)
            else:
                norm = torch.linalg.vector_norm(piece, p, dtype=torch.float64).to(self._device)
                total = torch.maximum(total, norm) if math.isinf(p) else total + norm.pow(p)
        return total

    def _merge(self, parts: Tensor, dim: int | None = None) -> Tensor:
        dims = tuple(range(parts.dim())) if dim is None else dim
        return parts.amax(dims) if math.isinf(self._config.norm_type) else parts.sum(dims)

    def _norm(self, parts: Tensor) -> Tensor:
        """The norm, loss scale removed, of what has these sums of powers (or maxima)."""
        norm = self._merge(parts)
        if math.isfinite(self._config.norm_type):
            norm = norm.pow(1.0 / self._config.norm_type)
        return norm if self.loss_scale is None else norm / self.loss_scale

    def _first_bad(self, parts: Tensor) -> Tensor | float:
        """1 + position, counted over all packs, of the first non-finite element; 0 for none.

        On CPU the element, on an accelerator (where looking for it would be another pass over
        the gradients) the first element of the span that holds it.
        """
        bad = ~parts.isfinite()
        starts = [1.0]
        for grads in self._grads:
            starts.append(starts[-1] + grads.pack.layout.numel)
        if self._device.type != "cpu":
            begin = tuple(at + g.pack.own.start for at, g in zip(starts, self._grads, strict=False))
            # Not begin[index]: to index by a tensor of no dimension is to ask for its value.
            found = torch.where(bad, self._on_device(begin), math.inf).amin()
            return torch.where(bad.any(), found, 0.0)
        for at, grads, is_bad in zip(starts, self._grads, bad.tolist(), strict=False):
            if is_bad:
                index = int(torch.argmax((~grads.own.isfinite()).to(torch.uint8)))
                return at + grads.pack.own.start + index
        return 0.0

    def _on_device(self, pattern: tuple[float, ...]) -> Tensor:
        """A pattern of present gradients, or positions, as doubles; copied once for each."""
        known = self._patterns.get(pattern)
        if known is None:
            if len(self._patterns) > 8:
                self._patterns.clear()
            known = torch.tensor(pattern, dtype=torch.float64).to(self._device)
            self._patterns[pattern] = known
        return known

    def _present(self, pattern: tuple[bool, ...], counts: Tensor) -> list[list[bool]]:
        """Slots with a gradient on some rank.

        A gradient that is here is present. Only for a slot of our own span without one do we
        have to look at what the others said, which on an accelerator waits for the all-reduce.
        """
        owned = (mine for grads in self._grads for mine in grads.owned)
        needed = self._comm.size > 1 and any(
            mine and not here for mine, here in zip(owned, pattern, strict=True)
        )
        everywhere = pattern
        if needed:
            everywhere = tuple(count > 0 for count in counts.tolist())
        slots = iter(everywhere)
        return [list(islice(slots, len(grads.owned))) for grads in self._grads]

    def _count(self, skip: Tensor, bad: Tensor) -> None:
        self._tally[0] += skip
        self._tally[1] = (self._tally[1] + 1) * skip
        self._tally[2:] = bad - 1
        self._host.copy_(self._tally, non_blocking=True)
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _locate(self, bad: list[int]) -> str:
        """Name the first bad element of each rank's span, and the ranks that it came from.

        Outside its own span a rank still has its own gradients. All ranks are here in the same
        step on CPU, so they can ask each other; on an accelerator the owner's span is named.
        """
        found = [(owner, *self._element(at)) for owner, at in enumerate(bad) if at >= 0]
        if self._device.type != "cpu":
            return "; ".join(
                f"in the span of rank {owner} that begins in parameter {slot.name!r}"
                for owner, _, slot, _ in found
            )
        culprits = {owner: [owner] for owner, *_ in found}
        mine = [
            owner
            for owner, grads, _, offset in found
            if owner != self._comm.rank
            and grads.allocated
            and not bool(grads.data[offset].isfinite())
        ]
        for rank, spans in enumerate(self._comm.exchange(mine, self._device)):
            for owner in spans:
                culprits[owner] = [*(r for r in culprits[owner] if r != owner), rank]
        return "; ".join(
            f"rank {', '.join(map(str, culprits[owner]))}, parameter {slot.name!r}, "
            f"element {offset - slot.offset}"
            for owner, _, slot, offset in found
        )

    def _element(self, position: int) -> tuple[GradPack, Slot, int]:
        """Pack, slot and offset in the pack of an element counted over all packs."""
        for grads in self._grads:
            layout = grads.pack.layout
            if position < layout.numel:
                after = (slot for slot in layout.slots if position < slot.end)
                return grads, next(after, layout.slots[-1]), position
            position -= layout.numel
        raise AssertionError("a position beyond the last pack")


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second
