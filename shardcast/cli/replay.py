"""``shardcast replay``: the recorded steps of a run again, from the command line."""

from __future__ import annotations

import torch.distributed as dist

from shardcast import checkpoint
from shardcast.cli.estimate import function_of
from shardcast.cli.parser import Parser


def replay(arguments: list[str]) -> int:
    """Make the steps between a run's checkpoints again, and name the element that parts.

    See :func:`shardcast.checkpoint.replay`. On several ranks: ``torchrun -m shardcast replay ...``.
    The status is 1 where an element parts.
    """
    parser = Parser(prog="shardcast replay")
    parser.add_argument("directory", help="the checkpoints of the run; it needs two")
    parser.add_argument(
        "make",
        metavar="MODULE:FUNCTION",
        help="sets the job up as its script does, with init_process_group() on several ranks, and "
        "returns its model, its optimizer from shard(), and a function that makes the step of a "
        "number",
    )
    parser.add_argument("--first", type=int, help="step of the checkpoint to begin with")
    parser.add_argument("--last", type=int, help="step of the checkpoint to end with")
    parser.add_argument(
        "--start",
        type=int,
        default=0,
        help="number of the run's first step: 0 for a loop over range(steps) that saves step + 1, "
        "1 for one that saves step (default: 0)",
    )
    parsed = parser.parse_args(arguments)
    job = function_of("make", parsed.make)()
    if not isinstance(job, tuple) or len(job) != 3 or not callable(job[2]):
        raise ValueError(
            f"make: expected that {parsed.make} returns (model, optimizer, train), got {job!r}"
        )
    options = {"first": parsed.first, "last": parsed.last, "start": parsed.start}
    difference = checkpoint.replay(parsed.directory, *job, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("no difference" if difference is None else difference)
    return int(difference is not None)
