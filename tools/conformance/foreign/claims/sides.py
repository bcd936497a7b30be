"""The two sides that a claim is checked on: shardcast and, as a control, FSDP2 itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

import shardcast

Kind = Callable[..., torch.optim.Optimizer]


class FSDP2:
    """``fully_shard`` on some modules and on the model, then the optimizer."""

    whole = staticmethod(lambda tensor: whole(tensor))

    def shard(
        self,
        model: nn.Module,
        kind: Kind = torch.optim.Adam,
        modules: Sequence[Any] = (),
        lr: float = 1e-2,
        low: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        offload: bool = False,
        replicas: int = 1,
        mesh: Any = None,
        dp: Any = None,
        norm_type: float = 2,
        fp32_outputs: str | None = None,
    ) -> Any:
        policy = MixedPrecisionPolicy(low, reduce)
        if fp32_outputs is not None:
            policy = MixedPrecisionPolicy(low, reduce, torch.float32, False)
        options: dict[str, Any] = {"mp_policy": policy}
        options["offload_policy"] = CPUOffloadPolicy(False) if offload else OffloadPolicy()
        if replicas > 1:
            shape = (replicas, dist.get_world_size() // replicas)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        if mesh is not None:
            options["mesh"] = mesh[dp]
        for module in modules:
            fully_shard(module, **options)
        fully_shard(model, **options)
        return kind(model.parameters(), lr=lr)

    def shard_low(self, model: nn.Module, modules: Sequence[Any], low: torch.dtype) -> None:
        """Shard a model with some modules in low precision."""
        for module in modules:
            fully_shard(module, mp_policy=MixedPrecisionPolicy(low))
        fully_shard(model)

    def used(self, module: Any, name: str) -> Tensor:
        """Return the parameter that a forward has used."""
        group = fully_shard.state(module)._fsdp_param_groups[0]
        return next(
            p for p in group.fsdp_params if p._module_info.param_name == name
        )._unsharded_param

    def weights(self, model: nn.Module, optimizer: Any) -> list[Tensor]:
        return [whole(param.detach()) for param in model.parameters()]

    def grads(self, model: nn.Module, optimizer: Any) -> list[Tensor | None]:
        return [None if p.grad is None else whole(p.grad) for p in model.parameters()]

    @contextmanager
    def micro_batch(self, model: Any, optimizer: Any, is_last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(is_last)
        yield

    def clip(self, model: nn.Module, optimizer: Any, max_norm: float, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def reset(self, model: Any) -> None:
        """Clear the state of a failed forward."""
        model.reset_iter_state()

    def announce(self, module: nn.Module, method: str) -> None:
        """Register a method other than ``forward`` that uses parameters."""
        register_fsdp_forward_method(module, method)


class Shardcast:
    """``shardcast.shard`` of the whole model; it ignores FSDP2's groups of modules."""

    whole = staticmethod(lambda tensor: whole(tensor))

    def shard(
        self,
        model: nn.Module,
        kind: Kind = torch.optim.Adam,
        modules: Sequence[Any] = (),
        lr: float = 1e-2,
        low: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        offload: bool = False,
        replicas: int = 1,
        mesh: Any = None,
        dp: Any = None,
        **options: Any,
    ) -> Any:
        options = {"param_dtype": low or torch.float32, "autocast": False, **options}
        options |= {"fuse": "eager", "offload": offload}
        # Sums are always in fp32; this keeps the mean in fp32, too, as FSDP2's reduce_dtype does.
        if reduce == torch.float32:
            options.setdefault("grad_dtype", reduce)
        if replicas > 1:
            options["shard_ranks"] = dist.get_world_size() // replicas
        if mesh is not None:
            options |= {"mesh": mesh, "dp": dp}
        optimizer = kind(model.parameters(), lr=lr)
        return shardcast.shard(model, optimizer, **options)

    def shard_low(self, model: nn.Module, modules: Sequence[Any], low: torch.dtype) -> None:
        """Shard a model with some modules in low precision and all others in fp32."""
        within = {id(param) for module in modules for param in module.parameters()}
        others = [name for name, p in model.named_parameters() if id(p) not in within]
        self.shard(model, low=low, keep_fp32=others)

    def used(self, module: Any, name: str) -> Tensor:
        return getattr(module, name)

    def weights(self, model: nn.Module, optimizer: Any) -> list[Tensor]:
        """Return the masters, after a comparison with the model's parameters."""
        masters = [optimizer.full_parameters()]
        dist.broadcast_object_list(masters, src=0)
        for name, param in model.named_parameters():
            masters[0].setdefault(name, param.detach())  # frozen: no master
            torch.testing.assert_close(masters[0][name].to(param.dtype), param.detach())
        return [masters[0][name] for name, _ in model.named_parameters()]

    def grads(self, model: nn.Module, optimizer: Any) -> list[Tensor | None]:
        optimizer.gather_gradients()
        return [param.grad for param in model.parameters()]

    @contextmanager
    def micro_batch(self, model: Any, optimizer: Any, is_last: bool) -> Iterator[None]:
        if is_last:
            yield
        else:
            with optimizer.no_sync():
                yield

    def clip(self, model: nn.Module, optimizer: Any, max_norm: float, norm_type: float) -> Tensor:
        return optimizer.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def reset(self, model: Any) -> None:
        """No operation: a failed forward needs no reset."""

    def announce(self, module: nn.Module, method: str) -> None:
        """No operation: parameters are unsharded in every method."""


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


SIDES = {"FSDP2": FSDP2, "shardcast": Shardcast}


class Claim:
    """The claim of a test, and the number of ranks that the test uses on CPUs."""

    def __init__(self, world: int, claim: Callable[[Any], None], without: str, control: str):
        self.world, self.claim, self.without, self.control = world, claim, without, control


def claim(
    world: int, without: str = "", control: str = ""
) -> Callable[[Callable[[Any], None]], Claim]:
    """Decorator: turn a function of a side into a claim.

    Args:
        without: parts of the test that are left out, such as those about shards of parameters.
        control: why the claim is not run on FSDP2.
    """
    return lambda function: Claim(world, function, without, control)


def claims_in(*members: dict[str, Any]) -> dict[str, Claim | str]:
    """Return the claims of some modules by the names of the tests."""
    return {name: it for given in members for name, it in given.items() if isinstance(it, Claim)}
