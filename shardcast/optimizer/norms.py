"""Norms of mean gradients of single parameters, for scripts that read them from ``.grad``.

``torch.nn.utils.clip_grad_norm_`` and loops that log norms read one number per parameter. No rank
has a whole mean, but all ranks together can compute its norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.memory.gradients import Gradients
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.norm import PNorm

# Finishes the means of own spans, in a call that all ranks make; raises on all ranks what its check
# raises on any of them.
Land = Callable[[str, Callable[[], None]], None]


class Known(NamedTuple):
    """Norms of a pack's parameters, and the state of the mean that they were computed from."""

    mean: weakref.ref[Tensor]
    version: int
    backward: int | None
    norms: Tensor


class ParameterNorms:
    """The norm of each parameter's mean gradient.

    The first norm that a script reads computes all of them in one all-gather. They are kept until
    a mean changes.
    """

    def __init__(self, packed: PackedOptimizer, land: Land) -> None:
        self._packed, self._land = packed, land
        self._known: dict[float, dict[Gradients, Known]] = {}  # by norm type and pack
        me = weakref.ref(self)

        def of(grads: Gradients, position: int, p: float) -> Tensor:
            it = me()
            assert it is not None  # the optimizer, which holds it, is gone with its stand-ins
            return it.of(grads, position, p)

        packed.reduce.norm_of = of

    @torch.no_grad()
    def of(self, grads: Gradients, position: int, p: float) -> Tensor:
        """Return the ``p``-norm of one parameter's mean, 0-dim fp32.

        Collective: every rank, unless the norms of this pack are still known.

        Raises:
            RuntimeError: the gradients are multiplied by a loss scale or by a number of tokens.
        """
        self._packed.reduce.multiply_in()
        known = self._known.get(p, {}).get(grads)
        if known is None or not self._is_current(grads, known):
            self._compute(p)
            known = self._known[p][grads]
        return known.norms[position].clone()  # a script may edit it

    def _is_current(self, grads: Gradients, known: Known) -> bool:
        """Return whether the mean was neither reduced nor edited since.

        A compiled kernel may write a mean without a new version, but only after a backward.
        """
        own, backward = grads.own, self._packed.reduce.last_backward
        # By identity: weak references compare what they refer to, here by elements.
        return known.mean() is own and (known.version, known.backward) == (own._version, backward)

    def _compute(self, p: float) -> None:
        """Compute the norms of all parameters. Collective: every rank."""
        packed, call = self._packed, f"norm of .grad (norm_type {p:g})"

        def check() -> None:
            is_counted = packed.decider.tokens.counted
            if is_counted or packed.decider.loss_scale is not None:
                raise RuntimeError(
                    f"{call}: .grad still includes the "
                    f"{'number of tokens' if is_counted else 'loss scale'}; clip with "
                    "optimizer.clip_grad_norm_(max_norm), and log optimizer.grad_norm after the "
                    "step"
                )

        self._land(call, check)
        by_comm: dict[Comm, list[Gradients]] = {}
        for grads in packed.reduce.grads:
            by_comm.setdefault(grads.pack.comm, []).append(grads)
        known = self._known[p] = {}
        for comm, packs in by_comm.items():
            of = PNorm(p, packs[0].own.device)
            parts = [grads.part(n) for grads in packs for n in range(len(grads.pack.params))]
            powers = of.powers(parts).double()
            every = powers.repeat(comm.size)  # a group of one rank gathers nothing
            comm.all_gather(every, powers, call)
            norms = of.root(every.view(comm.size, -1), None).to(MASTER_DTYPE)
            counts = [len(grads.pack.params) for grads in packs]
            for grads, values in zip(packs, norms.split(counts), strict=True):
                backward = packed.reduce.last_backward
                known[grads] = Known(weakref.ref(grads.own), grads.own._version, backward, values)
