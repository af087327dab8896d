"""The Trainer of transformers on a small GPT-2."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from parts import PASSES, STEPS, stepped


class Text(Dataset[Any]):
    def __init__(self) -> None:
        self.ids = torch.randint(0, 256, (2048, 64), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Lines(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        stepped()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=3, n_head=4))
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=PASSES,
        max_steps=STEPS,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1000,
    )
    Trainer(model=net, args=settings, train_dataset=Text(), callbacks=[Lines()]).train()


if __name__ == "__main__":
    main()
