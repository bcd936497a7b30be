"""nanoGPT's published loss of a small GPT on Shakespeare, from its own script."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from evidence import Suite, Verdict

PUBLISHED = 1.88
APART = 0.01  # loss difference to DDP; also of the unedited script to its README
OF_FORMS = 0.05  # the same, with blocks' matrices in 4 or 8 bits
DDP = {"device_ids=[ddp_local_rank]": ""}
SETTINGS = """config/train_shakespeare_char.py --device=cpu --compile=False
--log_interval=1 --block_size=64 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000
--lr_decay_iters=2000 --dropout=0.0"""  # from its README
LEAN = str(Path(__file__).resolve().parents[3] / "configs" / "lean.yaml")
BLOCKS = "['*.c_*.weight']"
FORMS = ("mxfp8", "mxfp4", "fp8_block128")
OPTIONS = {
    "fp32": {"SHARDCAST_PARAM_DTYPE": "fp32"},
    "bf16": {},
    "lean": {"SHARDCAST_CONFIG": LEAN},
    **{form: {"SHARDCAST_PUBLISHED": f"{{{form}: {BLOCKS}}}"} for form in FORMS},
}
CASES = [
    *((world_size, "fp32") for world_size in (1, 2, 4)),
    *((world_size, "bf16") for world_size in (1, 2)),
    *((2, option) for option in ("lean", *FORMS)),
]
SUITE = Suite(
    name="nanoGPT",
    claim=(
        "`train_shakespeare_char.py` with its README's settings for a CPU, on char-rnn's "
        "tinyshakespeare: 2,000 steps of 12 sequences, for which nanoGPT reports a validation "
        f"loss of 1.88. The loss must be within {APART} ({OF_FORMS} with published forms) of the "
        "loss of the same script under DDP, with equal processes and batches. On one process, the "
        f"unmodified script runs without DDP, and its loss must be within {APART} of 1.88"
    ),
    source="karpathy/nanoGPT",
    commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    blob="de5785051050d64bbda37a4964c2c079f0739b2b",
    path="train.py",
    license="MIT",
    cases=len(CASES),
    replaced={
        "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n": "",
        "from model import GPTConfig, GPT": "from model import GPTConfig, GPT; import shardcast",
        "    model = DDP(model, device_ids=[ddp_local_rank])": (
            "    optimizer = shardcast.shard(model, optimizer)"
        ),
        "model.module if ddp else model": "model",
        "torch.nn.utils.clip_grad_norm_(": "optimizer.clip_grad_norm_(",
        "                    'optimizer': optimizer.state_dict(),\n": "",
    },
)


@pytest.fixture(scope="module")
def folder(sources: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkout with prepared data and both scripts."""
    ours, folder = SUITE.text(sources), tmp_path_factory.mktemp("nanogpt") / "checkout"
    assert sources is not None
    shutil.copytree(sources / "nanoGPT", folder)
    data = folder / "data" / "shakespeare_char"
    shutil.copy(sources / "char-rnn" / "data" / "tinyshakespeare" / "input.txt", data)
    subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True, capture_output=True)
    stock = (folder / "train.py").read_text(encoding="utf-8")
    for old, new in (*[*SUITE.replaced.items()][:1], *DDP.items()):
        stock = stock.replace(old, new)
    (folder / "ddp.py").write_text(stock, encoding="utf-8")
    (folder / "ours.py").write_text(ours, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def losses(folder: Path) -> Iterator[Callable[[int, str], float]]:
    """Return a function of the number of processes and the option; two trainings run at a time."""
    asked = [*((world_size, "ddp") for world_size in (1, 2, 4)), *CASES]
    with ThreadPoolExecutor(2) as pool:
        found = {case: pool.submit(loss_of, folder, *case) for case in asked}
        yield lambda world_size, option: found[world_size, option].result()


@pytest.mark.timeout(7200)  # includes waiting in the queue of trainings
@pytest.mark.parametrize(("world_size", "option"), CASES)
def test_the_published_loss(
    world_size: int, option: str, losses: Callable[[int, str], float], verdicts: list[Verdict]
) -> None:
    loss, stock = losses(world_size, option), losses(world_size, "ddp")
    case = f"{option}, {world_size} process{'es' * (world_size > 1)}"
    assert abs(losses(1, "ddp") - PUBLISHED) <= APART
    assert abs(loss - stock) <= (OF_FORMS if option in FORMS else APART), (loss, stock)
    beside = "with DDP" if world_size > 1 else "unmodified"
    verdicts.append(Verdict(SUITE, case, "passed", f"{case}: {loss:.3f}, {beside} {stock:.3f}"))


def loss_of(folder: Path, world_size: int, option: str) -> float:
    """Return the last validation loss; a step has 12 sequences, the validation 240."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    script = "ours.py"
    if option == "ddp":  # one process runs the unedited script
        script = "ddp.py" if world_size > 1 else "train.py"
    words = [*([] if script == "train.py" else launcher), script, *SETTINGS.split()]
    words += [f"--batch_size={12 // world_size}", f"--gradient_accumulation_steps={world_size}"]
    words += [f"--eval_iters={20 * world_size}", "--backend=gloo", "--dtype=float32"]
    words += [f"--out_dir=out-{option}-{world_size}"]
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **OPTIONS.get(option, {})},
        capture_output=True,
        check=False,
        text=True,
    )
    assert not ended.returncode, ended.stdout[-2000:] + ended.stderr[-4000:]
    found = re.findall(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)", ended.stdout)
    assert found[-1][0] == "2000", found
    return float(found[-1][1])
