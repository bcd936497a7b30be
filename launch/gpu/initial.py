"""Initial weights of a CUDA run, made on a host: a GPU's random numbers, in NumPy.

    PYTHONPATH=.:launch python -m gpu.initial --model "125 M"                   # train on this host
    PYTHONPATH=.:launch python -m gpu.initial --model "760 M" --system sharded --warmup 1

Both train on this host with the initial weights and the batch of ``end_to_end`` on a GPU, and print
the losses. Losses can be compared across devices only if the initial weights are equal. 760 M
parameters take about 20 GB and half an hour on two cores.

torch draws numbers on a GPU with Philox 4x32-10. Each thread of the grid draws four at a time, for
elements one grid apart, so the numbers depend on the GPU's number of multiprocessors. Normal
numbers come from Box-Muller; a GPU's sines are less exact.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu import end_to_end
from gpu.bench import Bench

H100 = 132  # multiprocessors of the SXM card
THREADS, PER_PROCESSOR = 256, 2048 // 256  # threads per block; blocks per multiprocessor
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
WORD = np.uint64(0xFFFFFFFF)
UNIT = np.float32(2.0**-32)
ANGLE = np.float32(2 * np.pi * 2.0**-32)
NEAR = 1e-5  # tolerance for normal numbers of a GPU, whose sines are off by 1e-6
# A GPU of up to 240 multiprocessors fills a tensor of LENGTH in two rounds. PLACE is in the second.
LENGTH, PLACE = 1 << 21, 2_000_000
# By GPU: its multiprocessors, and eight numbers from PLACE of seed 0, which `environment` of a
# report prints. No report has been recorded yet.
RECORDED: dict[str, tuple[int, tuple[float, ...]]] = {}

Words = NDArray[np.uint64]


def philox(counter: Sequence[Words], key: Sequence[int]) -> tuple[Words, Words, Words, Words]:
    """Return the four words of each counter, ten rounds of Philox 4x32.

    Args:
        counter: four arrays of words, which broadcast.
        key: two words.
    """
    first, second, third, fourth = counter
    keys = [np.uint64(word) for word in key]
    multipliers = [np.uint64(multiplier) for multiplier in MULTIPLIERS]
    high = np.uint64(32)
    for _ in range(10):
        one, other = first * multipliers[0], third * multipliers[1]
        first, third = (other >> high) ^ second ^ keys[0], (one >> high) ^ fourth ^ keys[1]
        second, fourth = other & WORD, one & WORD
        keys = [(word + np.uint64(step)) & WORD for word, step in zip(keys, WEYL, strict=True)]
    return first, second, third, fourth


def normal(words: tuple[Words, Words, Words, Words]) -> NDArray[np.float32]:
    """Return four rows of normal numbers from two pairs of words."""
    rows: list[NDArray[np.float32]] = []
    for size, angle in (words[:2], words[2:]):
        uniform = size.astype(np.float32) * UNIT + UNIT / 2
        turn = (angle.astype(np.float32) * np.float64(ANGLE) + ANGLE / 2).astype(np.float32)
        radius = np.sqrt(np.float32(-2) * np.log(uniform))
        rows += [radius * np.sin(turn), radius * np.cos(turn)]
    return np.stack(rows)


def uniform(words: tuple[Words, Words, Words, Words]) -> NDArray[np.float32]:
    """Return four rows of uniform numbers in (0, 1]."""
    return np.stack([word.astype(np.float32) * UNIT + UNIT / 2 for word in words])


class CudaRandom(TorchDispatchMode):
    """Mode in which host tensors are filled with a GPU's random numbers, as after ``manual_seed``.

    Args:
        processors: multiprocessors of the GPU.
    """

    def __init__(self, seed: int = 0, processors: int = H100) -> None:
        super().__init__()
        self._key = seed & int(WORD), seed >> 32
        self._blocks = processors * PER_PROCESSOR
        self._drawn = 0  # counters that each thread has used for earlier tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.normal_.default:
            tensor, mean, std = (*args, *(0.0, 1.0)[len(args) - 1 :])
            return self._fill(tensor, normal).mul_(std).add_(mean)
        if func is torch.ops.aten.uniform_.default:
            tensor, low, high = (*args, *(0.0, 1.0)[len(args) - 1 :])
            self._fill(tensor, uniform).mul_(high - low).add_(low)
            return tensor.masked_fill_(tensor == high, low)
        return func(*args, **(kwargs or {}))

    def _fill(self, tensor: Tensor, draw: Any) -> Tensor:
        """Write the next numbers into a contiguous fp32 tensor, one round of the grid at a time."""
        flat, count = tensor.view(-1), tensor.numel()
        if tensor.dtype != torch.float32 or count * tensor.itemsize >= 1 << 31:
            raise ValueError("tensor: expected fp32 of less than 2 GiB, which one kernel fills")
        threads = THREADS * min(-(-count // THREADS), self._blocks)
        thread, zero = np.arange(threads, dtype=np.uint64), np.zeros(1, dtype=np.uint64)
        for start in range(0, count, 4 * threads):
            counter = np.full(1, self._drawn, dtype=np.uint64)
            words = philox((counter & WORD, counter >> np.uint64(32), thread, zero), self._key)
            values = torch.from_numpy(draw(words)).view(-1)[: count - start]
            flat[start : start + len(values)].copy_(values)
            self._drawn += 1
        return tensor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = {**end_to_end.MODELS, **end_to_end.TINY}
    systems = {"autocast": end_to_end.plain, "sharded": end_to_end.sharded}
    parser.add_argument("--model", choices=models, default="125 M")
    parser.add_argument("--system", choices=systems, default="autocast")
    parser.add_argument("--processors", type=int, default=H100, help="multiprocessors of the GPU")
    parser.add_argument("--perturb", type=float, default=0.0, help="weights x (1 + this x N(0, 1))")
    parser.add_argument("--warmup", type=int, default=end_to_end.WARMUP, help="steps; 1: none")
    args = parser.parse_args()
    config, batch = models[args.model]
    bench = Bench(True, Path("unused.json"))
    with CudaRandom(0, args.processors):
        model = end_to_end.GPT(config)
    end_to_end.perturb(model, args.perturb, seed=1)
    x, y = end_to_end.tokens(bench, batch, config.context, config.vocabulary)
    forward, optimizer = systems[args.system](model, bench.device)
    for loss in end_to_end.losses(forward, optimizer, x, y, args.warmup):
        print(f"{loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
