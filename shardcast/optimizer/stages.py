"""The stages of a pipeline that one rank holds, as one tree of modules with their own names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def joined(stages: Sequence[nn.Module]) -> nn.Module:
    """One stage itself; of several a module that is never called, and holds what they hold.

    Raises:
        ValueError: two stages have something under one name.
    """
    if len(stages) == 1:
        return stages[0]
    root = nn.Module()
    for stage in stages:
        _graft(root, stage, "")
    return root


def _graft(target: nn.Module, source: nn.Module, prefix: str) -> None:
    for name, param in source.named_parameters(recurse=False):
        _check_free(
            dict(target.named_parameters(recurse=False)).get(name, param), param, prefix, name
        )
        target.register_parameter(name, param)
    for name, buffer in source.named_buffers(recurse=False):  # such as tables that all stages have
        if name not in dict(target.named_buffers(recurse=False)):
            target.register_buffer(name, buffer, name not in source._non_persistent_buffers_set)
    for name, child in source.named_children():
        there = dict(target.named_children()).get(name, child)
        if there is child:
            target.add_module(name, child)
        else:
            both = nn.Module()  # neither stage's own is touched
            _graft(both, there, f"{prefix}{name}.")
            _graft(both, child, f"{prefix}{name}.")
            target.add_module(name, both)


def _check_free(there: Tensor, mine: Tensor, prefix: str, name: str) -> None:
    if there is not mine:
        raise ValueError(
            f"model: two pipeline stages of this rank have a tensor named {prefix + name!r}; keep "
            "the names of the whole model, as when layers of a copy of it are deleted"
        )
