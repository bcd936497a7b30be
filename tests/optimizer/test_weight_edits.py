"""Weights that a script writes between steps, compared with the script on a plain fp32 model."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, of, values
from pairwise import seeds
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import shardcast
from shardcast.memory.shard import take_moved
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import ThreadedWorld, threaded_world

pytestmark = pytest.mark.timeout(120)

BF16 = torch.bfloat16
adamw = of("AdamW", lr=3e-2)


# -- every way to write ---------------------------------------------------------------------------

Door = Callable[[nn.Parameter, Tensor], Any]  # writes values of the parameter's own dtype into it


def by_element(param: nn.Parameter, new: Tensor) -> None:
    flat, values = param.data.view(-1), new.reshape(-1)
    for index in range(len(flat)):
        if bits(flat[index]) != bits(values[index]):
            flat[index] = values[index]


def by_numpy(param: nn.Parameter, new: Tensor) -> None:
    bits(param.detach()).numpy()[...] = bits(new).numpy()


def by_storage(param: nn.Parameter, new: Tensor) -> None:
    place = param.storage_offset(), param.shape, param.stride()
    torch.empty(0, dtype=param.dtype).set_(param.untyped_storage(), *place).copy_(new)


DOORS: dict[str, Door] = {
    "copy_": lambda param, new: param.copy_(new),
    "data": lambda param, new: param.data.copy_(new),
    "elements": by_element,
    "assigned": lambda param, new: setattr(param, "data", new.clone()),
    "numpy": by_numpy,
    "storage": by_storage,
    "foreach": lambda param, new: torch._foreach_copy_([param.detach()], [new]),
    "vector": lambda param, new: nn.utils.vector_to_parameters(new.reshape(-1), [param]),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def some(model: nn.Module, seed: int) -> list[tuple[nn.Parameter, Tensor]]:
    """Return new values of parameters: rows, single elements, clamps, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    edits = []
    for param in model.parameters():
        new = param.detach().clone()
        kind = int(torch.randint(6, (), generator=generator))
        if kind == 0:
            new.view(-1)[-1] = 0.5 + seed / 256  # a new value each time
        elif kind == 1:
            new[-1] = 0.0
        elif kind == 2:
            new.clamp_(-0.0625, 0.0625)
        elif kind == 3:
            new.mul_(-0.5)
        elif kind == 4:
            new.view(-1)[0] = -0.0
        edits.append((param, new))
    return edits


adafactor = of("Adafactor", lr=3e-2)
momentum = of("SGD", lr=1e-3, momentum=0.9)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    matrices = torch.optim.Muon([param for param in params if param.dim() == 2])
    return [matrices, torch.optim.AdamW([param for param in params if param.dim() != 2])]


EPILOGUES = {"averages": {"ema": 0.5}, "metrics": 2}
WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bf16": (adamw, {}),
    "fp16": (adamw, {"param_dtype": torch.float16, "loss_scale": 1.0}),
    "epilogues": (adamw, EPILOGUES),
    "device": (adamw, {}),
    "device, epilogues": (adamw, EPILOGUES),
    "offload": (adamw, {"offload": True}),
    "overlap": (adamw, {"overlap_sync": True, "pack_params": 2}),
    "whole": (adamw, {"partition": "whole"}),
    "moments": (momentum, {"moments": "bf16"}),
    "accumulate": (adamw, {"accumulate": "sharded"}),
    "adafactor": (adafactor, {}),
    "adafactor, epilogues": (adafactor, EPILOGUES),
    "muon": (muon, {}),
    "kept": (adamw, {"keep_fp32": ("b.*",)}),
}


def take_by_hand(optimizer: Any) -> None:
    """Repeat the rule: if published bits are not those of the cast, they become the master."""
    optimizer.wait_sync()
    take_moved(packed_of(optimizer).shards)
    for shard in packed_of(optimizer).shards if optimizer.config.master != "split16" else ():
        for fragment in shard.fragments if not shard.in_place else ():
            part = shard.local(fragment.start, fragment.stop)
            master, published = shard.read(part).clone(), shard.published[part]
            for index in range(len(master)):
                if bits(master[index].to(published.dtype)) != bits(published[index]):
                    master[index] = published[index].float()
            shard.set_exact(fragment, master)


def set_up(group: Any, way: str, **fields: Any) -> tuple[nn.Module, Any]:
    build, of_way = WAYS[way]
    model = CASES["mlp"].build()
    fields = {"fuse": "eager", **of_way, **fields}
    return model, shardcast.shard(model, build(model), process_group=group, **fields)


@pytest.mark.needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["bf16", "fp16"])
def test_a_compiled_update_takes_the_same_edits_and_no_others(way: str):
    """Compiled code must not confuse a rounded value with the unrounded one."""
    assert_edits_are_those_by_hand(1, way, 0, fuse="compile")
    (model, optimizer), (plain, eager) = set_up(None, way, fuse="compile"), set_up(None, way)
    for step in range(4):
        for each, of_each in ((model, optimizer), (plain, eager)):
            install(each, step)
            of_each.step()
        before = packed_of(optimizer).shards[0].data.clone()
        take_by_hand(optimizer)
        assert torch.equal(packed_of(optimizer).shards[0].data, before)
    rounded = before != packed_of(optimizer).shards[0].published
    assert rounded[before != 0].double().mean() > 0.9, "masters are more exact"
    masters = optimizer.full_parameters(), eager.full_parameters()
    torch.testing.assert_close(*masters, rtol=1e-5, atol=1e-6)


def test_the_copy_of_the_owner_decides():
    """If one rank edits alone, all ranks get the owner's values; with DDP they would drift."""

    def run(group: Any, editor: int) -> dict[str, Tensor]:
        model, optimizer = set_up(group, "whole")
        install(model, 0)
        optimizer.step()
        if group.rank() == editor:
            model.a.weight.data.fill_(3.0)
        install(model, 1)
        optimizer.step()
        return values(model)

    ends = [ThreadedWorld(2).run(run, editor) for editor in (0, 1)]
    for one, other in ends:
        assert_same_bits(one, other)
    assert sorted(bool((end[0]["a.weight"] > 2).all()) for end in ends) == [False, True]


def test_a_nan_that_a_script_writes_is_in_the_model_after_the_step():
    model, optimizer = set_up(None, "bf16")
    install(model, 0)
    optimizer.step()
    model.a.weight.data[3, 2] = torch.nan
    install(model, 1)
    optimizer.step()
    assert model.a.weight.isnan().sum() == 1 and model.a.weight[3, 2].isnan()


def test_weights_written_before_the_first_step_begin_an_average():
    model, optimizer = set_up(None, "bf16", averages={"ema": 0.75})
    model.a.bias.data.fill_(8.0)
    install(model, 0)
    optimizer.step()
    assert (optimizer.full_parameters("ema")["a.bias"] > 7).all()


def random_run(group: Any, way: str, seed: int, by_hand: bool, fields: dict[str, Any]) -> Any:
    """Run random writes of all kinds, reads, switched weights, absent gradients and skips.

    Args:
        by_hand: write masters by hand before each step that is not skipped.
    """
    draw = random.Random(seed)
    model, optimizer = set_up(group, way, max_skipped_steps=99, **fields)
    seen = []
    for step in range(8):
        with torch.no_grad():
            for _ in range(draw.randrange(3)):
                for param, new in some(model, draw.randrange(99)):
                    if draw.random() < 0.5:
                        DOORS[draw.choice([*DOORS])](param, new)
        if draw.random() < 0.3:
            backup = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict({name: 0.5 * tensor for name, tensor in backup.items()})
            model.load_state_dict(backup)
        install(model, step)
        for param in model.parameters():
            if draw.random() < 0.2:
                param.grad = None
        skips = draw.random() < 0.2
        if skips:
            model.a.weight.grad = torch.full_like(model.a.weight, torch.inf)
        if by_hand and not skips:
            take_by_hand(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of skipped steps
            optimizer.step()
        optimizer.wait_sync()
        if draw.random() < 0.3:
            seen.append(optimizer.digest())
    return seen, optimizer.digest(), values(model)


def assert_edits_are_those_by_hand(size: int, way: str, seed: int, **fields: Any) -> None:
    found, expected = (
        ThreadedWorld(size).run(random_run, way, seed, by_hand, fields) for by_hand in (False, True)
    )
    for one, other in zip(found, expected, strict=True):
        assert one[:2] == other[:2]
        assert_same_bits(one[2], other[2])
        assert_same_bits(one[2], found[0][2])


@pytest.mark.parametrize("seed", seeds(len(WAYS)))  # one for each way
def test_random_edits_are_those_of_masters_that_are_written_by_hand(
    seed: int, on_device: Callable[[str], None]
):
    way, size = [*WAYS][seed % len(WAYS)], 1 + seed % 4
    on_device(way)
    assert_edits_are_those_by_hand(size, way, seed)


def meshed(mesh: Any, way: str) -> Tensor:
    torch.manual_seed(0)
    whole = torch.randn(8, 4)
    local = whole.chunk(2)[mesh.get_local_rank("tp")].clone()
    model = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]))
    optimizer = shardcast.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.0), mesh=mesh, param_dtype=BF16
    )
    with torch.no_grad():
        if way == "dtensor":
            model.weight.clamp_(-0.25, 0.25)
        elif way == "local":
            model.weight.to_local().clamp_(-0.25, 0.25)
        else:
            model.weight.to_local().data.clamp_(-0.25, 0.25)
    model.weight.grad = DTensor.from_local(torch.zeros(4, 4, dtype=BF16), mesh["tp"], [Shard(0)])
    optimizer.step()
    return copy.copy(packed_of(optimizer).shards[0].data)


@pytest.mark.parametrize("way", ["dtensor", "local", "data"])
def test_tensor_parallel_weights_may_be_written_too(way: str):
    largest = max(m.abs().max() for m in threaded_world({"dp": 2, "tp": 2}, meshed, way))
    assert largest < 0.251  # smaller masters are cast to 0.25
