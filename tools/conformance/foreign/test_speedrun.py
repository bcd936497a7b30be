"""modded-nanogpt's simple speedrun: its own sharding compared with shardcast, on a tiny model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import speedrun
from evidence import Suite, Verdict

STEPS = 20
SUITE = Suite(
    name="modded-nanogpt",
    claim=(
        f"{STEPS} steps of a tiny model on two CPU processes, with its own sharding of Muon and "
        "with shardcast (`tools/speedrun.py`). Each case lists the largest difference between "
        "the two validation losses in any step"
    ),
    source="KellerJordan/modded-nanogpt",
    commit=speedrun.COMMIT,
    blob=speedrun.BLOB,
    path=speedrun.PATH,
    license="MIT",
    cases=3,
    replaced=speedrun.SHARDED,
)
WHOLE = dataclasses.replace(SUITE, replaced={})
CASES = {  # edits of both, shardcast's options, tolerance of losses
    "fp32": (speedrun.FP32, {"param_dtype": "fp32"}, 1e-5),
    "bf16, with an fp32 master of the embedding": (
        speedrun.BF16,
        {"param_dtype": "bf16", "grad_dtype": "fp32"},
        1e-3,
    ),
    "unchanged, with embedding and moments in bf16": ({}, {"param_dtype": "bf16"}, 1e-3),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_a_speedrun_has_the_losses_of_its_own_sharding(
    case: str, tmp_path: Path, sources: Path | None, verdicts: list[Verdict]
) -> None:
    edits, options, apart = CASES[case]
    data = tmp_path / "tokens"
    speedrun.write_data(data, STEPS, tiny=True)
    steps = {"train_steps = 3250": f"train_steps = {STEPS}"}
    text = WHOLE.text(sources)
    common = [steps, speedrun.ON_CPU, speedrun.TINY, edits]
    own, sharded = speedrun.beside(text, tmp_path, data, 2, common, options).values()
    assert [*own] == [*sharded] == [*range(STEPS + 1)]
    assert own[STEPS][0] < own[0][0] - 0.5  # it learns
    worst = max(abs(own[step][0] - sharded[step][0]) for step in own)
    ends = f"loss {own[0][0]:.3f} falls to {own[STEPS][0]:.4f}, with shardcast to "
    ends += f"{sharded[STEPS][0]:.4f}"
    told = f"{ends}; " + (f"at most {worst:.1g} apart" if worst else "equal in all printed digits")
    assert worst <= apart, told
    verdicts.append(Verdict(SUITE, case, "passed", f"{case}: {told}"))
