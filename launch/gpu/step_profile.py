"""Part 3: kernels that a step launches, their streams, and the gaps between them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch.profiler import ProfilerActivity, profile, record_function

import shardcast
from gpu.bench import Bench, tokens
from gpu.ranks import backend_for, on_ranks

STEP = "shardcast: step"
SIZES = {False: (GPTConfig(32000, 512, 768, 12, 12), 4), True: (GPTConfig(64, 16, 32, 2, 2), 1)}


def run(bench: Bench) -> None:
    with bench.row(ranks=2, backend=backend_for(bench)) as found:
        found.update(on_ranks(bench, profiled, bench)[0])
    with bench.row(ranks=1) as found:
        found.update(profiled(None, bench))


def profiled(group: dist.ProcessGroup | None, bench: Bench) -> dict[str, Any]:
    """Return figures of the optimizer phase of one step."""
    torch.manual_seed(0)
    bench = bench if group is None else bench.of_rank(group.rank())
    config, batch = SIZES[bench.dry]
    model = GPT(config).to(bench.device)
    optimizer = shardcast.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        param_dtype=torch.bfloat16,
        max_grad_norm=1.0,
        process_group=group,
    )
    x, y = tokens(bench, batch, config.context, config.vocabulary)

    def step() -> None:
        model(x, y).backward()
        with record_function(STEP):
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    bench.sync()
    activities = [ProfilerActivity.CPU] + ([] if bench.dry else [ProfilerActivity.CUDA])
    with profile(activities=activities) as seen:
        step()
        bench.sync()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summary(events)


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return figures of the optimizer phase from the events of a trace.

    A kernel belongs to the phase if its launch, found by correlation number, lies within the phase
    on the host. So asynchronous execution does not matter.
    """
    spans = [e for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation"]
    begin, end = spans[0]["ts"], spans[0]["ts"] + spans[0]["dur"]
    launches = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= event["ts"] <= end
    }
    kernels = sorted(
        (
            event
            for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
            and event["args"].get("correlation") in launches
        ),
        key=lambda event: event["ts"],
    )
    streams = Counter(e["args"]["stream"] for e in events if e.get("cat") == "kernel")
    operators = [e for e in events if e.get("cat") == "cpu_op" and begin <= e["ts"] <= end]
    figures: dict[str, Any] = {"operators": len(operators), "host_us": round(end - begin)}
    if not kernels:
        return figures
    compute = streams.most_common(1)[0][0]
    gaps = [
        max(0.0, after["ts"] - before["ts"] - before["dur"]) for before, after in pairwise(kernels)
    ]
    sync = [event for event in kernels if "nccl" in event["name"].lower()]
    waits = [
        e["name"] for e in events if "Synchronize" in e.get("name", "") and begin <= e["ts"] <= end
    ]
    return {
        **figures,
        "kernels": len(kernels),
        "longest": "; ".join(
            f"{e['name'][:40]} {e['dur']:.0f} us"
            for e in sorted(kernels, key=lambda e: -e["dur"])[:3]
        ),
        "busy_us": round(sum(event["dur"] for event in kernels)),
        "gaps_us": round(sum(gaps)),
        "longest_gap_us": round(max(gaps, default=0.0)),
        "streams": len({event["args"]["stream"] for event in kernels}),
        "sync_kernels": len(sync),
        "sync_on_compute_stream": {e["args"]["stream"] for e in sync} <= {compute},
        "host_waits": len(waits),
    }
