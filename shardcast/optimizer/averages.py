"""Averages of weights: switched into the model and back, gathered, begun from existing ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.memory.shard import Shard, take_moved
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.plan.layout import Fragment


def saved_buffers(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The buffers that ``state_dict`` saves, each under its first name.

    Asked of the modules, since hooks may give the keys of ``state_dict`` other names.
    """
    names: dict[Tensor, str] = {}
    for prefix, module in (pair for stage in stages for pair in stage.named_modules()):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
    return {name: buffer for buffer, name in names.items()}


class Averages:
    """The averages of one optimizer, that ``averages`` of the configuration names."""

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer = optimizer
        self._names = [options.name for options in optimizer.config.averages]

    def check(self, call: str, name: str) -> None:
        """Raise for a name that is no average."""
        if name not in self._names:
            known = ", ".join(map(repr, self._names)) or "none"
            raise ValueError(
                f"{call}: expected the name of an average, {known}, got {name!r}; "
                "averages={'ema': 0.999} of shard() makes one"
            )

    def values(self, shard: Shard, number: int, name: str) -> Tensor:
        """One fragment of an average, 1-d fp32; may be the memory itself."""
        return self._optimizer.update_of(shard).average(shard, number, name)

    @contextmanager
    def switched(self, name: str) -> Iterator[None]:
        """See :meth:`shardcast.ShardedOptimizer.averaged`. Collective."""
        optimizer = self._optimizer

        def ready() -> None:
            self.check("averaged", name)
            optimizer.refuse_averaged("averaged")
            optimizer.resync_masters()

        optimizer.process_groups.everyone.together(ready, optimizer.device, "averaged")
        buffers = {
            key: _compat.local_tensor(buffer)
            for key, buffer in saved_buffers(optimizer.stages).items()
        }
        with torch.no_grad():
            optimizer.buffers_of_training |= {key: b.clone() for key, b in buffers.items()}
            shards = [shard for shard in optimizer.shards if shard.grads is not None]
            weights = [shard.lend() for shard in shards]
            for shard in shards:
                for number, fragment in enumerate(shard.fragments):
                    part = shard.local(fragment.start, fragment.stop)
                    shard.published[part].copy_(self.values(shard, number, name))
            self._sync(shards, name)
        try:
            yield
        finally:
            with torch.no_grad():
                for key, buffer in buffers.items():
                    # ``.data``: a graph that has saved the buffer stays usable.
                    buffer.data.copy_(optimizer.buffers_of_training.pop(key))
                optimizer.sync.wait()
                take_moved(optimizer.shards)
                if any(self._is_edited(shard, name) for shard in shards):
                    warn_first(
                        f"averaged({name!r}): weights were written while the average was in the "
                        "model; they are dropped, as the weights of the training come back"
                    )
                for shard, own in zip(shards, weights, strict=True):
                    shard.take_back(own)
                self._sync(shards, None)

    def _sync(self, shards: list[Shard], name: str | None) -> None:
        """Send what owners published to all ranks; note which average it is."""
        optimizer = self._optimizer
        optimizer.sync()
        # Autograd is to refuse a backward through a forward with other weights.
        torch.autograd.graph.increment_version(
            [param for shard in shards for param in shard.pack.in_model]
        )
        optimizer.average_in_model = name

    def _is_edited(self, shard: Shard, name: str) -> bool:
        """Whether what the own span publishes is not the average any more; waits for the device."""
        for number, fragment in enumerate(shard.fragments):
            published = shard.published[shard.local(fragment.start, fragment.stop)]
            cast = self.values(shard, number, name).to(published.dtype)
            if not torch.equal(published.view(torch.uint8), cast.view(torch.uint8)):
                return True
        return False

    def load(self, name: str, weights: Mapping[str, Tensor], steps: int) -> None:
        """See :meth:`shardcast.ShardedOptimizer.load_average`. Collective."""
        optimizer = self._optimizer

        def checked() -> None:
            self.check("load_average", name)
            optimizer.refuse_averaged("load_average")
            shapes = {slot.name: slot.shape for _, slot in optimizer.layout.slots()}
            for parameter, expected in shapes.items():
                given = weights.get(parameter)
                shape = None if given is None else tuple(_compat.local_tensor(given).shape)
                if shape != expected:
                    raise ValueError(
                        f"load_average: {parameter!r} has shape {shape}, expected {expected}; give "
                        "all parameters by the names of model.named_parameters"
                    )

        optimizer.process_groups.everyone.together(checked, optimizer.device, "load_average")

        def parts(shard: Shard) -> Iterator[tuple[Fragment, Tensor]]:
            for fragment in shard.fragments:
                start, stop = fragment.param_range
                given = _compat.local_tensor(weights[fragment.slot.name]).detach()
                yield fragment, given.reshape(-1)[start:stop]

        # A frozen parameter is its own average, and keeps none, unless it is given another one.
        frozen = [shard for shard in optimizer.shards if shard.grads is None]
        others = [any(_differs(shard, *part) for part in parts(shard)) for shard in frozen]
        if frozen:
            optimizer.activate_together(frozen, others)
        for shard in optimizer.shards:
            for number, (_, values) in enumerate(parts(shard)):
                optimizer.update_of(shard).load_average(shard, number, name, values, steps)


def _differs(shard: Shard, fragment: Fragment, values: Tensor) -> bool:
    own = shard.exact(fragment)
    return not torch.equal(values.to(own), own)
