"""Parts that the adapters of frameworks share: what is sharded together, models saved in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcast._compat import groups
from shardcast.config import ShardcastConfig
from shardcast.optimizer.sharded import ShardedOptimizer, packed_of

PATIENCE = timedelta(seconds=60)  # for other ranks that may be in a call, too


def following(
    config: ShardcastConfig, option: str, value: str, dtype: torch.dtype, *, mixed: bool | None
) -> ShardcastConfig:
    """The configuration under a framework whose own ``option`` asks for ``dtype``.

    A ``param_dtype`` that was not named is ``dtype``. One that was named wins over fp32, which
    is the default of every framework, and must equal any other. Likewise ``autocast`` is
    ``mixed``: whether the framework's word means autocast; ``None``: it says nothing of it.

    Raises:
        ValueError: they contradict each other.
    """
    if mixed is not None and "autocast" not in config.named:
        config = config.replace(autocast=mixed)
    if "param_dtype" not in config.named:
        return config.replace(param_dtype=dtype)
    if dtype not in (torch.float32, config.param_dtype):
        raise ValueError(
            f"{option} is {value!r} but the shardcast configuration has param_dtype "
            f"{config.to_dict()['param_dtype']!r}; give one of them, or equal ones"
        )
    return config


class Cluster(NamedTuple):
    """Optimizers that have a model in common, and all models that they train."""

    optimizers: list[torch.optim.Optimizer]
    models: list[nn.Module]


def models_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of the ``models`` that ``optimizer`` trains."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    return [model for model in models if not params.isdisjoint(model.parameters())]


def clusters(
    optimizers: Iterable[torch.optim.Optimizer], models: Sequence[nn.Module]
) -> list[Cluster]:
    """The ``optimizers`` with the models that they train, those together that share one."""
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
    """Take ``broadcast_buffers`` as a framework was told it for DDP, unless ``config`` names it."""
    named = "broadcast_buffers" in config.named
    return config if named else config.replace(broadcast_buffers=broadcast)


def check_loss_scales(configs: Sequence[ShardcastConfig]) -> None:
    """Check optimizers that are sharded apart, in a framework with one way to scale a loss.

    Raises:
        ValueError: their loss scales differ, or would in time.
    """
    scales = {
        "dynamic" if c.loss_scale is None and c.param_dtype == torch.float16 else c.loss_scale
        for c in configs
    }
    if len(configs) > 1 and (len(scales) > 1 or "dynamic" in scales):
        raise ValueError(
            "loss_scale: expected one fixed number beside several optimizers that are sharded "
            f"apart, got {', '.join(map(str, scales))}: each would change a scale of its own, and "
            "whose loss a backward gets is not known. Set loss_scale in the shardcast "
            "configuration, or train in bf16"
        )


def scale_loss(optimizers: Sequence[ShardedOptimizer], loss: Tensor) -> Tensor:
    """Return ``loss`` times the loss scale, which is one, see :func:`check_loss_scales`."""
    scaled = [optimizer.scale_loss(loss) for optimizer in optimizers]
    return scaled[0] if scaled else loss


def divides_by_tokens(optimizers: Sequence[ShardedOptimizer]) -> bool:
    """Return whether a step divides by counted tokens, so that a framework must not divide."""
    return any(packed_of(sharded).decider.tokens.counted for sharded in optimizers)


def exact_state(
    state: dict[str, Any], optimizer: ShardedOptimizer, prefix: str = ""
) -> dict[str, Any]:
    """The ``state`` of a model with the masters as parameters, on rank 0. Collective.

    A parameter that was written since the last step, by weight averaging or a load, is as in
    ``state``.

    Args:
        prefix: of the model's names in what was given to :func:`shardcast.shard`.
    """
    masters = optimizer.full_parameters()

    def exact(name: str, value: Any) -> Any:
        master = masters.get(prefix + name)  # a module may have other names in its state
        if master is None or not isinstance(value, Tensor) or value.shape != master.shape:
            return value
        same = torch.equal(master.to(value.dtype), value.to(master.device))
        return master if same else value

    return {name: exact(name, value) for name, value in state.items()}


def called_on_all_ranks(call: str) -> bool:
    """Return whether all ranks come to ``call``, a name that is equal on them and never used twice.

    A script may save on rank 0 alone, which is enough under DDP. So rank 0 waits :data:`PATIENCE`
    for the ranks, and answers them: no rank begins a collective that another one leaves out.
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
        except RuntimeError:  # DistStoreError, or an older one
            store.set(place, "some ranks")
    return bool(store.get(place) == b"all ranks")
