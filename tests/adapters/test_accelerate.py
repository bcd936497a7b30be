"""shardcast.accelerate in one process: ways to use it, configuration, guards and steps."""

from __future__ import annotations

import gc
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import (
    Accelerator,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from accelerate.optimizer import AcceleratedOptimizer
from models import MLP, parts
from oracle import difference, mlp, pair
from test_accelerate_processes import fresh
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import LambdaLR

import shardcast
import shardcast.run
from shardcast import ShardedOptimizer
from shardcast.accelerate import ShardcastAccelerator, ShardcastOptimizer, guards

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    fresh()
    yield
    fresh()


def accelerator_of(precision: str = "no", config: Any = None, **options: Any) -> Any:
    return ShardcastAccelerator(
        cpu=True, mixed_precision=precision, shardcast_config=config, **options
    )


def prepared(accelerator: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
    model = MLP() if model is None else model
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def one_step(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.randn(4, 7)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


# -- ways to use it ---------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [True, False])
def test_prepare_shards_without_ddp(autocast: bool) -> None:
    accelerator = accelerator_of("bf16", None if autocast else {"autocast": False})
    network = MLP()
    optimizer = torch.optim.AdamW(network.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    # The order does not matter: the model is placed before its optimizer is sharded.
    wrapped, ready, model = accelerator.prepare(scheduler, optimizer, network)
    assert model is network
    assert isinstance(ready, ShardcastOptimizer) and isinstance(ready, AcceleratedOptimizer)
    assert isinstance(ready.optimizer, ShardedOptimizer)
    assert accelerator.sharded_optimizer is ready.optimizer
    assert {p.dtype for p in model.parameters()} == {BF16}
    assert accelerator.scaler is None
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu") == autocast
    assert model(torch.randn(2, 7)).dtype == FP32, "as with Accelerate's autocast"
    one_step(accelerator, model, ready)
    wrapped.step()
    assert ready.param_groups[0]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize("named", [False, True])
def test_a_loss_that_a_model_of_transformers_computes_is_as_exact_as_its_logits(
    named: bool,
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=5,
        hidden_dropout_prob=0.0,
        classifier_dropout=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens, labels = torch.arange(24).view(4, 6), torch.tensor([0, 1, 2, 3])
    # The control: a user's own value, here an empty one, is not changed.
    options = {"autocast": False, **({"fp32_outputs": ()} if named else {})}
    accelerator = accelerator_of("bf16", options)
    model, _ = prepared(accelerator, transformers.BertForSequenceClassification(shape))
    found = model(input_ids=tokens, labels=labels)
    exact = nn.functional.cross_entropy(found.logits, labels)
    assert found.loss.dtype == found.logits.dtype == FP32
    assert torch.equal(found.loss, exact) == (not named)


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run ``python -m shardcast.run`` in this process, and undo its changes."""
    monkeypatch.setattr(accelerate, "Accelerator", Accelerator)
    monkeypatch.setattr(accelerate.accelerator, "Accelerator", Accelerator)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, shardcast.run.TRAINER, raising=False)  # it caches its class

    def started(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["shardcast.run", *arguments])
        shardcast.run.main()

    return started


def test_run_makes_an_unedited_script_shard(
    tmp_path: Path, run_here: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "helper.py").write_text("word = 'beside the script'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, helper\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True, mixed_precision='bf16')\n"
        "model = torch.nn.Linear(3, 3)\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "print(type(accelerator).__name__, model.weight.dtype, sys.argv[1:],"
        " helper.word, __name__)\n"
    )
    run_here(str(script), "--steps", "3")
    expected = "ShardcastAccelerator torch.bfloat16 ['--steps', '3'] beside the script __main__"
    assert capsys.readouterr().out.strip() == expected


@pytest.mark.parametrize(
    ("arguments", "told"), [([], "expected a script, got nothing"), (["no.py"], "'no.py' does not")]
)
def test_run_tells_what_it_expects(
    arguments: list[str],
    told: str,
    run_here: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        run_here(*arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "usage: python -m shardcast.run" in error and told in error


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(3)"])
def test_run_destroys_the_process_group_that_a_script_leaves(
    tmp_path: Path, end: str, run_here: Callable[..., None]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import torch.distributed as dist\n"
        f"dist.init_process_group('gloo', f'file://{tmp_path}/store', rank=0, world_size=1)\n{end}"
    )
    failed = end == "sys.exit(3)"  # destroying the group might hang
    with pytest.raises(SystemExit, match="3") if failed else nullcontext():
        run_here(str(script))
    assert torch.distributed.is_initialized() == failed


# -- guards -----------------------------------------------------------------------------------


def plain(**changes: Any) -> Any:
    """Return a stand-in with the attributes of an accelerator that guards check."""
    usual = {
        "distributed_type": SimpleNamespace(value="MULTI_GPU"),
        "mixed_precision": "no",
        "has_fp8_handler": False,
        "parallelism_config": None,
        "num_processes": 2,
        "ddp_handler": None,
        "autocast_handler": None,
        "scaler_handler": None,
    }
    return SimpleNamespace(**{**usual, **changes})


COMPRESSED = DistributedDataParallelKwargs(comm_hook="fp16")
UNUSED = DistributedDataParallelKwargs(find_unused_parameters=True)
SCALER = GradScalerKwargs(init_scale=8.0)
FP32_ONLY = AutocastKwargs(enabled=False)


@pytest.mark.parametrize(
    ("keywords", "error", "names"),
    [
        ({"mixed_precision": "fp16", "kwargs_handlers": [SCALER]}, RuntimeError, "loss_scale_init"),
        ({"kwargs_handlers": [COMPRESSED]}, RuntimeError, "reduce_dtype"),
        ({"mixed_precision": "bf16", "kwargs_handlers": [FP32_ONLY]}, RuntimeError, "autocast: fa"),
    ],
)
def test_what_has_no_effect_is_refused(
    keywords: dict[str, Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=re.escape(names)):
        ShardcastAccelerator(cpu=True, **keywords)


@pytest.mark.parametrize(
    ("found", "names"),
    [
        *(
            ({"distributed_type": SimpleNamespace(value=kind)}, f"distributed_type {kind}")
            for kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
        ),
        ({"has_fp8_handler": True}, "fp8"),
        ({"mixed_precision": "fp8"}, "fp8"),
        ({"parallelism_config": SimpleNamespace(sp_size=2)}, "sp_size=2"),
    ],
)
def test_other_ways_to_distribute_are_refused(found: dict[str, Any], names: str) -> None:
    with pytest.raises(RuntimeError, match=names):
        guards.refuse_unsupported(plain(**found))
    guards.refuse_unsupported(plain(parallelism_config=SimpleNamespace(sp_size=1)))
    accelerator_of(kwargs_handlers=[UNUSED])


def test_two_silent_worlds_of_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set by `accelerate launch --multi_gpu` on a machine without GPUs.
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 2 .*is alone.*USE_CPU.*before a"):
        guards.refuse_unsupported(plain(num_processes=1))
    guards.refuse_unsupported(plain())


def test_model_and_optimizer_may_come_one_after_the_other_but_not_alone() -> None:
    accelerator = accelerator_of()
    network = MLP()
    optimizer = torch.optim.AdamW(network.parameters())
    with pytest.raises(ValueError, match="prepare model and optimizer in one call"):
        accelerator.prepare(optimizer)
    model = accelerator.prepare(network)
    ready = accelerator.prepare(optimizer)
    one_step(accelerator, model, ready)


def test_a_model_without_its_optimizer_trains_in_one_process_only() -> None:
    accelerator, network = accelerator_of(), MLP()
    model = accelerator.prepare(network)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    one_step(accelerator, model, plain)
    several, x = MLP(), torch.randn(2, 7)
    with pytest.raises(RuntimeError, match="the model was prepared without its optimizer"):
        guards.refuse_training("no", 2, several, (x,))
    with torch.no_grad():
        guards.refuse_training("no", 2, several, (x,))
    guards.refuse_training("no", 2, several.eval(), (x,))
    fresh()
    model = accelerator_of("bf16").prepare(MLP())
    with pytest.warns(UserWarning, match="mixed_precision 'bf16' has no effect on a model that"):
        model(torch.randn(2, 7))


def test_models_that_are_not_trained_are_let_through() -> None:
    accelerator = accelerator_of("bf16")
    network, teacher, judge = MLP(), MLP().requires_grad_(False), MLP()
    ready = accelerator.prepare(teacher, network, torch.optim.AdamW(network.parameters()))
    model, optimizer = ready[1:]
    judge = accelerator.prepare_model(judge, evaluation_mode=True)
    x = torch.randn(4, 7)
    before = [[param.clone() for param in one.parameters()] for one in (model, teacher, judge)]
    accelerator.backward((model(x) - teacher(x)).square().mean() + 0 * judge(x).mean())
    optimizer.step()
    moved = [
        any(not torch.equal(old, new) for old, new in zip(values, one.parameters(), strict=True))
        for values, one in zip(before, (model, teacher, judge), strict=True)
    ]
    assert moved == [True, False, False]


def test_a_model_of_another_accelerator_is_refused_until_that_one_lets_go() -> None:
    first = accelerator_of("bf16")
    model, optimizer = prepared(first)
    second = accelerator_of("bf16")
    anew = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=r"already called on this model.*free_memory\(model\)"):
        second.prepare(model, anew)
    first.free_memory(model)
    model, optimizer = second.prepare(model, anew)
    one_step(second, model, optimizer)


def test_a_ddp_model_is_refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = MLP()
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel already"):
        accelerator_of().prepare_model(wrapped)


def test_a_pair_that_was_sharded_by_hand_is_taken_as_it_is() -> None:
    accelerator = accelerator_of()
    model = MLP()
    sharded = shardcast.shard(model, torch.optim.AdamW(model.parameters()), param_dtype=BF16)
    model, optimizer = accelerator.prepare(model, sharded)
    assert accelerator.sharded_optimizer is sharded is optimizer.optimizer
    one_step(accelerator, model, optimizer)
    with pytest.raises(RuntimeError, match=r"call accelerator\.prepare"):
        _ = accelerator_of().sharded_optimizer


# -- the step ---------------------------------------------------------------------------------


def test_clipping_checks_what_it_is_given() -> None:
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    x = torch.randn(4, 7)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        with pytest.raises(RuntimeError, match=r"write `if accelerator\.sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        with pytest.raises(ValueError, match=r"all but 4 of 6; pass model\.parameters\(\)"):
            accelerator.clip_grad_norm_(model.a.parameters(), 1.0)
        with pytest.raises(ValueError, match=r"expected norm_type 2\.0, got inf; set norm"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == pytest.approx(expected)
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        norm = accelerator.clip_grad_norm_(other.parameters(), 1e-3)
        assert norm == pytest.approx(6**0.5), "other parameters are clipped as usual"
        optimizer.step()


def test_clip_by_value_bounds_the_unscaled_gradients() -> None:
    accelerator = accelerator_of("fp16", {"loss_scale_init": 8.0})
    plain = nn.Linear(7, 3)
    weight = plain.weight.detach().clone()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(4, 7)).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    torch.testing.assert_close(weight - model.weight, torch.full((3, 7), 0.5), atol=2e-3, rtol=0)


def test_unscale_gradients_says_that_the_step_does_it() -> None:
    accelerator = accelerator_of("bf16")
    prepared(accelerator)
    accelerator.unscale_gradients()  # does nothing without a loss scale
    accelerator.free_memory()
    fresh()
    accelerator = accelerator_of("fp16")
    _, optimizer = prepared(accelerator)
    with pytest.raises(RuntimeError, match=r"inside optimizer\.step\(\).*remove the call"):
        accelerator.unscale_gradients(optimizer)


def test_the_state_round_trip_of_stock_accelerate_keeps_masters_and_moments_exact() -> None:
    model = MLP()
    sharded = shardcast.shard(model, torch.optim.AdamW(model.parameters()), param_dtype=BF16)
    model(torch.randn(4, 7)).float().square().mean().backward()
    sharded.step()
    before = parts(sharded)
    accelerator_of()  # AcceleratedOptimizer needs an accelerator's state
    AcceleratedOptimizer(sharded, device_placement=True)
    after = parts(sharded)
    assert {t.dtype for key, t in after.items() if key[-1] == "master"} == {FP32}
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    masters = torch.cat([t for key, t in before.items() if key[-1] == "master"])
    assert not torch.equal(masters, masters.bfloat16().float()), "the control: a cast would show"


# -- the rest ---------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    on_params = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    on_modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    return on_params + on_modules


def test_the_fp32_state_has_the_masters_behind_a_published_form() -> None:
    forms = {"published": {"mxfp8": ["0.weight"]}}
    accelerator = ShardcastAccelerator(cpu=True, mixed_precision="bf16", shardcast_config=forms)
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 1))
    model.again = model[0]
    model, optimizer = prepared(accelerator, model)
    accelerator.backward(model[0](torch.randn(4, 32)).square().mean())
    optimizer.step()
    masters, state = optimizer.full_parameters(), accelerator.get_state_dict(model)
    assert not torch.equal(masters["0.weight"].bfloat16(), model[0].weight)
    for name, master in masters.items():
        assert torch.equal(state[name], master) and state[name].dtype == torch.float32, name
    with torch.no_grad():
        model[0].weight[0, 0] = 3.0
    assert accelerator.get_state_dict(model)["0.weight"][0, 0] == 3.0


@pytest.mark.parametrize("wrapped", ["checkpoint", "compiled", "part compiled later"])
def test_a_wrapper_hides_no_master(wrapped: str) -> None:
    """With a wrapper, names in ``named_parameters`` differ from those in ``state_dict``."""
    accelerator = accelerator_of("bf16")
    first = nn.Linear(3, 3)
    model = nn.Sequential(checkpoint_wrapper(first) if wrapped == "checkpoint" else first, MLP())
    model, _ = prepared(accelerator, torch.compile(model) if wrapped == "compiled" else model)
    if wrapped == "part compiled later":
        model[0] = torch.compile(model[0])
    state = accelerator.get_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    assert {value.dtype for value in state.values()} == {FP32}


def test_free_memory_removes_the_hooks_with_the_optimizer_and_training_may_go_on() -> None:
    accelerator = accelerator_of("bf16")
    model, optimizer = prepared(accelerator)
    one_step(accelerator, model, optimizer)
    kept = model
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert model is None and optimizer is None and not accelerator.is_sharding
    assert hooks(kept) == 0
    model, optimizer = prepared(accelerator)
    accelerator.free_memory()  # like Trainer at the start of every train()
    again, ready = accelerator.prepare(model, optimizer)
    assert again is model and ready is optimizer
    weight = model.a.weight.detach().clone()
    one_step(accelerator, model, optimizer)
    assert not torch.equal(weight, model.a.weight)
    accelerator.free_memory()  # without arguments, hooks stay until the optimizer is freed
    assert hooks(model) > 0
    del optimizer, ready
    gc.collect()
    assert hooks(model) == 0


def test_an_older_state_that_cannot_be_deleted_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 deletes it, so after an error the others would hang in their next call."""
    accelerator = accelerator_of("bf16")
    prepared(accelerator)
    accelerator.save_state(str(tmp_path))
    stock = shutil.rmtree

    def refused(path: Path, **options: Any) -> None:
        if Path(path).name == "state-0":
            raise PermissionError(13, "Permission denied", str(path))
        stock(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.warns(UserWarning, match="state-0.* could not be deleted"):
        assert accelerator.save_state(str(tmp_path)) == tmp_path / "state-1"
    assert {path.name for path in tmp_path.iterdir()} == {"state-0", "state-1"}


def test_a_file_of_a_script_beside_the_shards_is_no_state(tmp_path: Path) -> None:
    accelerator = accelerator_of("bf16")
    prepared(accelerator)
    folder = accelerator.save_state(str(tmp_path))
    (folder / "shardcast.yaml").write_text("param_dtype: bf16\n")
    accelerator.load_state(str(tmp_path))


@pytest.mark.parametrize("own_prefix", [False, True])
def test_a_state_of_accelerate_loads_with_the_names_of_a_wrapper_and_without(
    tmp_path: Path, own_prefix: bool
) -> None:
    def built() -> nn.Module:
        return nn.ModuleDict({"module": nn.Linear(2, 2)}) if own_prefix else nn.Linear(2, 2)

    accelerator = Accelerator(cpu=True)
    model, _ = prepared(accelerator, built())
    accelerator.save_state(str(tmp_path / "plain"), safe_serialization=False)
    shutil.copytree(tmp_path / "plain", tmp_path / "wrapped")
    torch.save(
        {f"module.{name}": value for name, value in model.state_dict().items()},
        tmp_path / "wrapped" / "pytorch_model.bin",
    )
    for name in ("plain", "wrapped"):
        fresh()
        accelerator = accelerator_of()
        again, _ = prepared(accelerator, built())
        accelerator.load_state(str(tmp_path / name))
        assert difference(model, again) == 0
        again.load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            again.load_state_dict(torch.load(tmp_path / "wrapped" / "pytorch_model.bin"))


def test_counted_tokens_are_not_divided_twice_nor_rounded() -> None:
    """41 / 41 is 1, but 41 * (1 / 41) in fp32 is not."""
    accelerator = accelerator_of(gradient_accumulation_steps=41)
    _, optimizer = prepared(accelerator)
    optimizer.count(1)
    loss = torch.ones((), requires_grad=True)
    accelerator.backward(loss)
    assert loss.grad == 1.0


def test_a_guard_takes_the_loss_and_a_tracker_the_metrics() -> None:
    config = {"guard": lambda norm, loss: loss > 1, "metrics": True, "averages": {"ema": 0.5}}
    accelerator = accelerator_of("no", config)
    model, optimizer = prepared(accelerator, nn.Sequential(nn.Linear(7, 3)))
    logged: list[dict[str, Any]] = []
    accelerator.trackers = [SimpleNamespace(name="", log=lambda it, **_: logged.append(it))]
    for loss in (0.5, 2.0):
        before = model[0].weight.detach().clone()
        accelerator.backward(model(torch.ones(4, 7)).square().mean())
        optimizer.step(loss=loss)
        accelerator.log(shardcast.metrics.flat(optimizer.metrics("0.weight")))
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == (loss > 1) == torch.equal(before, model[0].weight)
    assert logged[0].keys() == logged[1].keys() and logged[0]["update_norm/0.weight"] > 0
    with optimizer.averaged("ema"):
        assert not torch.equal(before, model[0].weight)
    assert torch.equal(before, model[0].weight)
    with optimizer.owned() as parts:
        for part in parts:
            part.master.mul_(2)
    with optimizer.whole("0.weight") as params:
        params["0.weight"].master.mul_(2)
    assert torch.equal(4 * before, model[0].weight)


# -- several optimizers of one model ---------------------------------------------------------------

INPUT = torch.randn(8, 7, generator=torch.Generator().manual_seed(3))


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def train_two(it: ShardcastAccelerator, model: Any, optimizers: Any, schedulers: Any):
    for _ in range(4):
        it.backward(model(INPUT).square().mean())
        for one in (*optimizers, *schedulers):
            one.step()
        for one in optimizers:
            one.zero_grad()


def test_a_list_of_optimizers_is_prepared_as_one_that_a_scheduler_drives_whole():
    config = {"averages": {"ema": 0.0}, "metrics": True}
    apart, it = accelerator_of("no", config), accelerator_of("no", config)
    expected, model = mlp(), mlp()
    muon, adamw = pair(expected)
    schedulers = halving(muon), halving(adamw)
    first, expected, second, *schedulers = apart.prepare(muon, expected, adamw, *schedulers)
    assert first is not second
    train_two(apart, expected, [first, second], schedulers)
    model, optimizer = it.prepare(model, pair(model))
    train_two(it, model, [optimizer], [it.prepare(halving(optimizer))])
    assert difference(model, expected) == 0
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 2**4] * 2
    for one in (first, second, optimizer):
        assert one.sharded.layout.partition == "mixed" and not one.step_was_skipped
        assert len(one.metrics()) == len([*model.parameters()])
        with one.averaged("ema"):
            assert difference(model, expected) == 0
    with pytest.raises(RuntimeError, match="already called on this model"):
        it.prepare(*pair(model))
    it.free_memory(model, optimizer)
    model, *optimizers = it.prepare(model, *pair(model))
    train_two(it, model, optimizers, [])
    assert difference(model, expected) > 0
