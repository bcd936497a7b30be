"""The training program for grids of ranks: its stages, its flags, and the comparison of runs."""

from __future__ import annotations

import copy

import pytest
import torch
from gpt import GPT, GPTConfig
from train_hybrid import parse_arguments

TINY = GPTConfig(context=16, width=32, depth=5, heads=2, tie_head=True)


def stages_of(network: GPT, count: int) -> list[GPT]:
    return [copy.deepcopy(network).keep(number, count) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_one_after_the_other_are_the_whole_model(count: int) -> None:
    network = GPT(TINY)
    tokens = torch.randint(256, (2, 16))
    x = tokens
    for stage in stages_of(network, count):
        x = stage(x)
    assert torch.equal(x, network(tokens))
    names = [name for stage in stages_of(network, count) for name, _ in stage.named_parameters()]
    tied = ["head.weight"] * (count > 1)
    assert sorted(names) == sorted([*dict(network.named_parameters()), *tied])
    with pytest.raises(ValueError, match="6 pipeline stages need as many blocks, there are 5"):
        network.keep(0, 6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--baseline --dp 2", "--baseline: it runs in one process"),
        ("--dp 3", "--micro-batches 8 is not a multiple of --dp 3"),
        ("--tp 3", "--heads 4 is not a multiple of --tp 3"),
    ],
)
def test_a_grid_that_does_not_fit_is_an_error(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(flags.split())
    assert message in capsys.readouterr().err
