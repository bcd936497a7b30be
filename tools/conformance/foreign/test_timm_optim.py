"""timm's own tests of its optimizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torchvision_operators
from evidence import Suite, Verdict

SUITE = Suite(
    name="timm",
    claim=(
        "its optimizers are `shardcast.shard(model, create_optimizer_v2(...))` in fp32, on 1 and "
        "2 processes (`tools/conformance/foreign/timm_optim.py`). Each call of a check is a "
        "case. After a failed check, the test continues"
    ),
    source="huggingface/pytorch-image-models",
    commit="aa4b5850c1543fa488abf260f18390eda46cf85d",
    blob="65fb927fa20a53c37b6b4ce6d0caeb49274af84e",
    path="tests/test_optim.py",
    license="Apache-2.0",
    cases=220,
    replaced={
        "from timm.optim import create_optimizer_v2, ": (
            "from timm_optim import create_optimizer_v2, noted\nfrom timm.optim import "
        ),
        "os.environ.get('TORCH_DEVICE', 'cuda')": "'cpu'",
        **{
            f"def {check}(": f"@noted\ndef {check}("
            for check in (
                "_test_state_dict",
                "_test_basic_cases_template",
                "_test_model",
                "_test_rosenbrock",
            )
        },
    },
)
REFUSED = {  # words of the error, and the reason
    "param_groups: expected": "extends `param_groups` instead of calling `add_param_group`",
    "Lamb cannot be sharded": "clips by its own norm over all parameters (`max_grad_norm`)",
    "holds another optimizer": "wraps another optimizer; only the inner one can be sharded",
}
# Other tests of the file do not use create_optimizer_v2.
NAMED = "not compiled and not factory and not param_groups"
OURS = {1: (), 2: ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")}


Checks = list[tuple[str, int, str, str]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, sources: Path | None) -> Path:
    path = tmp_path_factory.mktemp("timm") / Path(SUITE.path).name
    path.write_text(SUITE.text(sources), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stock(file: Path) -> Checks:
    """Return timm's own results; tests that fail there do not count."""
    return checks_of(file, 1, STOCK="1")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_checks_of_timms_optimizers(
    world_size: int, file: Path, stock: Checks, verdicts: list[Verdict]
) -> None:
    ours = checks_of(file, world_size)
    wrong = []
    assert [key[:-1] for key in ours] == [key[:-1] for key in stock]
    for (test, number, check, error), (*_, of_timm) in zip(ours, stock, strict=True):
        case = f"{test}.{check} {number}, {world_size} processes"
        last = error.strip().rpartition("\n")[2]
        reason = next((reason for words, reason in REFUSED.items() if words in last), "")
        if of_timm:
            told = of_timm.strip().rpartition("\n")[2]
            verdicts.append(Verdict(SUITE, case, "not applicable", f"also fails in timm: {told}"))
        elif not error:
            verdicts.append(Verdict(SUITE, case, "passed"))
        elif reason:
            verdicts.append(Verdict(SUITE, case, "refused", reason))
        else:
            wrong.append(f"{case}\n{error[-2000:]}")
    assert not wrong, "\n\n".join(wrong)


def checks_of(file: Path, world_size: int, **environment: str) -> Checks:
    """Return test, number, name and error of each check; the error is from any rank."""
    folder = file.parent / f"checks-{world_size}{''.join(environment)}"
    folder.mkdir()
    (file.parent / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    helpers = Path(torchvision_operators.__file__).parent
    path = os.pathsep.join(map(str, [Path.cwd(), Path(__file__).parent, helpers]))
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", NAMED, str(file)]
    ended = subprocess.run(
        [sys.executable, *OURS[world_size], *words],
        cwd=file.parent,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "CHECKS": str(folder), **environment},
        capture_output=True,
    )
    assert ended.returncode in (0, 1), ended.stdout[-4000:] + ended.stderr[-4000:]
    by_rank = []
    for rank in range(world_size):
        lines = (folder / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        seen: Counter[str] = Counter()
        by_rank.append([])
        for test, check, error in map(json.loads, lines):
            seen[test] += 1
            by_rank[-1].append((test, seen[test], check, error))
    return [max(ranks, key=lambda one: bool(one[-1])) for ranks in zip(*by_rank, strict=True)]
