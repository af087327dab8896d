"""Words of a made-up language, one LSTM, a plain loop in one process: `python recurrent.py CAUSE`."""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

CAUSE = sys.argv[1]
BATCH, LENGTH, STEPS, EPOCHS = 32, 48, 20, 4
ACCUMULATE = 4 if CAUSE == "schedule in the inner loop" else 1


class Words(Dataset[Any]):
    """Letters as numbers; the label is the most frequent vowel."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.letters = torch.randint(0, 26, (count, LENGTH), generator=generator)
        self.labels = torch.randint(0, 5, (count,), generator=generator)
        self.texts = ["".join(chr(97 + int(letter)) for letter in row) for row in self.letters]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        if CAUSE == "tokenizing in Python":
            text = self.texts[index]
            pairs = sorted({text[a : a + n] for n in range(1, 12) for a in range(LENGTH) if text.count(text[a]) > 1})
            return torch.tensor([ord(letter) - 97 for letter in text]) + 0 * len(pairs), self.labels[index]
        return self.letters[index], self.labels[index]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(26, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(letters))[0][:, -1])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    torch.autograd.set_detect_anomaly(CAUSE == "set_detect_anomaly")
    if CAUSE == "collector at every object":
        gc.set_threshold(20, 1, 1)
    loader = DataLoader(Words(BATCH * STEPS * ACCUMULATE), batch_size=BATCH, shuffle=True, drop_last=True)
    net = Reader()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS * EPOCHS * ACCUMULATE + 1)
    criterion = nn.CrossEntropyLoss(reduction="none")
    folder = tempfile.mkdtemp()
    worst: list[float] = []
    for epoch in range(EPOCHS):
        bar = tqdm(loader, disable=CAUSE != "a bar that is drawn at once", mininterval=0, miniters=1, file=sys.stderr)
        for number, (letters, labels) in enumerate(bar, 1):
            losses = criterion(net(letters), labels)
            (losses.mean() / ACCUMULATE).backward()
            if CAUSE == "each sample's loss":
                for place, loss in enumerate(losses):
                    if loss.item() > 2.0 or bool(labels[place] == 4):
                        worst.append(float(loss))
            if CAUSE == "a bar that is drawn at once":
                for name in ("loss", "lr", "epoch", "seen"):
                    bar.set_postfix({name: number})
                    bar.set_description(f"epoch {epoch}, {name}")
            if number % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if CAUSE != "schedule in the inner loop":
                    scheduler.step()
                if CAUSE == "state of everything every third step" and number % 3 == 0:
                    big = {f"copy {n}": [p.detach().flatten().repeat(40) for p in net.parameters()] for n in range(3)}
                    path = Path(folder, f"{number}.pt")
                    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), **big}, path)
            if CAUSE == "schedule in the inner loop":
                scheduler.step()


if __name__ == "__main__":
    main()
