"""Estimate what each rank will hold and send, before a job starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardcast.comm import Comm
from shardcast.comm.process_groups import ranks_of_shards
from shardcast.config import ConfigSource, ShardcastConfig
from shardcast.optimizer.setup import Plan, plan_for
from shardcast.plan.algorithms import GROUPED, Topology
from shardcast.plan.layout import Layout, PackLayout
from shardcast.plan.originals import ELEMENTWISE, OptimizerList
from shardcast.plan.packing import with_algorithms
from shardcast.plan.partition import ELEMENT
from shardcast.plan.precision import MASTER_DTYPE, exact_sums, grad_dtype, wire_dtype
from shardcast.plan.publishing import publishing_of
from shardcast.step.update import updates_of
from shardcast.step.update.held import Held, held_of, state_tensors

__all__ = ["Estimate", "estimate", "peers", "state_tensors"]

KNOWN = ELEMENTWISE | {torch.optim.Muon}  # optimizers whose state is known in advance


@dataclass(frozen=True)
class Estimate:
    """Bytes of the fullest rank after the first step, by kind as in ``memory_report()``.

    Attributes:
        world_size: data-parallel ranks.
        layout: the packs that ``shard()`` would make, and over how many ranks they are sharded.
        averages: bytes of averages of weights, on the fullest rank.
        offload: bytes of host memory for mean gradients and casts in transit over the bus.
        outside: bytes of parameters that the optimizer does not hold, and of buffers; not in
            ``total``.
        frozen: part of ``outside`` in fp32 parameters, which ``convert_rest`` halves.
        host: part of ``total`` in host memory (``offload``).
        encoded: bytes of all ranks' codes and scales during a sync (``published``); not in
            ``total``.
        sent: bytes per step sent by ``sender``, the rank that sends most.
        collectives: launches per step, including the small all-reduce.
        imbalance: masters, state and gradients of the fullest rank, relative to the mean of all
            ranks; 1 is optimal.
        cost_imbalance: the same for the work of the update, in the units that decide owners of
            whole parameters (``cost_fn``, or operations).
    """

    world_size: int
    layout: Layout
    parameters: int
    gradients: int
    masters: int
    state: int
    averages: int
    offload: int
    outside: int
    frozen: int
    host: int
    encoded: int
    sent: int
    sender: int
    collectives: int
    imbalance: float
    cost_imbalance: float

    @property
    def packs(self) -> int:
        """Number of packs of the layout."""
        return len(self.layout.packs)

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        owned = self.masters + self.state + self.averages + self.offload
        return self.parameters + self.gradients + owned + self.outside


def estimate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerList,
    world_size: int,
    config: ConfigSource = None,
    backend: str = "nccl",
    ranks_per_node: int = 8,
    micro_batches: int = 1,
) -> Estimate:
    """Return what :func:`shardcast.shard` would hold on ``world_size`` ranks. Local, any process.

    Args:
        model: model, usually built on ``meta``.
        optimizer: an elementwise torch optimizer over its parameters, or Muon, or a list of them;
            unchanged.
        world_size: number of data-parallel ranks.
        config: a config or a mapping; ``None`` reads the environment.
        backend: backend of the process group, which decides the collectives. With gloo the model is
            on a CPU.
        ranks_per_node: data-parallel ranks per node, numbered node by node; also decides
            collectives.
        micro_batches: backwards per step; from the ninth on, gradients are summed in fp32.

    Raises:
        ValueError: the optimizer is of another class, whose state is not known before it runs.
        TypeError, ValueError: ``shard()`` would refuse an argument, too.
    """
    originals = OptimizerList.of(optimizer)
    for each in originals.optimizers:
        if type(each) not in KNOWN:
            names = ", ".join(sorted(kind.__name__ for kind in KNOWN))
            raise ValueError(
                f"optimizer: expected one of {names}, got {type(each).__name__}; the state of "
                "others is not known before they run: see optimizer.memory_report() after a step"
            )
    for name, count in (("world_size", world_size), ("micro_batches", micro_batches)):
        if count < 1:
            raise ValueError(f"{name}: expected a number >= 1, got {count}")
    if not isinstance(config, ShardcastConfig):
        config = ShardcastConfig.load(config)
    updates_of(originals, config, Comm(None))  # raises for the same inputs as shard()
    size = ranks_of_shards(config, world_size)
    plan = plan_for(model, originals, config, size)
    topology = Topology(backend, min(size, ranks_per_node))
    layout = with_algorithms(plan.layout, config, topology)
    plan = dataclasses.replace(plan, layout=layout)
    allocated = cache(partial(held_of, originals, config.replace(offload=False)))
    copies = world_size // size
    # Gradients of micro-batches stay on each rank until the last one, in addition to the mean.
    alone = world_size == 1 and not config.scales_loss  # its gradients are the means
    accumulates = not alone and micro_batches > 1 and config.accumulate == "local"
    sums = exact_sums(micro_batches, config) if alone else micro_batches > 1
    sums = sums and not accumulates
    reductions = micro_batches if config.accumulate == "sharded" else 1
    publishing, costs = publishing_of(config), dict[str, float]()
    local = encoded = 0
    shares: list[list[_Share]] = [[] for _ in range(size)]
    for pack in layout.packs:
        trained = [0] * size
        for owner, _, count in pack.parts() if pack.requires_grad else ():
            trained[owner] += count
        for slot in pack.slots:
            costs[slot.name] = plan.costs.get(slot.name, ELEMENT * slot.numel)
        grad = MASTER_DTYPE if sums else grad_dtype(pack.dtype, config)
        if accumulates and pack.requires_grad:
            of_batches = MASTER_DTYPE if exact_sums(micro_batches, config) else grad
            local += sum(slot.numel for slot in pack.slots) * of_batches.itemsize
        share_of = cache(partial(_share, plan, copies, allocated, pack, grad, reductions))
        encoding = None if publishing is None else publishing.encoding(pack)
        encoded += encoding.size if encoding is not None and pack.requires_grad and size > 1 else 0
        for owner, start, stop in pack.spans:
            plain = (stop - start) * pack.dtype.itemsize
            values = plain if encoding is None else encoding.nbytes[owner]
            shares[owner].append(share_of(stop - start, trained[owner], values))
    ranks = [_Share(*map(sum, zip(*packs, strict=True))) for packs in shares]
    owned = [_owned(rank) + rank.gradients for rank in ranks]
    most = owned.index(max(owned))
    fullest = ranks[most]
    parameters = sum(pack.nbytes for pack in layout.packs)
    sent = [rank.sent for rank in ranks]
    return Estimate(
        world_size,
        layout,
        parameters=parameters,
        gradients=fullest.gradients + local,
        masters=fullest.masters,
        state=fullest.state,
        averages=fullest.averages,
        offload=fullest.offload,
        outside=_outside(plan),
        frozen=plan.precision.frozen_bytes(plan.outside.values()),
        host=_owned(fullest) if config.offload else 0,
        encoded=encoded,
        sent=max(sent),
        sender=sent.index(max(sent)),
        collectives=_collectives(
            layout.trained, topology.backend, config, size, copies, reductions
        ),
        imbalance=_over_mean(owned),
        cost_imbalance=_over_mean(by_owner(layout, costs)),
    )


class _Share(NamedTuple):
    """A rank's memory and messages for its span of a pack, or for all of them; bytes.

    Attributes:
        offload: host copies of mean and published span.
    """

    masters: int
    state: int
    averages: int
    offload: int
    gradients: int
    sent: int


def _share(
    plan: Plan,
    copies: int,
    allocated: Callable[..., Held],
    pack: PackLayout,
    grad: torch.dtype,
    reductions: int,
    numel: int,
    trained: int,
    values: int,
) -> _Share:
    """Return the share of a span of elements, see :func:`.held_of`, with gradients in ``grad``.

    Args:
        reductions: how often gradients are reduced in a step.
        values: bytes of its published values on the wire.
    """
    config, size = plan.config, plan.layout.world_size
    share = allocated(pack.dtype, pack.groups[0], pack.cast, numel, trained)
    published = numel * pack.dtype.itemsize if config.offload else 0
    if not pack.requires_grad:
        return _Share(*share, published, 0, 0)
    wire = wire_dtype(pack.dtype, config).itemsize
    if pack.algorithms.reduce == "two_level":  # sums are twice as long as their pieces
        near, nodes = pack.algorithms.node, size // pack.algorithms.node
        sent = ((near - 1) * nodes + 2 * (nodes - 1)) * numel * wire
    else:
        sent = (pack.numel - numel) * wire
    sent += 2 * (copies - 1) * numel * MASTER_DTYPE.itemsize // copies
    sent *= reductions
    if trained or pack.algorithms.sync == "all_gather":
        sent += (size - 1) * values
    mean = numel * grad.itemsize
    offload = published + mean if config.offload else 0
    return _Share(*share, offload, mean, sent)


def _owned(share: _Share) -> int:
    """Return the bytes that the update needs, except the mean itself."""
    return share.masters + share.state + share.averages + share.offload


def _sync_launches(
    packs: Sequence[PackLayout], backend: str, config: ShardcastConfig
) -> list[tuple[str, list[PackLayout]]]:
    """Return algorithms with packs that are synced in one launch, or by messages at the same time.

    During the next forward, which waits for each pack separately, each pack has its own launch, and
    messages become broadcasts. See ``Comm.all_gather_all`` and ``Sync.begin``.
    """
    launches: dict[object, tuple[str, list[PackLayout]]] = {}
    alone = config.overlap_sync or config.offload  # each during the update of the next one
    for pack in packs:
        sync = pack.algorithms.sync
        if alone and sync == "messages":
            sync = "broadcast"
        together = not alone and (sync == "messages" or backend in GROUPED)
        kind = sync, pack.dtype if sync == "all_gather" else None
        launches.setdefault(kind if together else pack.index, (sync, []))[1].append(pack)
    return list(launches.values())


def _collectives(
    packs: Sequence[PackLayout],
    backend: str,
    config: ShardcastConfig,
    size: int,
    copies: int,
    reductions: int,
) -> int:
    """Return the launches of a step, including the small all-reduce."""
    launches = int(size * copies > 1) + len(packs) * (copies > 1) * reductions
    if size == 1:
        return launches
    launches += sum(1 + (pack.algorithms.reduce == "two_level") for pack in packs) * reductions
    for sync, synced in _sync_launches(packs, backend, config):
        if sync == "all_gather" or backend in GROUPED:
            launches += 1
        elif sync == "messages":
            launches += len(synced)
        else:  # see Comm.broadcast_all
            launches += sum(len(pack.owned_spans) for pack in synced)
    return launches


def _over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if any(values) else 1.0


def _outside(plan: Plan) -> int:
    """Return bytes of parameters outside the optimizer, and of buffers, once they are cast."""
    precision = plan.precision
    dtypes: dict[Tensor, torch.dtype] = {
        param: precision.rest_dtype(param) for param in plan.outside.values()
    }
    for module in plan.model.modules():
        for buffer in module.buffers(recurse=False):
            dtypes[buffer] = precision.buffer_dtype(module, buffer)
    return sum(
        tensor.nbytes if tensor.dtype == dtype else tensor.numel() * dtype.itemsize
        for tensor, dtype in dtypes.items()
    )


def by_owner(layout: Layout, values: Mapping[str, float]) -> list[float]:
    """Return each rank's share of ``values``, which are given by parameter name."""
    sums = [0.0] * layout.world_size
    for pack in layout.trained:
        for owner, slot, count in pack.parts():
            sums[owner] += values.get(slot.name, 0.0) * (count / slot.numel)
    return sums


def peers(numel: int, moments: float, world_size: int) -> dict[str, float]:
    """Return the bytes per rank that other systems hold for ``numel`` mixed-precision parameters.

    Counts persistent tensors after a backward, without activations, buckets in flight and temporary
    casts. Local.

    Args:
        numel: number of parameters.
        moments: optimizer state tensors per parameter, 2 for Adam.
        world_size: number of data-parallel ranks.
    """
    exact = 4.0 * (1 + moments)  # fp32 weights and moments
    return {
        "DDP + autocast": numel * (exact + 4),
        # torch's: fp32 weights and gradients on every rank, sharded moments.
        "ZeroRedundancyOptimizer": numel * (4 + 4 + 4.0 * moments / world_size),
        "ZeRO-1": numel * (2 + 2 + exact / world_size),
        "ZeRO-2": numel * (2 + (2 + exact) / world_size),
        "FSDP2": numel * (exact + 4) / world_size,
        # From its docs/source/api-guide/dist_optimizer.md: 6 + 12 / d for bf16 parameters with fp32
        # gradients.
        "Megatron": numel * (2 + 4 + exact / world_size),
        # From its README: 24-bit weights (bf16 and a byte), a byte per moment, bf16 gradients.
        "FlashOptim + DDP": numel * (2 + 1 + moments + 2),
    }
