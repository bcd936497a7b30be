"""``published``: parameters that lie on the grid of a quantized form, decided once by their owner.

The owner of a block rounds its new fp32 masters in every step, and nobody else has to: forward,
recomputation, every micro-batch and whoever reads the weights see the same bf16 numbers, which are
codes times powers of two (:mod:`.forms`). The gradient at them goes to the master.
"""

from shardcast.extensions.published_forms.option import OPTION

__all__ = ["OPTION"]
