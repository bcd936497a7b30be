"""A plug-in of pytest that skips what DeepSpeed's tests ask of stages other than 1 and 2."""

from __future__ import annotations

import pytest

STAGES = "ZeRO-3 shards parameters, stage 0 nothing"
NAMED = {  # parts of names
    "Zero3": STAGES,
    "ZeroPartitionCache": STAGES,
    "ParamPartitioningSkipInit": STAGES,
    "EmptyParameterGroup": STAGES,
    "_backward_without_scale": (
        "expects an error of the backward; where a loss was not scaled `step()` raises"
    ),
    "nvme_offload": "offloads to NVMe",
    "_param_offload": STAGES,
    "rejects_overlap_comm": "is about an option of DeepSpeed's communication",
    "rejects_coalesce": "is about an option of DeepSpeed's communication",
    "rejects_pipeline": "is about DeepSpeed's pipelines",
    "BucketSize::test[1001]": "is about the size of DeepSpeed's buffers",
    "PartitionNcclAlignment": "reads DeepSpeed's partitions",
    "BF16OptimizerGradReduction": "reads DeepSpeed's flat gradients",
    "ZeroOffloadOptim::test[True]": "asks for DeepSpeed's own Adam on CPUs",
    "Training::test[muon": "asks for DeepSpeed's own Muon",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        stage = getattr(item, "callspec", None) and item.callspec.params.get("zero_stage", 1)
        reason = next((reason for part, reason in NAMED.items() if part in item.nodeid), None)
        if stage in (0, 3):
            reason = STAGES
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
