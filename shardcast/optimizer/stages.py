"""The stages of a pipeline that one rank holds, as one tree of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from shardcast.comm import warn_first


class Stages(nn.Module):
    """Several stages, named as in the whole model; it is never called."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self._stages = tuple(stages)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all stages; torch finds parameters and buffers by it."""
        memo = set() if memo is None else memo
        for stage in self._stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)


def joined(stages: Sequence[nn.Module]) -> nn.Module:
    """One stage itself; of several a module that holds what they hold.

    Raises:
        ValueError: two stages have different parameters under one name.
    """
    if len(stages) == 1:
        return stages[0]
    root = Stages(stages)
    params: dict[str, nn.Parameter] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        if params.setdefault(name, param) is not param:
            raise ValueError(
                f"model: two pipeline stages of this rank have a tensor named {name!r}; keep the "
                "names of the whole model, as when layers of a copy of it are deleted"
            )
    holders = Counter(param for stage in stages for param in set(stage.parameters()))
    if any(count > 1 and param.requires_grad for param, count in holders.items()):
        warn_first(
            "model: two pipeline stages of this rank share a Parameter, whose gradient torch's "
            "schedules divide once for each stage: pass scale_grads=False to the schedule and "
            "divide the loss"
        )
    return root


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
