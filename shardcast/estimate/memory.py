"""What each rank will hold, move and send, before a job starts, without its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.chance import KEY
from shardcast.memory.codecs import CODECS, master_codec, moment_codec, row_of
from shardcast.memory.shard import FILL
from shardcast.optimizer.setup import Plan, plan_for
from shardcast.plan.algorithms import GROUPED, Algorithms, Topology, syncs_at_once
from shardcast.plan.costs import PRESETS, Machine
from shardcast.plan.layout import Layout, PackLayout, Slot
from shardcast.plan.originals import OptimizerList
from shardcast.plan.packing import with_algorithms
from shardcast.plan.partition import ELEMENT, ELEMENTWISE, matrix_products
from shardcast.plan.precision import MASTER_DTYPE, grad_dtype, wire_dtype
from shardcast.plan.shard_ranks import shard_ranks
from shardcast.step.reduce.tree import most_sums
from shardcast.step.update import updates_of
from shardcast.step.update.rules import STATE_NAMES, rule_of

KNOWN = ELEMENTWISE | {torch.optim.Muon}  # optimizers whose state is known before they run


@dataclass(frozen=True)
class Traffic:
    """What a step does with one pack; bytes.

    Attributes:
        wire: of all its gradients as they travel.
        stored: of all its parameters.
        received: of gradients, on the rank that owns most of it, once they are reduced.
        summed: of the fp32 sums that travel between copies, on the rank that owns most of it.
        owners: ranks that have something of it to sync.
        algorithms: how it is reduced and synced; empty for a world of one.
        dtype: of its parameters.
    """

    wire: int
    stored: int
    received: int
    summed: int
    owners: int
    algorithms: Algorithms
    dtype: torch.dtype

    @property
    def sync_kind(self) -> tuple[str, torch.dtype | None]:
        """Packs with an equal one may be synced in one launch, see Comm.all_gather_all."""
        sync = self.algorithms.sync
        return sync, self.dtype if sync == "all_gather" else None


@dataclass(frozen=True)
class Estimate:
    """Bytes of the rank that holds most, after the first step; per kind as in ``memory_report()``.

    Attributes:
        world_size: data-parallel ranks.
        layout: the packs that ``shard()`` would make, and how many of the ranks share them.
        averages: bytes of averages of weights, on the fullest rank.
        outside: parameters that the optimizer does not hold, and buffers; not in the report.
        setup_peak: bytes at the worst moment of ``shard()``, on the rank that needs most: all
            parameters and buffers of the model as they are built, the pack that is being made,
            and the masters that are there already. Host memory of ``offload`` is counted too.
        host: how much of ``total`` is in host memory by ``offload``.
        sent: bytes that leave a rank in a step, of the one that sends most, ``sender``.
        collectives: launches per step, the small all-reduce included.
        imbalance: what the fullest rank holds of masters, state and sharded gradients, over the
            mean of all ranks; 1 at best.
        cost_imbalance: the same of what the update computes, as owners of whole parameters are
            chosen by it (the units of ``cost_fn``, or operations).
        traffic: of the packs that train, in the order of the layout.
        updated: bytes that the update reads and writes on the rank that updates most.
        normed: bytes that the norm reads there.
        products: per rank, floating-point operations of Muon's matrix products.
    """

    world_size: int
    layout: Layout
    parameters: int
    gradients: int
    masters: int
    state: int
    averages: int
    outside: int
    host: int
    setup_peak: int
    sent: int
    sender: int
    collectives: int
    imbalance: float
    cost_imbalance: float
    traffic: tuple[Traffic, ...]
    updated: int
    normed: int
    products: tuple[float, ...]

    @property
    def copies(self) -> int:
        """How many runs of ranks hold masters and state."""
        return self.world_size // self.layout.world_size

    @property
    def packs(self) -> int:
        """How many the layout has."""
        return len(self.layout.packs)

    @property
    def total(self) -> int:
        """All kinds together; the peak of setting up aside."""
        owned = self.masters + self.state + self.averages
        return self.parameters + self.gradients + owned + self.outside


def estimate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerList,
    world_size: int,
    config: ShardcastConfig | Mapping[str, Any] | None = None,
    topology: Topology = Topology("nccl", 8),  # noqa: B008, it is a constant
    machine: Machine = PRESETS["h100"],
) -> Estimate:
    """What :func:`shardcast.shard` would hold on ``world_size`` ranks. Local, any process.

    Args:
        model: usually built on ``meta``.
        optimizer: an elementwise one of torch over its parameters, or Muon, or a list of them;
            unchanged.
        config: a config or a mapping; ``None`` reads the environment.
        topology: for which algorithms are chosen: the backend, and how many ranks share a node.
        machine: for ``shard_ranks: auto``, its network and how much memory a device has.

    Raises:
        ValueError: another optimizer, whose state depends on more than the number of elements.
        TypeError, ValueError: what ``shard`` refuses too.
    """
    originals = OptimizerList.of(optimizer)
    for each in originals.optimizers:
        if type(each) not in KNOWN:
            known = ", ".join(sorted(kind.__name__ for kind in KNOWN))
            raise ValueError(
                f"optimizer: expected one of {known}, got {type(each).__name__}; the state of "
                "others is not known before they run: see optimizer.memory_report() after a step"
            )
    if world_size < 1:
        raise ValueError(f"world_size: expected a number of ranks >= 1, got {world_size}")
    if not isinstance(config, ShardcastConfig):
        config = ShardcastConfig.load(config)
    updates_of(originals, config, Comm(None))  # refuses what shard() does
    plan = plan_for(model, originals, config, world_size)
    cast_peak, live = _convert_outside(plan)
    topology = Topology(topology.backend, min(world_size, topology.node))
    free, joined = machine.capacity - live, topology._replace(between=machine.between)
    size, why = shard_ranks(config, plan.layout, joined, free, plan.operations)
    if size < world_size:
        plan = plan_for(model, originals, config, size)
        topology = topology._replace(node=min(size, topology.node))
    layout = dataclasses.replace(with_algorithms(plan.layout, config, topology), sharding=why)
    ranks = [_Rank() for _ in range(size)]
    copies = world_size // size
    traffic = [_add(ranks, pack, plan, originals, copies) for pack in layout.packs]
    sharded = config.grads == "sharded" and world_size > 1
    owned_bytes = [
        rank.masters + rank.state + rank.averages + sharded * rank.gradients for rank in ranks
    ]
    fullest = ranks[owned_bytes.index(max(owned_bytes))]
    sent = [rank.sent for rank in ranks]
    trained = [pack for pack in traffic if pack is not None]
    return Estimate(
        world_size,
        layout,
        parameters=sum(pack.numel * pack.dtype.itemsize for pack in layout.packs),
        gradients=fullest.gradients if sharded else sum(rank.gradients for rank in ranks),
        masters=fullest.masters,
        state=fullest.state,
        averages=fullest.averages,
        outside=live - sum(param.nbytes for param in plan.params.values()),
        host=fullest.masters + fullest.state + fullest.averages if config.offload else 0,
        setup_peak=max(cast_peak, live + _packing_peak(plan)),
        sent=max(sent),
        sender=sent.index(max(sent)),
        collectives=_launches(trained, topology.backend, config.overlap_sync, size, copies),
        imbalance=_over_mean(owned_bytes),
        cost_imbalance=_over_mean([rank.cost for rank in ranks]),
        traffic=tuple(trained),
        updated=max(rank.updated for rank in ranks),
        normed=max(rank.normed for rank in ranks),
        products=tuple(rank.products for rank in ranks),
    )


def state_tensors(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """How many tensors one of the :data:`KNOWN` optimizers keeps of a parameter, 0-dim ones aside.

    Args:
        group: its options.
    """
    kind: Any = type(optimizer)
    if kind in STATE_NAMES:
        return len(rule_of(kind, group).state)
    if kind is torch.optim.Muon:
        return 1
    single = nn.Parameter(torch.zeros(1, dtype=MASTER_DTYPE))  # as the masters that it will run on
    single.grad = torch.zeros_like(single)
    twin = kind([{**group, "params": [single]}])
    twin.step()
    state = [value for value in twin.state[single].values() if isinstance(value, Tensor)]
    return sum(value.dim() > 0 for value in state)


def _master_bytes(pack: PackLayout, numel: int, config: ShardcastConfig) -> int:
    """Of masters of ``numel`` elements beside their parameters."""
    if pack.dtype == MASTER_DTYPE:
        return 0
    return master_codec(config, pack.dtype).nbytes(numel, row_of(config, pack.dtype))


@dataclass
class _Rank:
    """What one rank holds and moves in bytes, and computes, for its spans of all packs."""

    masters: int = 0
    state: int = 0
    averages: int = 0
    gradients: int = 0
    sent: int = 0
    updated: int = 0
    normed: int = 0
    cost: float = 0.0
    products: float = 0.0

    def hold(
        self, pack: PackLayout, numel: int, elements: int, kind: type, tensors: int,
        config: ShardcastConfig,
    ) -> None:  # fmt: skip
        """Add the update of a span.

        Args:
            numel, elements: of the span, and those of them that are no padding.
            kind, tensors: class of the optimizer, and how many state tensors it keeps.
        """
        row, moments = row_of(config, pack.dtype), moment_codec(config, "")
        rows, keys, state = -(-numel // row), 0, tensors * elements * MASTER_DTYPE.itemsize
        if kind in STATE_NAMES:  # kept for the whole span
            keys = KEY * rows if tensors and moments.by_chance else 0
            state = tensors * moments.nbytes(numel, row)
        codecs = [CODECS[average.stored]() for average in config.averages]
        averages = sum(codec.nbytes(numel, row) for codec in codecs)
        if not keys and any(codec.by_chance for codec in codecs):
            averages += KEY * rows
        self.state += state + keys
        self.averages += averages
        master = _master_bytes(pack, numel, config)
        grad = grad_dtype(pack.dtype, config).itemsize
        # A pack that is its own master, or half of it, is read too; else it is only written.
        passes = 1 if master and not master_codec(config, pack.dtype).has_published else 2
        moved = grad + passes * pack.dtype.itemsize
        self.updated += numel * moved + 2 * (master + state + averages) + keys
        self.normed += numel * grad


def _add(
    ranks: Sequence[_Rank], pack: PackLayout, plan: Plan, originals: OptimizerList, copies: int
) -> Traffic | None:
    """Add a pack to what each rank does; gives its traffic, or None where it is frozen."""
    config, size = plan.config, len(ranks)
    for span in pack.spans:  # of frozen ones too
        ranks[span.owner].masters += _master_bytes(pack, span.numel, config)
    if not pack.requires_grad:
        return None
    optimizer, group = originals.owner(pack.group), originals.group(pack.group)
    tensors = state_tensors(optimizer, group)
    products = {slot: matrix_products(optimizer, group, slot.shape) for slot in pack.slots}
    elements = [0] * size  # of parameters; the rest of a span is padding
    for owner, slot, count in _parts(pack):
        elements[owner] += count
        share = count / slot.numel
        ranks[owner].cost += plan.costs.get(slot.name, ELEMENT * slot.numel) * share
        ranks[owner].products += products[slot] * share
    grad = grad_dtype(pack.dtype, config).itemsize
    wire, stored = wire_dtype(pack.dtype, config).itemsize, pack.dtype.itemsize
    sums = 0  # of micro-batches in fp32, one of which is sent
    if config.reproducible > size:
        sums, wire = most_sums(config.reproducible // size), MASTER_DTYPE.itemsize
    for span in pack.spans:
        rank, numel = ranks[span.owner], span.numel
        rank.gradients += numel * (grad + sums * MASTER_DTYPE.itemsize)
        if pack.algorithms.reduce == "two_level":  # sums are twice as long as what is summed
            near, nodes = pack.algorithms.node, size // pack.algorithms.node
            rank.sent += ((near - 1) * nodes + 2 * (nodes - 1)) * numel * wire
        else:
            rank.sent += (pack.numel - numel) * wire
        rank.sent += 2 * (copies - 1) * numel * MASTER_DTYPE.itemsize // copies
        if elements[span.owner] or pack.algorithms.sync == "all_gather":
            rank.sent += (size - 1) * numel * stored
        if elements[span.owner]:
            rank.hold(pack, numel, elements[span.owner], type(optimizer), tensors, config)
    longest = max(span.numel for span in pack.spans)
    return Traffic(
        wire=pack.numel * wire,
        stored=pack.numel * stored,
        received=longest * grad,
        summed=longest * MASTER_DTYPE.itemsize,
        owners=sum(map(bool, elements)),
        algorithms=pack.algorithms,
        dtype=pack.dtype,
    )


def _launches(
    packs: Sequence[Traffic], backend: str, overlap_sync: bool, size: int, copies: int
) -> int:
    """Of a step, the small all-reduce included."""
    launches, together = int(size * copies > 1) + len(packs) * (copies > 1), set[Any]()
    for pack in packs if size > 1 else ():
        launches += 2 if pack.algorithms.reduce == "two_level" else 1
        sync = pack.algorithms.sync
        if sync != "messages" and syncs_at_once(sync, backend, overlap_sync):
            together.add(pack.sync_kind)
        else:
            # See Comm.broadcast_all, and Sync.begin.
            broadcasts = sync == "broadcast" or (sync == "messages" and overlap_sync)
            alone = broadcasts and backend not in GROUPED
            launches += pack.owners if alone else 1
    return launches + len(together)


def _parts(pack: PackLayout) -> Iterator[tuple[int, Slot, int]]:
    """Owner, slot and elements of each part of a parameter.

    One walk along slots and spans: ``pack.fragments()`` of each of a thousand ranks takes long.
    """
    position = 0
    for span in pack.spans:
        while position < len(pack.slots):
            slot = pack.slots[position]
            count = min(slot.end, span.stop) - max(slot.offset, span.start)
            if count > 0:
                yield span.owner, slot, count
            if slot.end > span.stop:  # the rest of it is the next rank's
                break
            position += 1


def _over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if any(values) else 1.0


def _packing_peak(plan: Plan) -> int:
    """Bytes that making the packs needs at its worst moment, above the model as it is.

    At a pack's worst moment either its originals and the fp32 staging of all of it are there, or,
    originals freed, the staging, the cast pack and what becomes the masters of the own span
    (:func:`shardcast.memory.shard.build_shard`).
    """
    peak = live = 0
    config, size = plan.config, plan.layout.world_size
    masters = [0] * size
    for pack in plan.layout.packs:
        params = [plan.params[slot.name] for slot in pack.slots]
        originals = sum(param.nbytes for param in params)
        stored = pack.numel * pack.dtype.itemsize
        staged = pack.numel * MASTER_DTYPE.itemsize
        codec = master_codec(config, pack.dtype)
        if pack.dtype == MASTER_DTYPE:  # what is staged becomes the pack, which has the masters
            alone = size == 1 and len(params) == 1 and pack.padding == 0
            # Then its own storage is the pack's: see Pack.fill.
            adopted = alone and params[0].is_contiguous() and params[0].dtype == pack.dtype
            peak = max(peak, live + max(masters) + (0 if adopted else staged))
        else:
            for span in pack.spans:
                if codec.plain and span.numel == pack.numel and not config.offload:
                    added = 0  # the staging becomes the masters
                else:
                    added = min(span.numel, FILL) * codec.encoding_bytes
                    added += _master_bytes(pack, span.numel, config)
                worst = max(staged, staged - originals + stored + added)
                peak = max(peak, live + masters[span.owner] + worst)
                masters[span.owner] += _master_bytes(pack, span.numel, config)
        live += stored - originals
    return peak


def _convert_outside(plan: Plan) -> tuple[int, int]:
    """Bytes of all parameters and buffers: at most, while those outside are cast, and after.

    The order is that of ``shard()``: parameters outside of the optimizer, then buffers.
    """
    model, precision = plan.model, plan.precision
    peak = live = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    casts: list[tuple[Tensor, torch.dtype]] = [
        (param, precision.rest_dtype(param)) for param in plan.outside.values()
    ]
    for module in model.modules():
        for buffer in module.buffers(recurse=False):
            casts.append((buffer, precision.buffer_dtype(module, buffer)))
    for tensor, dtype in casts:
        if tensor.dtype != dtype:
            cast = tensor.numel() * dtype.itemsize
            peak = max(peak, live + cast)
            live += cast - tensor.nbytes
    return peak, live
