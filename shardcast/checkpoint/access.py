"""What a checkpoint takes from, and gives to, a model and its sharded optimizer.

The one place in this package that uses the engine of a :class:`shardcast.ShardedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.checkpoint import storage
from shardcast.checkpoint.parts import Part, Stored, is_elementwise, model_path, state_path, whole
from shardcast.checkpoint.region import Region
from shardcast.checkpoint.source import Source
from shardcast.memory.shard import Shard
from shardcast.optimizer.sharded import ShardedOptimizer
from shardcast.optimizer.state_dict import load_groups
from shardcast.plan.layout import Fragment, Slot
from shardcast.plan.precision import MASTER_DTYPE

T = TypeVar("T")
# What torch's CheckpointWrapper puts into the names of modules, and takes out of state_dict's keys.
RECOMPUTED = "_checkpoint_wrapped_module."
EXTRA_STATE = "_extra_state"  # the last part of torch's key for get_extra_state()


class Snapshot:
    """The present values of a model and its optimizer, as parts that are stored under names.

    Raises:
        TypeError: ``optimizer`` is not a sharded one.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, ShardedOptimizer):
            raise TypeError(
                "optimizer: expected what shardcast.shard returned, got "
                f"{type(optimizer).__name__}; pass that object, unwrapped"
            )
        self.model = _compat.unwrapped(model)
        self._optimizer = optimizer
        self._engine = engine = optimizer.engine
        self._shards, self._update, self._comm = engine.shards, engine.update, engine.comm
        self.rank, self.size = self._comm.rank, self._comm.size
        self.partition = optimizer.layout.partition
        self.slots: dict[str, Slot] = {slot.name: slot for _, slot in optimizer.layout.slots()}
        self._regions = {name: Region.whole(slot.shape) for name, slot in self.slots.items()}
        self._cut = {slot.name: p.partition == "even" for p, slot in optimizer.layout.slots()}
        held = {param for shard in self._shards for param in shard.pack.params}
        outside = {n: p for n, p in self.model.named_parameters() if p not in held}
        buffers = _persistent(self.model)
        self._rest = {**outside, **buffers}  # what is stored besides the masters
        self._outside = outside
        stored = self.model.state_dict(keep_vars=True)
        self._extra = {n: v for n, v in stored.items() if n.split(".")[-1] == EXTRA_STATE}

    def check_model(self) -> None:
        """Raise ValueError if the optimizer was made for another model."""
        if self.model is not self._engine.model:
            raise ValueError(
                "model: it is not the one that the optimizer was sharded with; pass that one"
            )

    def together(self, act: Callable[[], T], call: str) -> T:
        """What ``act`` returns here, if it succeeds on all ranks; else all raise. Collective.

        Args:
            call: what the caller is in; ranks that meet here in different calls all raise.
        """
        return self._comm.together(_acknowledging(act, call), self._engine.device, call)

    def collect(self, act: Callable[[], T], call: str) -> list[T]:
        """:meth:`together`; what it returned on all ranks, which should be small."""
        return self._comm.collect(_acknowledging(act, call), self._engine.device, call)

    # -- out --------------------------------------------------------------------------------

    def parts(self) -> Iterator[Part]:
        """What this rank stores: its masters and state, and its share of the rest."""
        self._engine.hooks.resync()  # weights that load_state_dict put behind the masters
        for shard, number, fragment in self._owned():
            slot, (start, _) = fragment.slot, fragment.param_range
            region = self._regions[slot.name]
            yield Part(model_path(slot.name), region, start, shard.exact(fragment))
            for name, value in self._update.fragment_state(shard, number).items():
                path = state_path(slot.name, name)
                if not isinstance(value, Tensor):
                    continue  # among the objects
                if is_elementwise(value, slot.shape, fragment.numel):
                    yield Part(path, region, start, value.detach().reshape(-1))
                elif start == 0:
                    yield whole(path, value)
        if self.rank == 0:
            for name, slot in self.slots.items():
                if slot.numel == 0:
                    yield whole(model_path(name), torch.empty(slot.shape))
        for number, (name, tensor) in enumerate(self._rest.items()):
            owner = number % self.size if name in self._outside else 0  # equal on all ranks
            if owner == self.rank:
                yield whole(model_path(name), tensor)

    def objects(self) -> dict[str, dict[str, Any]]:
        """This rank's state that is not a tensor, by parameter and state name."""
        found: dict[str, dict[str, Any]] = {}
        for shard, number, fragment in self._owned():
            values = self._update.fragment_state(shard, number)
            plain = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
            if plain:
                found[fragment.slot.name] = plain
        return found

    def _owned(self) -> Iterator[tuple[Shard, int, Fragment]]:
        for shard in self._shards:
            for number, fragment in enumerate(shard.fragments):
                yield shard, number, fragment

    def head(self) -> dict[str, Any]:
        """What is stored once: plain facts, group options and the loss scale."""
        names = {p: n for n, p in self.model.named_parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        return {
            "optimizer": self._engine.originals.name,
            "groups": [
                {**group, "params": [names[param] for param in group["params"]]}
                for group in self._optimizer.param_groups
            ],
            "places": list(self._engine.originals.places),
            "scaler": self._engine.combine.state_dict(),
            "ties": {name: names[param] for name, param in every if names[param] != name},
            "trained": list(self.slots),
            "extra_state": self._extra,
        }

    def cuts(self, name: str) -> bool:
        """Whether several ranks may own a part of this parameter."""
        return self._cut[name]

    # -- in ---------------------------------------------------------------------------------

    def by_name(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights under ``state_dict``'s keys by the names that are used here."""
        ours = [*self.shapes(), *self.head()["ties"]]
        names = {state_key(name): name for name in ours}
        return {names.get(key, key): value for key, value in weights.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every stored parameter and buffer of the model, by name."""
        shapes = {name: slot.shape for name, slot in self.slots.items()}
        return {**shapes, **{name: tuple(tensor.shape) for name, tensor in self._rest.items()}}

    def take_options(self, source: Source) -> None:
        """Take groups, loss scale and extra state; make ready the packs that have state."""
        packs = {
            pack.index
            for pack, slot in self._optimizer.layout.slots()
            if source.state.get(slot.name)
        }
        self._engine.activate_packs(packs)
        if source.groups is not None:
            load_groups(self._optimizer.param_groups, source.groups)
        if source.scaler is not None:
            self._engine.combine.load_state_dict(dict(source.scaler))
        for name, value in (source.extra_state or {}).items():
            self.model.get_submodule(name.removesuffix(EXTRA_STATE).rstrip(".")).set_extra_state(
                value
            )

    @torch.no_grad()
    def take_tensors(self, source: Source) -> None:
        """Read masters and state pack by pack. Local; :meth:`publish` must follow."""
        for shard in self._shards:
            self._take_pack(shard, source)
        staged = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in self._rest.items()}
        source.read([whole(model_path(name), tensor) for name, tensor in staged.items()])
        for name, tensor in self._rest.items():
            tensor.copy_(staged[name])

    def _take_pack(self, shard: Shard, source: Source) -> None:
        parts, exact, states = [], [], []
        for fragment in shard.fragments:
            slot, (start, stop) = fragment.slot, fragment.param_range
            exact.append(shard.exact(fragment))
            region = self._regions[slot.name]
            parts.append(Part(model_path(slot.name), region, start, exact[-1]))
            states.append(dict(source.state.get(slot.name, {})))
            for key, stored in states[-1].items():
                if isinstance(stored, Stored):
                    path, shape = state_path(slot.name, key), stored.shape
                    widened = stored.dtype.is_floating_point and shape and not source.exact
                    dtype = MASTER_DTYPE if widened else stored.dtype
                    if shape and (shape == region.shape or self.cuts(slot.name)):
                        value = torch.empty(stop - start, dtype=dtype)
                        held = region if shape == region.shape else Region.whole(shape)
                        parts.append(Part(path, held, start, value))
                    else:
                        value = torch.empty(shape, dtype=dtype)
                        parts.append(whole(path, value))
                    states[-1][key] = value
        source.read(parts)
        for number, (own, values) in enumerate(zip(exact, states, strict=True)):
            shard.set_exact(shard.fragments[number], own)
            self._update.load_fragment(shard, number, values)

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters and make all packs equal on all ranks. Collective."""
        self._engine.publish()


def _acknowledging(act: Callable[[], T], call: str) -> Callable[[], T]:
    def acknowledged() -> T:
        value = act()
        storage.SYSTEM.reached("acknowledge", call)
        return value

    return acknowledged


def state_key(name: str) -> str:
    """The key that ``state_dict`` has for a parameter or buffer."""
    return name.replace(RECOMPUTED, "")


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``state_dict`` saves, each under its first name.

    Asked of the modules, since hooks may give the keys of ``state_dict`` other names.
    """
    found: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
    return {name: buffer for buffer, name in found.items()}
