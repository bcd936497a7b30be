"""Fine-tune a causal language model with the Trainer of transformers and a sharded optimizer.

    accelerate launch --config_file configs/accelerate/cpu_two_processes.yaml \
        launch/train_trainer.py --use_cpu --bf16 --output_dir runs/trainer

It takes the flags of `transformers.TrainingArguments` and the few below. To avoid downloads, a
small Llama with random weights learns bytes of the standard library; a real script differs in the
model and the data. Only two lines are shardcast's: the import, and `ShardcastTrainer` instead of
`Trainer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from corpus import Corpus
from torch import Tensor
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments

from shardcast.transformers import ShardcastTrainer


@dataclass
class ModelArguments:
    context: int = field(default=64, metadata={"help": "tokens (bytes) of one sequence"})
    width: int = 64
    depth: int = 2
    sequences: int = field(default=512, metadata={"help": "training sequences"})
    corpus_mb: int = field(default=2, metadata={"help": "read at most so many MiB"})


class Sequences(Dataset[dict[str, Tensor]]):
    """`count` evenly spread sequences of a text, as the model's inputs and labels."""

    def __init__(self, text: Tensor, context: int, count: int) -> None:
        self._text, self._context, self._count = text, context, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * (self._text.numel() - self._context) // self._count
        tokens = self._text[start : start + self._context].long()
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))  # type: ignore[arg-type]
    shape, args = parser.parse_args_into_dataclasses()
    corpus = Corpus.load([], shape.context, shape.corpus_mb << 20)
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=shape.width,
            intermediate_size=4 * shape.width,
            num_hidden_layers=shape.depth,
            num_attention_heads=4,
            max_position_embeddings=shape.context,
        )
    )
    trainer = ShardcastTrainer(
        model=model,
        args=args,
        train_dataset=Sequences(corpus.train, shape.context, shape.sequences),
        eval_dataset=Sequences(corpus.held_out, shape.context, 64),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    print(trainer.evaluate())
    trainer.save_model()
    trainer.accelerator.end_training()  # destroys the process group


if __name__ == "__main__":
    main()
