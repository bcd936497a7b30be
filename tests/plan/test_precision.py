"""The dtype of each parameter, and forwards with these dtypes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from models import CASES, Block, sharded
from pairwise import pairwise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardcast.testing import ThreadedWorld, threaded_world

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def kept(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.dtype == FP32}


def of_block(number: int, *layers: str) -> set[str]:
    return {f"blocks.{number}.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


EVERY = ("ln1", "ln2", "qkv", "out", "fc", "proj")
NORMS = of_block(0, "ln1", "ln2") | of_block(1, "ln1", "ln2") | {"ln.weight", "ln.bias"}
RULES: dict[str, tuple[Any, set[str]]] = {
    "nothing": ((), set()),
    "preset": ("norms", NORMS),
    "one pattern": ("blocks.0.fc.*", of_block(0, "fc")),
    "a pattern of one parameter keeps its module": ("blocks.0.fc.bias", of_block(0, "fc")),
    "pattern over layers": ("*.qkv.weight", of_block(0, "qkv") | of_block(1, "qkv")),
    "class": (nn.LayerNorm, NORMS),
    "class with all inside": (Block, of_block(0, *EVERY) | of_block(1, *EVERY)),
    "predicate": (lambda name, param: param.shape == (11, 18), {"wpe.weight"}),
    "several": (("norms", "wpe.*"), NORMS | {"wpe.weight"}),
    "a tie keeps both ends": ("head.weight", {"wte.weight"}),
    "a tie seen from the other end": ("wte.weight", {"wte.weight"}),
}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rule", RULES)
def test_rules_keep_the_named_modules_in_fp32_and_the_model_trains(rule: str, dtype: torch.dtype):
    keep, expected = RULES[rule]
    model, reference = CASES["gpt"].build(), CASES["gpt"].build()
    options = {"autocast": False, "loss_scale": 1.0}
    optimizer = sharded(model, param_dtype=dtype, keep_fp32=keep, **options)
    assert kept(model) == expected
    for pack in optimizer.layout.packs:
        names = {slot.name for slot in pack.slots}
        assert pack.dtype == (FP32 if names & expected else dtype)
        assert names <= expected or not names & expected
    tokens, _ = CASES["gpt"].batch(0)
    out = model(tokens)
    is_kept = "wte.weight" in expected  # the head's weight
    assert out.dtype == (FP32 if is_kept else dtype), "the model's outputs are in param_dtype"
    # Two blocks with activations of order 1, rounded to 8 bits (bf16) about ten times each.
    torch.testing.assert_close(out.float(), reference(tokens), atol=0.1, rtol=0.1)
    CASES["gpt"].loss(model, CASES["gpt"].batch(0)).backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    optimizer.step()


class Inner(nn.Module):
    """Module that records the dtypes of its input and of its first layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        between = self.a(x)
        self.seen = x.dtype, between.dtype
        return self.b(between)


@pytest.mark.parametrize(
    ("keep", "given", "between", "out"),
    [
        ((), BF16, BF16, BF16),
        (Inner, FP32, FP32, FP32),
        ("1.a.*", BF16, FP32, BF16),
        ("*", FP32, FP32, FP32),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_kept_modules_take_and_return_fp32(
    keep: Any, given: torch.dtype, between: torch.dtype, out: torch.dtype, autocast: bool
):
    model = nn.Sequential(nn.Linear(4, 4), Inner())
    sharded(model, param_dtype=BF16, keep_fp32=keep, autocast=autocast)
    assert model(torch.ones(2, 4)).dtype == out
    assert model[1].seen == (given, between)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_kept_embedding_gives_exact_values_and_a_kept_norm_what_it_is_given(autocast: bool):
    table, norm = nn.Embedding(3, 4), nn.LayerNorm(4)
    model = nn.Sequential(table, norm, nn.Linear(4, 4))
    expected = table.weight.detach().clone()
    options = {"param_dtype": BF16, "keep_fp32": ("0.*", "norms"), "autocast": autocast}
    sharded(model, **options)
    assert model(torch.arange(3)).dtype == BF16
    assert torch.equal(table(torch.arange(3)), expected)
    assert norm(table(torch.arange(3))).dtype == (FP32 if autocast else BF16)


class Vectors(nn.Module):
    """Parameters that cannot be factors of a matmul, and some that can."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((1, 3, 1, 1), 123.675), requires_grad=False)
        self.scale, self.token = nn.Parameter(torch.tensor(2.66)), nn.Parameter(torch.ones(1, 1, 3))
        self.matrix, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        self.gain = nn.ParameterDict({"gain": nn.Parameter(torch.ones(3))})
        self.energies, self.table = nn.Embedding(9, 1), nn.Embedding(9, 3)
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)


@pytest.mark.parametrize("autocast", [False, True])
def test_vectors_that_no_layer_of_torch_multiplies_stay_fp32_under_autocast(autocast: bool):
    model = Vectors()
    sharded(model, param_dtype=BF16, autocast=autocast)
    vectors = {"mean", "scale", "token", "gain.gain", "energies.weight", "norm.weight", "norm.bias"}
    assert kept(model) == (vectors if autocast else set())


class Translations(nn.Module):
    """Distances of embeddings, as in TransE: autocast casts none of its operations."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(20, 6), nn.EmbeddingBag(5, 6)
        self.linear = nn.Linear(6, 6) if linear else nn.Identity()

    def forward(self, triples: Tensor) -> Tensor:
        head, tail = (self.linear(self.entities(triples[:, n])) for n in (0, 2))
        return (head + self.relations(triples[:, 1:2]) - tail).norm(dim=1).mean()


def test_tables_of_a_model_without_any_other_matrix_stay_fp32_under_autocast():
    torch.manual_seed(0)
    plain, model = Translations(False), Translations(False)
    model.load_state_dict(plain.state_dict())
    adagrad = partial(torch.optim.Adagrad, lr=0.1)
    optimizers = (
        adagrad(plain.parameters()),
        sharded(
            model, optimizer=lambda it: adagrad(it.parameters()), param_dtype=BF16, fuse="eager"
        ),
    )
    assert kept(model) == {"entities.weight", "relations.weight"}
    for step in range(20):
        draw = torch.Generator().manual_seed(step)
        triples = torch.randint(5, (16, 3), generator=draw)
        losses = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            with torch.autocast("cpu", BF16):
                losses.append(each(triples))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for linear, fields in ((True, {}), (False, {"autocast": False})):
        model = Translations(linear)
        sharded(model, param_dtype=BF16, **fields)
        assert kept(model) == set(), "negative control"


@pytest.mark.parametrize("names", ["2", "", ("2",), ["*"]])
def test_named_modules_return_fp32(names: Any):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _m, _args, out: seen.append(out.dtype))
    sharded(model, param_dtype=BF16, fp32_outputs=names)
    out = model(torch.ones(1, 4))
    assert out.dtype == FP32 and torch.equal(out, out.bfloat16().float())
    assert seen == [FP32 if names == ["*"] else BF16], "the next layer accepts both"


Pair = namedtuple("Pair", ["left", "right"])


def test_inputs_of_kept_modules_are_cast_inside_containers_of_any_kind():
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            seen["args"], seen["kwargs"] = args, kwargs
            return self.weight.sum()

    seen: dict[str, Any] = {}
    model = nn.ModuleDict({"probe": Probe(), "linear": nn.Linear(2, 2)})
    sharded(model, param_dtype=BF16, keep_fp32=Probe)
    x, index, flags = torch.ones(2, dtype=BF16), torch.arange(2), torch.ones(2, dtype=torch.bool)
    double, scalar = torch.ones(2, dtype=torch.float64), torch.tensor(1.0, dtype=BF16)
    more = OrderedDict(a={"b": [x]}, c=flags)
    model["probe"](x, [x, (x, index)], Pair(x, scalar), more=more, d=double)
    first, (second, (third, fourth)), pair = seen["args"]
    more = seen["kwargs"]["more"]
    assert first.dtype == second.dtype == third.dtype == FP32
    assert fourth.dtype == torch.int64
    assert isinstance(pair, Pair) and pair.left.dtype == FP32
    assert pair.right is scalar, "0-dim tensors are counts or losses"
    assert isinstance(more, OrderedDict) and more["a"]["b"][0].dtype == FP32
    assert more["c"].dtype == torch.bool
    assert seen["kwargs"]["d"].dtype == torch.float64, "other dtypes are not cast"
    assert x.dtype == BF16, "the caller's tensor is unchanged"


def test_inputs_can_be_left_alone_and_fp32_models_cast_nothing():
    model, exact = nn.Linear(4, 2), nn.Linear(4, 2)
    sharded(model, param_dtype=BF16, cast_forward_inputs=False, autocast=False)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(1, 4))
    assert model(torch.ones(1, 4, dtype=BF16)).dtype == BF16
    sharded(exact, cast_forward_inputs=True)
    assert exact(torch.ones(1, 4)).dtype == FP32 and "forward" not in vars(exact)


@pytest.mark.parametrize(
    ("fields", "grad", "wire"),
    [
        ({}, BF16, BF16),
        ({"grad_dtype": FP32}, FP32, FP32),
        ({"reduce_dtype": FP32}, BF16, FP32),
        ({"grad_dtype": FP32, "reduce_dtype": BF16}, FP32, BF16),
    ],
)
def test_gradient_and_wire_dtypes(fields: dict[str, Any], grad: torch.dtype, wire: torch.dtype):
    def train(group: Any) -> torch.dtype:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, param_dtype=BF16, **fields)
        CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
        optimizer.step()
        assert model.a.weight.grad.dtype == grad
        (exchange,) = [call for call in group.log if call.op == "all_to_all_single"]
        return exchange.dtype

    assert ThreadedWorld(2).run(train) == [wire, wire]


@pytest.mark.parametrize(
    ("size", "held", "partition"),
    pairwise((2, 1), (True, False), ("even", "whole")),
)
def test_more_than_eight_micro_batches_are_added_up_in_fp32(size: int, held: bool, partition: str):
    """A bf16 sum of ones stays at 264. The pack has two parameters; hooks count one."""

    def accumulated(group: Any, number: int, **fields: Any) -> tuple[torch.dtype, list[float]]:
        model = nn.Linear(4, 2)
        fields = {"param_dtype": BF16, "partition": partition, **fields}
        optimizer = sharded(model, group, **fields)
        for step in range(2):
            for micro in range(number):
                last = micro + 1 == number
                with optimizer.no_sync() if held and not last else contextlib.nullcontext():
                    loss = model(torch.ones(1, 4)).float().sum()
                    (256 * loss if micro == 8 else loss).backward()
            optimizer.gather_gradients()
            sums = [*model.weight.grad.flatten().tolist(), *model.bias.grad.tolist()]
            optimizer.step()
            if step == 0:
                optimizer.zero_grad()
        return model.weight.grad.dtype, sums

    def run(number: int, **fields: Any) -> Any:
        ranks = threaded_world(size, lambda group: accumulated(group, number, **fields))
        assert all(rank == ranks[0] for rank in ranks)
        return ranks[0]

    # Ranks that reduce after every backward sum in fp32 from the second one on. Ranks that reduce
    # one fp32 sum round it only once, so bf16 is enough for the result.
    reduces = size > 1 and not held
    assert run(8) == (FP32 if reduces else BF16, [8.0] * 10)
    stays = (FP32, [272.0] * 10) if reduces else (BF16, [264.0] * 10)
    assert run(17, grad_dtype=BF16) == stays, "negative control: local sums"
    assert run(17) == (BF16 if size > 1 and held else FP32, [272.0] * 10)


@pytest.mark.parametrize("size", [1, 2])
def test_more_than_eight_gradients_of_one_backward_are_added_up_in_fp32(size: int):
    """Each re-entrant checkpoint produces one."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(300):
                x = checkpoint(lambda y: y + self.weight, x, use_reentrant=True)
            return x

    def run(group: Any) -> list[float]:
        model = Repeated()
        optimizer = sharded(model, group, param_dtype=BF16, autocast=False)
        model(torch.zeros(4, dtype=BF16, requires_grad=True)).sum().backward()
        assert model.weight.dtype == BF16
        optimizer.gather_gradients()
        return model.weight.grad.tolist()

    assert ThreadedWorld(size).run(run) == [[300.0] * 4] * size
