"""Patterns of popular DDP scripts, each on a small net."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Report, Variant
from loops import STEPS, generator, mlp, tokens, trained, vectors
from recipes import recipe
from torch import Tensor, nn


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


@recipe("DINO: gradients of the last layer cancelled in the first steps", "torch")
def cancelled(variant: Variant) -> Report:
    def cancel(model: Any, step: int) -> None:
        if step < 3:
            for parameter in model[4].parameters():
                parameter.grad = None

    model = mlp()
    return trained(variant, model, adamw(model), graded=cancel)


@recipe("DINO: each gradient clipped by its own norm", "torch")
def clipped_each(variant: Variant) -> Report:
    def clip(model: Any, step: int) -> None:
        for parameter in model.parameters():
            scale = 0.01 / (parameter.grad.norm() + 1e-6)
            if scale < 1:
                parameter.grad.mul_(scale)

    model = mlp()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.2), graded=clip)


@recipe("timm's adaptive_clip_grad", "timm", error=RuntimeError, match="gather_gradients")
def adaptive_clip(variant: Variant) -> Report:
    from timm.utils import adaptive_clip_grad

    def clip(model: Any, step: int) -> None:
        adaptive_clip_grad(model.parameters(), 0.01)

    model = mlp()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.2), graded=clip)


@recipe("gradient centralization by hand", "torch", error=RuntimeError, match="gather_gradients")
def centralized(variant: Variant) -> Report:
    def center(model: Any, step: int) -> None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))

    model = mlp()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.2), graded=center)


@recipe("EDM: nan_to_num of every gradient", "torch")
def nan_to_num(variant: Variant) -> Report:
    def clean(model: Any, step: int) -> None:
        for parameter in model.parameters():
            torch.nan_to_num(parameter.grad, nan=0, posinf=1e5, neginf=-1e5, out=parameter.grad)

    model = mlp()
    return trained(variant, model, adamw(model), graded=clean)


@recipe("fairseq: gradients multiplied after backward", "torch")
def multiplied(variant: Variant) -> Report:
    def multiply(model: Any, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.25 * (step + 1))

    model = mlp()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.1), graded=multiply)


@recipe("gradient noise, equal on the ranks", "torch")
def noisy_gradients(variant: Variant) -> Report:
    rng = torch.Generator().manual_seed(5)

    def noise(model: Any, step: int) -> None:
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=rng) * 0.01
            parameter.grad.add_(drawn.to(parameter.grad.dtype))

    model = mlp()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.1), graded=noise)


@recipe("norm of the gradients computed by hand, after gather_gradients()", "torch")
def logged_norm(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        if not variant.stock:
            optimizer.gather_gradients()
        norm = torch.stack([p.grad.float().norm() for p in plain.parameters()]).norm()
        optimizer.step()
        losses += [loss.item(), norm.item()]
    return variant.report(model, losses)


class Fgm:
    """Adversarial steps on one layer that read ``.grad``, as in Kaggle notebooks."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.backup = model, {}

    def attack(self, epsilon: float = 0.5) -> None:
        for name, parameter in self.model.named_parameters():
            if name.startswith("0."):
                self.backup[name] = parameter.data.clone()
                norm = torch.norm(parameter.grad)
                parameter.data.add_(epsilon * parameter.grad / norm)

    def restore(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name in self.backup:
                parameter.data = self.backup[name]
        self.backup = {}


@recipe("FGM: adversarial second backward, with gather_gradients()", "torch")
def fgm(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    adversary, losses = Fgm(plain), []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        if not variant.stock:
            optimizer.gather_gradients()
        adversary.attack()
        with variant.autocast():
            second = F.mse_loss(model(x).float(), y)
        second.backward()
        adversary.restore()
        optimizer.step()
        losses += [loss.item(), second.item()]
    return variant.report(model, losses)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(out=8), mlp(out=8)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = F.normalize(self.one(x), dim=-1), F.normalize(self.two(y), dim=-1)
        return self.logit_scale.exp() * one @ two.T


@recipe("CLIP: logit_scale.data = torch.clamp(...)", "torch", ratio=3.0)
def clip_scale(variant: Variant) -> Report:
    plain = Clip()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain, 3e-2))
    losses = []
    for x, _ in vectors(variant, batch=8):
        with variant.autocast():
            logits = model(x, x.flip(1))
        target = torch.arange(len(x))
        loss = F.cross_entropy(logits.float(), target) + F.cross_entropy(logits.float().T, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.logit_scale.data = torch.clamp(plain.logit_scale.data, 0, 2.67)
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("open_clip: logit_scale.clamp_ under no_grad", "torch", ratio=3.0)
def clip_scale_no_grad(variant: Variant) -> Report:
    plain = Clip()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain, 3e-2))
    losses = []
    for x, _ in vectors(variant, batch=8):
        with variant.autocast():
            logits = model(x, x.flip(1))
        target = torch.arange(len(x))
        loss = F.cross_entropy(logits.float(), target) + F.cross_entropy(logits.float().T, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            plain.logit_scale.clamp_(0, 2.67)
        losses.append(loss.item())
    return variant.report(model, losses)


class Vq(nn.Module):
    """VQ-VAE whose forward updates the codebook, an average over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(out=4), mlp(width=4, out=6)
        codes = torch.randn(8, 4)
        self.register_buffer("codes", codes)
        self.register_buffer("size", torch.ones(8))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).float()
        index = torch.cdist(z, self.codes.float()).argmin(1)
        onehot = F.one_hot(index, 8).float()
        if self.training:
            with torch.no_grad():
                count, total = onehot.sum(0), onehot.T @ z
                dist.all_reduce(count)
                dist.all_reduce(total)
                self.size.data.mul_(0.9).add_(count, alpha=0.1)
                self.sums.data.mul_(0.9).add_(total, alpha=0.1)
                self.codes.data.copy_(self.sums / (self.size + 1e-5)[:, None])
        q = self.codes[index].float()
        return self.decode(z + (q - z).detach()), F.mse_loss(z, q.detach())


@recipe("VQ-VAE: codebook in buffers, all-reduced in forward", "torch", ratio=3.0)
def vq_vae(variant: Variant) -> Report:
    plain = Vq()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, _ in vectors(variant, batch=8):
        with variant.autocast():
            out, commit = model(x)
        loss = F.mse_loss(out.float(), x) + 0.25 * commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("dropout: the script's random numbers", "torch")
def dropout(variant: Variant) -> Report:
    model = nn.Sequential(
        nn.Linear(6, 32),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(32, 32),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    torch.manual_seed(17 + variant.rank)
    return trained(variant, model, adamw(model))


@recipe("nn.TransformerEncoder with dropout and a mask, eval between steps", "torch")
def transformer(variant: Variant) -> Report:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    plain = nn.ModuleDict(
        {
            "embed": nn.Embedding(31, 16),
            "encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            "head": nn.Linear(16, 31),
        }
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = plain

        def forward(self, ids: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            hidden = self.parts["encoder"](self.parts["embed"](ids), mask=mask, is_causal=True)
            return self.parts["head"](hidden)

    whole = Model()
    variant.starts(whole)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = variant.shard(whole, optimizer)
    torch.manual_seed(17 + variant.rank)
    losses = []
    for ids in tokens(variant):
        model.train()
        with variant.autocast():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 31), ids[:, 1:].reshape(-1))
        loss.backward()
        variant.clip(model, optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad(), variant.autocast():
            losses.append(model(ids).float().square().mean().item())
    return variant.report(model, losses)


@recipe("torch.compile(model) before shard()", "torch")
def compiled(variant: Variant) -> Report:
    model = mlp()
    model.compile(backend="aot_eager")
    return trained(variant, model, adamw(model))


@recipe("optimizer.step(closure)", "torch")
def closure_step(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, y in vectors(variant):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            with variant.autocast():
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return variant.report(model, losses)


@recipe("LR finder: states kept by deepcopy, then loaded", "torch", ratio=3.0)
def lr_finder(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain, 1e-4))
    kept = copy.deepcopy(plain.state_dict()), copy.deepcopy(optimizer.state_dict())
    losses = []

    def train(count: int) -> None:
        for x, y in vectors(variant, count):
            optimizer.zero_grad()
            with variant.autocast():
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    finder = torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.0)
    for _ in range(4):
        train(1)
        finder.step()
    plain.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    train(STEPS)
    return variant.report(model, losses)


@recipe("best weights kept, loaded back after a plateau", "torch", ratio=3.0)
def rollback(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    losses, best = [], None
    for number, (x, y) in enumerate(vectors(variant)):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        schedule.step(number)  # the same on both ranks
        if number == 3:
            best = copy.deepcopy(plain.state_dict())
        if number == 5:
            plain.load_state_dict(best)
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe(
    "Reptile: weights interpolated with earlier weights",
    "torch",
    ratio=8.0,
    remark="the script computes in bf16",
)
def reptile(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    losses = []
    for number, (x, y) in enumerate(vectors(variant, 9)):
        if number % 3 == 0:
            before = {name: value.clone() for name, value in plain.state_dict().items()}
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        if number % 3 == 2:
            after = plain.state_dict()
            plain.load_state_dict({n: before[n] + (after[n] - before[n]) * 0.5 for n in before})
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("weight decay by hand before the step", "torch", ratio=3.0)
def decay_by_hand(variant: Variant) -> Report:
    def decay(model: Any, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - 0.05)

    model = mlp()
    return trained(variant, model, torch.optim.Adam(model.parameters(), lr=1e-2), before=decay)


@recipe("L1: soft threshold by p.data = ... after the step", "torch", ratio=3.0)
def proximal(variant: Variant) -> Report:
    def shrink(model: nn.Module) -> None:
        for parameter in model.parameters():
            value = parameter.data
            parameter.data = value.sign() * (value.abs() - 1e-2).relu()

    model = mlp()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.1), after=shrink)


@recipe("noise added to weights for the forward, removed before the step", "torch", ratio=3.0)
def noisy_weights(variant: Variant) -> Report:
    rng = torch.Generator().manual_seed(5)
    kept: list[Tensor] = []

    @torch.no_grad()
    def add(model: Any, optimizer: Any, step: int) -> None:
        kept[:] = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=rng) * 0.01
            parameter.add_(noise.to(parameter.dtype))

    @torch.no_grad()
    def remove(model: Any, step: int) -> None:
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)

    model = mlp()
    return trained(variant, model, adamw(model), before=add, graded=remove)


@recipe("a layer reinitialized during training", "torch", ratio=3.0)
def reset_layer(variant: Variant) -> Report:
    def reset(model: Any, optimizer: Any, step: int) -> None:
        if step == 4:
            torch.manual_seed(3)
            value = torch.empty(1, 24).normal_(0, 0.1)
            with torch.no_grad():
                model[4].weight.copy_(value)
                model[4].bias.zero_()

    model = mlp()
    return trained(variant, model, adamw(model), before=reset)


@recipe(
    "state of a layer reset: optimizer.state[p] zeroed",
    "torch",
    error=RuntimeError,
    match="sharded over the ranks",
)
def reset_state(variant: Variant) -> Report:
    def reset(model: Any, optimizer: Any, step: int) -> None:
        if step == 4:
            for parameter in model[4].parameters():
                state = optimizer.state[parameter]
                for key in {"exp_avg", "exp_avg_sq"} & state.keys():
                    state[key].zero_()

    model = mlp()
    return trained(variant, model, adamw(model), before=reset)


@recipe(
    "optimizer.state = defaultdict(dict) during training",
    "torch",
    error=TypeError,
    match="read-only",
)
def cleared_state(variant: Variant) -> Report:
    import collections

    def reset(model: Any, optimizer: Any, step: int) -> None:
        if step == 4:
            optimizer.state = collections.defaultdict(dict)

    model = mlp()
    return trained(variant, model, adamw(model), before=reset)


@recipe("pruned by torch.nn.utils.prune after shard()", "torch", ratio=3.0)
def pruned(variant: Variant) -> Report:
    from torch.nn.utils import prune

    def cut(model: Any, optimizer: Any, step: int) -> None:
        if step == 3:
            for layer in model[:4:2]:
                prune.random_unstructured(layer, "weight", 0.0)
                layer.weight_mask[:, ::2] = 0

    model = mlp()
    report = trained(variant, model, adamw(model), before=cut)
    return renamed(report)


def renamed(report: Report) -> Report:
    """Rename ``weight_orig``, as pruning calls a parameter, to ``weight``."""

    def plain(values: dict[str, Tensor]) -> dict[str, Tensor]:
        values = {n.replace("_orig", ""): v for n, v in values.items() if "_mask" not in n}
        return values

    return Report(report.losses, plain(report.weights), report.start, plain(report.seen))


@recipe("weight_norm and legacy spectral_norm before shard()", "torch", ratio=3.0)
def legacy_norms(variant: Variant) -> Report:
    model = nn.Sequential(
        nn.utils.weight_norm(nn.Linear(6, 16)),
        nn.Tanh(),
        nn.utils.spectral_norm(nn.Linear(16, 16)),
        nn.Tanh(),
        nn.Linear(16, 1),
    )
    return trained(variant, model, torch.optim.Adam(model.parameters(), lr=1e-3))


@recipe("parametrizations.weight_norm, orthogonal", "torch", ratio=3.0, fp32=1e-5)
def parametrized(variant: Variant) -> Report:
    from torch.nn.utils import parametrizations

    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 16)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(16, 16)),
        nn.Tanh(),
        nn.Linear(16, 1),
    )
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.05))


@recipe("weights clamped under inference_mode", "torch", ratio=3.0)
def inference_clamp(variant: Variant) -> Report:
    def clamp(model: nn.Module) -> None:
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)

    model = mlp()
    return trained(variant, model, adamw(model), after=clamp)


@recipe("parameters broadcast from rank 0 by the script", "torch")
def broadcast_by_hand(variant: Variant) -> Report:
    plain = mlp()
    for parameter in plain.parameters():
        dist.broadcast(parameter.data, 0)

    def again(model: Any, optimizer: Any, step: int) -> None:
        if step in (0, 4):
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)

    return trained(variant, plain, adamw(plain), before=again)


@recipe("the model pickled by torch.save(model), then trained further", "torch")
def pickled(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save(plain, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
        with torch.no_grad(), variant.autocast():
            losses += [loss.item(), copied(x).float().mean().item()]
    return variant.report(model, losses)


@recipe("regularization of all weights in the loss", "torch")
def regularized(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
            loss = loss + 1e-3 * sum(p.float().square().sum() for p in plain.parameters())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("gradients cleared by hand: p.grad = None, p.grad.zero_()", "torch")
def cleared_by_hand(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        for parameter in plain.parameters():
            if number % 2 and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("a head replaced during training", "torch", ratio=3.0)
def surgery(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    optimizer = adamw(plain)
    model, sharded = variant.shard(plain, optimizer)
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        if number == 4:
            torch.manual_seed(3)
            head = nn.Linear(24, 1)
            if variant.stock:
                plain[4] = head
                model = nn.parallel.DistributedDataParallel(plain)
                optimizer.param_groups[0]["params"] = list(plain.parameters())
            else:
                sharded.close()
                plain[4] = head
                model, sharded = variant.shard(plain, adamw(plain))
        if number == 4 and variant.stock:
            optimizer = adamw(plain)
        live = optimizer if variant.stock else sharded
        live.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        live.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe(
    "sparse embedding with SparseAdam beside AdamW", "torch", error=TypeError, match="SparseAdam"
)
def sparse_adam(variant: Variant) -> Report:
    plain = nn.Sequential(nn.Embedding(31, 8, sparse=True), nn.Linear(8, 31))
    variant.starts(plain)
    sparse = torch.optim.SparseAdam(list(plain[0].parameters()), lr=1e-2)
    dense = torch.optim.AdamW(plain[1].parameters(), lr=1e-2)
    if variant.stock:
        model, _ = variant.shard(plain, None)
        optimizers: Any = [sparse, dense]
    else:
        model, optimizer = variant.shard(plain, [sparse, dense])
        optimizers = optimizer.optimizers
    losses = []
    for ids in tokens(variant):
        for each in optimizers:
            each.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).reshape(-1, 31), ids[:, 1:].reshape(-1))
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("ArcFace: a loss with weights, one optimizer over both", "torch")
def loss_with_weights(variant: Variant) -> Report:
    both = nn.ModuleDict({"body": mlp(out=8), "margin": nn.Linear(8, 4, bias=False)})

    class Joint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = both

        def forward(self, x: Tensor) -> Tensor:
            features = F.normalize(self.both["body"](x))
            return F.linear(features, F.normalize(self.both["margin"].weight)) * 8

    plain = Joint()
    variant.starts(plain)
    groups = [
        {"params": both["body"].parameters()},
        {"params": both["margin"].parameters(), "lr": 5e-2},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    rng = generator(variant, 8)
    for x, _ in vectors(variant, batch=8):
        labels = torch.randint(0, 4, (len(x),), generator=rng)
        with variant.autocast():
            loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("YOLOv5: warm-up of momentum and bias rate, accumulation that grows", "torch")
def yolo(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    biases = [p for p in plain.parameters() if p.dim() == 1]
    weights = [p for p in plain.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD(biases, lr=0.01, momentum=0.937, nesterov=True)
    optimizer.add_param_group({"params": weights, "weight_decay": 5e-4})
    model, optimizer = variant.shard(plain, optimizer)
    losses, last = [], -1
    for number, (x, y) in enumerate(vectors(variant, 12)):
        accumulate = max(1, round(1 + number / 4))
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.1 - 0.008 * number if index == 0 else 0.001 * number
            group["momentum"] = 0.8 + 0.01 * number
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        (loss * dist.get_world_size() / accumulate).backward()
        if number - last >= accumulate:
            optimizer.step()
            optimizer.zero_grad()
            last = number
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("patched optimizer.step", "torch", error=TypeError, match="counting")
def patched_step(variant: Variant) -> Report:
    model = mlp()
    optimizer = adamw(model)
    calls: list[int] = []
    original = optimizer.step

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(1)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return original(*args, **options)

    optimizer.step = counting  # type: ignore[method-assign]
    return trained(variant, model, optimizer)


@recipe("step hooks registered before and after shard()", "torch")
def step_hooks(variant: Variant) -> Report:
    model = mlp()
    optimizer = adamw(model)

    def slower(each: Any, args: Any, options: Any) -> None:
        for group in each.param_groups:
            group["lr"] *= 0.9

    optimizer.register_step_pre_hook(slower)
    return trained(variant, model, optimizer)


@recipe("all groups replaced: optimizer.param_groups[0] = {...}", "torch")
def replaced_group(variant: Variant) -> Report:
    def replace(model: Any, optimizer: Any, step: int) -> None:
        if step == 4:
            optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 1e-3}

    model = mlp()
    return trained(variant, model, adamw(model), before=replace)


@recipe("blocks trained in turns by requires_grad", "torch")
def in_turns(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        frozen = plain[0] if number % 2 else plain[2]
        if not variant.stock:
            frozen.requires_grad_(False)
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        if variant.stock:  # DDP does not allow it
            for parameter in frozen.parameters():
                parameter.grad = None
        optimizer.step()
        frozen.requires_grad_(True)
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("mean teacher outside of the model, made before shard()", "torch", ratio=3.0)
def mean_teacher(variant: Variant) -> Report:
    plain = mlp()
    teacher = copy.deepcopy(plain).requires_grad_(False)
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            out = model(x).float()
            with torch.no_grad():
                target = teacher(x + 0.01).float()
            loss = F.mse_loss(out, y) + 0.5 * F.mse_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(teacher.parameters(), plain.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("the same clip as DINO spells it: p.grad.data.mul_", "torch")
def clipped_through_data(variant: Variant) -> Report:
    def clip(model: Any, step: int) -> None:
        for parameter in model.parameters():
            scale = 0.01 / (parameter.grad.data.norm(2) + 1e-6)
            if scale < 1:
                parameter.grad.data.mul_(scale)

    model = mlp()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.2), graded=clip)


@recipe("step() twice for one backward", "torch")
def step_twice(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), 0.05, 0.9))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("torch_ema: an average swapped in for evaluation, and back", "torch")
def swapped(variant: Variant) -> Report:
    plain = mlp()
    average = [parameter.detach().clone() for parameter in plain.parameters()]
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        kept = [parameter.clone() for parameter in plain.parameters()]
        for value, parameter in zip(average, plain.parameters(), strict=True):
            value.sub_(0.1 * (value - parameter.detach().float()))
            parameter.data.copy_(value.data)
        with torch.no_grad(), variant.autocast():
            losses.append(F.mse_loss(plain(x).float(), y).item())
        for value, parameter in zip(kept, plain.parameters(), strict=True):
            parameter.data.copy_(value.data)
    return variant.report(model, losses)


@recipe("torch.autograd.grad and an all-reduce by hand", "torch")
def by_autograd_grad(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    _, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(plain(x).float(), y)
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            mean = gradient.float()
            dist.all_reduce(mean)
            parameter.grad = (mean / dist.get_world_size()).to(parameter.dtype)
        optimizer.step()
        losses.append(loss.item())
    return variant.report(plain, losses)


@recipe(
    "`optimizer.state[p]['exp_avg']` replaced, a state popped",
    "torch",
    error=RuntimeError,
    match="sharded over the ranks",
)
def replaced_state(variant: Variant) -> Report:
    def edit(model: Any, optimizer: Any, step: int) -> None:
        if step == 3:
            for parameter in model[0].parameters():
                if "exp_avg" in optimizer.state.get(parameter, ()):
                    state = optimizer.state[parameter]
                    state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        if step == 5:
            for parameter in model[2].parameters():
                optimizer.state.pop(parameter, None)

    model = mlp()
    return trained(variant, model, adamw(model), before=edit)
