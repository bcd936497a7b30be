"""Trainers of transformers, TRL, PEFT and sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import Report, Variant
from recipes import recipe

VOCABULARY = 64


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 64,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **options,
            }
        )
    )


def tokenizer() -> Any:
    """Return a tokenizer of the words w3 ... w63 and the usual special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<pad>",
    )


def text(seed: int, words: int) -> str:
    rng = torch.Generator().manual_seed(seed)
    return " ".join(f"w{3 + int(i) % 61}" for i in torch.randint(0, 61, (words,), generator=rng))


def arguments(variant: Variant, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": variant.folder,
        "use_cpu": True,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
        **variant.precision(),
        **options,
    }


def trained(variant: Variant, trainer: Any, prefix: str = "") -> Report:
    if not variant.start:
        variant.starts(trainer.model)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    optimizer = None if variant.stock else trainer.accelerator.sharded_optimizer
    report = variant.report(trainer.model, losses, optimizer=optimizer, prefix=prefix)
    report.losses += [float(norm) for norm in norms]
    return report


def causal_rows(count: int = 48) -> list[dict[str, Any]]:
    """Return sequences of different lengths whose prompts are masked out of the loss."""
    rows = []
    for index in range(count):
        rng = torch.Generator().manual_seed(index)
        length = 6 + index % 9
        ids = torch.randint(3, VOCABULARY, (length,), generator=rng)
        labels = ids.clone()
        labels[: index % 4] = -100
        pad = 16 - length
        rows.append(
            {
                "input_ids": torch.nn.functional.pad(ids, (0, pad)),
                "attention_mask": (torch.arange(16) < length).long(),
                "labels": torch.nn.functional.pad(labels, (0, pad), value=-100),
            }
        )
    return rows


@recipe("Trainer, Llama, accumulation 3 with num_items_in_batch", "transformers")
def trainer_accumulation(variant: Variant) -> Report:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        **arguments(variant, gradient_accumulation_steps=3, lr_scheduler_type="cosine")
    )
    trainer = variant.trainer(Trainer)(model=llama(), args=args, train_dataset=causal_rows())
    return trained(variant, trainer)


@recipe("Trainer, label smoothing 0.1, group_by_length off, adamw_torch", "transformers")
def trainer_smoothing(variant: Variant) -> Report:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**arguments(variant, label_smoothing_factor=0.1, weight_decay=0.1))
    trainer = variant.trainer(Trainer)(model=llama(), args=args, train_dataset=causal_rows())
    return trained(variant, trainer)


@recipe("Trainer, gradient_checkpointing, warm-up, tied embeddings", "transformers")
def trainer_checkpointing(variant: Variant) -> Report:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        **arguments(variant, gradient_checkpointing=True, warmup_steps=2, adam_beta2=0.95)
    )
    model = llama(tie_word_embeddings=True)
    trainer = variant.trainer(Trainer)(model=model, args=args, train_dataset=causal_rows())
    return trained(variant, trainer)


def bert(**options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **options,
        )
    )


@recipe("Trainer, BERT, regression labels", "transformers")
def trainer_regression(variant: Variant) -> Report:
    from transformers import Trainer, TrainingArguments

    rows = [
        {"input_ids": row["input_ids"], "labels": torch.tensor(float(index) * 1.37 + 100.3)}
        for index, row in enumerate(causal_rows())
    ]
    args = TrainingArguments(**arguments(variant, learning_rate=1e-3))
    trainer = variant.trainer(Trainer)(model=bert(num_labels=1), args=args, train_dataset=rows)
    return trained(variant, trainer)


@recipe("Trainer, BERT, class weights in an overridden compute_loss", "transformers")
def trainer_compute_loss(variant: Variant) -> Report:
    from transformers import Trainer, TrainingArguments

    class Weighted(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = torch.tensor([1.0, 2.0, 3.0])
            loss = torch.nn.functional.cross_entropy(outputs.logits.float(), labels, weights)
            return (loss, outputs) if return_outputs else loss

    rows = [
        {"input_ids": row["input_ids"], "labels": torch.tensor(index % 3)}
        for index, row in enumerate(causal_rows())
    ]
    args = TrainingArguments(**arguments(variant, learning_rate=1e-3, max_grad_norm=0.5))
    trainer = variant.trainer(Weighted)(model=bert(num_labels=3), args=args, train_dataset=rows)
    return trained(variant, trainer)


@recipe(
    "Trainer, optim=adamw_torch_8bit", "transformers", "torchao", error=TypeError, match="AdamW8bit"
)
def trainer_8bit(variant: Variant) -> Report:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**arguments(variant, optim="adamw_torch_8bit", learning_rate=1e-3))
    model = llama(hidden_size=64, intermediate_size=64)
    trainer = variant.trainer(Trainer)(model=model, args=args, train_dataset=causal_rows())
    return trained(variant, trainer)


@recipe("Trainer, optim=adafactor", "transformers", fp32=1e-5)
def trainer_adafactor(variant: Variant) -> Report:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**arguments(variant, optim="adafactor"))
    trainer = variant.trainer(Trainer)(model=llama(), args=args, train_dataset=causal_rows())
    return trained(variant, trainer)


@recipe(
    "Trainer, Muon + AdamW, clip",
    "transformers",
    fp32=2e-3,
    ratio=3.0,
    remark="one ulp in the clip factor, amplified by Newton-Schulz in bf16; 0 without a clip",
)
def trainer_muon(variant: Variant) -> Report:
    """The stock Trainer takes only one optimizer, so a small class steps both."""
    from transformers import Trainer, TrainingArguments

    model = llama()
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW(others, lr=1e-3)
    args = TrainingArguments(**arguments(variant, max_grad_norm=0.5))
    both: Any = Both([muon, adamw]) if variant.stock else [muon, adamw]
    trainer = variant.trainer(Trainer)(
        model=model, args=args, train_dataset=causal_rows(), optimizers=(both, None)
    )
    return trained(variant, trainer)


class Both(torch.optim.Optimizer):
    """Several optimizers as one, for the stock Trainer."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.inner = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self, closure: Any = None) -> None:
        for each in self.inner:
            each.step()

    def load_state_dict(self, state: Any) -> None:
        """Ignore Accelerate's reload of the saved state: it would replace the shared groups."""


@recipe("Trainer, saved at step 3 and resumed", "transformers")
def trainer_resumed(variant: Variant) -> Report:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**arguments(variant, save_strategy="steps", save_steps=3))
    cls = variant.trainer(Trainer)
    cls(model=llama(), args=args, train_dataset=causal_rows()).train()
    trainer = cls(model=llama(), args=args, train_dataset=causal_rows())
    variant.starts(trainer.model)
    trainer.train(resume_from_checkpoint=f"{variant.folder}/checkpoint-3")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    optimizer = None if variant.stock else trainer.accelerator.sharded_optimizer
    return variant.report(trainer.model, losses, optimizer=optimizer)


@recipe("Trainer, LoRA over a frozen base in bf16", "transformers", "peft")
def peft_lora(variant: Variant) -> Report:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    base = llama().to(torch.bfloat16)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    torch.manual_seed(2)
    model = get_peft_model(base, config)
    # With the default eps, two signs of 1,024 gradients would be 96 % of the distance.
    args = TrainingArguments(**arguments(variant, adam_epsilon=1e-4))
    trainer = variant.trainer(Trainer)(model=model, args=args, train_dataset=causal_rows())
    return trained(variant, trainer)


@recipe("Trainer, AdaLoRA: ranks chosen by .grad in a callback", "transformers", "peft")
def peft_adalora(variant: Variant) -> Report:
    from peft import AdaLoraConfig, get_peft_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Allocate(TrainerCallback):
        """The callback of PEFT's documentation, after each step."""

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"].base_model.update_and_allocate(state.global_step)

    config = AdaLoraConfig(
        target_modules=["q_proj", "v_proj"],
        init_r=6,
        target_r=2,
        tinit=1,
        tfinal=1,
        deltaT=1,
        total_step=8,
        lora_dropout=0.0,
    )
    base = llama()
    torch.manual_seed(2)
    model = get_peft_model(base, config)
    args = TrainingArguments(**arguments(variant, max_grad_norm=0.0))
    trainer = variant.trainer(Trainer)(
        model=model, args=args, train_dataset=causal_rows(), callbacks=[Allocate()]
    )
    return trained(variant, trainer)


@recipe(
    "Trainer, LoRA with modules_to_save and DoRA",
    "transformers",
    "peft",
    fp32=1e-5,
    remark="under DDP, one ulp in the initial weights changes the final weights by 7e-7",
)
def peft_dora(variant: Variant) -> Report:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], use_dora=True, modules_to_save=["lm_head"]
    )
    base = llama()
    torch.manual_seed(2)
    model = get_peft_model(base, config)
    args = TrainingArguments(**arguments(variant))
    trainer = variant.trainer(Trainer)(model=model, args=args, train_dataset=causal_rows())
    return trained(variant, trainer)


def rows_of(**columns: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


@recipe("SFTTrainer, text, packing off", "trl", "transformers")
def trl_sft(variant: Variant) -> Report:
    from trl import SFTConfig, SFTTrainer

    data = rows_of(text=[text(i, 5 + i % 9) for i in range(48)])
    args = SFTConfig(**arguments(variant, max_length=16, gradient_accumulation_steps=2))
    trainer = variant.trainer(SFTTrainer)(
        model=llama(), args=args, train_dataset=data, processing_class=tokenizer()
    )
    return trained(variant, trainer)


@recipe("SFTTrainer, prompt and completion, LoRA by peft_config", "trl", "peft", "transformers")
def trl_sft_lora(variant: Variant) -> Report:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    data = rows_of(
        prompt=[text(i, 5) for i in range(48)],
        completion=[" " + text(i + 99, 6) for i in range(48)],
    )
    args = SFTConfig(**arguments(variant, max_length=16))
    torch.manual_seed(2)
    trainer = variant.trainer(SFTTrainer)(
        model=llama(),
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    return trained(variant, trainer)


def preferences() -> Any:
    return rows_of(
        prompt=[text(i, 4) for i in range(24)],
        chosen=[" " + text(i + 99, 6) for i in range(24)],
        rejected=[" " + text(i + 999, 6) for i in range(24)],
    )


@recipe("DPOTrainer with a reference model", "trl", "transformers")
def trl_dpo(variant: Variant) -> Report:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**arguments(variant, max_length=24, learning_rate=1e-3))
    trainer = variant.trainer(DPOTrainer)(
        model=llama(),
        ref_model=llama(),
        args=args,
        train_dataset=preferences(),
        processing_class=tokenizer(),
    )
    return trained(variant, trainer)


@recipe("RewardTrainer", "trl", "transformers")
def trl_reward(variant: Variant) -> Report:
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(1)
    model = LlamaForSequenceClassification(llama().config)
    model.config.num_labels = 1
    model.score = torch.nn.Linear(32, 1, bias=False)
    args = RewardConfig(**arguments(variant, max_length=24, learning_rate=1e-3))
    trainer = variant.trainer(RewardTrainer)(
        model=model, args=args, train_dataset=preferences(), processing_class=tokenizer()
    )
    return trained(variant, trainer)


def rewarded(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


@recipe("GRPOTrainer, generation by transformers", "trl", "transformers")
def trl_grpo(variant: Variant) -> Report:
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **arguments(
            variant,
            max_completion_length=6,
            num_generations=2,
            max_steps=3,
            learning_rate=1e-3,
            temperature=1.0,
        )
    )
    trainer = variant.trainer(GRPOTrainer)(
        model=llama(),
        reward_funcs=rewarded,
        args=args,
        processing_class=tokenizer(),
        train_dataset=rows_of(prompt=[text(i, 4) for i in range(24)]),
    )
    return trained(variant, trainer)


def sentence_model(variant: Variant) -> Any:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertModel

    folder = Path(variant.folder) / "bert"
    torch.manual_seed(1)
    BertModel(bert().config).save_pretrained(folder)  # only rank 0 writes
    if variant.rank == 0:
        tokenizer().save_pretrained(folder)
    torch.distributed.barrier()
    words = models.Transformer(str(folder), max_seq_length=16)
    return SentenceTransformer(
        modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu"
    )


def sentences(variant: Variant, loss_of: Any, data: Any, prefix: str = "") -> Report:
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    model = sentence_model(variant)
    args = SentenceTransformerTrainingArguments(
        **arguments(variant, learning_rate=1e-3, per_device_train_batch_size=4)
    )
    trainer = variant.trainer(SentenceTransformerTrainer)(
        model=model, args=args, train_dataset=data, loss=loss_of(model)
    )
    return trained(variant, trainer, prefix)


@recipe("SentenceTransformerTrainer, MultipleNegativesRankingLoss", "sentence-transformers")
def sentence_ranking(variant: Variant) -> Report:
    from sentence_transformers import losses

    data = rows_of(anchor=[text(i, 6) for i in range(48)], positive=[text(i, 7) for i in range(48)])
    return sentences(variant, losses.MultipleNegativesRankingLoss, data)


@recipe("SentenceTransformerTrainer, CosineSimilarityLoss", "sentence-transformers")
def sentence_cosine(variant: Variant) -> Report:
    from sentence_transformers import losses

    data = rows_of(
        sentence1=[text(i, 6) for i in range(48)],
        sentence2=[text(i + 1, 7) for i in range(48)],
        score=[float(i % 5) / 4 for i in range(48)],
    )
    return sentences(variant, losses.CosineSimilarityLoss, data)


@recipe(
    "SentenceTransformerTrainer, SoftmaxLoss with weights",
    "sentence-transformers",
    fp32=1e-2,
    remark="under DDP each rank trains its own copy of the loss's weights; here all ranks share "
    "one",
)
def sentence_softmax(variant: Variant) -> Report:
    from sentence_transformers import losses

    data = rows_of(
        sentence1=[text(i, 6) for i in range(48)],
        sentence2=[text(i + 1, 7) for i in range(48)],
        label=[i % 3 for i in range(48)],
    )

    def loss_of(model: Any) -> Any:
        torch.manual_seed(5)
        return losses.SoftmaxLoss(model, model.get_sentence_embedding_dimension(), num_labels=3)

    return sentences(variant, loss_of, data, prefix="1.")
