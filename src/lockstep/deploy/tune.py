"""`--method qat` for a run that was trained without it: some more epochs with fake quantization, in this process."""

from __future__ import annotations

import msgspec
import torch

from lockstep.deploy.subject import Subject
from lockstep.models import layers
from lockstep.quantize import training
from lockstep.quantize.fold import fold_batch_norm
from lockstep.quantize.scheme import Scheme
from lockstep.training import optimizers
from lockstep.training.loss import Loss, penalize

# Of the run's learning rate: the weights are trained, they are only to settle on the integers.
LR_SHARE = 0.1


def fine_tune(subject: Subject, epochs: int, scheme: Scheme = training.SCHEME) -> training.Qat:
    """Train on from the run's weights; the subject's model has fake layers from then on.

    Batch norm is folded before, so the weights that are rounded are those that will be deployed, whatever the scheme.
    """
    spec, recipe = subject.spec, subject.spec.recipe
    model, _ = fold_batch_norm(subject.model, subject.example)
    subject.model = model
    qat = training.prepare(model, subject.example, recipe, scheme)
    lr = spec.plan.lr * LR_SHARE
    optimizer = optimizers.build(msgspec.structs.replace(recipe.optimizer, lr=lr), model.parameters())
    loss_of, count, step = Loss(recipe, subject.data.class_weights), spec.plan.train_samples, 0
    subject.train.keyed = subject.train.keyed or layers.needs_keys(model)
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        for epoch in range(recipe.epochs + 1, recipe.epochs + epochs + 1):
            subject.visit_train(epoch)
            for low in range(0, count, recipe.global_batch):
                batch = subject.train.train_batch(low, min(low + recipe.global_batch, count))
                layers.bind(batch.keys, len(batch.labels))
                loss = loss_of(model(batch.images), batch) / (subject.train.units(low, len(batch.labels)) or 1.0)
                loss.backward()  # type: ignore[no-untyped-call]
                penalize(optimizer.parameters, recipe.regularize)
                optimizer.step()
                for parameter in optimizer.parameters:
                    parameter.grad = None
                step += 1
                qat.after_step(step)
    model.eval()
    subject.qat = qat
    return qat
