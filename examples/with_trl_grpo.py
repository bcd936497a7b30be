"""Reinforcement learning in fp16 with TRL.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/with_trl_grpo.py

A Llama with random weights learns to produce words with even numbers. Needs ``pip install trl``.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from shardcast.transformers import ShardcastTrainerMixin


class Trainer(ShardcastTrainerMixin, GRPOTrainer):  # <- before TRL's trainer
    asleep = 0

    def _generate(self, prompts: list) -> tuple:
        optimizer = self.accelerator.sharded_optimizer
        with optimizer.asleep(keep={"parameters"}):  # <- rollouts can use the freed memory
            self.asleep += optimizer.memory_report().get("asleep", 0)
            return super()._generate(prompts)


def share_of_even(completions: list[str], **_: object) -> list[float]:
    numbers = [[int(word[1:]) for word in text.split() if word[0] == "w"] for text in completions]
    return [sum(n % 2 == 0 for n in row) / max(1, len(row)) for row in numbers]


words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 64)}}
inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
)
cuda = torch.cuda.is_available()
args = GRPOConfig(
    output_dir="runs/grpo",
    fp16=True,  # <- rollouts and training see the same fp16 weights; the loss scale is shardcast's
    use_cpu=not cuda,
    per_device_train_batch_size=8,
    num_generations=8,
    max_completion_length=8,
    learning_rate=1e-2,
    max_steps=30,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    reward_funcs=share_of_even,
    args=args,
    processing_class=tokenizer,
    shardcast_config={"convert_rest": True},  # <- a reference model or LoRA base in fp16, too
    train_dataset=Dataset.from_dict({"prompt": [f"w{i}" for i in range(3, 60)]}),
)
trainer.train()
if trainer.is_world_process_zero():
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    optimizer = trainer.accelerator.sharded_optimizer
    print(f"reward {rewards[0]:.2f}, at the end: reward {rewards[-1]:.2f}")
    print(f"loss scale {optimizer.loss_scale}, {optimizer.skipped_steps} steps skipped")
    print(f"{trainer.asleep / 1e6:.1f} MB slept in host memory, over all rollouts")
trainer.accelerator.end_training()
