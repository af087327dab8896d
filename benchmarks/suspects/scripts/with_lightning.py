"""Lightning's Trainer in one process: `python with_lightning.py CAUSE`."""

from __future__ import annotations

import copy
import sys
import tempfile
from typing import Any

import lightning
import torch
from common import Net, Pictures, collate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional
from torch.utils.data import DataLoader

CAUSE = sys.argv[1]
BATCH, STEPS, EPOCHS = 128, 12, 5


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class KeepWeights(Callback):
    """Keeps a copy of the module after every step, and of the ones before."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for _ in range(30):
            self.kept = copy.deepcopy(module.net)


def main() -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(0)
    callbacks: list[Any] = [KeepWeights()] if CAUSE == "slow callback" else []
    often: dict[str, Any] = {"val_check_interval": 4} if CAUSE == "validation every few steps" else {}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(tempfile.mkdtemp()),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        detect_anomaly=CAUSE == "anomaly detection",
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if often else 0,
        **often,
    )
    train = DataLoader(Pictures(BATCH * STEPS), batch_size=BATCH, shuffle=True, collate_fn=collate)
    test = DataLoader(Pictures(BATCH * 4, seed=1), batch_size=BATCH, collate_fn=collate)
    trainer.fit(Task(), train, test)


if __name__ == "__main__":
    main()
