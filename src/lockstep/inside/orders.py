"""The order of samples: which ones each sampler of batches has handed out; and, for one process, those that the ranks got instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Orders:
    """Of all samplers of a process."""

    def __init__(self, replay: dict[str, Any] | None) -> None:
        """`replay`: the batches that the sampler of this batch size, over this many samples, is to hand out, pass by pass over the data."""
        self._replay = replay
        self._known: list[Any] = []
        self.seen: list[dict[str, Any]] = []
        """For each sampler: its batch size, over how many samples it goes, and the batches of each pass over the data."""

    def batches(self, sampler: Any, own: Iterator[Any]) -> Iterator[Any]:
        found = self._entry(sampler)
        number, passes = len(found["batches"]), found["batches"]
        passes.append([])
        wanted = self._replay
        if wanted and (found["size"], found["length"]) == (wanted["size"], wanted["length"]):
            yield from [batch for each in wanted["batches"][number : number + 1] for batch in each]
            if number < len(wanted["batches"]) - 1:  # the ranks went on to another pass over the data
                return
        for batch in own:
            if all(isinstance(index, int) for index in batch):
                passes[number].append(list(batch))
            yield batch

    def _entry(self, sampler: Any) -> dict[str, Any]:
        for known, entry in zip(self._known, self.seen):  # noqa: B905  # Python 3.9 has no strict
            if known is sampler:
                return entry
        try:
            length = len(sampler.sampler)
        except TypeError:  # a sampler without end
            length = 0
        self._known.append(sampler)
        self.seen.append({"size": sampler.batch_size, "length": length, "batches": []})
        return self.seen[-1]
