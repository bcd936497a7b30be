"""A pytest plug-in that skips DeepSpeed's tests of features that shardcast does not have."""

from __future__ import annotations

import pytest

STAGES = "needs ZeRO-3, which shards parameters, or stage 0, which shards nothing"
NAMED = {  # parts of names
    "Zero3": STAGES,
    "ZeroPartitionCache": STAGES,
    "ParamPartitioningSkipInit": STAGES,
    "EmptyParameterGroup": STAGES,
    "_backward_without_scale": (
        "expects the backward of an unscaled loss to raise; here `step()` raises"
    ),
    "nvme_offload": "offloads to NVMe",
    "_param_offload": STAGES,
    "rejects_overlap_comm": "tests a communication option of DeepSpeed",
    "rejects_coalesce": "tests a communication option of DeepSpeed",
    "rejects_pipeline": "tests DeepSpeed's pipelines",
    "BucketSize::test[1001]": "tests the size of DeepSpeed's buffers",
    "PartitionNcclAlignment": "reads DeepSpeed's partitions",
    "BF16OptimizerGradReduction": "reads DeepSpeed's flat gradients",
    "ZeroOffloadOptim::test[True]": "needs DeepSpeed's CPU Adam",
    "Training::test[muon": "needs DeepSpeed's Muon",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        stage = getattr(item, "callspec", None) and item.callspec.params.get("zero_stage", 1)
        reason = next((reason for part, reason in NAMED.items() if part in item.nodeid), None)
        if stage in (0, 3):
            reason = STAGES
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
