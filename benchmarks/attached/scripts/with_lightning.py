"""Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from parts import BATCH, PASSES, STEPS, WORLD, convnet, pictures, stepped

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Task(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        stepped()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    torch.set_num_threads(1)
    pl.seed_everything(0)
    silent: dict[str, Any] = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False
    )
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        accumulate_grad_batches=PASSES,
        **silent,
    )
    trainer.fit(Task(), DataLoader(pictures(), BATCH, shuffle=True))


if __name__ == "__main__":
    main()
