"""DeepSpeed's own tests of ZeRO, and of ZeRO with the caller's own backwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from evidence import Suite, Verdict, run_pytest

API = Path(__file__).parent / "deepspeed_api"
STANDS = (
    "`import deepspeed` imports shardcast (`tools/conformance/foreign/deepspeed_api`); stage 1 is "
    '`accumulate="local"`, and stage 2 is `accumulate="sharded"`'
)
COMMIT = "edaa7221267243c7be7fb49c5d5f5c4fb97b4641"
BACKWARD = Suite(
    name="DeepSpeed, user backward",
    claim=f"it compares DDP with ZeRO on 2 processes; {STANDS}. Unless a test names another "
    "dtype, models are in fp32, with the test's tolerances for fp32",
    source="deepspeedai/DeepSpeed",
    commit=COMMIT,
    blob="1b75675491d7584de47b1d665e82f5a34e6ef9c3",
    path="tests/unit/v1/zero/test_zero_user_backward.py",
    license="Apache-2.0",
    cases=195,
    replaced={"device_ids=[rank], output_device=rank": ""},
)
ZERO = Suite(
    name="DeepSpeed, ZeRO",
    claim=f"{STANDS}. Tests that use the device's preferred dtype run in bf16",
    source="deepspeedai/DeepSpeed",
    commit=COMMIT,
    blob="a56d873d8408d4e69280bd7700d81a0ffea5094b",
    path="tests/unit/v1/zero/test_zero.py",
    license="Apache-2.0",
    cases=99,
)
WORDS = {  # words of the error
    "is not what shardcast has": (
        "not applicable",
        "needs ZeRO-3, which shards parameters, or stage 0, which shards nothing",
    ),
}
LOW = "fp16 or bf16 or torch_autocast"  # tests whose names contain a dtype
RUNS = {  # pytest's arguments, and whether models are fp32
    BACKWARD.name: ((("-k", LOW), False), (("-k", f"not ({LOW})"), True)),
    ZERO.name: (((), False),),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", [ZERO, BACKWARD], ids=lambda suite: suite.name)
def test_the_tests_of_zero(
    suite: Suite,
    tmp_path: Path,
    sources: Path | None,
    verdicts: list[Verdict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = suite.text(sources)
    assert sources is not None
    tests = shutil.copytree(sources / "DeepSpeed" / "tests", tmp_path / "tests")
    file = tests / Path(suite.path).name
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("DS_UNITTEST_TIMEOUT", "60")
    ran = []
    for arguments, fp32 in RUNS[suite.name]:
        if fp32:
            monkeypatch.setenv("FP32", "1")
        plugin = ("-p", "stages")
        ran += run_pytest(file, *plugin, *arguments, path=[API, tests], timeout=120)
    wrong = []
    for test in ran:
        told = next((told for words, told in WORDS.items() if words in test.message), None)
        if test.outcome == "passed":
            verdicts.append(Verdict(suite, test.name, "passed"))
        elif test.outcome == "skipped":
            reason = test.message.strip().splitlines()[0]
            verdicts.append(Verdict(suite, test.name, "not applicable", reason))
        elif told is not None:
            verdicts.append(Verdict(suite, test.name, *told))
        else:
            wrong.append(f"{test.name}\n{test.message[-3000:]}")
    assert not wrong, "\n\n".join(wrong)
