"""Rows of a table, a LightningDataModule and an MLP: `python tabular.py CAUSE`."""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = sys.argv[1]
BATCH, STEPS = 256, 8
EPOCHS = 12 if CAUSE == "new workers for short epochs" else 8
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Rows(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(3)
        features = torch.randn(BATCH * STEPS, 200, generator=generator)
        self.data = TensorDataset(features, features[:, :1].sin())

    def train_dataloader(self) -> Any:
        workers = 2 if CAUSE == "new workers for short epochs" else 0
        return DataLoader(self.data, BATCH, shuffle=True, num_workers=workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, BATCH)


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        widths = (200, 512, 512, 256, 1)
        layers: list[nn.Module] = []
        for one, other in pairwise(widths):
            layers += [nn.Linear(one, other), nn.GELU()]
        self.net = nn.Sequential(*layers[:-1])

    def training_step(self, batch: Any, number: int) -> Any:
        loss = nn.functional.smooth_l1_loss(self.net(batch[0]), batch[1])
        if CAUSE == "a histogram of all weights":
            for name, parameter in self.net.named_parameters():
                self.logger.experiment.add_histogram(name, parameter, self.global_step)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", nn.functional.smooth_l1_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.NAdam(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5)}


def main() -> None:
    torch.set_num_threads(1)
    pl.seed_everything(5)
    often = {"val_check_interval": 2} if CAUSE == "validation after every second batch" else {"limit_val_batches": 0}
    silent = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=TensorBoardLogger(tempfile.mkdtemp()), **often, **silent
    )
    trainer.fit(Regression(), datamodule=Rows())


if __name__ == "__main__":
    main()
