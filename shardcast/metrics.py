"""Results of ``optimizer.metrics()``, for people and for loggers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Metrics", "flat", "worst"]

Metrics = Mapping[str, Mapping[str, Tensor]]
"""0-dim tensors on the device, by parameter and name of the metric."""


def flat(metrics: Metrics) -> dict[str, float]:
    """Flatten to ``{"update_norm/layer.weight": 0.01, ...}`` for a logger.

    Local; waits for the device.
    """
    tensors = {
        f"{metric}/{name}": value
        for name, numbers in metrics.items()
        for metric, value in numbers.items()
    }
    values = torch.stack([*tensors.values()]).tolist() if tensors else []
    return dict(zip(tensors, values, strict=True))


def worst(metrics: Metrics, by: str = "update_to_weight", count: int = 10) -> str:
    """Return a table of the ``count`` parameters whose metric ``by`` is largest.

    Local; waits for the device.

    Raises:
        ValueError: there is no such metric.
    """
    values = flat(metrics)
    names = list(next(iter(metrics.values()), {}))
    if names and by not in names:
        raise ValueError(f"by: expected one of {', '.join(names)}, got {by!r}")

    def size(name: str) -> float:
        value = values[f"{by}/{name}"]
        return value if value == value else float("inf")  # NaN sorts first

    chosen = sorted(metrics, key=size, reverse=True)[:count]
    rows = [("parameter", *names)]
    rows += [(name, *(f"{values[f'{metric}/{name}']:.3g}" for metric in names)) for name in chosen]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows
    )
