"""With Trainer from transformers.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/with_trainer.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from shardcast.transformers import ShardcastTrainer

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
)
rows = [{"input_ids": (torch.arange(16) + n) % 64} for n in range(512)]
rows = [{**row, "labels": row["input_ids"]} for row in rows]
args = TrainingArguments(
    output_dir="runs/trainer",
    bf16=True,  # <- sets param_dtype
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    max_steps=30,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = ShardcastTrainer(  # <- instead of Trainer
    model=model,
    args=args,
    train_dataset=rows,
    shardcast_config={"accumulate": "sharded"},  # <- shardcast's options
)
result = trainer.train()
if trainer.is_world_process_zero():
    last = [row["loss"] for row in trainer.state.log_history if "loss" in row][-1]
    print(f"mean loss {result.training_loss:.3f}, of the last steps: loss {last:.3f}")
trainer.accelerator.end_training()
