"""Accumulation of Accelerate, Trainer and Lightning: one mean over all tokens; and a guard."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import DataLoaderConfiguration
from accelerate.data_loader import BatchSamplerShard
from lightning.pytorch import LightningModule, Trainer
from test_accelerate_processes import fresh
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from shardcast.accelerate import ShardcastAccelerator
from shardcast.accelerate.data import check_dealt, deal_consecutive
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
    """Two of each micro-batch, which have from 2 to 16 labels.

    The first of a row is none, which nothing predicts: Trainers before 5.23 would count it.
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
    """The sum over tokens."""
    logits = model(batch["input_ids"]).float()
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=PADDING, reduction="sum"
    )


def tokens_of(batch: Rows) -> Tensor:
    return batch["labels"].ne(PADDING).sum()


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(32, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 32))


def llama() -> Any:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=16,
        )
    )  # fmt: skip


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
    """Its loss is a sum over the tokens that it counts, and Trainer must divide it no more."""

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

    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=2, max_steps=STEPS,
        gradient_accumulation_steps=MICRO_BATCHES // ranks, learning_rate=0.5, max_grad_norm=0,
        optim="sgd",
        lr_scheduler_type="constant", report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model = llama().eval()  # as from_pretrained gives it
    trainer = InOrder(model, arguments, train_dataset=rows(), shardcast_config=config)
    trainer.train()
    if (
        config.get("reproducible") and kind is ShardcastTrainer
    ):  # predictions are in the order of their inputs
        labels = torch.stack([row["labels"] for row in rows()])
        assert torch.equal(torch.from_numpy(trainer.predict(rows()).label_ids), labels)
    return trainer.optimizer.optimizer


def by_counting_trainer(config: Any, ranks: int, folder: str) -> Any:
    return by_trainer(config, ranks, folder, CountingTrainer)


def by_lightning(config: Any, ranks: int, folder: str) -> Any:
    return fit_lightning(Module(ranks), config, ranks, folder, False)


def fit_lightning(module: Any, config: Any, ranks: int, folder: str, deals: bool) -> Any:
    trainer = Trainer(
        strategy=ShardcastStrategy(config), accelerator="cpu", devices=ranks, max_epochs=1,
        accumulate_grad_batches=MICRO_BATCHES // ranks, use_distributed_sampler=deals,
        default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, precision="32-true",
    )  # fmt: skip
    trainer.fit(module)
    return trainer.strategy.precision_plugin.sharded[0]


FRAMEWORKS = {
    "accelerate": by_accelerate, "trainer": by_trainer, "counting": by_counting_trainer,
    "lightning": by_lightning,
}  # fmt: skip


def train(
    group: Any, framework: str, config: Any, folder: str, ranks: int = 0
) -> tuple[str, dict[str, Tensor]]:
    fresh()
    sharded = FRAMEWORKS[framework](config, ranks or group.size(), folder)
    return sharded.digest(), sharded.full_parameters()


def by_hand(framework: str) -> dict[str, Tensor]:
    """In one process, of all tokens of a step in one mean."""
    with_trainer = framework in ("trainer", "counting")
    model = llama() if with_trainer else small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = [*DataLoader(rows(), batch_size=2 * MICRO_BATCHES)]  # type: ignore[arg-type]
    for batch in batches:
        loss = model(**batch).loss if with_trainer else loss_of(model, batch) / tokens_of(batch)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
    prefix = "net." if framework == "lightning" else ""
    return {prefix + name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_is_the_mean_over_the_tokens_of_all_ranks_and_micro_batches(
    tmp_path: Path, gloo: SpawnedWorld, framework: str
) -> None:
    expected = by_hand(framework)
    for _, weights in gloo.run(train, framework, {}, str(tmp_path), timeout=100)[:1]:
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=2e-6, rtol=0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_reproducible_runs_have_the_same_bits_at_any_number_of_ranks(
    tmp_path: Path, gloo: SpawnedWorld, four: SpawnedWorld, framework: str
) -> None:
    digests = []
    config = {"reproducible": MICRO_BATCHES}
    for world, reproducible in ((gloo, True), (four, MICRO_BATCHES)):
        counted = {"reproducible": reproducible}
        digests += [world.run(train, framework, counted, str(tmp_path), timeout=100)[0][0]]
    digests += [train(None, framework, config, str(tmp_path), 1)[0]]
    assert len(set(digests)) == 1


def dealt_batches(size: int, training: bool, **options: Any) -> tuple[list[Any], list[Any]]:
    """The batches of each of two ranks, and what deals them in steps of four."""
    samplers = [BatchSampler(range(size), 2, drop_last=False) for _ in range(2)]
    shards = [BatchSamplerShard(it, 2, rank, **options) for rank, it in enumerate(samplers)]
    loaders = [SimpleNamespace(batch_sampler=shard) for shard in shards]
    dealt = [it for loader in loaders for it in deal_consecutive(loader, 4, lambda: training)]
    assert not any(deal_consecutive(loader, 4, lambda: training) for loader in loaders)
    return [list(shard) for shard in shards], dealt


def test_a_step_that_trains_has_its_batches_rank_after_rank_and_an_evaluation_in_turn() -> None:
    trained, in_turn = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    ended = SimpleNamespace(end_of_dataloader=True)
    for training, expected in ((True, trained), (False, in_turn)):
        batches, dealt = dealt_batches(8, training)
        assert batches == expected
        if training:
            check_dealt(dealt, ended)
        else:
            with pytest.raises(RuntimeError, match=r"call model\.train\(\) before the loop"):
                check_dealt(dealt, ended)


@pytest.mark.parametrize("size", range(9, 16))
def test_a_step_that_accelerate_fills_up_has_all_samples_and_is_refused_in_training(
    size: int,
) -> None:
    for training in (True, False):
        batches, dealt = dealt_batches(size, training)
        assert {number for of_rank in batches for batch in of_rank for number in batch} == {
            *range(size)
        }
        within, ended = (SimpleNamespace(end_of_dataloader=end) for end in (False, True))
        if training:
            check_dealt(dealt, within)
            with pytest.raises(RuntimeError, match="a DataLoader with drop_last=True whose number"):
                check_dealt(dealt, ended)


def test_a_short_batch_that_is_not_filled_up_trains() -> None:
    batches, dealt = dealt_batches(15, True, even_batches=False)
    assert batches[1][-1] == [14]
    check_dealt(dealt, SimpleNamespace(end_of_dataloader=True))


def test_the_sampler_of_a_dealt_loader_may_be_replaced() -> None:
    _, (dealt, _) = dealt_batches(8, True)
    dealt.sampler = range(7, -1, -1)
    assert [*dealt.batch_sampler] == [[7, 6], [5, 4], [3, 2], [1, 0]]
    assert dealt.sampler == range(7, -1, -1) and dealt.batch_size == 2


def is_unwelcome(norm: Tensor, _loss: Tensor | None) -> Tensor:
    return norm > 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_guard_skips_steps_of_each_framework(tmp_path: Path, framework: str) -> None:
    fresh()
    sharded = FRAMEWORKS[framework]({"guard": is_unwelcome}, 1, str(tmp_path))
    assert sharded.guarded_steps == sharded.skipped_steps == STEPS


class Dealt(Module):
    """Its loader is Lightning's to deal out."""

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]


def dealt_otherwise(group: Any, folder: str) -> list[str]:
    """What is said of loaders whose order depends on the number of ranks."""
    fresh()
    config = {"reproducible": MICRO_BATCHES}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        split = DataLoaderConfiguration(split_batches=True)
        accelerator = ShardcastAccelerator(
            cpu=True, shardcast_config=config, dataloader_config=split
        )
        accelerator.prepare(DataLoader(rows(), batch_size=2))  # type: ignore[arg-type]
        fit_lightning(Dealt(group.size()), config, group.size(), folder, True)
    return [str(it.message) for it in caught if "reproducible" in str(it.message)]


def test_loaders_that_give_other_micro_batches_to_other_ranks_are_warned_of(
    tmp_path: Path, gloo: SpawnedWorld
) -> None:
    ranks = gloo.run(dealt_otherwise, str(tmp_path), timeout=100)
    told = [text for texts in ranks for text in texts]  # by whichever rank is the first
    told.sort(key=lambda text: text.split()[1] != "expected")
    assert [text.split()[1] for text in told] == ["expected", "Lightning's"]
    assert "split_batches" in told[0] and "use_distributed_sampler=False" in told[1]
