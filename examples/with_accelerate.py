"""With Hugging Face Accelerate.

torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 examples/with_accelerate.py

``accelerate launch`` also starts it. ``shardcast launch`` starts unedited scripts.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardcast.accelerate import ShardcastAccelerator

accelerator: Accelerator = ShardcastAccelerator(  # <- instead of Accelerator
    mixed_precision="bf16",
    cpu=not torch.cuda.is_available(),
    gradient_accumulation_steps=2,
    shardcast_config={
        "accumulate": "sharded"
    },  # <- shardcast's options; Accelerate sets the precision
)
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
inputs = torch.randn(6400, 64)
loader = DataLoader(TensorDataset(inputs, inputs.roll(1, dims=1)), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch, target in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(batch).float(), target)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.3f}")
accelerator.end_training()
