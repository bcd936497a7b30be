"""``shardcast launch``: Accelerate's launcher, from one file that also configures shardcast."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from shardcast.config import ShardcastConfig
from shardcast.launched import STORE
from shardcast.option_files import CONFIG_VARIABLE, check_file, read_yaml

if TYPE_CHECKING:
    import argparse

SECTION = "shardcast_config"
RUNNER = "shardcast.run"
FLAGS = {  # of Accelerate's launcher for what distributes by itself
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
}


def launch(arguments: list[str]) -> int:
    """Start a script like `accelerate launch`; its file may also configure shardcast.

    The section ``shardcast_config:`` of ``--config_file`` is checked before any process starts
    and reaches the processes through ``SHARDCAST_CONFIG``. All other flags and sections are
    Accelerate's. The script runs under ``shardcast.run`` and needs no edit.
    """
    import shardcast.accelerate  # noqa: F401  # says which extra is missing

    from accelerate.commands.launch import launch_command, launch_command_parser  # isort: skip

    parser = launch_command_parser()
    parser.prog = "shardcast launch"
    parser.epilog = f"The section {SECTION}: of --config_file configures shardcast."
    parsed = parser.parse_args(arguments)
    ours, accelerate_options = split_config(parsed.config_file)
    _check_launch(parsed, ours, accelerate_options)
    _have_it_shard(parsed)
    os.environ.setdefault(STORE, "1")  # else most restarts of the processes fail
    with tempfile.TemporaryDirectory(prefix="shardcast-launch-") as directory:
        if ours is not None:
            path = Path(directory, "shardcast.yaml")
            path.write_text(yaml.safe_dump(ours))
            os.environ[CONFIG_VARIABLE] = str(path)
            parsed.config_file = os.fspath(Path(directory, "accelerate.yaml"))
            Path(parsed.config_file).write_text(yaml.safe_dump(accelerate_options))
        launch_command(parsed)
    return 0


def split_config(path: str | None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Split a launch file into its ``shardcast_config`` section (or ``None``) and the rest.

    Raises:
        TypeError, ValueError: the section or the file is not a mapping, an option is unknown or has
            an invalid value, or there are two configurations.
    """
    if path is None:
        return None, {}
    content = read_yaml(Path(path))
    if SECTION not in content:
        return None, content
    ours = content.pop(SECTION) or {}
    if not isinstance(ours, dict):
        raise ValueError(
            f"{path}: {SECTION}: expected a mapping of options, got {type(ours).__name__}"
        )
    check_file(ShardcastConfig, ours, Path(path), SECTION)
    if os.environ.get(CONFIG_VARIABLE):
        raise ValueError(
            f"two configurations: {path} has a section {SECTION}, and {CONFIG_VARIABLE} names "
            f"{os.environ[CONFIG_VARIABLE]}; unset one (single options: SHARDCAST_<OPTION>)"
        )
    return ours, content


def _check_launch(
    parsed: argparse.Namespace, ours: Mapping[str, Any] | None, rest: Mapping[str, Any]
) -> None:
    """Refuse settings that would fail, or be ignored, in every process."""
    # Not at the top: the other commands do not need Accelerate.
    from accelerate.utils import parse_flag_from_env

    from shardcast.accelerate.guards import resolve_config

    precision = str(parsed.mixed_precision or rest.get("mixed_precision") or "no").lower()
    if precision == "fp8":
        raise ValueError(
            "mixed_precision: expected no, bf16 or fp16, got fp8; shardcast has no fp8"
        )
    resolve_config(precision, ours)
    kind = str(rest.get("distributed_type", "")).upper()
    for flag, name in FLAGS.items():
        if getattr(parsed, flag) or kind == name:
            raise ValueError(
                f"distributed_type: expected MULTI_GPU or NO, got {name}; it shards or distributes "
                "by itself and cannot be combined with shardcast"
            )
    processes = parsed.num_processes or rest.get("num_processes") or 1
    several = int(processes) > 1 and (parsed.multi_gpu or kind == "MULTI_GPU")
    if int(processes) > 1 and (parsed.cpu or kind == "MULTI_CPU"):
        raise ValueError(
            f"num_processes: expected 1 with --cpu or MULTI_CPU, with which Accelerate starts one "
            f"process, got {processes}; run ACCELERATE_USE_CPU=true shardcast launch --multi_gpu "
            f"--num_processes {processes} ..., or set distributed_type: MULTI_GPU and "
            "use_cpu: true in the file"
        )
    if several and rest.get("use_cpu"):  # Accelerate's launcher forgets it for several processes
        os.environ["ACCELERATE_USE_CPU"] = "true"
    on_cpu = parsed.cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    if several and not on_cpu and not torch.accelerator.is_available():
        raise ValueError(
            f"distributed_type: MULTI_GPU with {processes} processes, but this machine has no GPU "
            "that torch can use; for processes on the CPU set use_cpu: true in the file, as "
            "configs/accelerate/shardcast_cpu.yaml does, or set ACCELERATE_USE_CPU=true"
        )


def _have_it_shard(parsed: argparse.Namespace) -> None:
    """Start the script through :mod:`shardcast.run`, so that its Accelerator shards."""
    script, arguments = parsed.training_script, parsed.training_script_args
    if parsed.no_python:
        print(
            "shardcast launch: --no_python starts the program as it is; it shards only what it "
            "passes to shardcast itself",
            file=sys.stderr,
        )
    elif not (parsed.module and script == RUNNER):
        if not parsed.module and not os.path.isfile(script):
            raise FileNotFoundError(f"script {script!r} does not exist")
        parsed.training_script_args = [*(["-m"] if parsed.module else []), script, *arguments]
        parsed.training_script, parsed.module = RUNNER, True
