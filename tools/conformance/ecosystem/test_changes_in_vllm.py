"""vLLM's loader of patches applies the results of ``optimizer.changes()``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import run_world
from quantizers import batch, gpt, loss_of
from torch import Tensor, nn

import shardcast

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
STEPS = 12


def loader_of_vllm() -> Any:
    """Import only vLLM's file with the loader: the rest needs GPU libraries."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("vLLM is not installed: pip install --no-deps vllm")
    folder = Path(found.submodule_search_locations[0]) / "model_executor" / "model_loader"
    path = folder / "checkpoint_weight_patch.py"
    spec = importlib.util.spec_from_file_location("checkpoint_weight_patch_of_vllm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Served(nn.Module):
    """A model as in an inference engine: ``load_weights`` writes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt().bfloat16()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        params = dict(self.model.named_parameters())
        names = set()
        for name, values in weights:
            params[name].copy_(values)
            names.add(name)
        return names


@pytest.mark.parametrize("published", [{}, {"published": {"mxfp4": "blocks.*[!12].weight"}}])
def test_its_loader_of_patches_gives_a_served_model_the_bits_of_the_training(
    published: dict[str, Any],
):
    """This holds after each step. One step is skipped, and one weight is edited by the script."""
    vllm = loader_of_vllm()

    def run(group: Any) -> list[tuple[list[Any], dict[str, Tensor]]]:
        model = gpt()
        optimizer: Any = shardcast.shard(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            process_group=group,
            changes=True,
            autocast=False,
            param_dtype="bf16",
            **published,
        )
        told, version = [], None
        for step in range(STEPS):
            changes = optimizer.changes(since=version)
            version = changes.version
            patches = [vllm.CheckpointWeightPatch(*patch) for patch in changes]
            told.append((patches, {n: p.detach().clone() for n, p in model.named_parameters()}))
            inputs, targets = batch(step, group.rank(), 0)
            loss = loss_of(model(inputs), targets)
            (loss * torch.inf if step == 5 else loss).backward()
            if step == 7:
                with torch.no_grad():
                    model.get_parameter("blocks.0.fc.weight")[3, 5] = 0.25
            optimizer.step()
            optimizer.zero_grad()
        return told

    results, _ = run_world(2, run)
    served = Served()
    numels = []
    for of_ranks in zip(*results, strict=True):
        patches = [patch for of_rank, _ in of_ranks for patch in of_rank]
        vllm.load_checkpoint_weight_patches(served, patches)
        numels.append(sum(patch.values.numel() for patch in patches))
        for name, values in of_ranks[0][1].items():
            there = served.model.get_parameter(name)
            assert torch.equal(there.view(torch.int16), values.view(torch.int16)), name
    assert numels[6] == 0, "the skipped step"
    assert 0 < max(numels[1:]) < numels[0]
