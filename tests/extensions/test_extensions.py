"""The examples of CONTRIBUTING.md run."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from models import CASES, assert_same_bits, run_world, sharded, train, values

from shardcast import ShardcastConfig, checkpoint, option_values
from shardcast.comm import REDUCTIONS
from shardcast.extensions import low_moments
from shardcast.optimizer.sharded import packed_of

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
EXAMPLES = re.findall(
    r"```python\n# extensions/(\w+)\.py, registered as +([^\n]*)\n(.*?)```", TEXT, re.DOTALL
)
LINES = re.findall(r'```python\n# \S+, a line of (\w+) +"(\w+)": (\w+)\n(.*?)```', TEXT, re.DOTALL)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> type[ShardcastConfig]:
    """Add the options and modules of the examples to the configuration."""
    fields: list[tuple[str, Any, Any]] = []
    for name, line, source in EXAMPLES:
        module = ModuleType(f"shardcast.extensions.{name}")
        exec(compile(source, f"{name}.py", "exec"), vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        declared = re.fullmatch(r"(\w+): (\w+) = (.*)", line)
        assert declared is not None and declared[1] == name
        fields.append((name, declared[2], eval(declared[3], vars(option_values).copy())))
    kind: Any = dataclasses.make_dataclass("Config", fields, bases=(ShardcastConfig,), frozen=True)
    return kind  # type: ignore[no-any-return]


def test_there_is_an_example_of_each_protocol_of_at_most_forty_lines():
    assert [name for name, _, _ in EXAMPLES] == ["veto", "norms", "mean_weights"]
    assert [table for table, _, _, _ in LINES] == ["CODECS", "REDUCTIONS"]
    assert all(len(each[-1].splitlines()) < 40 for each in EXAMPLES + LINES)


def example(table: str) -> tuple[str, Any]:
    """Return the name and the class of the example for a table."""
    ((name, kind, source),) = (line for each, *line in LINES if each == table)
    module = ModuleType(name)
    exec(compile(source, "CONTRIBUTING.md", "exec"), vars(module))
    return name, vars(module)[kind]


def trained(group: Any, **options: Any) -> tuple[Any, Any]:
    """Return the model and its optimizer after some steps."""
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, **options)
    train(model, optimizer, range(3))
    return model, optimizer


def test_the_signal_of_one_rank_has_a_step_skipped_on_all(config: type[ShardcastConfig]):
    def run(group: Any) -> int:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, config=config(veto=True))
        for step in range(3):
            before = values(model)
            packed_of(optimizer).decider.signal_of("veto").vetoed = step == 1 and group.rank() == 1
            train(model, optimizer, [step])
            same = all(map(torch.equal, values(model).values(), before.values()))
            assert same == (step == 1)
        return optimizer.skipped_steps

    with pytest.warns(UserWarning, match="step skipped by a veto"):
        assert run_world(2, run)[0] == [1, 1]


def test_the_step_hook_keeps_norms_over_a_checkpoint(config: type[ShardcastConfig], tmp_path: Path):
    def run(group: Any) -> None:
        case, given, norms = CASES["mlp"], config(norms=2), list[Any]()
        model = case.build()
        optimizer = sharded(model, group, config=given)
        assert optimizer.memory_report()["norms"] == 16
        for step in range(3):
            train(model, optimizer, [step])
            norms.append(optimizer.grad_norm)
        kept = packed_of(optimizer).hook_of("norms").last
        torch.testing.assert_close(kept.float(), torch.stack(norms[1:]), rtol=0, atol=0)
        checkpoint.save(tmp_path, model, optimizer, step=3)
        again = case.build()
        other = sharded(again, group, config=given)
        resumed = packed_of(other).hook_of("norms")
        checkpoint.load(tmp_path, again, other)
        assert torch.equal(resumed.last, kept)
        resumed.last.zero_()
        other.load_state_dict(optimizer.state_dict())
        assert torch.equal(resumed.last, kept)

    run_world(2, run)


def test_the_epilogue_keeps_the_mean_of_the_weights(config: type[ShardcastConfig], tmp_path: Path):
    def run(group: Any) -> None:
        model, steps = CASES["mlp"].build(), list[Any]()
        optimizer = sharded(model, group, config=config(mean_weights=True))
        for step in range(4):
            train(model, optimizer, [step])
            steps.append(optimizer.full_parameters())
        checkpoint.save(tmp_path / "saved", model, optimizer, step=4)
        if group.rank() == 0:
            checkpoint.export(tmp_path / "saved", tmp_path / "out", weights="mean")
            means = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
            for name, mean in means.items():
                expected = torch.stack([weights[name] for weights in steps]).mean(0)
                torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-7)

    run_world(2, run)


def test_the_codec_keeps_moments_in_half_the_bytes_and_what_it_has_decoded(
    monkeypatch: pytest.MonkeyPatch,
):
    name, kind = example("CODECS")
    monkeypatch.setitem(low_moments.CODECS, name, kind)
    within = option_values.one_of("fp32", *low_moments.CODECS)
    monkeypatch.setattr(low_moments, "OPTION", low_moments.OPTION._replace(within=within))
    values = torch.cat([torch.randn(50, 64), torch.zeros(1, 64), 1e-12 * torch.randn(1, 64)])
    for codec, given in ((kind(), values), (kind(signed=False), values.square())):
        pieces = codec.encode(given, None)
        assert all(map(torch.equal, codec.encode(codec.decode(pieces), None), pieces))

    def run(group: Any) -> None:
        (model, low), (exact, optimizer) = trained(group, moments=name), trained(group)
        assert low.memory_report()["state"] < 0.6 * optimizer.memory_report()["state"]
        for weight, expected in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=2e-2, atol=1e-3)

    run_world(2, run)


def test_the_reduction_brings_what_an_all_to_all_brings(monkeypatch: pytest.MonkeyPatch):
    name, kind = example("REDUCTIONS")
    monkeypatch.setitem(REDUCTIONS, name, kind)  # type: ignore[arg-type]
    declared = ShardcastConfig.__dataclass_fields__["reduce"]
    words = {**declared.metadata, "range": option_values.one_of("all_to_all", name)}
    monkeypatch.setattr(declared, "metadata", words)

    def run(group: Any) -> None:
        own, optimizer = trained(group, reduce=name)
        assert {pack.algorithms.reduce for pack in optimizer.layout.packs} == {name}
        assert_same_bits(values(own), values(trained(group, reduce="all_to_all")[0]))

    run_world(2, run)
