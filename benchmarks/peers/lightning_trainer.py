"""Lightning's Trainer with everything off that this job does not need.

Metrics go through `self.log` at epoch level, as its documentation has it. `barebones=True` would be faster
still, but it turns `self.log` into a no-op, so the job would no longer give its metrics.
"""

from __future__ import annotations

import logging
import warnings

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.peers.common import (
    Epoch,
    Images,
    Labels,
    Options,
    Stopwatch,
    build_adam,
    build_loader,
    build_net,
    main,
)


class Classifier(L.LightningModule):
    """Document D's net as a LightningModule."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.net = build_net(options)
        self.options = options

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs)
        loss = functional.cross_entropy(outputs, targets)
        accuracy = (outputs.argmax(1) == targets).float().mean()
        # The batch size is stated because Lightning would otherwise search the batch for it at every step.
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(targets))
        self.log("accuracy", accuracy, on_step=False, on_epoch=True, batch_size=len(targets))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_adam(self.net, self.options)


class EpochClock(L.Callback):
    """Times the training epoch alone; what `fit` sets up around it is no part of the comparison."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.watch.start()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.watch.stop()


def train(images: Images, labels: Labels, options: Options) -> Epoch:
    """One epoch of `Trainer.fit`."""
    clock = EpochClock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        log_every_n_steps=100,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Classifier(options), build_loader(images, labels, options))
    metrics = trainer.callback_metrics
    return Epoch(clock.watch.seconds, clock.watch.cpu_seconds, metrics["loss"].item(), metrics["accuracy"].item())


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main(train, ["lightning", "torchmetrics"])
