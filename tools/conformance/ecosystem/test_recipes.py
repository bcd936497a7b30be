"""Every recipe equals DDP in fp32 and is as close as autocast in bf16, or raises an error."""

from __future__ import annotations

import frameworks
import loops
import mistakes
import optimizers
import patterns
import published
import pytest
import resuming
import shipped_generative
import shipped_learning
import shipped_loops
import shipped_rl
import shipped_science
import shipped_tables
import trainers
from harness import compare, difference, raised, run
from recipes import ENTRIES, Entry, Row

assert all((frameworks, loops, mistakes, optimizers, patterns, published, resuming, trainers))
assert all((shipped_generative, shipped_learning, shipped_loops, shipped_rl, shipped_science))
assert shipped_tables
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_a_script_trains_as_under_ddp_or_is_refused(entry: Entry, rows: list[Row]):
    if entry.error is not None:
        rows.append(Row(entry, None))
        run(entry.train, ["ddp"])  # without shardcast the script is right
        assert raised(entry.train, "bf16", entry.error, entry.match) == [True, True]
        if not any(fp32 := raised(entry.train, "fp32", entry.error, entry.match)):
            assert difference(entry.train, "fp32") <= entry.fp32
        assert fp32[0] == fp32[1]
        return
    figures = compare(entry.train)
    rows.append(Row(entry, figures))
    print(entry.train.__name__, figures)
    if entry.warned:
        assert any(entry.warned in text for text in figures.warnings), figures.warnings
        return
    assert figures.fp32 <= entry.fp32
    assert figures.loss_fp32 <= max(1e-4, 10 * entry.fp32)
    assert figures.ranks == 0.0
    assert figures.ratio <= entry.ratio
