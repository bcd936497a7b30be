"""Options beside the core: the examples of CONTRIBUTING.md run, and what is off is not imported."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from commands import python
from models import CASES, assert_same_bits, run_world, sharded, values

from shardcast import ShardcastConfig, checkpoint, option_values
from shardcast.optimizer.stateful import packed_of

pytestmark = pytest.mark.timeout(60)
TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
EXAMPLES = re.findall(
    r"```python\n# extensions/(\w+)\.py, registered as +([^\n]*)\n(.*?)```", TEXT, re.DOTALL
)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> type[ShardcastConfig]:
    """The options with those of the examples, whose modules are there."""
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


def test_there_is_a_signal_and_a_step_hook_of_about_thirty_lines():
    assert [name for name, _, _ in EXAMPLES] == ["veto", "norms"]
    assert all(20 < len(source.splitlines()) < 40 for _, _, source in EXAMPLES)


def test_the_signal_of_one_rank_has_a_step_skipped_on_all(config: type[ShardcastConfig]):
    def run(group: Any) -> int:
        case = CASES["mlp"]
        model = case.build()
        optimizer = sharded(model, group, config=config(veto=True))
        for step in range(3):
            before = values(model)
            case.loss(model, case.batch(step)).backward()
            packed_of(optimizer).decider.signal_of("veto").vetoed = step == 1 and group.rank() == 1
            optimizer.step()
            optimizer.zero_grad()
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
            case.loss(model, case.batch(step)).backward()
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
        kept = packed_of(optimizer).hook_of("norms").last
        torch.testing.assert_close(kept.float(), torch.stack(norms[1:]), rtol=0, atol=0)
        checkpoint.save(tmp_path, model, optimizer, step=3)
        again = case.build()
        other = sharded(again, group, config=given)
        checkpoint.load(tmp_path, again, other)
        assert_same_bits({"norms": packed_of(other).hook_of("norms").last}, {"norms": kept})
        state = optimizer.state_dict()
        packed_of(other).hook_of("norms").last.zero_()
        other.load_state_dict(state)
        assert_same_bits({"norms": packed_of(other).hook_of("norms").last}, {"norms": kept})

    run_world(2, run)


def test_an_option_that_is_off_is_not_imported():
    script = (
        "import sys, torch, shardcast; model = torch.nn.Linear(4, 4); "
        "optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters())); "
        "model(torch.ones(1, 4)).sum().backward(); optimizer.step(); "
        "print(sorted(name for name in sys.modules if name.startswith('shardcast.extensions.')))"
    )
    done = python("-c", script)
    lookout = ["", ".lookout", ".places"]  # no option asks for it: every process has one
    expected = [f"shardcast.extensions.waiting{part}" for part in lookout]
    assert done.stdout.strip() == str(expected), done.stderr
