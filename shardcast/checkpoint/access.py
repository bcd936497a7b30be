"""The values that a checkpoint reads from, and writes to, a model and its sharded optimizer.

Only this module of the package uses the internals of a :class:`shardcast.ShardedOptimizer`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.checkpoint.dcp import Stored
from shardcast.checkpoint.inventory import Inventory, LocalInventory, Replica, merge
from shardcast.checkpoint.region import Region, ShardView
from shardcast.checkpoint.source import StateSource, model_path, state_path
from shardcast.memory.codecs import row_of
from shardcast.memory.hashing import hasher_of
from shardcast.memory.shard import Shard
from shardcast.optimizer.groups import activate_packs
from shardcast.optimizer.model import saved_buffers
from shardcast.optimizer.sharded import ShardedOptimizer, packed_of
from shardcast.optimizer.state import (
    agree_on_counts,
    forget_averages,
    is_elementwise,
    load_groups,
    load_step_state,
    step_state,
)
from shardcast.option_values import as_yaml
from shardcast.plan.layout import Fragment, PackLayout
from shardcast.plan.parallel_dims import PackGroups, pack_groups_of
from shardcast.plan.precision import MASTER_DTYPE

T = TypeVar("T")
Model = nn.Module | Sequence[nn.Module]  # or this rank's stages of a pipeline
EXTRA_STATE = "_extra_state"  # the last part of torch's key for get_extra_state()
# The last checkpoint that each optimizer loaded, its digest at that time, and hashes of this rank's
# other tensors.
_loaded = weakref.WeakKeyDictionary[ShardedOptimizer, tuple[str, str, list[int]]]()


class Snapshot:
    """The current values of a model and its optimizer, as parts that are stored under names.

    Args:
        model: the model that was passed to ``shard``.

    Raises:
        TypeError: ``optimizer`` is not sharded.
    """

    inventory: Inventory
    """Tensors that all ranks hold, known after :meth:`meet`."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, ShardedOptimizer):
            raise TypeError(
                "optimizer: expected what shardcast.shard returned, got "
                f"{type(optimizer).__name__}; pass that object, unwrapped"
            )
        self._given: Sequence[Any] = model if isinstance(model, (list, tuple)) else [model]
        self._sharded, self._packed = optimizer, packed_of(optimizer)
        packed = self._packed
        self._process_groups = packed.process_groups
        self.comm, self.device = self._process_groups.everyone, packed.device
        self.partition = packed.layout.partition
        self._trained = {name: param for param, name in packed.names().items()}
        cut = {param for param in self._trained.values() if param.numel()}
        # Parameters that are stored whole: those without an optimizer, and those without elements.
        self._outside = {n: p for n, p in packed.model.named_parameters() if p not in cut}
        self._buffers = saved_buffers(packed.stages)
        tensors = {**self._trained, **self._outside, **self._buffers}
        self._regions = {name: Region.of(tensor) for name, tensor in tensors.items()}
        self._extra: dict[str, tuple[nn.Module, object]] = {
            name: (stage, value)
            for stage in packed.stages
            for name, value in stage.state_dict(keep_vars=True).items()
            if name.split(".")[-1] == EXTRA_STATE
        }

    def together(self, act: Callable[[], T], call: str) -> T:
        """Return the result of ``act`` if it succeeds on all ranks; else all raise. Collective.

        Args:
            call: name of the caller; if ranks meet here in different calls, all of them raise.
        """
        return self._packed.together(act, call)

    def collect(self, act: Callable[[], T], call: str) -> list[T]:
        """:meth:`together`, but return the results of all ranks, which should be small."""
        return self.comm.collect(act, self.device, call)

    def meet(self, call: str) -> None:
        """Find out which tensors all ranks hold. Collective.

        Raises:
            ValueError: the optimizer belongs to another model.
        """
        own = self.together(lambda: self._local_inventory(call), call)
        if self._process_groups.is_data_parallel:  # all ranks hold the same parameters
            self.inventory = merge({0: own})
            return
        comm, device = self.comm, self.device
        digests = comm.exchange(hashlib.sha256(repr(own).encode()).digest(), device)
        # Among ranks that hold the same parameters, such as data-parallel ones, the first one
        # sends.
        is_first = digests.index(digests[comm.rank]) == comm.rank
        gathered = comm.gather(own if is_first else None, device)
        by_rank = {rank: content for rank, content in enumerate(gathered) if content is not None}
        merged = self.together(lambda: merge(by_rank) if comm.rank == 0 else None, call)
        self.inventory = comm.share(merged, device)  # type: ignore[assignment]  # rank 0's

    def _local_inventory(self, call: str) -> LocalInventory:
        self._packed.need_masters(call)
        models, stages = [_compat.unwrapped(model) for model in self._given], self._packed.stages
        pairs = zip(models, stages, strict=False)
        if len(models) != len(stages) or any(model is not stage for model, stage in pairs):
            raise ValueError(
                "model: expected the model that was passed to shard() with this optimizer, got "
                "another one; pass that one"
            )
        parallel_dims = self._process_groups.parallel_dims
        params = {
            name: self._replica(name, pack_groups_of(parallel_dims, name, param))
            for name, param in self._outside.items()
        }
        for layout, slot in self._packed.layout.slots():
            params[slot.name] = self._replica(slot.name, layout.pack_groups, layout)
        names = {param: name for name, param in (self._trained | self._outside).items()}
        every = self._packed.model.named_parameters(remove_duplicate=False)
        return LocalInventory(
            params,
            {name: self._regions[name] for name in self._buffers},
            [
                [names[param] for param in group["params"]]
                for group in self._packed.originals.groups
            ],
            {name: names[param] for name, param in every if names[param] != name},
            [(tie.first, tie.second) for tie in parallel_dims.ties],
            list(self._extra),
        )

    def _replica(
        self, name: str, pack_groups: PackGroups, pack: PackLayout | None = None
    ) -> Replica:
        parallel_dims, region = self._process_groups.parallel_dims, self._regions[name]
        place = (
            parallel_dims.coordinate.get(parallel_dims.pipeline, 0),
            parallel_dims.expert_blocks(pack_groups)[1],
        )
        cut = pack is not None and (pack.partition == "even" or not region.is_whole)
        return Replica(region, pack_groups.is_primary, pack is not None, cut, place)

    # -- out --------------------------------------------------------------------------------

    def views(self) -> Iterator[ShardView]:
        """Return the parts that this rank stores: masters, state, and its share of the rest."""
        self._packed.ready_to_read()
        for shard, number, fragment in self._stored():
            region, (start, _) = self._regions[fragment.slot.name], fragment.param_range
            name, update = (
                self.inventory.stored(fragment.slot.name),
                self._packed.update_of(shard),
            )
            yield ShardView(model_path(name), region, start, shard.exact(fragment))
            for key, value in update.fragment_state(shard, number).items():
                path = state_path(name, key)
                if is_elementwise(value, fragment, update.elementwise):
                    yield ShardView(path, region, start, value.detach().reshape(-1))
                elif isinstance(value, Tensor) and start == 0 and region.is_first:
                    yield ShardView.whole(path, value)  # other values are among the objects
        for number, (name, param) in enumerate(self._outside.items()):
            pack_groups = pack_groups_of(self._process_groups.parallel_dims, name, param)
            comm = self._process_groups.comm(pack_groups.shard)
            # Ranks with equal copies take turns.
            if pack_groups.is_primary and comm.rank == number % comm.size:
                yield self._view(name, param)
        averages = self._packed.hook_of("averages")
        of_training = {} if averages is None else averages.buffers  # set inside ``averaged()``
        for name, buffer in self._buffers.items():
            if self.inventory.buffers[name, self._regions[name]] == self.comm.rank:
                yield self._view(name, of_training.get(name, buffer))

    def _view(self, name: str, tensor: Tensor) -> ShardView:
        """Return the view of a parameter or buffer outside the optimizer."""
        flat = _compat.local_tensor(tensor).detach().reshape(-1)
        return ShardView(model_path(self.inventory.stored(name)), self._regions[name], 0, flat)

    def _stored(self) -> Iterator[tuple[Shard, int, Fragment]]:
        """Return the fragments that this rank stores: each once, however many copies there are."""
        for shard in self._packed.shards:
            if shard.pack.layout.pack_groups.is_primary:
                for number, fragment in enumerate(shard.fragments):
                    yield shard, number, fragment

    def objects(self) -> dict[str, dict[str, Any]]:
        """Return this rank's state that is not a tensor, by parameter and state name."""
        objects: dict[str, dict[str, Any]] = {}
        for shard, number, fragment in self._stored():
            values = self._packed.update_of(shard).fragment_state(shard, number, decode=False)
            plain = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
            if plain:
                objects[self.inventory.stored(fragment.slot.name)] = plain
        return objects

    def extra_state(self) -> dict[str, Any]:
        """Return modules' extra state that this rank stores."""
        owners = self.inventory.extra
        return {n: value for n, (_, value) in self._extra.items() if owners[n] == self.comm.rank}

    def head(self) -> dict[str, Any]:
        """Return values that are stored once: plain facts, group options and the loss scale."""
        groups = zip(self._packed.originals.groups, self.inventory.groups, strict=True)
        return {
            "optimizer": self._packed.originals.name,
            "groups": [{**group, "params": list(names)} for group, names in groups],
            "places": list(self._packed.originals.places),
            "scaler": step_state(self._packed),
            "ties": dict(self.inventory.ties),
            "published": as_yaml(self._packed.config.published),
        }

    def digest(self) -> str:
        """Return the digest of masters and state. Collective."""
        digest: str = self._sharded.digest()
        return digest

    def note_loaded(self, folder: Path, digest: str) -> None:
        """Remember that all tensors come from ``folder``. Local.

        Args:
            digest: of masters and state.
        """
        _loaded[self._sharded] = str(folder), digest, self._hashes_of_rest()

    def is_as_loaded(self, folder: Path) -> bool:
        """Return whether all tensors are unchanged since they were loaded. Collective."""
        place, digest, rest = _loaded.get(self._sharded, ("", "", []))
        if place != str(folder):
            return False
        is_same = digest == self.digest() and rest == self._hashes_of_rest()
        return all(self.comm.exchange(is_same, self.device))

    def _hashes_of_rest(self) -> list[int]:
        """Return hashes of this rank's buffers and parameters without masters. Local."""
        rest = [_compat.local_tensor(it) for it in (self._outside | self._buffers).values()]
        return [int(hasher_of(tensor.device)(tensor)) for tensor in rest]

    def forms(self) -> str:
        """Return options that determine the state and its precision. Collective."""
        config = self._packed.config
        averages = [(average.name, average.stored) for average in config.averages]
        forms = f"moments={config.moments!r}, averages={averages!r}"
        if config.moments == "int8":
            # Values of a row share a scale, so other rows give other values.
            rows = [
                (slot.name, row_of(config, layout.dtype), self._regions[slot.name])
                for layout, slot in self._packed.layout.slots()
            ]
            digest = hashlib.sha256(repr(sorted(map(repr, rows))).encode()).hexdigest()
            forms += f", rows={sorted(set(self.comm.exchange(digest, self.device)))}"
        return forms

    # -- in ---------------------------------------------------------------------------------

    def by_name(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights under ``state_dict``'s keys by our names."""
        ours = [*self.inventory.shapes, *self.inventory.ties]
        names = {_compat.state_key(name): name for name in ours}
        return {names.get(key, key): value for key, value in weights.items()}

    def refuse_inside(self, call: str) -> None:
        """Raise RuntimeError inside ``averaged()``, ``owned()`` or ``whole()``, on all ranks."""
        self._packed.refuse_inside(call)

    def take_options(self, source: StateSource) -> None:
        """Load groups, loss scale and extra state; activate packs that have state."""
        packs = {
            pack.index
            for pack, slot in self._packed.layout.slots()
            if source.state.get(self.inventory.stored(slot.name))
        }
        activate_packs(self._packed, packs)
        if source.chosen is None:
            forget_averages(self._packed)
        if source.groups is not None:
            load_groups(self._packed.originals.groups, source.groups)
        if source.scaler is not None:
            load_step_state(self._packed, source.scaler)
        states = source.extra_state or {}
        for name, (stage, _) in self._extra.items():
            if name in states:
                module = stage.get_submodule(name.removesuffix(EXTRA_STATE).rstrip("."))
                module.set_extra_state(states[name])

    @torch.no_grad()
    def take_tensors(self, source: StateSource) -> None:
        """Read masters and state pack by pack. Local; :meth:`publish` must follow."""
        self._packed.ready_to_read()
        for shard in self._packed.shards:
            self._take_pack(shard, source)
        untrained: dict[str, Tensor] = {
            name: tensor
            for name, tensor in {**self._outside, **self._buffers}.items()
            if source.takes(self.inventory.stored(name))
        }
        views = [self._view(name, tensor) for name, tensor in untrained.items()]
        staged = [replace(view, flat=torch.empty_like(view.flat, device="cpu")) for view in views]
        source.read(staged)
        for tensor, view in zip(untrained.values(), staged, strict=True):
            local = _compat.local_tensor(tensor)
            local.copy_(view.flat.view(local.shape))

    def _take_pack(self, shard: Shard, source: StateSource) -> None:
        views, loading = [], []
        for number, fragment in enumerate(shard.fragments):
            region, (start, stop) = self._regions[fragment.slot.name], fragment.param_range
            name = self.inventory.stored(fragment.slot.name)
            if not source.takes(name):
                continue
            # The masters' own memory, if they are plain, because the source has all of them.
            own = shard.read(shard.local(fragment.start, fragment.stop))
            state = dict(source.state.get(name, {}))
            views.append(ShardView(model_path(name), region, start, own))
            for key, stored in state.items():
                if isinstance(stored, Stored):
                    path, shape = state_path(name, key), stored.shape
                    cut = shape != () and shape == region.shape
                    widened = stored.dtype.is_floating_point and shape and not source.exact
                    dtype = MASTER_DTYPE if widened else stored.dtype
                    value = torch.empty(stop - start if cut else shape, dtype=dtype)
                    flat = ShardView(path, region, start, value)
                    views.append(flat if cut else ShardView.whole(path, value))
                    state[key] = value.view(fragment.shape) if cut else value
            loading.append((number, fragment, own, state))
        source.read(views)
        for number, fragment, own, state in loading:
            shard.set_exact(fragment, own)
            self._packed.update_of(shard).load_fragment(shard, number, state)

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters and make all packs equal on all ranks. Collective."""
        agree_on_counts(self._packed)
        self._packed.publish()
