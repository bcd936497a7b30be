"""Other packages' optimizers, with the loop of PyTorch's DDP tutorial."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Report, Variant
from loops import mlp, trained, vectors
from recipes import recipe
from torch import Tensor, nn


def of_timm(variant: Variant, name: str, **options: Any) -> Report:
    from timm.optim import create_optimizer_v2

    model = mlp()
    optimizer = create_optimizer_v2(model, opt=name, weight_decay=0.05, **options)
    return trained(variant, model, optimizer)


@recipe("lamb with its own clip", "timm", error=TypeError, match="max_grad_norm")
def timm_lamb_clips(variant: Variant) -> Report:
    return of_timm(variant, "lamb", lr=1e-2)


@recipe("lamb, max_grad_norm=None", "timm")
def timm_lamb(variant: Variant) -> Report:
    return of_timm(variant, "lamb", lr=1e-2, max_grad_norm=None)


@recipe("nadamw", "timm")
def timm_nadamw(variant: Variant) -> Report:
    return of_timm(variant, "nadamw", lr=1e-2)


@recipe("adopt", "timm")
def timm_adopt(variant: Variant) -> Report:
    return of_timm(variant, "adopt", lr=1e-2)


@recipe("adafactorbv", "timm")
def timm_adafactor(variant: Variant) -> Report:
    return of_timm(variant, "adafactorbv", lr=1e-2)


@recipe("lion", "timm", ratio=2.5)
def timm_lion(variant: Variant) -> Report:
    return of_timm(variant, "lion", lr=1e-3)


@recipe("lars", "timm")
def timm_lars(variant: Variant) -> Report:
    return of_timm(variant, "lars", lr=1e-1)


@recipe("cautious adamw", "timm", ratio=2.5)
def timm_cadamw(variant: Variant) -> Report:
    return of_timm(variant, "cadamw", lr=1e-2)


@recipe("muon", "timm")
def timm_muon(variant: Variant) -> Report:
    return of_timm(variant, "muon", lr=1e-2)


@recipe("lookahead_adamw: inside", "timm", error=TypeError, match="AdamW")
def timm_lookahead(variant: Variant) -> Report:
    return of_timm(variant, "lookahead_adamw", lr=1e-2)


@recipe("adan with its own clip", "pytorch-optimizer", error=TypeError, match="max_grad_norm")
def adan_clips(variant: Variant) -> Report:
    from pytorch_optimizer import Adan

    model = mlp()
    return trained(variant, model, Adan(model.parameters(), lr=1e-2, max_grad_norm=0.5))


@recipe("Adan", "pytorch-optimizer")
def adan(variant: Variant) -> Report:
    from pytorch_optimizer import Adan

    model = mlp()
    return trained(variant, model, Adan(model.parameters(), lr=1e-2))


@recipe("SOAP", "pytorch-optimizer", ratio=3.0)
def soap(variant: Variant) -> Report:
    from pytorch_optimizer import SOAP

    model = mlp()
    return trained(variant, model, SOAP(model.parameters(), lr=1e-2, precondition_frequency=2))


@recipe("AdEMAMix", "pytorch-optimizer")
def ademamix(variant: Variant) -> Report:
    from pytorch_optimizer import AdEMAMix

    model = mlp()
    return trained(variant, model, AdEMAMix(model.parameters(), lr=1e-2))


@recipe("StableAdamW", "pytorch-optimizer")
def stable_adamw(variant: Variant) -> Report:
    from pytorch_optimizer import StableAdamW

    model = mlp()
    return trained(variant, model, StableAdamW(model.parameters(), lr=1e-2))


@recipe("Ranger21", "pytorch-optimizer", error=TypeError, match="Ranger21")
def ranger21(variant: Variant) -> Report:
    from pytorch_optimizer import Ranger21

    model = mlp()
    return trained(
        variant, model, Ranger21(model.parameters(), lr=1e-1, num_iterations=12, weight_decay=1.0)
    )


@recipe("Lion", "lion-pytorch", ratio=2.5)
def lion(variant: Variant) -> Report:
    from lion_pytorch import Lion

    model = mlp()
    return trained(variant, model, Lion(model.parameters(), lr=1e-3, weight_decay=0.1), clip=1.0)


@recipe("Adan", "adan-pytorch")
def adan_lucidrains(variant: Variant) -> Report:
    from adan_pytorch import Adan

    model = mlp()
    return trained(variant, model, Adan(model.parameters(), lr=1e-3, eps=1e-2))


@recipe("RAdam, DiffGrad, Yogi of torch_optimizer", "torch_optimizer")
def yogi(variant: Variant) -> Report:
    import torch_optimizer

    model = mlp()
    return trained(variant, model, torch_optimizer.Yogi(model.parameters(), lr=1e-2))


@recipe(
    "AdamWScheduleFree: train(), eval()", "schedulefree", remark="compares weights after eval()"
)
def schedule_free(variant: Variant) -> Report:
    import schedulefree

    plain = mlp()
    variant.starts(plain)
    optimizer = schedulefree.AdamWScheduleFree(plain.parameters(), lr=1e-2, warmup_steps=3)
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        if number == 4:
            optimizer.eval()
            with torch.no_grad(), variant.autocast():
                losses.append(F.mse_loss(model(x).float(), y).item())
        optimizer.train()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.eval()
    return variant.report(model, losses)


@recipe("Prodigy", "prodigyopt", error=TypeError, match="Prodigy")
def prodigy(variant: Variant) -> Report:
    from prodigyopt import Prodigy

    model = mlp()
    return trained(variant, model, Prodigy(model.parameters(), lr=1.0))


@recipe("DAdaptAdam", "dadaptation", error=TypeError, match="DAdaptAdam")
def dadapt(variant: Variant) -> Report:
    from dadaptation import DAdaptAdam

    model = mlp()
    return trained(variant, model, DAdaptAdam(model.parameters(), lr=1.0))


def eight_bit(variant: Variant, build: Any) -> Report:
    """Save, load and resume halfway; a weight of 4,096 elements has 8-bit moments."""

    def fresh() -> Any:
        torch.manual_seed(0)
        plain = mlp(width=64, inside=64)
        return plain, *variant.shard(plain, build(plain))

    plain, model, optimizer = fresh()
    variant.starts(plain)
    losses = []
    for number, (x, y) in enumerate(vectors(variant, width=64)):
        if number == 4:
            weights = plain.state_dict() if variant.stock else optimizer.full_parameters()
            weights = {name: value.clone() for name, value in weights.items()}
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            if not variant.stock:
                optimizer.close()
            plain, model, optimizer = fresh()
            if variant.stock:
                plain.load_state_dict(weights)
            optimizer.load_state_dict(torch.load(file, weights_only=False))
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("AdamW8bit", "torchao", error=TypeError, match="AdamW8bit")
def adamw8bit(variant: Variant) -> Report:
    from torchao.optim import AdamW8bit

    return eight_bit(variant, lambda model: AdamW8bit(model.parameters(), lr=1e-3))


@recipe("AdamW4bit", "torchao", error=TypeError, match="AdamW4bit")
def adamw4bit(variant: Variant) -> Report:
    from torchao.optim import AdamW4bit

    return eight_bit(variant, lambda model: AdamW4bit(model.parameters(), lr=1e-3))


@recipe("AdamWFp8", "torchao", error=TypeError, match="AdamWFp8")
def adamwfp8(variant: Variant) -> Report:
    from torchao.optim import AdamWFp8

    return eight_bit(variant, lambda model: AdamWFp8(model.parameters(), lr=1e-3))


class Lookahead(torch.optim.Optimizer):
    """The class that many repositories copy: it holds another optimizer and its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer = optimizer
        self.k, self.alpha, self.count = k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state: Any = {}
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slows in zip(self.param_groups, self.slow, strict=True):
                for parameter, slow in zip(group["params"], slows, strict=True):
                    slow.add_(parameter.detach().to(slow.dtype) - slow, alpha=self.alpha)
                    parameter.copy_(slow)
        return loss


@recipe("Lookahead given to shard()", "torch", error=TypeError, match="AdamW")
def lookahead_inside(variant: Variant) -> Report:
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(variant, model, Lookahead(inner))


@recipe("Lookahead around the sharded optimizer", "torch", ratio=4.0)
def lookahead_around(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, inner = variant.shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    optimizer = Lookahead(inner)
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


class Sam(torch.optim.Optimizer):
    """The optimizer of davda54/sam."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "Sharpness Aware Minimization requires closure"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self) -> Tensor:
        norms = [
            p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        return torch.norm(torch.stack(norms), p=2)


@recipe("SAM given to shard()", "torch", error=TypeError, match="SGD")
def sam_given(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    optimizer = Sam(plain.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        with variant.autocast():
            F.mse_loss(model(x).float(), y).backward()
        optimizer.second_step(zero_grad=True)
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("SAM written with gather_gradients()", "torch", ratio=3.0)
def sam(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        if not variant.stock:
            optimizer.gather_gradients()
        with torch.no_grad():
            gradients = [p.grad.float() for p in plain.parameters()]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            old = [p.detach().clone() for p in plain.parameters()]
            for p, g in zip(plain.parameters(), gradients, strict=True):
                p.add_((0.05 / norm * g).to(p.dtype))
        optimizer.zero_grad()
        with variant.autocast():
            F.mse_loss(model(x).float(), y).backward()
        with torch.no_grad():
            for p, value in zip(plain.parameters(), old, strict=True):
                p.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("PCGrad replaces gradients", "torch", error=RuntimeError, match="gather_gradients")
def pcgrad(variant: Variant) -> Report:
    plain = mlp(out=2)
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    parameters = list(plain.parameters())
    losses = []
    for x, y in vectors(variant):
        gradients = []
        for task in range(2):
            optimizer.zero_grad()
            with variant.autocast():
                loss = F.mse_loss(model(x)[:, task : task + 1].float(), y * (1 - 2 * task))
            loss.backward()
            gradients.append([p.grad.clone() for p in parameters])
            losses.append(loss.item())
        one, two = (torch.cat([g.flatten() for g in each]) for each in gradients)
        if (dot := one @ two) < 0:
            one = one - dot / two.square().sum() * two
        merged, at = one + two, 0
        for p in parameters:
            p.grad = merged[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
    return variant.report(model, losses)


def zeropower(matrix: Tensor, steps: int = 5) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    if x.size(0) > x.size(1):
        x = x.mT
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.size(0) > matrix.size(1) else x


class Muon(torch.optim.Optimizer):
    """KellerJordan/Muon: it divides the matrices among the ranks and gathers them itself."""

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.0) -> None:
        params = sorted(params, key=lambda p: p.size(), reverse=True)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params, size = group["params"], dist.get_world_size()
            pad = [*params, *[torch.empty_like(params[-1])] * (size - len(params) % size)]
            for base in range(len(params))[::size]:
                if base + dist.get_rank() < len(params):
                    p = params[base + dist.get_rank()]
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    state = self.state[p]
                    if len(state) == 0:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    momentum = state["momentum_buffer"]
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    update = zeropower(p.grad.lerp_(momentum, group["momentum"]))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.reshape(p.shape).to(p.dtype), alpha=-group["lr"])
                dist.all_gather(pad[base : base + size], pad[base + dist.get_rank()])


@recipe("Keller Jordan's Muon beside AdamW", "torch", error=TypeError, match="torch.optim.Muon")
def keller_jordan(variant: Variant) -> Report:
    plain = nn.Sequential(
        nn.Linear(6, 24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24), nn.Linear(24, 1)
    )
    variant.starts(plain)
    matrices = [plain[1].weight, plain[3].weight]
    others = [p for p in plain.parameters() if not any(p is m for m in matrices)]
    muon, adamw = Muon(matrices), torch.optim.AdamW(others, lr=1e-2)
    return several(variant, plain, [muon, adamw])


@recipe("torch.optim.Muon beside AdamW", "torch", fp32=1e-5, ratio=3.0)
def muon(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    matrices = [p for p in plain[:4].parameters() if p.dim() == 2]
    others = [p for p in plain.parameters() if not any(p is m for m in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]
    return several(variant, plain, optimizers)


def several(variant: Variant, plain: nn.Module, optimizers: list[Any]) -> Report:
    if variant.stock:
        model, _ = variant.shard(plain, None)
    else:
        model, optimizer = variant.shard(plain, optimizers)
        optimizers = optimizer.optimizers
    schedulers = [
        torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.1, total_iters=8) for each in optimizers
    ]
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        for each in optimizers:
            each.step()
        for each in schedulers:
            each.step()
        for each in optimizers:
            each.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("ZeroRedundancyOptimizer given to shard()", "torch", error=TypeError, match="AdamW")
def zero_redundancy(variant: Variant) -> Report:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
    )
    return trained(variant, model, optimizer)


@recipe("GradScaler left in the script", "torch", error=RuntimeError, match="GradScaler")
def grad_scaler(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        variant.clip(model, optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return variant.report(model, losses)
