"""The training program for grids of ranks: its stages, its flags, and the comparison of runs."""

from __future__ import annotations

import copy

import metrics
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


def test_stages_keep_the_names_of_the_whole_model_and_share_only_the_tied_weight() -> None:
    network = GPT(TINY)
    names = [name for stage in stages_of(network, 3) for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted([*dict(network.named_parameters()), "head.weight"])


def test_more_stages_than_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="6 pipeline stages need as many blocks, there are 5"):
        GPT(TINY).keep(0, 6)


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


def losses(*values: float, corpus: str = "text") -> list[metrics.Record]:
    records = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(values)]
    return [{"kind": "run", "corpus": corpus}, *records]


def test_the_largest_difference_is_relative_and_over_common_steps() -> None:
    assert metrics.largest_difference(losses(4, 2, 1), losses(5, 3)) == (1, 0.5)
    with pytest.raises(ValueError, match="different text"):
        metrics.largest_difference(losses(1), losses(1, corpus="other"))
    with pytest.raises(ValueError, match="no step"):
        metrics.largest_difference(losses(1), losses())
