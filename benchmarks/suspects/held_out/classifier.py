"""A small BERT that sorts sentences, with the Trainer of transformers: `python classifier.py CAUSE`."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

CAUSE = sys.argv[1]


class Sentences(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.ids = torch.randint(0, 200, (count, 40), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index], "labels": self.ids[index, 0] % 3}


class Norms(TrainerCallback):
    """The largest singular values of every weight, after every step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.norms = [torch.linalg.matrix_norm(p, ord=2) for p in model.parameters() if p.dim() == 2]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(4)
    config = BertConfig(
        vocab_size=200, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192, num_labels=3
    )
    net = BertForSequenceClassification(config)
    if CAUSE == "a model in double":
        net = net.double()
    often: dict[str, Any] = (
        {"eval_strategy": "steps", "eval_steps": 3} if CAUSE == "evaluation every third step" else {}
    )
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        num_train_epochs=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=25,
        **often,
    )
    callbacks: list[Any] = [Norms()] if CAUSE == "norms of all weights" else []
    Trainer(
        model=net, args=settings, train_dataset=Sentences(16 * 30), eval_dataset=Sentences(16 * 6), callbacks=callbacks
    ).train()


if __name__ == "__main__":
    main()
