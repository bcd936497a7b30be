"""Quantize in another way than the library: take the nearest entry of a table of all codes.

Also contains the training that published forms are compared with: plain torch with fp32
parameters and a fake quantizer in the forward of each micro-batch on each rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import GPT
from torch import Tensor, nn
from torch.func import functional_call

from shardcast.serving.forms import FORMS

VOCABULARY, DIM = 64, 128
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
Fake = Callable[[Tensor, str], Tensor]


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """Return the nearest entries of a rising table, with the values' signs; ties go to even."""
    size = values.abs().clamp(max=table[-1].item())
    above = torch.searchsorted(table, size).clamp(min=1)
    low, high = table[above - 1], table[above]
    is_high = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return torch.where(is_high, high, low).copysign(values)


def by_table(values: Tensor, form: str) -> Tensor:
    """Return a matrix quantized to a form, as bf16; values must be finite and of usual size."""
    rows, columns = FORMS[form].block_rows, FORMS[form].block_columns
    blocks = values.double().unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    largest = blocks.abs().amax((-3, -1), keepdim=True)
    is_fp4 = form.startswith("mxfp4")
    if form == "fp8_block128" or form.endswith("_rceil"):
        scale = torch.ceil(torch.log2(largest / (6 if is_fp4 else 448))).exp2()
    else:
        scale = torch.floor(torch.log2(largest)).exp2() / (4 if is_fp4 else 256)
    scale = torch.where(largest > 0, scale, 1.0)
    found = nearest(blocks / scale, E2M1 if is_fp4 else E4M3) * scale
    return found.flatten(-4, -3).flatten(-2).to(torch.bfloat16)


def gpt() -> nn.Module:
    """Return a model whose matrices consist of whole blocks of each form."""
    torch.manual_seed(0)
    return GPT(vocab=VOCABULARY, dim=DIM)


def batch(step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + 1000 * step + 10 * rank + micro)
    tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train_plain(
    form: str, patterns: str, ranks: int, micro_batches: int, steps: int, fake: Fake
) -> tuple[list[list[float]], dict[str, Tensor], int]:
    """Return the losses of each rank, the final masters, and the count of quantized weights."""
    import fnmatch

    model = gpt()
    masters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(masters.values(), lr=3e-3, fused=True)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    quantized = 0
    for step in range(steps):
        sums: list[Mapping[str, Tensor]] = []
        for rank in range(ranks):
            grads: dict[str, Tensor] = {}
            for micro in range(micro_batches):
                weights = {}
                for name, master in masters.items():
                    values = master.detach()
                    if fnmatch.fnmatch(name, patterns):
                        values, quantized = fake(values, form), quantized + 1
                    # A leaf, so that its gradient is used for the master (straight-through).
                    weights[name] = values.to(torch.bfloat16).requires_grad_()
                    weights[name].grad_dtype = torch.float32
                inputs, targets = batch(step, rank, micro)
                loss = loss_of(functional_call(model, weights, (inputs,)), targets)
                (loss / micro_batches).backward()
                losses[rank].append(loss.item())
                for name, weight in weights.items():
                    assert weight.grad is not None
                    grads[name] = grads[name] + weight.grad if name in grads else weight.grad
            sums.append(grads)
        for name, master in masters.items():
            total = torch.stack([grads[name] for grads in sums]).double().sum(0)
            master.grad = (total / ranks).float()
        optimizer.step()
    return losses, {name: master.detach() for name, master in masters.items()}, quantized


def train_published(
    group: Any, form: str, patterns: str, micro_batches: int, steps: int, **options: Any
) -> tuple[list[float], dict[str, Tensor], Any, nn.Module]:
    """Train in the same way on one rank of a sharded model with published forms."""
    import shardcast

    rank, model = (0 if group is None else group.rank()), gpt()
    optimizer = shardcast.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        process_group=group,
        autocast=False,
        cast_forward_inputs=False,
        grad_dtype=torch.float32,
        published={form: patterns},
        **options,
    )
    losses = []
    for step, micro in itertools.product(range(steps), range(micro_batches)):
        inputs, targets = batch(step, rank, micro)
        loss = loss_of(model(inputs), targets)
        if micro + 1 < micro_batches:
            with optimizer.no_sync():
                (loss / micro_batches).backward()
        else:
            (loss / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer.full_parameters(), optimizer, model


def vectors() -> dict[str, Tensor]:
    """Return named matrices of 128 x 256 whose bits depend on no generator."""
    place = torch.arange(128 * 256)
    usual = ((place * 1103515245 + 12345) % 2**31 / 2**30 - 1).float().view(128, 256)
    power = (place * 7 % 41 - 20).float().exp2().view(128, 256)
    odd = (place % 3 == 0).view(128, 256)
    return {
        "usual": usual * 0.03125,
        "wide": usual * power,
        "bf16": (usual * power).bfloat16().float(),
        "denormal": torch.where(odd, usual, usual * 2.0**-140),
        "huge": usual * 2.0**127,
        "zeros": torch.where(odd, 0.0, -0.0).view(128, 256),
        "largest": torch.full((128, 256), 448.0).copysign(usual),
    }
