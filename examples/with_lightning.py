"""With Lightning: python examples/with_lightning.py starts two processes. torchrun also works."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardcast.lightning import ShardcastStrategy


class Rolled(LightningModule):
    """Module that learns to roll its input by one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


seed_everything(0, verbose=False)
inputs = torch.randn(6400, 64)
loader = DataLoader(TensorDataset(inputs, inputs.roll(1, dims=1)), batch_size=32)
trainer = Trainer(
    strategy=ShardcastStrategy({"accumulate": "sharded"}),  # <- instead of "ddp"; or "shardcast"
    precision="bf16-true",
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=2,
    max_epochs=1,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Rolled(), loader)
if trainer.is_global_zero:
    print(f"loss {trainer.callback_metrics['loss'].item():.3f}")
