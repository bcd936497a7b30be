"""After the reduction, edits of ``.grad`` apply at the owners, and reads raise an error."""

from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
import sys
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from oracle import BATCH, mlp, on_ranks
from pairwise import WHOLE
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_value_

import shardcast
from shardcast.memory import stand_in
from shardcast.memory.stand_in import StandIn
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(120)
NAMES: dict[str, Any] = {
    "F": functional,
    "clip_grad_value_": clip_grad_value_,
    "copy": copy,
    "io": io,
    "np": np,
    "operator": operator,
    "pickle": pickle,
    "torch": torch,
}
# g is the gradient of p; a is a plain tensor of its shape.
EDITS = """
g.mul_(.5) | operator.imul(g, 2) | operator.iadd(g, 1) | operator.itruediv(g, 2) | g.zero_()
operator.setitem(g, 0, 1) | g[:, 1].zero_() | g.view(-1)[3:5].fill_(1.) | g.data.mul_(.5)
g.clamp_(-1e-3, 1e-3) | torch.nan_to_num(g, nan=0, out=g) | torch.nan_to_num_(g) | g.fill_(2.)
torch.mul(g, 2, out=g) | torch.mul(a, 2, out=g) | torch.add(g, a, alpha=2, out=g) | g.pow_(2)
g.add_(p.detach(), alpha=.1) | g.add_(torch.randn_like(g)) | g.mul_((p > 0).float()) | g.sign_()
g.masked_fill_(p > 0, 0) | torch._foreach_mul_([g], 2) | torch._foreach_add_([g], [a])
torch._foreach_mul_([g, a], [2., 3.]) | torch._foreach_zero_([g])
torch._foreach_clamp_max_([g], 0)
torch._foreach_lerp_([g], [a], .5) | torch._foreach_addcmul_([g], [a], [p.data], .5) | g.neg_()
g.detach_() | g.requires_grad_(False) | g.copy_(a) | g.data.copy_(a) | g.lerp_(a, .1) | g.abs_()
clip_grad_value_([p], 1e-3) | clip_grad_value_([p], 1e-3, foreach=False) | g.mul_(torch.tensor(.5))
setattr(g, 'data', a) | setattr(g, 'requires_grad', False) | torch.mul(input=g, other=2, out=g)
torch.ops.aten.mul_.Tensor(g, 2) | g[0][1].neg_() | g.t()[2].zero_() | g.mul_(g) | g.div_(3)
g.index_fill_(1, torch.tensor([0, 2]), 0.) | g.tril_() | g.addcdiv_(a, a + 3) | g[1:, ::2].mul_(4)
g.index_add_(0, torch.tensor([1]), a[:1]) | operator.setitem(g, p > 0, 3.) | g.detach().T.add_(1)
g.unbind()[1].mul_(2) | g.chunk(2)[1].zero_() | g.reshape(-1)[::3].fill_(5)
g[0, 1:].data.copy_(a[0, 1:])
g.scatter_(0, torch.zeros(1, g.shape[1], dtype=torch.int64), 7.) | g.sub_(a)
torch.maximum(g, a, out=g) | torch.clamp(g, -1e-4, 1e-4, out=g) | g.data.zero_() | g.ge_(0)
exec('g[1:, ::2] *= 4', dict(g=g)) | exec('g.data.view(-1)[3:70] -= 1', dict(g=g))
exec('g[0] += a[1]; g.t()[2][1:] /= 3; g[...] *= 2', dict(g=g, a=a))
"""
RANDOM = """
g.normal_() | g.uniform_() | g.bernoulli_(.5) | g.exponential_() | torch.nn.init.normal_(g)
F.dropout(g, inplace=True) | g.apply_(lambda x: 2 * x) | g.random_() | g.cauchy_()
"""
ANSWERS = """
g.shape | g.size(0) | g.device | g.dtype | g.is_sparse | g.layout | g.numel() | g.dim() | g.ndim
len(g) | g.element_size() | g.requires_grad | g.grad_fn | g.is_cuda
g == None | g != None | g is None | torch.is_tensor(g) | torch.is_floating_point(g) | g.type()
g.nbytes | g.is_leaf | torch.result_type(g, 1.)
torch.zeros_like(g).sum() | g.new_ones(3).sum() | torch.ones_like(g).sum() | g.storage_offset() >= 0
hash(g) == id(g) | isinstance(g, torch.Tensor) | g.new_tensor([2.])
"""
VIEWS = """
g.data | g.detach() | g.view(-1) | g.flatten() | g.T | g[0] | g[1:] | g.chunk(2) | list(g) | [*g]
g.unbind() | g.reshape(-1) | g.contiguous() | g.to(g.device) | g.to(g.dtype) | g.float() | g.cpu()
g.double() | g.to(torch.float64) | g.bfloat16() | g.expand_as(p) | g.view_as(p)
g.unsqueeze(0) | g.transpose(0, 1) | torch.flatten(g) | g[0, 1]
"""
READS = """
g.norm(2, 0) | g[0].norm() | torch.linalg.norm(g, 2) | g.norm(0.) | g.norm('nuc')
g[1:].data.norm(2) | g.norm(keepdim=True) | torch.norm(g, out=a.sum()) | g[0].expand_as(g).norm()
g.abs() | g + 1 | 1 + g | g * 2 | -g | g.sum() | g[0, 0].item() | g > 0
bool(g[0, 0]) | g.isnan() | torch.isfinite(g) | g.numpy() | np.asarray(g) | np.array(g) | g.tolist()
g.clone() | copy.deepcopy(g) | copy.copy(g)
pickle.dumps(g) | torch.save(g, io.BytesIO()) | torch.equal(g, g) | torch.allclose(g, g) | 0. in g
float(g[0, 0]) | int(g[0, 0]) | f'{g[0, 0]:.3f}' | '%.3f' % g[0, 0] | sum(g[0]) | max(g[0])
torch.cat([g]) | torch.stack([a, g])
torch.nn.utils.parameters_to_vector([g])
a.copy_(g) | operator.iadd(a, g) | a.add_(g) | a.lerp_(g, .1) | p.sub_(g) | p.data.add_(g, alpha=.1)
operator.setitem(g, 0, g[1]) | operator.setitem(g[1:], 0, g[0]) | operator.setitem(g, 0, -g[0])
operator.setitem(a, 0, g[0]) | torch.add(a, g, out=a) | torch._foreach_add_([a], [g])
torch._foreach_copy_([a], [g]) | g.cumsum_(0) | g.cumprod_(0) | g.renorm_(2, 0, 1) | g @ g.T
torch.cumsum(g, 0, out=g) | g.add_(g.view_as(g)) | g.copy_(g.flip(0)) | g.__dlpack__()
F.normalize(g) | F.normalize(g, out=g) | g.set_(a) | g.data.set_()
g.max() | g.argmax() | torch.topk(g.view(-1), 2) | g.data_ptr()
getattr(g, 'const_data_ptr', g.data_ptr)()
g.pow(2) | g.square() | p * g | torch.einsum('ij->i', g) | g[g > 0] | g[p > 0] | g[[0, 1]]
g.masked_select(p > 0) | torch.count_nonzero(g) | torch.where(p > 0, g, a) | g.mean() | g.std()
torch.optim.SGD([p], lr=.1).step() | torch.optim.SGD([p], lr=.1, foreach=True).step()
torch.optim.AdamW([p]).step() | torch.optim.AdamW([p], fused=True).step()
torch.optim.Adam([p], foreach=True).step() | torch.optim.Adagrad([p]).step()
torch.full_like(g, g[0, 0]) | torch.distributed.all_reduce(g)
torch.compile(lambda x: x * 2, backend='eager')(g)
"""


def cases(lines: str) -> list[str]:
    return [code.strip() for line in lines.strip().splitlines() for code in line.split(" | ")]


def parameter(model: Any, optimizer: Any, batch: Tensor) -> dict[str, Any]:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    p = model[2].weight
    assert type(p.grad) is StandIn
    return {**NAMES, "p": p, "g": p.grad, "a": torch.zeros(p.shape), "model": model}


@torch.no_grad()
def run(code: str, names: dict[str, Any]) -> Any:
    return eval(code, names)


@pytest.mark.parametrize("partition", ["even", "whole"])
def test_reads_raise_by_name_and_edits_questions_and_views_do_not(partition: str):
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        read = []
        names = parameter(model, optimizer, batch)
        for code in cases(READS) + cases(RANDOM):
            try:
                run(code, {**names})
                read.append(code)
            except RuntimeError as error:
                told = str(error)
                assert "reads .grad of '2.weight'" in told and "gather_gradients" in told, code
                # Another optimizer would train weights without masters, even on gathered gradients.
                names_class = code.startswith("torch.optim.")
                kind = code.removeprefix("torch.optim.").partition("(")[0]
                assert (f"({kind}), call close()" in told) == ("close()" in told) == names_class
        assert read == []
        for code in cases(VIEWS):
            names = parameter(model, optimizer, batch)
            views = [*stand_in.tensors(run(code, names))]
            assert views and all(type(view) is StandIn for view in views), code
            with pytest.raises(RuntimeError, match=r"'2\.weight'"):
                views[-1].sum()
        for code in cases(ANSWERS):
            names = parameter(model, optimizer, batch)
            seen = run(code, names)
            optimizer.gather_gradients()
            assert type(names["p"].grad) is Tensor
            assert seen == run(code, {**names, "g": names["p"].grad}), code
        names = parameter(model, optimizer, batch)
        assert "2.weight" in repr(names["g"]) and "2.weight" in f"{names['g']} {names['g'].data}"
        for convert in (nn.Module.float, lambda model: model.to("cpu"), copy.deepcopy):
            convert(model)  # moves nothing
        optimizer.step()

    on_ranks(script, 3, partition=partition)


VECTOR_EDITS = """
g.add_(a) | g.mul_((p > 0).float()) | g.lerp_(a, .1) | torch._foreach_add_([g], [a])
"""


def edited(group: Any, partition: str, codes: list[str], name: str = "2.weight") -> None:
    model = mlp()
    optimizer = shardcast.shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        process_group=group,
        param_dtype="fp32",
        fuse="eager",
        partition=partition,
        pack_params=2,
        alignment=8,
    )
    batch = BATCH.chunk(group.size())[group.rank()]
    p: Any = model.get_parameter(name)
    other = torch.arange(p.numel()).view(p.shape) / 8 - 1

    def gathered(code: str) -> Tensor:
        """Return the gathered gradient after the reduction and the edit."""
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        torch.manual_seed(0)
        run(code, {**NAMES, "p": p, "g": p.grad, "a": other})
        optimizer.gather_gradients()
        return p.grad.clone()

    mean = gathered("None")
    for code in codes:
        expected = nn.Parameter(p.detach().clone())
        expected.grad = mean.clone()
        names = {**NAMES, "p": expected, "g": expected.grad}
        torch.manual_seed(0)
        run(code, {**names, "a": other.clone()})
        assert torch.equal(gathered(code), expected.grad), code


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("size", [1, 2, 3, 4] if WHOLE else [2, 3])
def test_what_a_script_edits_at_the_owners_is_what_it_edits_under_ddp(size: int, partition: str):
    """Each edit runs on an even or an odd number of ranks; in full runs, on both."""
    codes = cases(EDITS)
    world = ThreadedWorld(size, timeout=60)
    world.run(edited, partition, codes if WHOLE else codes[size % 2 :: 2])
    world.run(edited, partition, cases(VECTOR_EDITS), "2.bias")


def test_torch_has_no_other_in_place_methods_that_compute_an_element_from_others():
    base = torch.rand(4, 5, dtype=torch.float64).mul_(0.5).add_(0.25)
    other, index = torch.rand(4, 5).double(), torch.tensor([2, 0, 1, 3])
    arguments: list[tuple[Any, ...]] = [
        (),
        (2.0,),
        (0,),
        (other,),
        (other, other),
        (0, 1),
        (2, 0, 0.1),
        (0, index, other),
        (0, index[:, None].expand(4, 5), other),
        (0, index, 1.5),
        (other > 0.5, 1.5),
        (other, 0.5),
        (other > 0.5, other),
        (other[:, :3], other[:3]),
        (other[:, 0], other[0]),
        (0.1, 0.9),
        (other.view(4, 5), other[0]),
        ((index,), other),
        (index, other[:, 0]),
    ]
    mixing, called = set(), set()
    for name in dir(Tensor):
        if not name.endswith("_") or name.endswith("__") or "philox" in name or "spars" in name:
            continue
        for args in arguments:
            results = []
            for change in (0.0, 0.125):
                torch.default_generator.manual_seed(0)  # not those of devices, which takes long
                x = base.clone()
                x[1, 2] += change
                try:
                    getattr(x, name)(*args)
                except (RuntimeError, TypeError, IndexError, ValueError, AttributeError):
                    break
                results.append(x)
            if len(results) == 2 and results[0].shape == base.shape:
                called.add(name)
                differs = (results[0] != results[1]) & ~results[0].isnan()
                differs[1, 2] = False
                if differs.any():
                    mixing.add(name)
    assert mixing == {"cumsum_", "cumprod_", "renorm_"}
    assert not mixing & stand_in.EDITS
    assert len(called & stand_in.EDITS) > 100


def test_what_was_kept_before_the_gather_is_told_of_and_not_read():
    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        assert [param.grad for param in model.parameters()] == [None] * 6
        model(batch).square().mean().backward()
        kept = [param.grad for param in model.parameters()]
        views = [grad.data.view(-1) for grad in kept]
        optimizer.gather_gradients()
        for param, grad, view in zip(model.parameters(), kept, views, strict=True):
            assert type(param.grad) is Tensor and param.grad.isfinite().all()
            for old in (grad, view):
                with pytest.raises(RuntimeError, match=r"reads \.grad"):
                    old.sum()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for grad, view in zip(kept, views, strict=True):
            for old in (grad, view):
                with pytest.raises(RuntimeError, match="a script kept"):
                    old.mul_(2)  # the mean of an earlier step

    on_ranks(script)


@pytest.mark.parametrize("steps", [False, True])
def test_what_was_kept_over_a_clear_is_told_of_and_does_not_train_as_zeros(steps: bool):
    """Scripts save gradients, clear them for another loss, and restore them."""

    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        kept = [param.grad for param in model.parameters()]
        if steps:
            model[0].weight.grad = None
            optimizer.step()
        else:
            optimizer.zero_grad()
        before = [param.detach().clone() for param in model.parameters()]
        for param, grad in zip(model.parameters(), kept, strict=True):
            param.grad = grad
        with pytest.raises(RuntimeError, match="the script kept"):
            optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()  # the next step works again
        assert not torch.equal(before[0], model[0].weight)

    on_ranks(script)


@pytest.mark.parametrize("way", ["cleared", "assigned", "zeroed"])
def test_what_was_kept_over_a_clear_of_one_gradient_does_not_edit_the_next_mean(way: str):
    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        param = model[0].weight
        model(batch).square().mean().backward()
        kept = param.grad
        if way == "zeroed":
            optimizer.zero_grad(set_to_none=False)
        else:
            param.grad = None if way == "cleared" else torch.ones_like(param)
        with optimizer.no_sync():
            param.sum().backward()
        with pytest.raises(RuntimeError, match=r"edits an old \.grad"):
            kept.mul_(0.5)

    on_ranks(script)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_what_a_script_keeps_does_not_depend_on_how_python_counts_references(
    more: int, monkeypatch: pytest.MonkeyPatch
):
    """CPython 3.14 counts one less, because a call borrows the references of variables."""
    count = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda it: count(it) - 1 + more)  # 1: the lambda's own

    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        param = model[0].weight
        model(batch).square().mean().backward()
        first = weakref.ref(param.grad)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        kept = param.grad
        assert kept is first()  # made once, if no script keeps it
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            assert param.grad is not kept
        with pytest.raises(RuntimeError, match=r"edits an old \.grad"):
            kept.mul_(0.5)
        last, param.grad = param.grad, None  # cleared alone
        with optimizer.no_sync():
            param.sum().backward()
        with pytest.raises(RuntimeError, match=r"edits an old \.grad"):
            last.mul_(0.5)

    on_ranks(script)


def test_a_read_that_mixes_dtypes_is_a_read_and_a_view_of_a_wrong_shape_is_torchs_own_error():
    """Under DDP, gradients are fp32; here they are bf16."""

    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        model(batch).float().square().mean().backward()
        grad = model[0].weight.grad.view(-1)
        with pytest.raises(
            RuntimeError, match=r"dot reads \.grad of '0\.weight'.*gather_gradients"
        ):
            torch.dot(grad, torch.ones(grad.numel()))
        with pytest.raises(RuntimeError, match=r"invalid for input of size"):
            grad.view(7, 2)

    on_ranks(script, param_dtype="bf16")


def test_a_gradient_is_not_given_to_another_parameter():
    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        model[0].bias.grad = model[0].bias.grad  # its own gradient: allowed
        model[0].weight.grad = model[2].weight.grad.view(-1)[:91].view(13, 7)
        with pytest.raises(RuntimeError, match=r"gradient of '0\.weight'.*'2\.weight'"):
            optimizer.step()

    on_ranks(script)


def test_gradients_leave_nothing_behind_when_the_optimizer_goes():
    def body(group: Any) -> Any:
        model = nn.Linear(40, 30)
        optimizer = shardcast.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group
        )
        model(torch.ones(2, 40)).float().sum().backward()
        seen, grad = weakref.ref(packed_of(optimizer).shards[0].grads), model.weight.grad
        optimizer.close()
        del optimizer
        gc.collect()
        with pytest.raises(RuntimeError, match=r"reads \.grad"):
            grad.sum()
        return seen()

    assert ThreadedWorld(2).run(body) == [None, None]


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_gradients_that_are_not_reduced_yet_are_this_ranks_own(accumulate: str):
    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        loss = model(batch).square().mean()
        own = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        with optimizer.no_sync():
            loss.backward()
        for param, grad in zip(model.parameters(), own, strict=True):
            is_own = type(param.grad) is Tensor and torch.equal(param.grad, grad)
            assert is_own == (accumulate == "local")

    on_ranks(script, accumulate=accumulate)


def test_a_model_is_converted_with_gradients_that_are_at_their_owners():
    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        model(batch).float().square().mean().backward()
        model.float()
        for param in model.parameters():
            assert param.grad.dtype == param.dtype == torch.float32
            with pytest.raises(RuntimeError, match=r"reads \.grad"):
                param.grad.sum()

    on_ranks(script, param_dtype="bf16")


@pytest.mark.parametrize("shard_ranks", ["all", 1])
def test_a_mean_that_was_not_cleared_is_never_part_of_a_gradient_that_can_be_read(shard_ranks: Any):
    """Under DDP, ``.grad`` is the sum. Here, one addend is at its owners and the other is local."""

    def run(mesh: Any) -> None:
        model, batch = mlp(), BATCH.chunk(2)[mesh.get_rank()]
        make = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = shardcast.shard(model, make, param_dtype="fp32", shard_ranks=shard_ranks)
        model(batch).square().mean().backward()
        optimizer.step()
        with optimizer.no_sync():
            for _ in range(2):
                model(batch).square().mean().backward()
                for param in model.parameters():
                    with pytest.raises(RuntimeError, match=r"reads \.grad.*lacks a part.*zero"):
                        param.grad.sum()
                    with pytest.raises(RuntimeError, match=r"edited or .* lacks a part.*zero"):
                        param.grad.mul_(0.5)
        norms = [param.grad.norm() for param in model.parameters()]  # sends the rest
        optimizer.gather_gradients()
        whole = [param.grad.norm() for param in model.parameters()]
        torch.testing.assert_close(norms, whole)
        optimizer.zero_grad(set_to_none=False)
        with optimizer.no_sync():
            model(batch).square().mean().backward()
            for param in model.parameters():
                assert type(param.grad) is Tensor and param.grad.norm() > 0

    ThreadedWorld({"dp": 2}).run(run)


def test_a_script_behaves_alike_with_every_number_of_ranks_that_share_a_mean():
    def run(mesh: Any, shard_ranks: Any) -> list[Tensor]:
        model, seen = mlp(), []
        make = torch.optim.SGD(model.parameters(), lr=0.1)
        where = {"shard_ranks": shard_ranks} if shard_ranks else {"mesh": mesh}
        optimizer = shardcast.shard(model, make, param_dtype="fp32", **where)
        batch = BATCH.chunk(2)[mesh.get_local_rank("dp")]
        for gathers in (True, False):
            model(batch).square().mean().backward()
            for param in model.parameters():
                with pytest.raises(RuntimeError, match=r"reads \.grad of"):
                    param.grad.sum()
                param.grad.mul_(0.5)
            if gathers:
                optimizer.gather_gradients()
                seen += [param.grad.clone() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            for param in model.parameters():
                with pytest.raises(RuntimeError, match=r"reads \.grad of"):
                    param.grad.sum()
                param.grad.add_(0.25)
        model(batch).square().mean().backward()
        optimizer.step()
        return [*seen, *(param.detach().clone() for param in model.parameters())]

    results = [ThreadedWorld({"dp": 2}).run(run, shard_ranks) for shard_ranks in ("all", 1)]
    for found in zip(*(rank for ranks in results for rank in ranks), strict=True):
        assert all(torch.equal(found[0], other) for other in found)
    ThreadedWorld({"dp": 1, "tp": 2}).run(run, None)


@pytest.mark.parametrize("before", ["nothing", "a backward in no_sync", "a kept mean"])
def test_a_lone_rank_with_a_divisor_reduces_as_several_ranks_do(before: str):
    model = nn.Linear(3, 2, bias=False)
    make = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer: Any = shardcast.shard(model, make, param_dtype="fp32")
    kept, start = None, model.weight.detach().clone()
    if before == "a backward in no_sync":
        with optimizer.no_sync():
            model.weight.sum().backward()
        assert torch.equal(model.weight.grad, torch.ones(2, 3))
    elif before == "a kept mean":
        model.weight.sum().backward()
        kept = model.weight.grad
        optimizer.zero_grad()
    optimizer.divisor = 4.0
    model.weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"reads \.grad of"):
        model.weight.grad.sum()
    model.weight.sum().backward()
    expected = torch.full((2, 3), 0.75 if before == "a backward in no_sync" else 0.5)
    optimizer.gather_gradients()
    assert torch.equal(model.weight.grad, expected)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), start - expected)
    assert kept is None or torch.equal(kept, torch.ones(2, 3))
    optimizer.zero_grad(set_to_none=False)
    optimizer.divisor = None
    model.weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), start - expected - 1.0)


def test_a_lone_rank_that_sets_a_divisor_keeps_the_clip_of_the_coming_step():
    found = []
    for divisor in None, 4.0:
        model = nn.Linear(3, 2, bias=False)
        nn.init.constant_(model.weight, 0.5)
        make = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = shardcast.shard(model, make, param_dtype="bf16")
        model(torch.arange(3, dtype=torch.bfloat16)).sum().backward()
        optimizer.clip_grad_norm_(0.25)
        optimizer.divisor = divisor
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        found.append(optimizer.full_parameters()["weight"])
    assert torch.equal(*found)


def test_a_lone_rank_that_sets_a_divisor_trains_no_parameter_without_a_gradient():
    model = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(2))
    make = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer: Any = shardcast.shard(model, make, param_dtype="fp32")
    (model[0].sum() + model[1].sum()).backward()
    optimizer.step()
    model.zero_grad()
    before = model[1].detach().clone()
    optimizer.divisor = 2.0
    model[0].sum().backward()
    optimizer.step()
    assert torch.equal(model[1], before)
    assert model[1].grad is None
