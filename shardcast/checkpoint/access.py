"""What a checkpoint takes from, and gives to, a model and its sharded optimizer.

The one place in this package that uses the engine of a :class:`shardcast.ShardedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.checkpoint.shards import Part, is_elementwise, model_path, state_path, whole
from shardcast.memory.shard import Shard
from shardcast.optimizer.sharded import ShardedOptimizer
from shardcast.optimizer.state_dict import load_groups
from shardcast.plan.layout import Fragment, Slot

# What torch's CheckpointWrapper puts into the names of modules, and takes out of state_dict's keys.
RECOMPUTED = "_checkpoint_wrapped_module."
EXTRA_STATE = "_extra_state"  # the last part of torch's key for get_extra_state()


class Held:
    """A model and its optimizer, as parts that are stored under names.

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
        self._shards, self._update = engine.shards, engine.update
        self._comm = engine.comm
        self.rank, self.size = self._comm.rank, self._comm.size
        self.partition = optimizer.layout.partition
        self._device = engine.device
        self.slots: dict[str, Slot] = {slot.name: slot for _, slot in optimizer.layout.slots()}
        held = {param for shard in self._shards for param in shard.pack.params}
        self._outside = {n: p for n, p in self.model.named_parameters() if p not in held}
        stored = self.model.state_dict(keep_vars=True)
        self._buffers = _persistent(self.model)
        self._extra = {n: v for n, v in stored.items() if n.split(".")[-1] == EXTRA_STATE}

    def check_model(self) -> None:
        """Raise ValueError if the optimizer was made for another model."""
        if self.model is not self._engine.model:
            raise ValueError(
                "model: it is not the one that the optimizer was sharded with; pass that one"
            )

    def together(self, act: Callable[[], Any], point: Callable[[], None]) -> list[Any]:
        """Run ``act`` here, tell everybody how it went; all ranks' results, or all raise.

        Args:
            point: called before this rank tells the others; for tests.
        """
        value, error = None, None
        try:
            value = act()
            point()
        except Exception as raised:
            error = raised
        told = None if error is None else (isinstance(error, ValueError), str(error))
        everyone = self._comm.exchange((value, told), self._device)
        if error is not None:
            raise error
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                kind = ValueError if theirs[0] else RuntimeError
                raise kind(f"rank {rank}: {theirs[1]}")
        return [result for result, _ in everyone]

    # -- out --------------------------------------------------------------------------------

    def parts(self) -> Iterator[Part]:
        """What this rank stores: its masters and state, and its share of the rest."""
        self._engine.hooks.resync()  # weights that load_state_dict put behind the masters
        for shard, number, fragment in self._owned():
            slot, (start, _) = fragment.slot, fragment.param_range
            yield Part(model_path(slot.name), slot.shape, start, shard.exact(fragment))
            for name, value in self._update.fragment_state(shard, number).items():
                path = state_path(slot.name, name)
                if not isinstance(value, Tensor):
                    continue  # among the objects
                if is_elementwise(value, slot.shape, fragment.numel):
                    yield Part(path, slot.shape, start, value.detach().reshape(-1))
                elif start == 0:
                    yield whole(path, value)
        if self.rank == 0:
            for name, slot in self.slots.items():
                if slot.numel == 0:
                    yield Part(model_path(name), slot.shape, 0, torch.empty(0))
            for name, buffer in self._buffers.items():
                yield whole(model_path(name), buffer)
        for number, (name, param) in enumerate(self._outside.items()):
            if number % self.size == self.rank:  # equal on all ranks
                yield whole(model_path(name), param)

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
            "optimizer": type(self._engine.original).__name__,
            "groups": [
                {**group, "params": [names[param] for param in group["params"]]}
                for group in self._optimizer.param_groups
            ],
            "scaler": self._engine.combine.state_dict(),
            "ties": {name: names[param] for name, param in every if names[param] != name},
            "trained": list(self.slots),
            "extra_state": self._extra,
        }

    # -- in ---------------------------------------------------------------------------------

    def by_name(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights under ``state_dict``'s keys by the names that are used here."""
        self.check_model()
        ours = [*self.shapes(), *self.head()["ties"]]
        names = {state_key(name): name for name in ours}
        return {names.get(key, key): value for key, value in weights.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every stored parameter and buffer of the model, by name."""
        rest = {**self._outside, **self._buffers}
        shapes = {name: slot.shape for name, slot in self.slots.items()}
        return {**shapes, **{name: tuple(tensor.shape) for name, tensor in rest.items()}}

    def load_head(self, head: Mapping[str, Any], with_state: set[str]) -> None:
        """Take the options and the loss scale; make ready the packs that have state."""
        packs = {
            pack.index for pack, slot in self._optimizer.layout.slots() if slot.name in with_state
        }
        self._engine.activate_packs(packs)
        load_groups(self._optimizer.param_groups, head["groups"])
        self._engine.combine.load_state_dict(head["scaler"])
        for name, value in head["extra_state"].items():
            self.model.get_submodule(name.removesuffix(EXTRA_STATE).rstrip(".")).set_extra_state(
                value
            )

    @torch.no_grad()
    def load(
        self,
        read: Callable[[Sequence[Part]], None],
        fresh: Callable[[str, int, int], tuple[list[Part], dict[str, Any]]],
    ) -> None:
        """Read masters and state pack by pack. Local; :meth:`publish` must follow.

        Args:
            read: fills parts.
            fresh: given a parameter and an interval, new memory for its stored state, and the
                state made of it.
        """
        for shard in self._shards:
            parts, exact, states = [], [], []
            for fragment in shard.fragments:
                slot, (start, stop) = fragment.slot, fragment.param_range
                own = shard.exact(fragment)
                exact.append(own)
                parts.append(Part(model_path(slot.name), slot.shape, start, own))
                needed, values = fresh(slot.name, start, stop)
                parts += needed
                states.append(values)
            read(parts)
            for number, (own, values) in enumerate(zip(exact, states, strict=True)):
                shard.set_exact(shard.fragments[number], own)
                self._update.load_fragment(shard, number, values)
        rest = {**self._outside, **self._buffers}
        staged = {name: torch.empty_like(tensor.detach()) for name, tensor in rest.items()}
        staged = {name: tensor.contiguous() for name, tensor in staged.items()}
        read([whole(model_path(name), tensor) for name, tensor in staged.items()])
        for name, tensor in rest.items():
            tensor.copy_(staged[name])

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters and make all packs equal on all ranks. Collective."""
        self._engine.publish()


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
