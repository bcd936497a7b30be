"""The claims of PyTorch's tests of FSDP2 and of DCP's states, on FSDP2 and shardcast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from claims import (
    clip_grad_norm,
    dcp,
    frozen,
    grad_dtype,
    mixed_precision,
    state_dict,
    training,
)
from claims.sides import Claim
from evidence import Suite, Verdict

FSDP = "test/distributed/_composable/fsdp/test_fully_shard_{}.py"
CLAIM = (
    "each test is rewritten in `tools/conformance/foreign/claims`, with the original's models, "
    "tolerances and number of ranks on CPUs. FSDP2 must pass it first"
)


def suite_of(name: str, path: str, commit: str, tests: dict[str, Claim | str]) -> Suite:
    return Suite(
        name=name,
        claim=CLAIM,
        source="pytorch/pytorch",
        path=path,
        license="BSD-3-Clause",
        cases=len(tests),
        commit=commit,
    )


COMMITS = {  # suffix of the file's name: claims, commit of the file
    "training": (training, "001df7b5cd514f6b4fb6ffbaad6ea31e7a2ada72"),
    "frozen": (frozen, "7023af4cb8e797ff7938300438a159bc967842c2"),
    "clip_grad_norm_": (clip_grad_norm, "0f31e61295ea6ab54df9279d4fd1e4c32599e81b"),
    "mixed_precision": (mixed_precision, "003a6c0a80952ae0ecfe7827b7b0d3c0515e4d25"),
    "grad_dtype": (grad_dtype, "4892d494420d10dec9e5a8e644ed021b7a7de3f3"),
    "state_dict": (state_dict, "01c2204bd02fbed4b2de9d03f02a4f0678499f5c"),
}
SUITES = [
    (module, suite_of(f"FSDP2, {name}", FSDP.format(name), commit, module.TESTS))
    for name, (module, commit) in COMMITS.items()
]
OF_DCP = "test/distributed/checkpoint/test_state_dict.py"
SUITES += [(dcp, suite_of("DCP", OF_DCP, "01d4728a564cd24d82e42f53f8cc3733060cd1fa", dcp.TESTS))]
MOVED = "converts a sharded model; the error says to convert it before `shard()`"
REFUSED = {  # words of the error, and the reason
    "test_to_float64_after_init": ("was moved out of its pack after shardcast.shard", MOVED),
    "test_clamp_reduce_dtype": ("was moved out of its pack after shardcast.shard", MOVED),
    "test_parameter_dtype_conversion_preserves_gradient": (
        "was moved out of its pack after shardcast.shard",
        MOVED,
    ),
}


def errors_of(side: str, world: int, folder: Path) -> dict[str, str]:
    """Return an error of each claim from any rank, or an empty string, by test."""
    names = [module.__name__.partition(".")[2] for module, _ in SUITES]
    report = folder / f"{side}-{world}.json"
    here = Path(__file__).parent
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    script = [str(here / "claims" / "run.py"), str(report), side, str(world), "", *names]
    path = os.pathsep.join([str(Path.cwd()), str(here)])
    ended = subprocess.run(
        [sys.executable, *words, *script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return {
        f"claims.{file}.{test}": error
        for file, test, error, _ in json.loads(report.read_text(encoding="utf-8"))
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return the error of each claim, by side."""
    claims = [claim for module, _ in SUITES for claim in module.TESTS.values()]
    worlds = sorted({claim.world for claim in claims if isinstance(claim, Claim)})
    folder = tmp_path_factory.mktemp("fsdp2")
    return {
        side: {k: v for world in worlds for k, v in errors_of(side, world, folder).items()}
        for side in ("FSDP2", "shardcast")
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("module", "suite"), SUITES, ids=lambda it: it.name if isinstance(it, Suite) else ""
)
def test_the_claims_of_fsdp2(
    module: Any, suite: Suite, ran: dict[str, dict[str, str]], verdicts: list[Verdict]
) -> None:
    wrong = []
    for test, claim in module.TESTS.items():
        key = f"{module.__name__}.{test}"
        if isinstance(claim, str):
            verdicts.append(Verdict(suite, test, "not applicable", claim))
            continue
        if not claim.control and ran["FSDP2"][key]:
            wrong.append(f"FSDP2 fails in {key}, so it is not its claim\n{ran['FSDP2'][key]}")
        error = ran["shardcast"][key]
        words, reason = REFUSED.get(test, ("", ""))
        left = f"left out: {claim.without}" if claim.without else ""
        if claim.control:
            left = f"{left}; " * bool(left) + f"not run on FSDP2: {claim.control}"
        if not error and not reason:
            verdicts.append(Verdict(suite, test, "passed", left))
        elif reason and words in error:
            verdicts.append(Verdict(suite, test, "refused", reason))
        else:
            wrong.append(f"{suite.name}, {test}\n{error or 'was expected to be refused'}")
    assert not wrong, "\n\n".join(wrong)
