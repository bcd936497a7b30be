"""Accumulation in Accelerate, Trainer and Lightning: one mean over all tokens; and a guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_lightning
import test_transformers
import torch
from lightning.pytorch import LightningModule
from test_accelerate_processes import fresh
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from shardcast.accelerate import ShardcastAccelerator
from shardcast.lightning import ShardcastStrategy
from shardcast.testing import SpawnedWorld
from shardcast.transformers import ShardcastTrainer

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice; the guard
]
MICRO_BATCHES, STEPS, PADDING = 4, 3, -100
Rows = dict[str, Tensor]


def rows() -> list[Rows]:
    """Return two rows for each micro-batch, which has 2 to 16 labels.

    A row's first token, which is not predicted, has no label: Trainer before 5.23 would count it.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [2 + 3 * (number % 3) + number % 2 for number in range(2 * MICRO_BATCHES * STEPS)]
    tokens = torch.randint(0, 32, (len(lengths), 10), generator=generator)
    labels = tokens.clone()
    labels[:, 0] = PADDING
    for number, length in enumerate(lengths):
        labels[number, length:] = PADDING
    return [{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)]


def loss_of(model: nn.Module, batch: Rows) -> Tensor:
    """Return the sum over tokens."""
    logits = model(batch["input_ids"]).float()
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=PADDING, reduction="sum"
    )


def tokens_of(batch: Rows) -> Tensor:
    return batch["labels"].ne(PADDING).sum()


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(32, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 32))


class Module(LightningModule):
    """Counts its tokens."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.net, self.ranks = small_model(), ranks

    def training_step(self, batch: Rows, _index: int) -> Tensor:
        self.optimizers().count(tokens_of(batch))
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> Any:
        share = MICRO_BATCHES // self.ranks
        batches = [*DataLoader(rows(), batch_size=2)]  # type: ignore[arg-type]
        numbers = range(len(batches))
        own = [n for n in numbers if n % MICRO_BATCHES // share == self.global_rank]
        return DataLoader([batches[number] for number in own], batch_size=None)  # type: ignore[arg-type]


class CountingTrainer(ShardcastTrainer):
    """Its loss is a sum over tokens that it counts, which Trainer must not divide again."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = False
        self.optimizer.count(inputs["labels"][:, 1:].ne(PADDING).sum())
        output = model(**inputs)
        return output.loss * inputs["labels"][:, 1:].ne(PADDING).sum()


def by_accelerate(config: Any, ranks: int, _folder: str) -> Any:
    accelerator = ShardcastAccelerator(
        cpu=True, gradient_accumulation_steps=MICRO_BATCHES // ranks, shardcast_config=config
    )
    model = small_model()
    loader: Any = DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.count(tokens_of(batch))
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.optimizer


def by_trainer(config: Any, ranks: int, folder: str, kind: Any = ShardcastTrainer) -> Any:
    class InOrder(kind):
        def _get_train_sampler(self, *_args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    arguments = test_transformers.arguments_of(
        folder,
        max_steps=STEPS,
        gradient_accumulation_steps=MICRO_BATCHES // ranks,
        learning_rate=0.5,
        max_grad_norm=0,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="no",
    )
    model = test_transformers.model_of().eval()  # like from_pretrained
    trainer = InOrder(model, arguments, train_dataset=rows(), shardcast_config=config)
    trainer.train()
    return trainer.optimizer.optimizer


def by_counting_trainer(config: Any, ranks: int, folder: str) -> Any:
    return by_trainer(config, ranks, folder, CountingTrainer)


def by_lightning(config: Any, ranks: int, folder: str) -> Any:
    trainer = test_lightning.trainer_of(
        folder,
        ranks,
        strategy=ShardcastStrategy(config),
        max_epochs=1,
        accumulate_grad_batches=MICRO_BATCHES // ranks,
        gradient_clip_val=None,
        use_distributed_sampler=False,
        callbacks=[],
        enable_checkpointing=False,
    )
    trainer.fit(Module(ranks))
    return trainer.strategy.precision_plugin.sharded[0]


FRAMEWORKS = {
    "accelerate": by_accelerate,
    "trainer": by_trainer,
    "counting": by_counting_trainer,
    "lightning": by_lightning,
}


def train(group: Any, framework: str, folder: str) -> dict[str, Tensor]:
    fresh()
    return FRAMEWORKS[framework]({}, group.size(), folder).full_parameters()


def by_hand(framework: str) -> dict[str, Tensor]:
    """Train in one process, with one mean over all tokens of a step."""
    with_trainer = framework in ("trainer", "counting")
    model = test_transformers.model_of() if with_trainer else small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = [*DataLoader(rows(), batch_size=2 * MICRO_BATCHES)]  # type: ignore[arg-type]
    for batch in batches:
        loss = model(**batch).loss if with_trainer else loss_of(model, batch) / tokens_of(batch)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
    prefix = "net." if framework == "lightning" else ""
    named = model.named_parameters(remove_duplicate=False)  # a tied weight under both names
    return {prefix + name: value.detach() for name, value in named}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_is_the_mean_over_the_tokens_of_all_ranks_and_micro_batches(
    tmp_path: Path, gloo: SpawnedWorld, framework: str
) -> None:
    expected = by_hand(framework)
    found = gloo.run(train, framework, str(tmp_path))[0]
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=2e-6, rtol=0)


def is_unwelcome(norm: Tensor, _loss: Tensor | None) -> Tensor:
    return norm > 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_guard_skips_steps_of_each_framework(tmp_path: Path, framework: str) -> None:
    fresh()
    sharded = FRAMEWORKS[framework]({"guard": is_unwelcome}, 1, str(tmp_path))
    assert sharded.guarded_steps == sharded.skipped_steps == STEPS
