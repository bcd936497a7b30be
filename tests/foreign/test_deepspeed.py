"""DeepSpeed's own tests of ZeRO with backwards that the caller makes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from evidence import Suite, Verdict, run_pytest

API = Path(__file__).parent / "deepspeed_api"
SUITE = Suite(
    name="DeepSpeed",
    claim=(
        "DDP is compared with ZeRO on 2 processes; the `deepspeed` that is imported is shardcast "
        '(`tests/foreign/deepspeed_api`), stage 1 `grads="full"` and stage 2 `grads="sharded"`. '
        "Models are of fp32, with its tolerances, where a test does not name another dtype"
    ),
    source="deepspeedai/DeepSpeed",
    commit="edaa7221267243c7be7fb49c5d5f5c4fb97b4641",
    blob="1b75675491d7584de47b1d665e82f5a34e6ef9c3",
    path="tests/unit/v1/zero/test_zero_user_backward.py",
    license="Apache-2.0",
    cases=195,
    replaced={"device_ids=[rank], output_device=rank": ""},
)
WORDS = {  # of the error
    "has no room for all gradients": ("refused", "reads all gradients beside `grads: sharded`"),
    "is not what shardcast has": ("not applicable", "ZeRO-3 shards parameters, stage 0 nothing"),
}
# Their pool loses the outcome of such a test, and waits.
UNSCALED = "test_error_when_backward_without_scale"
LATER = "a loss that was not scaled is an error of `step()` on all ranks, not of the backward"


@pytest.mark.timeout(5400)
def test_the_tests_of_zero(
    tmp_path: Path, sources: Path | None, verdicts: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SUITE.text(sources)
    assert sources is not None
    tests = shutil.copytree(sources / "DeepSpeed" / "tests", tmp_path / "tests")
    file = tests / Path(SUITE.path).name
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("DS_UNITTEST_TIMEOUT", "60")
    low = run_pytest(file, "-k", "fp16 or bf16", path=[API, tests], timeout=300)
    monkeypatch.setenv("FP32", "1")
    ran = low + run_pytest(file, "-k", "not (fp16 or bf16)", path=[API, tests], timeout=300)
    wrong = []
    for test in ran:
        told = next((told for words, told in WORDS.items() if words in test.message), None)
        if test.outcome == "passed":
            verdicts.append(Verdict(SUITE, test.name, "passed"))
        elif test.outcome == "skipped":
            reason = test.message.strip().splitlines()[0]
            verdicts.append(Verdict(SUITE, test.name, "not applicable", f"skips itself: {reason}"))
        elif UNSCALED in test.name:
            verdicts.append(Verdict(SUITE, test.name, "not applicable", LATER))
        elif told is not None:
            verdicts.append(Verdict(SUITE, test.name, *told))
        else:
            wrong.append(f"{test.name}\n{test.message[-3000:]}")
    assert not wrong, "\n\n".join(wrong)
