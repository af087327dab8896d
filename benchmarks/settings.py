"""What the command line chose, as every section gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """`samples` None means the whole training set; `only` empty means every contender."""

    repeats: int = 5
    samples: int | None = None
    only: frozenset[str] = field(default_factory=frozenset)
    extras: bool = False
    data: Path | None = None
    seed: int = 0
    quick: bool = False

    def chosen(self, name: str) -> bool:
        return not self.only or name in self.only
