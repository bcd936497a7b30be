"""Accelerate's ParallelismConfig and transformers' plans, in four real processes.

Accelerate accepts a ParallelismConfig only on accelerators; these tests make it accept processes.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from test_accelerate_processes import fresh
from test_transformers import arguments_of
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from shardcast.accelerate import ShardcastAccelerator
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import SpawnedWorld

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
STEPS, ROWS, CLIP = 4, 8, 0.05  # rows of a global batch
T = TypeVar("T")


def as_on_accelerators(fn: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> T:
        fresh()
        wanted = property(lambda accelerator: accelerator.parallelism_config is not None)
        with mock.patch.object(Accelerator, "multi_device", wanted):
            return fn(*args, **kwargs)

    return run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(31, 12), nn.LayerNorm(12)
        self.up, self.down, self.head = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 31)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.down(self.up(self.norm(hidden)).relu())
        scores = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(scores, target.flatten())


def seeded(build: Callable[[], T]) -> T:
    torch.manual_seed(3)
    return build()


def data() -> Tensor:
    return torch.randint(31, (STEPS * ROWS, 9), generator=torch.Generator().manual_seed(1))


@contextmanager
def context(accelerator: Accelerator, batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets; with context parallelism, this rank's part of the sequence."""
    ids, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    config = accelerator.parallelism_config
    if config is None or not config.cp_enabled:
        yield ids, target
        return
    with accelerator.maybe_context_parallel(buffers=[ids, target], buffer_seq_dims=[1, 1]):
        assert ids.shape[1] == (batch.shape[1] - 1) // config.cp_size
        yield ids, target


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def one_process() -> dict[str, Any]:
    """Train on whole batches in plain torch."""
    model = seeded(Net)
    optimizer, log = adam(model), {"loss": [], "norm": []}
    for batch in data().split(ROWS):
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        log["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        log["loss"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return log | {"params": {name: p.detach() for name, p in model.named_parameters()}}


@as_on_accelerators
def train(_group: Any, sizes: dict[str, int], folder: str = "", resume: bool = False) -> Any:
    parallel = ParallelismConfig(**sizes) if sizes else None
    accelerator = ShardcastAccelerator(cpu=True, parallelism_config=parallel)
    model: Any = seeded(Net)
    if "tp_size" in sizes:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    shares = parallel.data_parallel_size if parallel else accelerator.num_processes
    loader: Any = DataLoader(TensorDataset(data()), batch_size=ROWS // shares)
    model, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, STEPS // 2)
    log: dict[str, Any] = {"loss": [], "norm": []}
    for step, (batch,) in enumerate(loader):
        with context(accelerator, batch) as (batch, target):
            loss = model(batch, target)
            accelerator.backward(loss)
        log["norm"].append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
        log["loss"].append(accelerator.gather(loss.detach()[None]).mean().item())
        optimizer.step()
        optimizer.zero_grad()
        if folder and not resume and step == STEPS // 2 - 1:
            accelerator.save_state(folder)
    log["params"] = accelerator.get_state_dict(model)
    grid = packed_of(accelerator.sharded_optimizer).process_groups
    log["grid"] = grid.shard.size, grid.dp.size, grid.model.size
    accelerator.free_memory(model)
    return log


def assert_close(found: Any, expected: Any) -> None:
    for key in ("loss", "norm"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=0)
    torch.testing.assert_close(found["params"], expected["params"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        ({"tp_size": 2, "dp_shard_size": 2}, (2, 2, 2)),
        ({"tp_size": 4}, (1, 1, 4)),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, (2, 4, 1)),
        ({"dp_replicate_size": 4}, (4, 4, 1)),
        ({"cp_size": 2, "dp_shard_size": 2}, (4, 4, 1)),
    ],
    ids=str,
)
def test_a_parallelism_config_trains_as_one_process(
    four: SpawnedWorld, sizes: dict[str, int], grid: tuple[int, int, int]
) -> None:
    for found in four.run(train, sizes):
        assert_close(found, one_process())
        assert found["grid"] == grid  # sizes: shard, data-parallel, model-parallel


def test_a_saved_state_goes_on_on_another_grid(four: SpawnedWorld, tmp_path: Any) -> None:
    folder, expected = str(tmp_path), one_process()
    for found in four.run(train, {"tp_size": 2, "dp_shard_size": 2}, folder):
        assert_close(found, expected)
    after = {key: expected[key][STEPS // 2 :] for key in ("loss", "norm")}
    grids: list[dict[str, int]] = [{"tp_size": 2, "dp_shard_size": 2}, {}, {"tp_size": 4}]
    for sizes in grids:
        for found in four.run(train, sizes, folder, True):
            assert_close(found, after | {"params": expected["params"]})


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from data()


@as_on_accelerators
def refusals(_group: Any) -> None:
    accelerator = ShardcastAccelerator(
        cpu=True, parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2)
    )
    whole = Net()
    with pytest.raises(ValueError, match=r"tensor-parallel over 2 ranks.*found 1; parallelize it"):
        accelerator.prepare(whole, adam(whole))
    with pytest.raises(ValueError, match="expected dispatch_batches=False"):
        accelerator.prepare(DataLoader(Stream(), batch_size=2))
    model: Any = Net()
    both = distribute_tensor(model.up.weight, accelerator.torch_device_mesh, [Shard(0), Shard(1)])
    model.up.weight = nn.Parameter(both)
    with pytest.raises(TypeError, match=r"'up.weight' is a DTensor over mesh dimension 'dp_shard'"):
        accelerator.prepare(model, adam(model))
    fresh()
    with (
        mock.patch.object(Accelerator, "multi_device", property(lambda _: False)),
        pytest.raises(ValueError, match=r"only compatible.*got .*MULTI_CPU"),
    ):
        ShardcastAccelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=4))


def test_what_cannot_go_through_is_refused_by_name(four: SpawnedWorld) -> None:
    four.run(refusals)


class Text(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return STEPS * ROWS * 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(31, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def qwen() -> Any:
    """Return a tied model with norms whose gradient on each rank is a part of the sum."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    )


def cut_by_its_plan(model: Any, size: int) -> Any:
    """Apply tensor parallelism of transformers over neighboring ranks, without its FSDP2."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    plan = DistributedConfig(tp_size=size, tp_plan="auto", fsdp_size=ranks // size)
    _, meshes = initialize_distributed_mesh(plan)
    head = model.lm_head.weight  # tied, but a plan cuts each name separately
    model.lm_head.weight = nn.Parameter(head.detach().clone())
    alone = DistributedConfig(tp_size=size, tp_plan="auto", fsdp_size=1)
    model = type(model).maybe_distribute_model(model, alone, meshes)
    model.tie_weights()
    # Trainer and Accelerate take the number of data-parallel ranks from this.
    model.config.distributed_config.fsdp_size = ranks // size
    model._is_distributed_loading_by_transformers = False  # else Trainer refuses to save
    return model


@as_on_accelerators
def trained(_group: Any, folder: str, tp: int, resume: bool = False) -> Any:
    from shardcast.transformers import ShardcastTrainer

    model = seeded(qwen)
    if tp > 1:
        model = cut_by_its_plan(model, tp)
    arguments = arguments_of(
        folder,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=tp if tp > 1 else 4,
        adam_epsilon=1e-4,
        max_grad_norm=0.3,
    )
    kind = transformers.Trainer if tp == 1 else ShardcastTrainer
    trainer = kind(model=model, args=arguments, train_dataset=Text())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resume else None)
    log = {
        key: [entry[key] for entry in trainer.state.log_history if key in entry]
        for key in ("loss", "grad_norm", "learning_rate")
    }
    log["params"] = trainer.accelerator.get_state_dict(trainer.model)
    if tp > 1:
        trainer.accelerator.free_memory(model)
    return log


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.utils") is None,
    reason="transformers before 5.23 makes no DTensors",
)
def test_a_trainer_with_a_plan_of_transformers_trains_as_stock_in_one_process(
    four: SpawnedWorld, tmp_path: Any
) -> None:
    expected, folder = trained(None, str(tmp_path / "alone"), 1), str(tmp_path / "tp")
    first, resumed = four.run(trained, folder, 2), four.run(trained, folder, 2, True)
    for found in first + resumed:
        for key in ("loss", "grad_norm", "learning_rate"):
            assert len(found[key]) == STEPS
            torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=0)
        torch.testing.assert_close(found["params"], expected["params"], rtol=1e-5, atol=1e-6)
    last = transformers.Qwen3ForCausalLM.from_pretrained(f"{folder}/checkpoint-{STEPS}")
    for name, param in last.named_parameters():
        assert torch.equal(param, resumed[0]["params"][name]), name
