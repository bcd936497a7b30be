"""Run modded-nanogpt's ``train_gpt_simple.py`` with its own sharding and with shardcast.

``python tools/speedrun.py``, on 1, 2, 4 or 8 GPUs, prints both side by side. Model and data loop
are unchanged. :func:`shardcast.shard`, with bf16 parameters and fp32 masters, replaces the script's
division of Muon's matrices over ranks and its all-reduce of every gradient; see :data:`SHARDED`.

The script is not part of this repository. It is fetched, or given as ``--script``, and its hash is
checked. ``--data`` is the folder that its ``data/cached_fineweb10B.py`` fills. Without it, tokens
are random, which is enough to compare times, and losses with each other.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

PATH = "records/track_3_optimization/train_gpt_simple.py"
COMMIT = "f411b3d346aa52d3504324ca93c230fd84c6c07f"
BLOB = "e723a6bbce3e0ffbfb3383190212ed301197ebb3"  # from git hash-object
URL = f"https://raw.githubusercontent.com/KellerJordan/modded-nanogpt/{COMMIT}/{PATH}"
SHARDED = {  # text of the script: replacement
    "import torch.distributed as dist\n": (
        "import torch.distributed as dist\nfrom contextlib import nullcontext\nimport shardcast\n"
    ),
    # Muon: the one owner of a matrix has its whole gradient.
    "        world_size = dist.get_world_size()\n        rank = dist.get_rank()\n": (
        "        world_size, rank = 1, 0\n"
    ),
    (
        "            params_pad = params + [torch.empty_like(params[-1])]"
        " * (world_size - len(params) % world_size)\n"
    ): "",
    (
        "                dist.all_gather(params_pad[base_i:base_i + world_size],"
        " params_pad[base_i + rank])\n"
    ): "",
    "    optimizers = [optimizer1, optimizer2]\n": (
        "    optimizers = [shardcast.shard(model, [optimizer1, optimizer2], autocast=False)]\n"
        "    optimizers[0].divisor = 1  # the losses are sums\n"
    ),
    "            model(inputs[i*mbs:(i+1)*mbs], targets[i*mbs:(i+1)*mbs]).backward()\n": (
        "            last = i + 1 == len(inputs) // mbs\n"
        "            with nullcontext() if last else optimizers[0].no_sync():\n"
        "                model(inputs[i*mbs:(i+1)*mbs], targets[i*mbs:(i+1)*mbs]).backward()\n"
    ),
    (
        "        for name, p in model.named_parameters():\n"
        "            assert p.grad is not None, name\n"
        "            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)\n"
    ): "",
}
# The script sets no seed; both runs must start with the same weights.
SEED = {
    "import torch.nn.functional as F\n": "import torch.nn.functional as F\ntorch.manual_seed(0)\n"
}
ON_CPU = {
    "pin_memory=True": "pin_memory=False",
    'device="cuda"': 'device="cpu"',
    'torch.device("cuda", int(os.environ["LOCAL_RANK"]))': 'torch.device("cpu")',
    "torch.cuda.set_device(device)\n": "",
    'backend="nccl", device_id=device': 'backend="gloo"',
    "torch.cuda.get_device_name(device)": "'a CPU'",
    ".cuda()": "",
    "model.compile(dynamic=False)\n": "",
    "@torch.compile\n": "",
}
TINY = {
    "seq_len=1024": "seq_len=32",
    "head_dim=128": "head_dim=32",
    "vocab_size=50304, num_layers=12, model_dim=768": "vocab_size=256, num_layers=2, model_dim=64",
    "val_tokens = 20 * 524288": "val_tokens = 1024",
    "batch_size = 8 * 64 * 1024": "batch_size = 1024",
    "mbs = 64": "mbs = 8",
    "val_step_freq = 125 if step / train_steps < 0.9 else 25": "val_step_freq = 1",
}
# The script's embedding and its moments are bf16. In fp32, both runs compute the same throughout.
FP32 = {"nn.Embedding(vocab_size, model_dim).bfloat16()": "nn.Embedding(vocab_size, model_dim)"}
BF16 = {
    **FP32,
    "self.norm1(self.embed(inputs))": "self.norm1(self.embed(inputs).bfloat16())",
}
LINE = re.compile(r"step:(\d+)/\d+ val_loss:([\d.]+) train_time:[\d.]+s step_avg:([\d.nan]+)ms")
Curve = dict[int, tuple[float, float]]
"""By step: the validation loss, and the mean milliseconds per step until then."""


def script_at(path: Path | None) -> str:
    """Return the script, fetched if ``path`` is None; exit if it is not that of the commit."""
    if path is None:
        with urllib.request.urlopen(URL, timeout=60) as answer:
            data = answer.read()
    else:
        data = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if blob != BLOB:
        raise SystemExit(f"--script: expected {PATH} of {COMMIT} ({BLOB}), got {blob}")
    return data.decode()


def edited(text: str, *edits: Mapping[str, str]) -> str:
    for edit in edits:
        for old, new in edit.items():
            if old not in text:
                raise SystemExit(f"{PATH} has no {old!r}")
            text = text.replace(old, new)
    return text


def write_tokens(path: Path, count: int, vocabulary: int, seed: int) -> None:
    """Write tokens that each depend on the previous one, in the format of the script's files."""
    draw = torch.Generator().manual_seed(seed)
    header = torch.zeros(256, dtype=torch.int32)
    header[:3] = torch.tensor([20240520, 1, count])
    jumps = torch.multinomial(1 / torch.arange(1.0, 65.0), count, True, generator=draw)
    tokens = jumps.cumsum(0).remainder_(vocabulary).to(torch.uint16)
    path.write_bytes(header.numpy().tobytes() + tokens.numpy().tobytes())


def write_data(folder: Path, steps: int, tiny: bool) -> None:
    batch, held, vocabulary = (1024, 1024, 256) if tiny else (1 << 19, 20 << 19, 50257)
    folder.mkdir()
    write_tokens(folder / "fineweb_train_000001.bin", batch * (steps + 1) + 2, vocabulary, 0)
    write_tokens(folder / "fineweb_val_000000.bin", held + 2, vocabulary, 1)


def train(text: str, folder: Path, data: Path, processes: int, options: Mapping[str, str]) -> Curve:
    """Run a script on ``processes`` with ``SHARDCAST_*`` options; return its losses and times."""
    folder.mkdir()
    (folder / "data").mkdir()
    (folder / "data" / "fineweb10B").symlink_to(data.resolve(), target_is_directory=True)
    (folder / "train.py").write_text(text, encoding="utf-8")
    given = {f"SHARDCAST_{key.upper()}": value for key, value in options.items()}
    here = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    ended = subprocess.run(
        [sys.executable, *words, "train.py"],
        cwd=folder,
        text=True,
        check=False,
        env={**os.environ, **given, "PYTHONPATH": path},
        capture_output=True,
    )
    if ended.returncode:
        raise SystemExit(f"{folder.name}:\n{ended.stdout[-2000:]}\n{ended.stderr[:6000]}")
    return {int(s): (float(loss), float(ms)) for s, loss, ms in LINE.findall(ended.stdout)}


def beside(
    text: str,
    folder: Path,
    data: Path,
    processes: int,
    edits: Sequence[Mapping[str, str]],
    options: Mapping[str, str],
) -> dict[str, Curve]:
    """Train with the script's own sharding and with shardcast, both with ``edits``."""
    own = edited(text, SEED, *edits)
    return {
        "its own sharding": train(own, folder / "own", data, processes, {}),
        "shardcast": train(edited(own, SHARDED), folder / "sharded", data, processes, options),
    }


def table(curves: Mapping[str, Curve]) -> str:
    heads = [f"{name}, loss | ms per step" for name in curves]
    lines = [f"| step | {' | '.join(heads)} |", "|---:|" + "---:|---:|" * len(curves)]
    for step in next(iter(curves.values())):
        cells = [f"{curve[step][0]:.5f} | {curve[step][1]:.2f}" for curve in curves.values()]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", type=Path, help=f"{PATH} of modded-nanogpt; else it is fetched")
    parser.add_argument("--data", type=Path, help="the folder with fineweb_train_*.bin")
    parser.add_argument("--steps", type=int, help="default: 3250 with --data, else 100")
    parser.add_argument("--processes", type=int, help="1, 2, 4 or 8; default: one per GPU")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on two CPU processes")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry-run trains a tiny model on CPUs")
    processes = args.processes or (2 if args.dry_run else torch.cuda.device_count())
    steps = args.steps or (20 if args.dry_run else 3250 if args.data else 100)
    setting = {"train_steps = 3250": f"train_steps = {steps}"}
    both = [setting, *((ON_CPU, TINY) if args.dry_run else ())]
    text = script_at(args.script)
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), args.data
        if data is None:
            data = folder / "tokens"
            write_data(data, steps, tiny=args.dry_run)
        curves = beside(text, folder, data, processes, both, {"param_dtype": "bf16"})
    print(table(curves))


if __name__ == "__main__":
    main()
