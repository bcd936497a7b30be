"""shardcast.transformers, with one or several optimizers, compared with stock Trainer and DDP."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import warm
from commands import TORCHRUN, command, python
from models import values as weights
from safetensors.torch import load_file
from test_accelerate_processes import fresh
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, IterableDataset

from shardcast import frameworks
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import SpawnedWorld
from shardcast.transformers import ShardcastTrainer, ShardcastTrainerMixin, sharding

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
HELPED = f"{ROOT}:{ROOT / 'launch'}:{ROOT / 'tests/helpers'}"
STEPS, STOCK = 6, {"kind": "stock"}


class Text(Dataset[dict[str, Tensor]]):
    """48 sequences of 16 bytes of this file."""

    def __init__(self) -> None:
        data = torch.tensor(list(Path(__file__).read_bytes()[: 48 * 16]))
        self.rows = data.view(48, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model_of() -> Any:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )


def pair(model: Any) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the rest, with different rates."""
    inside = {p for n, p in model.named_parameters() if ".layers." in n and p.dim() == 2}
    rest = [p for p in model.parameters() if p not in inside]
    ordered = [p for p in model.parameters() if p in inside]
    return [torch.optim.Muon(ordered, lr=2e-2), torch.optim.AdamW(rest, lr=5e-3)]


class Creating(ShardcastTrainer):
    """Creates its optimizers where Trainer creates its single one."""

    def create_optimizer(self, *_: Any, **__: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = pair(self.model)
        return self.optimizer


def arguments_of(folder: str, **options: Any) -> Any:
    return transformers.TrainingArguments(
        **{
            "output_dir": folder,
            "use_cpu": True,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_steps": STEPS // 2,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 3,
            **options,
        }
    )


def trainer_of(
    folder: str,
    kind: str = "sharded",
    steps: int = STEPS,
    optimizers: Any = None,
    own: Any = (),
    **options: Any,
) -> Any:
    """``own`` are arguments only of ShardcastTrainer, ``options`` those of TrainingArguments."""
    fresh()
    config, model = options.pop("shardcast_config", None), model_of()
    usual = {"max_steps": steps, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
    arguments = arguments_of(folder, **{**usual, **options})
    kinds = {"stock": transformers.Trainer, "loss": WithLoss, "creating": Creating}
    kinds |= {"evaluating": Evaluating, "of part": sharding(OfPart), "own file": sharding(OwnFile)}
    cls: Any = kinds.get(kind, ShardcastTrainer)
    given = {} if kind == "stock" else {"shardcast_config": config, **dict(own)}
    if optimizers is not None:
        given["optimizers"] = optimizers(model)
    return cls(model=model, args=arguments, train_dataset=Text(), eval_dataset=Text(), **given)


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [(r["loss"], r["grad_norm"]) for r in trainer.state.log_history if "loss" in r]


def run(
    _group: Any, folder: str, resume: str | None = None, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    trainer = trainer_of(folder, **(options or {}))
    trainer.train(resume_from_checkpoint=resume)
    is_stock = type(trainer) is transformers.Trainer
    return {
        "log": logged(trainer),
        "eval": trainer.evaluate()["eval_loss"],
        "weights": weights(trainer.model),
        "masters": None if is_stock else masters_of(trainer),
    }


def masters_of(trainer: Any) -> dict[int, Tensor]:
    state = trainer.optimizer.optimizer.state_dict()["state"]
    return {number: values["master"] for number, values in state.items()}


class Evaluating(ShardcastTrainerMixin, transformers.Trainer):
    """Records the model's weights at each evaluation step."""

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        averages = packed_of(self.optimizer.optimizer).hook_of("averages")
        self.seen = averages.in_model, weights(model)
        return super().prediction_step(model, *args, **kwargs)


@pytest.mark.parametrize("average", ["ema", None])
def test_an_average_is_in_the_model_while_trainer_evaluates_after_two_calls_of_train(
    tmp_path: Path, average: str | None
):
    config = {"averages": {"ema": 0.5}, "metrics": True}
    own = {"evaluate_average": average, "log_metrics": "*.q_proj.*"}
    trainer = trainer_of(str(tmp_path), "evaluating", own=own, shardcast_config=config)
    trainer.train()
    (first, _), *_ = logged(trainer)
    trainer.train()
    assert logged(trainer)[0][0] < first, "it goes on from the weights of the first call"
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    key = "update_norm/model.layers.0.self_attn.q_proj.weight"
    assert entries and all(entry[key] > 0 for entry in entries)
    assert not any("k_proj" in key for entry in entries for key in entry)
    trained = weights(trainer.model)
    trainer.evaluate()
    name, seen = trainer.seen
    assert name == average and equal(weights(trainer.model), trained)
    expected = trainer.optimizer.optimizer.full_parameters(average)
    assert all(torch.equal(seen[name], value.to(seen[name])) for name, value in expected.items())
    assert equal(seen, trained) == (average is None)


def equal(left: dict[Any, Tensor], right: dict[Any, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_the_best_model_at_the_end_has_the_average_that_was_best(tmp_path: Path):
    trainer = trainer_of(
        str(tmp_path),
        own={"evaluate_average": "ema"},
        shardcast_config={"averages": {"ema": 0.5}},
        learning_rate=1.0,  # the loss rises after the first steps
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
    )
    trainer.train()
    best = trainer.state.best_metric
    assert trainer.state.best_global_step < STEPS
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


def test_the_first_loss_in_bf16_is_that_of_the_stock_trainer(tmp_path: Path):
    """The three micro-batches have 315 tokens, which bf16 cannot represent."""

    def first(kind: str, **options: Any) -> tuple[float, float]:
        trainer = trainer_of(
            str(tmp_path),
            kind,
            steps=1,
            bf16=True,
            save_strategy="no",
            gradient_accumulation_steps=3,
            per_device_train_batch_size=7,
            **options,
        )
        trainer.train()
        return logged(trainer)[0]

    loss, norm = first("stock")
    expected = pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-2)
    for config in ({}, {"autocast": False}):
        assert first("sharded", shardcast_config=config) == expected, config


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ranks_are_equal_and_two_optimizers_of_a_subclass_resume_exactly(
    tmp_path: Path, gloo: SpawnedWorld, precision: str
):
    options = {"kind": "creating", precision: True}
    whole = gloo.run(run, str(tmp_path / "a"), None, options)
    assert equal(whole[0]["weights"], whole[1]["weights"])
    middle = str(tmp_path / "a" / "checkpoint-3")
    again = gloo.run(run, str(tmp_path / "b"), middle, options)
    for mine, theirs in zip(again, whole, strict=True):
        assert equal(mine["weights"], theirs["weights"])
        assert equal(mine["masters"], theirs["masters"])
        assert mine["log"] == theirs["log"]


def test_a_scheduler_of_one_of_several_optimizers_is_refused(tmp_path: Path):
    def one(model: Any) -> Any:
        optimizers = pair(model)
        return optimizers, LambdaLR(optimizers[0], lambda n: 0.5**n)

    with pytest.raises(ValueError, match="expected no scheduler with several optimizers"):
        trainer_of(str(tmp_path), optimizers=one)


def test_the_stock_trainer_resumes_as_the_note_in_the_checkpoint_says(
    tmp_path: Path, gloo: SpawnedWorld
):
    ours = gloo.run(run, str(tmp_path / "ours"))[0]["log"]
    folder = tmp_path / "ours" / "checkpoint-3"
    note = (folder / "optimizer.pt.txt").read_text()
    (line,) = re.findall("^    (shardcast .*)$", note, re.MULTILINE)
    line = line.replace("shardcast ", f"{shlex.quote(warm.executable())} -m shardcast ", 1)
    done = command("bash", "-c", f"cd {shlex.quote(str(folder))} && {line}")
    assert done.returncode == 0, done.stderr
    try:
        stock = gloo.run(run, str(tmp_path / "stock"), str(folder), STOCK)[0]
    except RuntimeError as error:  # transformers 5.0 with Accelerate 1.10 cannot restore to "cpu:0"
        if "restore data location" not in str(error):
            raise
        pytest.skip(f"this Trainer loads no optimizer on CPU processes: {error}")
    for resumed, whole in zip(stock["log"], ours, strict=True):
        assert resumed == pytest.approx(whole, abs=1e-5, rel=1e-5)


def test_a_checkpoint_of_one_rank_goes_on_on_two(tmp_path: Path, gloo: SpawnedWorld):
    one = run(None, str(tmp_path / "one"))
    two = gloo.run(loaded, str(tmp_path / "one" / f"checkpoint-{STEPS}"))
    for number, master in one["masters"].items():
        pieces = [rank[number] for rank in two if number in rank]
        assert torch.equal(torch.cat(pieces), master)


def loaded(group: Any, checkpoint: str) -> dict[int, Tensor]:
    trainer = trainer_of(checkpoint + "-b", steps=STEPS)
    trainer.train(resume_from_checkpoint=checkpoint)  # no steps are left
    return masters_of(trainer)


def test_every_saved_form_loads_without_shardcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_of(str(tmp_path / "run"), bf16=True, save_strategy="no")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.model.save_pretrained(tmp_path / "pretrained")
    torch.save(trainer.model.state_dict(), tmp_path / "state.pt")
    held = load_file(tmp_path / "saved" / "model.safetensors")
    names = {name for name, _ in trainer.model.named_parameters()}
    assert names <= held.keys() | {"lm_head.weight"}, "one of two tied names may be missing"
    storages = [p.untyped_storage().data_ptr() for p in trainer.model.parameters()]
    assert len(set(storages)) == len(storages)
    expected = weights(trainer.model)
    for module in [name for name in sys.modules if name.split(".")[0] == "shardcast"]:
        monkeypatch.setitem(sys.modules, module, None)  # makes imports of it fail
    with pytest.raises(ImportError):
        import shardcast  # noqa: F401
    for form in ("saved", "pretrained"):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / form, dtype="bfloat16")
        low = {name: value.to(torch.bfloat16) for name, value in expected.items()}  # norms too
        assert equal(model.state_dict(), low), form
    again = model_of()
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert equal(again.bfloat16().state_dict(), low)


def test_neither_trainer_resumes_in_silence_without_the_optimizers_state(tmp_path: Path):
    trainer_of(str(tmp_path), steps=3).train()
    with pytest.raises(Exception, match="THE_STATE_IS_IN_shardcast__SEE_optimizer_pt_txt"):
        trainer_of(str(tmp_path), **STOCK, steps=4).train(resume_from_checkpoint=True)
    assert "shardcast export" in (tmp_path / "checkpoint-3" / "optimizer.pt.txt").read_text()
    shutil.rmtree(tmp_path / "checkpoint-3" / "shardcast")
    with pytest.raises(FileNotFoundError, match=r"lacks 'shardcast'.*delete 'optimizer\.pt'"):
        trainer_of(str(tmp_path), steps=4).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    with pytest.warns(UserWarning, match="the optimizer begins with fresh state"):
        trainer_of(str(tmp_path), steps=4).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_grad_norm": 0.1}, r"got 0\.1 in the .* clips to the 0\.5 of TrainingArguments"),
        ({"guard": {"loss": 6.0, "window": 4}}, "'loss' too: Trainer steps without a loss"),
    ],
)
def test_options_that_trainer_would_leave_unused_are_refused(
    tmp_path: Path, config: Any, message: str
):
    with pytest.raises(ValueError, match=message):
        trainer_of(str(tmp_path), shardcast_config=config).train()


def saved(group: Any, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """Save with and without masters, and only on rank 0; return the masters and warnings."""
    frameworks.PATIENCE = timedelta(seconds=0.5)
    trainer = trainer_of(f"{folder}/run", bf16=True, save_steps=STEPS)
    trainer.train()
    masters = trainer.accelerator.sharded_optimizer.full_parameters()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if group.rank() == 0:
            trainer.save_model(f"{folder}/alone")
            trainer.save_model(f"{folder}/alone again")
        group.barrier().wait()
        trainer.accelerator.save_masters = False
        trainer.save_model(f"{folder}/low")
        trainer.accelerator.save_masters = True
        trainer.accelerator.save_model(trainer.model, f"{folder}/mismatched")
        trainer.optimizer.step()  # restarts the numbering of calls
        trainer.accelerator.save_model(trainer.model, f"{folder}/matched")
        told = [str(w.message) for w in caught if "save_masters" in str(w.message)]
    return masters, told


def test_models_are_saved_in_fp32_and_on_rank_0_alone_in_low_precision_with_a_warning(
    tmp_path: Path, gloo: SpawnedWorld
):
    (masters, told), (_, told_on_1) = gloo.run(saved, str(tmp_path))
    assert (len(told), len(told_on_1)) == (1, 0), "once per job, by the first rank"
    checkpoint = tmp_path / "run" / f"checkpoint-{STEPS}"
    weights = load_file(checkpoint / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert all(torch.equal(value, masters[name]) for name, value in weights.items())
    assert json.loads((checkpoint / "config.json").read_text())["dtype"] == "float32"
    loaded = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(loaded.lm_head.weight, masters["lm_head.weight"])
    for name in ("alone", "alone again", "low", "mismatched"):
        found = load_file(tmp_path / name / "model.safetensors")
        matrices = {value.dtype for value in found.values() if value.dim() > 1}
        assert matrices == {torch.bfloat16}, name  # norms stay fp32
    found = load_file(tmp_path / "matched" / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float32}


class OfPart(transformers.Trainer):
    """Saves another model than it trains, like PPO (a part) and those that keep an average."""

    saves: Any = None

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        trained, self.model = self.model, self.saves or self.model
        super().save_model(*args, **kwargs)
        self.model = trained


class OwnFile(OfPart):
    """Writes the file itself, like sentence-transformers."""

    def _save(self, output_dir: str | None = None, *_: Any) -> None:
        self.model.save_pretrained(output_dir)


@pytest.mark.parametrize(("kind", "bf16"), [("of part", False), ("own file", True)])
def test_what_a_trainer_class_saves_itself_is_that_model_in_fp32(
    tmp_path: Path, kind: str, bf16: bool
):
    trainer = trainer_of(str(tmp_path / "run"), kind, bf16=bf16, save_strategy="no")
    trainer.train()
    shown = weights(trainer.model)
    masters = trainer.accelerator.sharded_optimizer.full_parameters()
    other = model_of()
    for name, model, prefix in (
        ("whole", None, ""),
        ("part", trainer.model.model, "model."),
        ("other", other, None),
    ):
        trainer.saves = model
        trainer.save_model(str(tmp_path / name))
        expected = masters if prefix is not None else dict(other.named_parameters())
        saved = load_file(tmp_path / name / "model.safetensors")
        assert saved and {value.dtype for value in saved.values()} == {torch.float32}
        for key, value in saved.items():
            assert torch.equal(value, expected[(prefix or "") + key]), (name, key)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"
    assert equal(weights(trainer.model), shown)
    trainer.train()  # the model is trained as before


def test_a_save_that_fails_leaves_the_model_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_of(str(tmp_path), "own file", bf16=True, save_strategy="no")
    trainer.train()
    shown = weights(trainer.model)

    def full(*_: Any) -> None:
        assert not equal(weights(trainer.model), shown)
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer.model, "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        trainer.save_model(str(tmp_path / "out"))
    assert equal(weights(trainer.model), shown)


class Clearing(transformers.TrainerCallback):
    """Clears gradients that Trainer's model.zero_grad() misses, like sentence-transformers."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def on_step_end(self, *_: Any, **__: Any) -> None:
        for param in self.loss.parameters():
            param.grad = None


class WithLoss(ShardcastTrainerMixin, transformers.Trainer):
    """Its loss has the model and its own weights, as in sentence-transformers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss = nn.Module()
        torch.manual_seed(8)
        self.loss.model, self.loss.head = self.model, nn.Linear(256, 3)
        self.loss.scale = nn.Parameter(torch.ones(()))
        self.add_callback(Clearing(self.loss))

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=1e-2)
        return super().create_optimizer()

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        logits = model(input_ids=inputs["input_ids"]).logits.mean(1)
        return nn.functional.cross_entropy(
            self.loss.head(logits) * self.loss.scale, inputs["labels"][:, 0] % 3
        )


def with_loss(
    _group: Any, folder: str, resume: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    trainer = trainer_of(folder, "loss", **(options or {}))
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer), weights(trainer.loss)


def test_weights_of_a_loss_train_beside_the_model(tmp_path: Path, gloo: SpawnedWorld):
    whole = with_loss(None, str(tmp_path / "one"), None, {"per_device_train_batch_size": 4})
    for bf16, tolerance in ((False, 1e-5), (True, 0.2)):  # bf16 norms differ by 8 % after six steps
        folder, options = str(tmp_path / f"{bf16}"), {"bf16": bf16}
        both = gloo.run(with_loss, folder, None, options)
        assert equal(both[0][1], both[1][1]), "the loss's weights must be averaged, too"
        for ours, one in zip(both[0][0], whole[0], strict=True):
            assert ours == pytest.approx(one, rel=tolerance)
        resume = f"{folder}/checkpoint-3"
        again = gloo.run(with_loss, f"{folder}b", resume, options)
        assert again[0][0] == both[0][0]  # all steps; the first three come from the checkpoint
        assert equal(again[0][1], both[0][1])
    names = load_file(tmp_path / "True" / "checkpoint-6" / "model.safetensors")
    assert {value.dtype for value in names.values()} == {torch.float32}


class Editing(transformers.TrainerCallback):
    """After each step, normalizes rows, resets some moments, and decays all weights by hand."""

    ROWS = tuple(f"model.layers.{number}.mlp.up_proj.weight" for number in range(2))

    def on_optimizer_step(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        if hasattr(optimizer, "whole"):
            with optimizer.whole(*self.ROWS) as params:
                for one in params.values():
                    self.edit(one.master, one.state)
            with optimizer.owned() as parts:
                for part in parts:
                    part.master.mul_(0.99)
            return
        with torch.no_grad():
            for name in self.ROWS:
                param = model.get_parameter(name)
                self.edit(param, optimizer.state[param])
            for param in model.parameters():
                param.mul_(0.99)

    def edit(self, weight: Tensor, state: Any) -> None:
        weight.copy_(nn.functional.normalize(weight, dim=1))
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment][1::2] = 0


class Pruning(transformers.TrainerCallback):
    """Reads gradients before the step, like pruning, and after it, like AdaLoRA."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(norms).norm()))

    def on_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        weight = model.model.layers[0].mlp.up_proj.weight
        scores = (weight * weight.grad).abs().detach()
        with torch.no_grad():
            weight.mul_(scores > scores.median())


def edited(_group: Any, folder: str, kind: str, bf16: bool = False) -> Any:
    """Return losses, weights, and on rank 0 the weights in full precision."""
    trainer = trainer_of(folder, kind, save_strategy="no", bf16=bf16)
    trainer.add_callback(Editing())
    trainer.train()
    shown = weights(trainer.model)
    if kind == "stock":
        return logged(trainer), shown, shown
    return logged(trainer), shown, trainer.accelerator.sharded_optimizer.full_parameters()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_callback_edits_masters_and_moments_as_it_edits_weights_under_ddp(
    tmp_path: Path, gloo: SpawnedWorld, bf16: bool
):
    losses, expected, _ = gloo.run(edited, str(tmp_path / "stock"), "stock")[0]
    first, second = gloo.run(edited, str(tmp_path / "ours"), "sharded", bf16)
    assert equal(first[1], second[1])
    for name in Editing.ROWS:  # more precisely than bf16
        norms = first[2][name].norm(dim=1)
        torch.testing.assert_close(norms, torch.full_like(norms, 0.99), rtol=1e-5, atol=0)
    for (loss, _), (of_stock, _) in zip(first[0], losses, strict=True):
        assert loss == pytest.approx(of_stock, rel=2e-2 if bf16 else 1e-5)
    for name, value in first[2].items() if not bf16 else ():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def pruned(_group: Any, folder: str, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    trainer, callback = trainer_of(folder, kind, max_grad_norm=0.0, save_strategy="no"), Pruning()
    trainer.add_callback(callback)
    trainer.train()
    return callback.norms, weights(trainer.model)


def test_callbacks_that_read_gradients_see_those_of_ddp(tmp_path: Path, gloo: SpawnedWorld):
    stock = gloo.run(pruned, str(tmp_path / "stock"), "stock")
    for norms, trained in gloo.run(pruned, str(tmp_path / "ours"), "sharded"):
        assert norms == pytest.approx(stock[0][0], rel=1e-4) and len(norms) == STEPS
        for name, value in stock[0][1].items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)


class Stream(IterableDataset[dict[str, Tensor]]):
    """The rows of Text as a stream; each epoch ends within an accumulation, which the next ends."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        text = Text()
        yield from (text[number] for number in range(len(text)))


def streamed(_group: Any, folder: str, kind: str) -> Any:
    trainer = trainer_of(folder, kind, save_strategy="no", gradient_accumulation_steps=5)
    trainer.train_dataset = Stream()
    trainer.train()
    return logged(trainer), weights(trainer.model)


def test_an_accumulation_goes_on_in_the_next_epoch_of_a_stream(tmp_path: Path, gloo: SpawnedWorld):
    log, trained = gloo.run(streamed, str(tmp_path / "stock"), "stock")[0]
    for ours, values in gloo.run(streamed, str(tmp_path / "ours"), "sharded"):
        assert len(ours) == STEPS
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(log), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, trained, rtol=1e-4, atol=1e-5)


class MakesItsOwn(transformers.Trainer):
    """A Trainer that does not create its accelerator by the name in Trainer's module."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = None


def test_a_trainer_that_makes_an_accelerator_of_another_class_is_refused(tmp_path: Path):
    class Mixed(ShardcastTrainerMixin, MakesItsOwn):
        pass

    fresh()
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match=r"transformers\.trainer\.Accelerator, got a NoneType"):
        Mixed(model=model_of(), args=arguments)


STOCK_SCRIPT = """
import sys
from transformers import Trainer, TrainerCallback
class Mine(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
mine = Mine.__new__(Mine)
assert isinstance(mine, Mine) and type(mine).__name__ == "ShardcastMine", type(mine)
sys.path.insert(0, {tests!r})
from test_transformers import trainer_of
for resume in (None, {folder!r} + "/checkpoint-3"):
    trainer = trainer_of({folder!r}, "stock", bf16=True)
    trainer.train(resume_from_checkpoint=resume)
    assert type(trainer.accelerator).__name__ == "ShardcastAccelerator"
"""


def test_the_stock_trainer_under_shardcast_run_saves_every_shard(tmp_path: Path):
    folder, script = str(tmp_path / "out"), tmp_path / "script.py"
    script.write_text(STOCK_SCRIPT.format(tests=str(Path(__file__).parent), folder=folder))
    done = python(*TORCHRUN, "-m", "shardcast.run", str(script), PYTHONPATH=HELPED)
    assert done.returncode == 0, done.stderr
    from shardcast import checkpoint

    found = checkpoint.inspect(tmp_path / "out" / "checkpoint-6" / "shardcast")
    assert found.world_size == 2
    assert (tmp_path / "out" / "checkpoint-6" / "optimizer.pt").stat().st_size < 100, "no state"
    weights = load_file(tmp_path / "out" / "checkpoint-6" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_the_example_script_trains_on_two_processes(tmp_path: Path):
    done = python(
        *("-m", "accelerate.commands.launch"),
        *("--config_file", "configs/accelerate/cpu_two_processes.yaml"),
        *("launch/train_trainer.py", "--use_cpu", "--bf16", "--output_dir", str(tmp_path)),
        *("--max_steps", "4", "--logging_steps", "2", "--report_to", "none"),
    )
    assert done.returncode == 0, done.stderr
    assert "eval_loss" in done.stdout
    assert (tmp_path / "checkpoint-4" / "shardcast").is_dir()
    assert (tmp_path / "model.safetensors").is_file()
