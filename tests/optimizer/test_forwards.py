"""Scripts written for DDP and autocast: the loss is the same, and inputs are not changed."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT, sharded
from pairwise import thinned
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast.testing import ThreadedWorld

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BATCH, WIDTH = 16, 32
Batch = Mapping[str, Any]


def mse_loss(outputs: Tensor, target: Tensor, **options: Any) -> Tensor:
    """torch before 2.13 has no gradient of an MSE loss of two dtypes."""
    if torch.__version__ < (2, 13):
        outputs = outputs.to(target.dtype)
    return F.mse_loss(outputs, target, **options)


class Regression(nn.Module):
    """Has its own bare weights, like a ViT, and takes labels and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.stem, self.norm = nn.Conv1d(3, WIDTH, 2, stride=2), nn.LayerNorm(WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        x = self.stem(x).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        x = self.head(self.norm(self.layer(x))[:, 0])
        return mse_loss(100 * x, labels, reduction="sum") / num_items_in_batch


class Denoiser(nn.Module):
    """Parts of a UNet: fp32 time steps, then layers with a group norm and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.first, self.norm = nn.Conv1d(3, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = nn.Conv1d(WIDTH, 3, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor, target: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        angles = steps[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = F.silu(self.norm(self.first(x))) + time[:, :, None]
        x = x.transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return mse_loss(self.last(x.transpose(1, 2)), target)


class Rotary(nn.Module):
    """Attention with rotary positions that are computed in fp32.

    Args:
        cast: cast rotated queries and keys to the dtype of the hidden states, as in transformers.
    """

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.cast = cast
        self.embed, self.qkv = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, dim=-1)
        rates = 100.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        angles = (torch.arange(tokens.shape[1])[:, None] * rates).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        if self.cast:
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = (x * cos + torch.cat(x.chunk(2, -1)[::-1], -1) * sin for x in (q, k))
        x = self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return F.cross_entropy(x.float().flatten(0, 1), tokens.flatten())


class Bare(nn.Module):
    """Multiplies by its own weights, one of them in a list and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.more = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 2) / 8)])
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.inner(torch.tanh(x @ self.weight))
        return mse_loss(100 * F.linear(x, self.more[0].t()), target)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(3, WIDTH, batch_first=True), nn.GRU(WIDTH, 2)
        self.mix, self.relu = nn.Bilinear(2, 2, 2), nn.PReLU()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        state = (torch.ones(1, len(x), WIDTH), torch.ones(1, len(x), WIDTH))
        x, (hidden, _) = self.lstm(x.transpose(1, 2), state)
        x = self.gru((x + hidden.transpose(0, 1)).transpose(0, 1))[0][-1]
        return mse_loss(self.relu(self.mix(x.float(), x.float())), target)


class Residual(nn.Module):
    """A residual stream that stays in fp32, the dtype of its inputs."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8)])
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            if self.recompute:
                x = x + checkpoint(lambda y, n=norm, f=layer: f(n(y)), x, use_reentrant=False)
            else:
                x = x + layer(norm(x))
        return mse_loss(x[..., :2].mean(1), target)


class Graph:
    """An object of unknown type that holds tensors, like PyG's ``Data``."""

    def __init__(self, x: Tensor, edge_index: Tensor) -> None:
        self.x, self.edge_index = x, edge_index


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, WIDTH), Bare()
        self.second.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, graph: Graph, target: Tensor) -> Tensor:
        source, sink = graph.edge_index
        x = self.first(graph.x)
        x = torch.zeros(len(graph.x), WIDTH, dtype=x.dtype).index_add(0, sink, x[source])
        return self.second(graph.x[:, :1] + x, target)


class Normed(nn.Module):
    """Weights that are computed from others, with both of torch's APIs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.second = parametrizations.orthogonal(nn.Linear(8, 8))
        self.third = parametrizations.weight_norm(nn.Linear(8, 8))
        self.fourth, self.fifth = spectral_norm(nn.Linear(8, 8)), weight_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third, self.fourth, self.fifth):
            x = torch.tanh(layer(x))
        return mse_loss(self.last(x).mean(1), target)


class Language(GPT):
    def forward(self, tokens: Tensor, num_items_in_batch: Tensor) -> Tensor:
        x = super().forward(tokens)
        loss = F.cross_entropy(x.float().flatten(0, 1), tokens.flatten(), reduction="sum")
        return loss / num_items_in_batch


def batches(seed: int) -> dict[str, Batch]:
    torch.manual_seed(seed)
    x, target = torch.randn(BATCH, 3, 8), torch.randn(BATCH, 2)
    steps = torch.rand(BATCH) * 1000
    return {
        "labels": {"x": x, "labels": 300 * target, "num_items_in_batch": torch.tensor(367.0)},
        "steps": {"x": x, "steps": steps, "target": torch.randn_like(x)},
        "tokens": {"tokens": torch.randint(11, (BATCH, 8))},
        "counted": {
            "tokens": torch.randint(37, (BATCH, 8)),
            "num_items_in_batch": torch.tensor(367.0),
        },
        "flat": {"x": x[..., 0], "target": 300 * target},
        "plain": {"x": x, "target": target},
        "graph": {"graph": Graph(x[..., 0], torch.randint(BATCH, (2, 40))), "target": 300 * target},
    }


Case = tuple[Callable[[], nn.Module], str, dict[str, Any]]
SCRIPTS: dict[str, Case] = {
    "regression labels, bare tokens": (Regression, "labels", {}),
    "time steps": (Denoiser, "steps", {}),
    "rotary positions": (lambda: Rotary(cast=True), "tokens", {}),
    "rotary positions in fp32": (lambda: Rotary(cast=False), "tokens", {"autocast": True}),
    "tokens counted by Trainer, tied head": (Language, "counted", {}),
    "norms in fp32": (Language, "counted", {"keep_fp32": "norms"}),
    "a part in fp32": (Regression, "labels", {"keep_fp32": ("layer.*", "token")}),
    "a head that returns fp32": (Regression, "labels", {"fp32_outputs": "head"}),
    "bare weights": (Bare, "flat", {}),
    "recurrent": (Recurrent, "plain", {}),
    "fp32 residual stream": (Residual, "plain", {}),
    "fp32 residual stream, recomputed": (lambda: Residual(recompute=True), "plain", {}),
    "an object of the script's own": (GraphNet, "graph", {}),
    "computed weights": (Normed, "plain", {}),
}
MODES = [
    (name, autocast)
    for name, case in SCRIPTS.items()
    for autocast in (False, True)
    if case[2].get("autocast", autocast) == autocast
]


def loss_and_norm(
    model: nn.Module, batch: Batch, autocast: bool, dtype: torch.dtype = BF16
) -> tuple[float, float]:
    with torch.autocast("cpu", dtype, enabled=autocast):
        loss = model(**batch)
    grads = torch.autograd.grad(loss.float(), list(model.parameters()), allow_unused=True)
    squares = (float(grad.float().square().sum()) for grad in grads if grad is not None)
    return float(loss), math.sqrt(sum(squares))


def figures(name: str, autocast: bool, dtype: torch.dtype = BF16) -> tuple[float, float, float]:
    """Return the largest differences: our loss from autocast's, its from fp32, gradient norms."""
    build, kind, fields = SCRIPTS[name]
    models = []
    for _ in range(3):
        torch.manual_seed(1)
        models.append(build())
    plain, stock, low = models
    optimizer = sharded(low, param_dtype=dtype, **{"autocast": autocast, **fields})
    distance, noise, gradients = [], [], []
    for seed in range(12):
        batch = batches(seed)[kind]
        exact, _ = loss_and_norm(plain, batch, False)
        expected, expected_norm = loss_and_norm(stock, batch, True, dtype)
        with optimizer.no_sync():
            loss, norm = loss_and_norm(low, batch, False)
        distance.append(abs(loss - expected) / abs(exact))
        noise.append(abs(expected - exact) / abs(exact))
        gradients.append(abs(norm - expected_norm) / expected_norm)
    return max(distance), max(noise), max(gradients)


def skip_where_torch_itself_cannot(name: str, dtype: torch.dtype) -> None:
    """Skip if stock autocast fails: oneDNN has no low-precision LSTM for some CPUs."""
    build, kind, _ = SCRIPTS[name]
    try:
        loss_and_norm(build(), batches(0)[kind], True, dtype)
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip(f"{name}: torch on this CPU {error}")


FP16_TOO = ("time steps", "bare weights", "fp32 residual stream")


@pytest.mark.parametrize(
    ("name", "autocast", "dtype"),
    [
        (*mode, dtype)
        for mode in MODES
        for dtype in (BF16, FP16)
        if dtype is BF16 or mode[0] in FP16_TOO
    ],
)
def test_a_script_has_the_loss_of_stock_autocast(name: str, autocast: bool, dtype: torch.dtype):
    skip_where_torch_itself_cannot(name, dtype)
    distance, noise, gradients = figures(name, autocast, dtype)
    assert distance < 2 * noise
    assert gradients < 0.05


class Gain(nn.Module):
    """Records whether it runs under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.autocast = torch.is_autocast_enabled("cpu")
        return x * self.gain


class Keeper(nn.Module):
    """A root with its own matrix, which records its inputs and a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(4, 4)), nn.LayerNorm(4)
        self.gain = Gain()
        self.last = nn.Linear(4, 4)
        self.seen: tuple[Any, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = (*args, *kwargs.values())
        x = self.gain(self.norm(self.seen[0] @ self.weight))
        self.normed = x.dtype
        return self.last(x)


INPUTS = (torch.ones(2, 4), torch.tensor(367.0), torch.tensor([497.3, 1.0]), torch.ones(2, 4))


class Strange(nn.Module):
    """Operations of third-party scripts that bf16 does not support, or not precisely enough."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.energies = nn.Embedding(50, 8), nn.Embedding(50, 1)
        nn.init.normal_(self.energies.weight, -1000, 300)
        self.first, self.head, self.loc = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 6)
        nn.init.zeros_(self.loc.weight)
        self.scale = nn.Parameter(torch.tensor(2.6593))

    def fourier(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.fft.rfft(self.first(x), dim=1).abs().mean()

    def singular(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.linalg.svdvals(self.first(x[0])).sum()

    def quantile(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.quantile(self.first(x), 0.9)

    def determinant(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.slogdet(self.first(x[0, :8]) + 3 * torch.eye(8))[1]

    def spatial(self, x: Tensor, tokens: Tensor) -> Tensor:
        images = x.reshape(2, 1, 40, 32)
        theta = self.loc(x.mean(1)).view(2, 2, 3) + torch.eye(2, 3)
        return F.grid_sample(images, F.affine_grid(theta, [2, 1, 9, 9])).sum()

    def positions(self, x: Tensor, tokens: Tensor) -> Tensor:
        y = self.table(tokens)
        places = torch.arange(tokens.shape[1], dtype=y.dtype)[:, None]
        return (y + torch.sin(places * torch.arange(1, 9))).square().mean() + 0 * self.first(
            y
        ).sum()

    def reference_energies(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.energies(tokens).mean() + self.first(x).mean()

    def summed_loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        losses = (F.cross_entropy(self.head(part), tokens[0, :2] % 3) for part in x[0].split(2))
        return sum(losses, torch.zeros(()))

    def temperature(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.scale.exp() * self.head(x[0]), tokens[0, :160] % 3)

    def fp32_island(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float()).square().mean()

    def forward(self, name: str, x: Tensor, tokens: Tensor) -> Tensor:
        loss = getattr(self, name)(x, tokens)
        assert loss.dtype == FP32
        return loss


STRANGE = [name for name in vars(Strange) if name != "forward" and not name.startswith("_")]


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize(("by_method", "with_own"), [(False, False), (False, True), (True, True)])
def test_operations_that_break_or_drift_in_pure_bf16_are_as_beside_ddp(
    name: str, by_method: bool, with_own: bool
):
    torch.manual_seed(0)
    exact, stock, ours = (Strange() for _ in range(3))
    for model in (stock, ours):
        model.load_state_dict(exact.state_dict())
    optimizer = sharded(ours, param_dtype=BF16)
    x, tokens = torch.randn(2, 160, 8), torch.randint(50, (2, 700))
    expected = exact(name, x, tokens)
    with torch.autocast("cpu", BF16):
        beside = stock(name, x, tokens)
    if by_method and name == "fp32_island":
        pytest.skip("outside of a forward the layer does not know that autocast was on")
    if by_method:  # such as a policy's; the script keeps its autocast around it
        with torch.autocast("cpu", BF16):
            loss = getattr(ours, name)(x, tokens)
    else:
        with torch.autocast("cpu", BF16, enabled=with_own):
            loss = ours(name, x, tokens)
    noise = float((beside - expected).abs() / expected.abs())
    # Autocast does not round the weights of an fp32 matmul; here they are bf16.
    least = 2**-8 if name == "fp32_island" else 1e-3
    assert float((loss - beside).abs() / expected.abs()) <= max(noise, least)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("autocast", [False, True])
def test_forward_gets_its_inputs_as_the_script_passes_them(autocast: bool):
    model = Keeper()
    sharded(model, param_dtype=BF16, autocast=autocast)
    model(*INPUTS[:2], steps=INPUTS[2], labels=INPUTS[3])
    assert all(seen is passed for seen, passed in zip(model.seen, INPUTS, strict=True))
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(2, 3))
    assert not torch.is_autocast_enabled("cpu"), "an error must not change it"


def test_what_is_inside_a_module_with_a_matrix_of_its_own_computes_low():
    model = Keeper()
    sharded(model, param_dtype=BF16, autocast=False)
    model(torch.ones(2, 4))
    assert model.normed == model.weight.dtype == BF16
    assert not model.gain.autocast and not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", FP16):
        assert model(torch.ones(2, 4)).dtype == FP16, "the script's own autocast still applies"
    assert model.gain.autocast


def test_under_autocast_norms_stay_fp32_and_kept_modules_run_without_it():
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.ones(4, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x @ self.weight
            seen.append(x.dtype)
            x = x @ self.weight + self.inner(x)
            seen.append(x.dtype)
            return x

    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Kept(), nn.Linear(4, 4))
    sharded(model, param_dtype=BF16, autocast=True, keep_fp32="2.weight")
    assert {p.dtype for p in model[1].parameters()} == {model[2].weight.dtype} == {FP32}
    assert model[2].inner.weight.dtype == BF16
    assert model(torch.ones(2, 4)).dtype == BF16
    assert seen == [FP32, FP32]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("autocast", [False, True])
def test_copies_keep_the_casts_and_a_closed_model_loses_them(autocast: bool):
    torch.manual_seed(0)
    model, x = Keeper(), torch.randn(2, 4)
    model(x)  # records what it sees
    forward, before = model.forward, {module: {*vars(module)} for module in model.modules()}
    optimizer = sharded(model, param_dtype=BF16, autocast=autocast)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    for each in (model, *copies):  # Trainer keeps the columns of data that a forward names
        assert inspect.signature(each.last.forward) == inspect.signature(nn.Linear(1, 1).forward)
    with torch.no_grad():
        model.weight.zero_()
        model.last.weight.zero_()
    for twin in copies:
        assert torch.equal(twin(x), expected), "a copy computes with its own weights"
    # A copy that is converted for evaluation computes in its new dtype.
    assert copies[0].eval().float().last(torch.ones(2, 4)).dtype == FP32
    optimizer.close()
    assert model.forward == forward
    assert {module: {*vars(module)} for module in model.modules()} == before


def test_a_forward_that_a_script_replaced_keeps_its_arguments():
    model = nn.Sequential(nn.Linear(4, 4))
    layer, calls = model[0], []
    layer.forward = lambda value, scale=1: calls.append(scale) or value @ layer.weight
    sharded(model, param_dtype=BF16)
    assert [*inspect.signature(layer.forward).parameters] == ["value", "scale"]
    assert layer(torch.ones(2, 4), scale=3).dtype == BF16 and calls == [3]


@pytest.mark.parametrize("autocast", [False, True])
def test_the_function_of_a_forward_can_be_bound_to_its_module(autocast: bool):
    """Accelerate's prepare() wraps ``model.forward.__func__`` and binds it to the model."""
    torch.manual_seed(0)
    model, x = Keeper(), torch.randn(2, 4)
    optimizer = sharded(model, param_dtype=BF16, autocast=autocast)
    expected = model(x)
    for module in (model, model.last):
        module.forward = MethodType(module.forward.__func__, module)
    twin = copy.deepcopy(model)
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(twin(x), expected), "a copy computes with its own weights"
    optimizer.close()
    assert model(x).dtype == FP32


def cloned(module: nn.Module) -> nn.Module:
    """Copy all attributes and make new parameters, like learn2learn and higher."""
    clone = module.__new__(type(module))
    clone.__dict__ = {**vars(module)}
    clone._parameters = {name: 2 * param for name, param in module._parameters.items()}
    clone._modules = {name: cloned(child) for name, child in module._modules.items()}
    return clone


def test_a_copy_of_the_attributes_with_other_weights_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sharded(model, param_dtype=BF16)
    expected = model[0](torch.ones(2, 4))
    assert torch.equal(copy.copy(model[0])(torch.ones(2, 4)), expected), "the same weights"
    with pytest.raises(RuntimeError, match="copy of a"):
        cloned(model)(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("autocast", "name"),
    thinned(2, [False, True], ["bare weights", "fp32 residual stream, recomputed"]),
)
def test_a_compiled_model_has_the_loss_of_an_eager_one(name: str, autocast: bool):
    build, kind, fields = SCRIPTS[name]
    torch.manual_seed(1)
    model = build()
    sharded(model, param_dtype=BF16, autocast=autocast, **fields)
    expected = loss_and_norm(model, batches(0)[kind], False)
    compiled = torch.compile(model, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    assert loss_and_norm(compiled, batches(0)[kind], False) == pytest.approx(expected, rel=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) + x @ self.weight


@pytest.mark.parametrize(("autocast", "in_place"), thinned(2, [False, True], [False, True]))
def test_equal_blocks_that_are_compiled_by_themselves_share_a_graph(autocast: bool, in_place: bool):
    """Dynamo compiles eight versions of a function, then runs it eagerly."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(10)))
    sharded(model, param_dtype=BF16, autocast=autocast)
    ran: list[str] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        name = f"graph {len({*ran})}"
        return lambda *args: (ran.append(name), graph(*args))[1]

    torch._dynamo.reset()
    for number in range(1, 11):
        if in_place:
            model[number].compile(backend=backend)
        else:
            model[number] = torch.compile(model[number], backend=backend)
    model(torch.randn(BATCH, WIDTH)).square().sum().backward()
    assert ran == ["graph 0"] * 10


@pytest.mark.parametrize("autocast", [False, True])
def test_a_sharded_model_is_exported_by_torch(autocast: bool):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))
    sharded(model, param_dtype=BF16, autocast=autocast)
    inputs = torch.randn(BATCH, WIDTH)
    program = torch.export.export(model.eval(), (inputs,))
    assert torch.equal(program.module()(inputs), model(inputs))


def test_layers_of_torch_that_read_their_childrens_weights_work_in_evaluation():
    """The fast paths of transformer layers call no inner module."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.MultiheadAttention(8, 2)).eval()
    x = torch.randn(2, 3, 8)
    expected = model[0](x), model[1](x, x, x)[0]
    sharded(model, param_dtype=BF16)
    with torch.no_grad():
        found = model[0](x), model[1](x, x, x)[0]
    torch.testing.assert_close([y.float() for y in found], list(expected), rtol=0.05, atol=0.05)


# -- parameters that stay fp32 by default ----------------------------------------------------------


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


class Adapted(nn.Module):
    """A frozen base, as in LoRA, and trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.trained = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False))
        self.base.requires_grad_(False)
        self.list = nn.ModuleList([encoder(), encoder()])
        self.list[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.list[1](self.list[0](self.base(x) + self.first(x))) + self.trained(x)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("came", "convert"), [(FP32, True), (FP32, False), (BF16, True), (BF16, False)]
)
def test_a_frozen_base_stays_as_it_came_unless_asked_or_without_autocast(
    came: torch.dtype, convert: bool, autocast: bool
):
    model = Adapted()
    for base in (model.base, model.list[0]):
        base.to(came)
    sgd = lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)  # noqa: E731
    optimizer = sharded(
        model, optimizer=sgd, param_dtype=BF16, convert_rest=convert, autocast=autocast
    )
    dtype = came if autocast and not convert else BF16
    assert model.base.weight.dtype == model.list[0][0].weight.dtype == dtype
    assert model.trained.weight.dtype == model.list[1][0].weight.dtype == BF16
    model(torch.randn(4, 4)).float().sum().backward()
    optimizer.step()


class Tower(nn.Module):
    """Layers of each kind, alternately trained and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layer_norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2)
        self.recurrent, self.last = nn.LSTM(8, 8), nn.Linear(8, 4)
        self.scales = nn.Parameter(torch.rand(8, 8))
        for frozen in (self.norm, self.up, self.layer_norm, self.recurrent):
            frozen.requires_grad_(False)
        self.down.weight.requires_grad_(False)  # as in BitFit, with a trained bias
        self.scales.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x)).transpose(1, 2)
        hidden = self.layer_norm(self.down(F.gelu(self.up(hidden))) @ self.scales)
        hidden = self.attention(hidden, hidden, hidden)[0]
        output: Tensor = self.last(self.recurrent(hidden)[0])
        return output


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("part", [None, "up"], ids=["the model", "a frozen layer of it"])
def test_frozen_layers_compute_the_bits_that_they_have_beside_ddp_under_autocast(
    held: bool, part: str | None
):
    x = torch.randn(3, 4, 5) if part is None else torch.randn(3, 8)

    def outcome(own: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Tower()
        params = [param for param in model.parameters() if held or param.requires_grad]
        sgd = torch.optim.SGD(params, lr=0.1)
        if own:
            shardcast.shard(model, sgd, param_dtype=BF16)
        called = model if part is None else getattr(model, part)
        with torch.autocast("cpu", BF16, enabled=not own):
            output = called(x)
        if part is None:
            output.float().square().mean().backward()
        trained = [param for param in model.parameters() if param.requires_grad]
        gradients = [param.grad.float() for param in trained if param.grad is not None]
        return [output.detach(), *gradients]

    stock, mine = outcome(False), outcome(True)
    assert len(stock) == len(mine) and stock[0].dtype == mine[0].dtype
    assert all(torch.equal(one, other) for one, other in zip(stock, mine, strict=True))


@pytest.mark.parametrize("cached", [False, True])
def test_an_autocast_around_the_model_that_is_off_turns_nothing_off_in_it(cached: bool):
    """Frameworks do this; without its cache, it used to be mistaken for one inside the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), param_dtype=BF16)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", BF16, enabled=False, cache_enabled=cached):
        output = model(x)
    assert output.dtype == BF16 and torch.equal(output, model(x))


@pytest.mark.parametrize("copied", [False, True])
def test_a_model_with_a_frozen_part_that_is_converted_to_be_evaluated_computes_in_fp32(
    copied: bool,
):
    torch.manual_seed(0)
    model, x = Tower().eval(), torch.randn(3, 4, 5)
    params = [param for param in model.parameters() if param.requires_grad]
    shardcast.shard(model, torch.optim.SGD(params, lr=0.1), param_dtype=BF16)
    model = copy.deepcopy(model) if copied else model
    model.float()
    plain = Tower().eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))


def test_a_kept_base_that_came_low_is_widened():
    """peft trains fp32 adapters on a bf16 base like this."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[:2].to(BF16).requires_grad_(False)
    sgd = lambda m: torch.optim.SGD(m[2].parameters(), lr=0.1)  # noqa: E731
    sharded(model, optimizer=sgd, keep_fp32="1.*")
    assert [layer.weight.dtype for layer in model] == [BF16, FP32, FP32]


def test_a_forward_that_converts_a_module_is_refused_by_name_on_every_rank():
    """Switch's router does this. It trains with the ``keep_fp32`` that the error suggests."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.classifier = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.classifier.to(FP32)
            return self.classifier(self.first(x).float())

    told = r"'classifier\.weight' from torch\.bfloat16 to(.|\n)*keep_fp32=\('classifier\.\*',\)"

    def run(group: Any, **fields: Any) -> None:
        model = Router()
        optimizer = sharded(model, group, param_dtype=BF16, **fields)
        with contextlib.nullcontext() if fields else pytest.raises(RuntimeError, match=told):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    ThreadedWorld(2).run(run)
    ThreadedWorld(2).run(lambda group: run(group, keep_fp32="classifier.*"))
