"""The Trainer of transformers on a small GPT-2: `python with_trainer.py CAUSE`."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CAUSE = sys.argv[1]


class Text(Dataset[Any]):
    def __init__(self) -> None:
        self.ids = torch.randint(0, 100, (8 * 60, 64), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=128, n_layer=3, n_head=4))
    often: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=10,
        **(often if CAUSE == "checkpoint every other step" else {"save_strategy": "no"}),
    )
    Trainer(model=net, args=settings, train_dataset=Text()).train()


if __name__ == "__main__":
    main()
