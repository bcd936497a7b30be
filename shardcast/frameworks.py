"""Shared by the adapters of frameworks: grouping of models, and saving them in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcast import _compat
from shardcast._compat import bare_name, groups
from shardcast.config import ShardcastConfig
from shardcast.optimizer.sharded import ShardedOptimizer, packed_of
from shardcast.serving.forms import FORMS

PATIENCE = timedelta(seconds=60)  # wait for other ranks to make the same call


def following(
    config: ShardcastConfig, option: str, value: str, dtype: torch.dtype, *, mixed: bool | None
) -> ShardcastConfig:
    """Return the configuration for a framework whose own ``option`` asks for ``dtype``.

    ``param_dtype`` becomes ``dtype`` unless it was given. A given one takes precedence over fp32,
    which is every framework's default, and must equal any other dtype. ``autocast`` likewise
    follows ``mixed``: whether the framework asks for autocast; ``None``: it does not say.

    Raises:
        ValueError: the two contradict each other.
    """
    if mixed is not None and "autocast" not in config.named:
        config = config.replace(autocast=mixed)
    if "param_dtype" not in config.named:
        return config.replace(param_dtype=dtype)
    if dtype not in (torch.float32, config.param_dtype):
        raise ValueError(
            f"{option} is {value!r} but the shardcast configuration has param_dtype "
            f"{config.to_dict()['param_dtype']!r}; set only one of them, or set both alike"
        )
    return config


class Cluster(NamedTuple):
    """Optimizers that share a model, and all models that they train."""

    optimizers: list[torch.optim.Optimizer]
    models: list[nn.Module]


def models_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the ``models`` that ``optimizer`` trains."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    return [model for model in models if not params.isdisjoint(_compat.parameters(model))]


def clusters(
    optimizers: Iterable[torch.optim.Optimizer], models: Sequence[nn.Module]
) -> list[Cluster]:
    """Group ``optimizers`` that share a model, each group with its models."""
    groups: list[Cluster] = []
    for optimizer in optimizers:
        joined = Cluster([optimizer], models_of(optimizer, models))
        for cluster in [c for c in groups if not set(joined.models).isdisjoint(c.models)]:
            groups.remove(cluster)
            models_once = dict.fromkeys(cluster.models + joined.models)
            joined = Cluster(cluster.optimizers + joined.optimizers, list(models_once))
        groups.append(joined)
    return groups


def with_buffers(config: ShardcastConfig, broadcast: bool) -> ShardcastConfig:
    """Set ``broadcast_buffers`` to a framework's DDP setting, unless ``config`` sets it."""
    named = "broadcast_buffers" in config.named
    return config if named else config.replace(broadcast_buffers=broadcast)


def check_loss_scales(configs: Sequence[ShardcastConfig]) -> None:
    """Check that separately sharded optimizers can share one loss scale, as a framework needs.

    Raises:
        ValueError: their loss scales differ, or may differ later.
    """
    scales = {
        "dynamic" if c.loss_scale is None and c.param_dtype == torch.float16 else c.loss_scale
        for c in configs
    }
    if len(configs) > 1 and (len(scales) > 1 or "dynamic" in scales):
        raise ValueError(
            "loss_scale: expected one fixed number for several separately sharded optimizers, "
            f"got {', '.join(map(str, scales))}: each would have its own scale, and a backward "
            "does not say whose loss it gets. Set loss_scale in the shardcast configuration, or "
            "train in bf16"
        )


def scale_loss(optimizers: Sequence[ShardedOptimizer], loss: Tensor) -> Tensor:
    """Return ``loss`` times the common loss scale, see :func:`check_loss_scales`."""
    scaled = [optimizer.scale_loss(loss) for optimizer in optimizers]
    return scaled[0] if scaled else loss


def divides_by_tokens(optimizers: Sequence[ShardedOptimizer]) -> bool:
    """Return whether a step divides by counted tokens; a framework must then not divide."""
    return any(packed_of(sharded).decider.tokens.counted for sharded in optimizers)


def exact_state(
    state: dict[str, Any], optimizer: ShardedOptimizer, prefix: str = ""
) -> dict[str, Any]:
    """Return the ``state`` of a model with masters as parameters, on rank 0. Collective.

    Parameters that were written since the last step (weight averaging, a load) stay as in
    ``state``.

    Args:
        prefix: prefix of the model's names in the model that was passed to :func:`shardcast.shard`.
    """
    masters = {bare_name(name): value for name, value in optimizer.full_parameters().items()}
    layouts = [shard.pack.layout for shard in packed_of(optimizer).shards]
    formed = [(bare_name(slot.name), it.cast) for it in layouts if it.cast for slot in it.slots]
    forms = {id(masters[name]): form for name, form in formed if name in masters}  # of ties, too

    def exact(name: str, value: Any) -> Any:
        master = masters.get(bare_name(prefix + name))  # a module's state may use other names
        if master is None or not isinstance(value, Tensor) or value.shape != master.shape:
            return value
        form = forms.get(id(master))
        published = master.to(value.dtype) if form is None else FORMS[form].round(master)
        same = torch.equal(published.to(value.dtype), value.to(master.device))
        return master if same else value

    return {name: exact(name, value) for name, value in state.items()}


def called_on_all_ranks(call: str) -> bool:
    """Return whether all ranks make ``call``, a name that is equal on them and used only once.

    A script may save on rank 0 alone, which is enough under DDP. So rank 0 waits :data:`PATIENCE`
    for the other ranks, and then tells them the result. No rank starts a collective that another
    rank leaves out.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    store, rank = groups.default_store(), dist.get_rank()
    place = f"shardcast/{call}"
    store.set(f"{place}/{rank}", "")
    if rank == 0:
        try:
            store.wait([f"{place}/{each}" for each in range(dist.get_world_size())], PATIENCE)
            store.set(place, "all ranks")
        except RuntimeError:  # DistStoreError; RuntimeError in older torch
            store.set(place, "some ranks")
    return bool(store.get(place) == b"all ranks")
