"""Check the claims of some files on one side: ``run.py REPORT SIDE WORLD ONLY FILE ...``.

Every rank runs it. Each claim has its own process groups, so a failed one does not affect others.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from claims.sides import SIDES, Claim

LIMIT = timedelta(seconds=60)


def main() -> None:
    report, name, world, only, *files = sys.argv[1:]
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, int(world), False, LIMIT)
    lines = []
    for file in files:
        tests = importlib.import_module(f"claims.{file}").TESTS
        for test, claim in tests.items():
            if not isinstance(claim, Claim) or claim.world != int(world) or only not in test:
                continue
            if name == "FSDP2" and claim.control:
                continue
            own = dist.PrefixStore(f"{file}.{test}", store)
            dist.init_process_group(
                "gloo", store=own, rank=rank, world_size=int(world), timeout=LIMIT
            )
            error, begun = "", time.perf_counter()
            try:
                claim.claim(SIDES[name]())
            except Exception:
                error = traceback.format_exc()
            errors: list[str] = [""] * int(world)
            try:
                dist.all_gather_object(errors, error)
            except Exception:
                errors = [error or traceback.format_exc()]
            gc.collect()
            dist.destroy_process_group()
            seconds = time.perf_counter() - begun
            lines.append([file, test, next(filter(None, errors), ""), round(seconds, 1)])
            if rank == 0:
                Path(report).write_text(json.dumps(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
