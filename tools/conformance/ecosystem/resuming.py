"""States saved and loaded across plain torch, shardcast and the frameworks."""

from __future__ import annotations

import contextlib
import io
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Report, Variant
from loops import mlp, vectors
from patterns import adamw
from recipes import recipe


def steps(variant: Variant, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for number, (x, y) in enumerate(vectors(variant, last)):
        if number >= first:
            optimizer.zero_grad()
            with variant.autocast():
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@recipe("a checkpoint of plain torch, resumed", "torch")
def from_plain(variant: Variant) -> Report:
    """In every variant, the first half runs under DDP in fp32."""
    plain = mlp()
    variant.starts(plain)
    optimizer = adamw(plain)
    losses = steps(variant, torch.nn.parallel.DistributedDataParallel(plain), optimizer, 0, 4)
    saved = through_file({"model": plain.state_dict(), "optimizer": optimizer.state_dict()})
    plain = mlp()
    plain.load_state_dict(saved["model"])
    model, optimizer = variant.shard(plain, adamw(plain))
    optimizer.load_state_dict(saved["optimizer"])
    losses += steps(variant, model, optimizer, 4, 8)
    return variant.report(model, losses)


@recipe("weights of plain torch loaded after shard()", "torch", ratio=3.0)
def weights_after(variant: Variant) -> Report:
    torch.manual_seed(5)
    saved = through_file(mlp().state_dict())
    plain = mlp()
    model, optimizer = variant.shard(plain, adamw(plain, 1e-4))
    plain.load_state_dict(saved)
    variant.start = {name: value.clone() for name, value in saved.items()}
    losses = steps(variant, model, optimizer, 0, 8)
    return variant.report(model, losses)


@recipe("full_state_dict() of rank 0, resumed by plain torch", "torch")
def to_plain(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = steps(variant, model, optimizer, 0, 4)
    if variant.stock:
        saved = [plain.state_dict(), optimizer.state_dict()]
    else:
        saved = [optimizer.full_parameters(), optimizer.full_state_dict()]
        optimizer.close()
    dist.broadcast_object_list(saved, 0)
    plain = mlp()
    plain.load_state_dict(saved[0])
    optimizer = adamw(plain)
    optimizer.load_state_dict(saved[1])
    variant.optimizer = None
    model = torch.nn.parallel.DistributedDataParallel(plain)
    losses += steps(variant, model, optimizer, 4, 8)
    return variant.report(plain, losses)


@recipe("torch.distributed.checkpoint.state_dict, full and CPU", "torch")
def dcp_state(variant: Variant) -> Report:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = steps(variant, model, optimizer, 0, 4)
    with contextlib.nullcontext() if variant.stock else optimizer.as_plain():
        state = through_file(get_optimizer_state_dict(plain, optimizer, options=options))
    weights = plain.state_dict() if variant.stock else optimizer.full_parameters()
    saved = [{name: value.clone() for name, value in weights.items()}]
    dist.broadcast_object_list(saved, 0)
    if not variant.stock:
        optimizer.close()
    plain = mlp()
    plain.load_state_dict(saved[0])
    model, optimizer = variant.shard(plain, adamw(plain))
    with contextlib.nullcontext() if variant.stock else optimizer.as_plain():
        set_optimizer_state_dict(plain, optimizer, state, options=options)
    losses += steps(variant, model, optimizer, 4, 8)
    return variant.report(model, losses)


@recipe(
    "state_dict() saved on rank 0 alone",
    "torch",
    warned="shardcast.checkpoint",
    remark="the state of the other ranks is not in it",
)
def rank_zero_state(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = steps(variant, model, optimizer, 0, 4)
    if variant.rank == 0:
        through_file(optimizer.state_dict())
    losses += steps(variant, model, optimizer, 4, 8)
    return variant.report(model, losses)


@recipe("Accelerate: save_state, load_state", "accelerate")
def accelerate_state(variant: Variant) -> Report:
    losses: list[float] = []
    for first, last in ((0, 4), (4, 8)):
        accelerator = variant.accelerator()
        torch.manual_seed(0)
        plain = mlp()
        if first == 0:
            variant.starts(plain)
        optimizer = adamw(plain)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        model, optimizer, schedule = accelerator.prepare(plain, optimizer, schedule)
        if first:
            accelerator.load_state(f"{variant.folder}/state")
        for number, (x, y) in enumerate(vectors(variant, last)):
            if number >= first:
                with accelerator.autocast():
                    loss = F.mse_loss(model(x).float(), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if first == 0:
            accelerator.save_state(f"{variant.folder}/state")
            accelerator.free_memory()
    return variant.report(plain, losses, optimizer=None if variant.stock else optimizer)


@recipe(
    "a checkpoint of ShardcastTrainer, resumed by the stock Trainer",
    "transformers",
    error=UnpicklingError,
    match="THE_STATE_IS_IN_shardcast__SEE_optimizer_pt_txt",
)
def stock_trainer(variant: Variant) -> Report:
    from trainers import arguments, causal_rows, llama
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**arguments(variant, save_strategy="steps", save_steps=3))
    cls = variant.trainer(Trainer)
    trainer = cls(model=llama(), args=args, train_dataset=causal_rows())
    variant.starts(trainer.model)
    trainer.train()
    if not variant.stock:
        trainer.accelerator.free_memory()
    trainer = Trainer(model=llama(), args=args, train_dataset=causal_rows())
    trainer.train(resume_from_checkpoint=f"{variant.folder}/checkpoint-3")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    variant.optimizer = None
    return variant.report(trainer.model, losses)


@recipe("Trainer, load_best_model_at_end, final weights", "transformers", ratio=3.0)
def best_model(variant: Variant) -> Report:
    from trainers import arguments, causal_rows, llama
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        **arguments(
            variant,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        )
    )
    rows = causal_rows()
    trainer = variant.trainer(Trainer)(
        model=llama(), args=args, train_dataset=rows, eval_dataset=rows[:8]
    )
    variant.starts(trainer.model)
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    variant.optimizer = None
    weights = weights_of(trainer)
    return Report(losses, weights, variant.start, weights)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the script's weights after training."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}
