"""torch's own tests of ZeroRedundancyOptimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchvision_operators
from evidence import Suite, Verdict, judge, run_pytest

SUITE = Suite(
    name="ZeroRedundancyOptimizer",
    claim=(
        "`shardcast.shard(model, optimizer_class(...))` in fp32 replaces its sharded optimizer, "
        "on 1 and 2 processes (`tools/conformance/foreign/zero_redundancy.py`)"
    ),
    source="yakov-helm/pytorch_exp",
    commit="c5e2a7738220d39b8602869406a76e2787ac5c6b",
    blob="f644a51ef79b5ca6a207595eb789b437f385c878",
    path="test/distributed/optim/test_zero_redundancy_optimizer.py",
    license="BSD-3-Clause",
    cases=42,
    replaced={
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n": (
            "from zero_redundancy import ZeroRedundancyOptimizer, unwrapped\n"
        ),
        "    @common_distributed.skip_if_no_gpu\n": "",
        "    @common_distributed.skip_if_rocm\n": "",
        "params=model.parameters(),": "params=model.parameters(), model=model,",
        "sharded_ddp_model = DDP(": "sharded_ddp_model = unwrapped(",
        "device_ids=[self.rank],": "",
    },
)
REFUSED = {  # words of the error, and the reason
    "test_same_dense_param_type": (
        "expected float32, bfloat16 or float16",
        "expects errors for sparse and float64 parameters; both raise, but the second raises a "
        "TypeError",
    ),
    "test_step_with_kwargs": (
        "step: expected only a closure, got kwarg=",
        "passes a custom argument through `step`",
    ),
    "Distributed.test_step": (
        "gather_gradients",
        "averages `.grad` itself, without `gather_gradients()`; shardcast averages it already",
    ),
}
PARTITION = "counts elements in ZeroRedundancyOptimizer's partition, which assigns whole parameters"
NOT_APPLICABLE = {
    "test_sharding": PARTITION,
    "test_add_param_group": PARTITION,
    "test_zero_join_cpu": "uses `Join` for uneven inputs, which shardcast does not support",
}
VACUOUS = {"test_nondefault_process_group": "returns immediately with fewer than four ranks"}


@pytest.mark.timeout(1800)
def test_the_tests_of_zero_redundancy_optimizer(
    tmp_path: Path, sources: Path | None, verdicts: list[Verdict]
) -> None:
    file = tmp_path / Path(SUITE.path).name
    file.write_text(SUITE.text(sources), encoding="utf-8")
    helpers = Path(torchvision_operators.__file__).parent
    ran = run_pytest(file, path=[helpers], timeout=300)
    verdicts += judge(SUITE, ran, REFUSED, NOT_APPLICABLE, VACUOUS)
