"""``gpu.initial``: the random numbers of a GPU on a host, without one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gpt import GPT, GPTConfig
from gpu.initial import LENGTH, NEAR, PLACE, RECORDED, CudaRandom, philox
from torch import nn

# Random123's kat_vectors of philox4x32 with 10 rounds: counter, key, and what comes out.
VECTORS = (
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
)
# First numbers of torch.randn(n, device="cuda") that others printed, by seed, rounded as printed:
# of 64 numbers, and of 131,072 of an issue of torch on numbers that differ between machines.
PRINTED = [
    (0, 64, "-0.9247 -0.4253 -2.6438 0.1452 -0.1209 -0.5797 -0.6229 -0.3284 -1.0745 -0.3631"),
    (42, 131_072, "0.1940 2.1614 -0.1721"),
]


def test_philox_has_the_public_vectors():
    words = np.array([[int(word, 16) for word in line.split()] for line in VECTORS], np.uint64)
    for line in words:
        out = philox([line[i : i + 1] for i in range(4)], [int(word) for word in line[4:6]])
        assert [int(word[0]) for word in out] == line[6:].tolist()
    several = philox([words[:2, i] for i in range(4)], [0, 0])  # counters side by side
    assert [int(word[0]) for word in several] == words[0, 6:].tolist()


def drawn(count: int, seed: int = 0, **options: int) -> torch.Tensor:
    with CudaRandom(seed, **options):
        return torch.empty(count).normal_()


@pytest.mark.parametrize(("seed", "count", "printed"), PRINTED)
def test_the_first_numbers_are_those_that_gpus_print(seed: int, count: int, printed: str):
    expected = [float(number) for number in printed.split()]
    found = drawn(count, seed)[: len(expected)].tolist()
    assert found == pytest.approx(expected, abs=5e-5 + NEAR)


@pytest.mark.parametrize("name", RECORDED)
def test_numbers_of_the_second_round_are_those_of_a_gpu(name: str):
    processors, numbers = RECORDED[name]
    found = drawn(LENGTH, processors=processors)[PLACE : PLACE + len(numbers)].tolist()
    assert found == pytest.approx(numbers, abs=1e-6 + NEAR)


def test_a_thread_draws_four_numbers_one_grid_apart():
    """By hand: the numbers of thread 5 in two rounds, and of another one in a second tensor."""
    threads = 2048  # of one multiprocessor
    with CudaRandom(7, processors=1):
        first, second = torch.empty(5 * threads).normal_(), torch.empty(300).normal_()

    def by_hand(counter: int, thread: int) -> list[float]:
        words = philox([np.array([n], np.uint64) for n in (counter, 0, thread, 0)], (7, 0))
        found = []
        for size, turn in ((words[0], words[1]), (words[2], words[3])):
            radius = math.sqrt(-2 * math.log((int(size[0]) + 0.5) / 2**32))
            angle = 2 * math.pi * (int(turn[0]) + 0.5) / 2**32
            found += [radius * math.sin(angle), radius * math.cos(angle)]
        return found

    numbers = by_hand(0, 5) + by_hand(1, 5)[:1]
    found = [first[row * threads + 5].item() for row in range(5)]
    assert found == pytest.approx(numbers, abs=1e-5)
    # Two rounds were drawn; 300 numbers need two blocks of 256 threads, the first of each thread.
    assert second[299].item() == pytest.approx(by_hand(2, 299)[0], abs=1e-5)


def test_a_model_begins_with_what_its_own_initialization_draws():
    """Each layer draws by itself first, and is initialized anew: the generator goes on."""
    with CudaRandom(0):
        model = GPT(GPTConfig(64, 16, 32, 2, 2))
    with CudaRandom(0):
        layers = [nn.Linear(32, 32), nn.Linear(32, 32)]
    weights = [param for name, param in model.named_parameters() if name.endswith("mlp.0.weight")]
    assert len(weights) == 2 and not torch.equal(*weights)
    assert all(0.018 < weight.std() < 0.022 and weight.mean().abs() < 2e-3 for weight in weights)
    bound = 1 / math.sqrt(32)
    for layer in layers:
        assert layer.weight.abs().max() <= bound and layer.bias.abs().max() <= bound
    assert not torch.equal(layers[0].weight, layers[1].weight)


def test_what_is_no_kernel_of_fp32_is_refused():
    with CudaRandom(), pytest.raises(ValueError, match="fp32"):
        torch.empty(4, dtype=torch.float64).normal_()
