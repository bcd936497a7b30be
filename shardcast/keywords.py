"""The options of :class:`.ShardcastConfig` as keywords, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from shardcast.option_values import CostFn, GroupFn, KeepRule


class Keywords(TypedDict, total=False):
    """The options as keywords; ``tests/test_config.py`` compares them with the config.

    Beyond the type that the config has in the end these are names of dtypes, single items in place
    of sequences, and mappings.
    """

    param_dtype: torch.dtype | str
    keep_fp32: KeepRule | Sequence[KeepRule]
    cast_forward_inputs: bool
    autocast: bool
    convert_rest: bool
    fp32_outputs: str | Sequence[str]
    cast_buffers: bool
    broadcast_buffers: bool | str | Sequence[str]
    grad_dtype: torch.dtype | str | None
    reduce_dtype: torch.dtype | str | None
    partition: str
    elementwise: bool | None
    shard_ranks: str | int
    pack_mb: float | None
    pack_params: int | None
    unpacked_first: int
    alignment: int
    group_fn: GroupFn | None
    cost_fn: CostFn | None
    max_grad_norm: float | None
    norm_type: float
    loss_scale: str | float | None
    loss_scale_init: float
    loss_scale_growth_interval: int
    max_skipped_steps: int
    guard: Mapping[str, Any] | Callable[[Tensor, Tensor | None], Tensor] | None
    on_error: str | Mapping[str, Any]
    accumulate: str
    master: str
    moments: str
    metrics: bool | int
    replica_check: int
    offload: bool
    averages: Mapping[str, Any]
    published: Mapping[str, str | Sequence[str]] | None
    changes: bool
    reduce: str
    sync: str
    overlap_sync: bool
    fuse: str
