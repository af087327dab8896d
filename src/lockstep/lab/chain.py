"""The ledger of a lab folder: predictions and runs in their order, as a hash chain.

Each record holds the hash of the one before it, so a record that was changed, moved or taken out breaks the chain from there on. A hash chain
without a secret can be made anew from its beginning. So what is measured hangs on it, too: the seed of a run is made of the newest prediction
before it (of the first record, where there is none). Whoever changes a prediction afterwards changes the seed that the run must have had, and
so every loss in its records; the first record has a random number, so no two students have the same seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from lockstep.errors import InputError
from lockstep.files import locked
from lockstep.reading import Damaged, decode, exists, read_file
from lockstep.run import append_line
from lockstep.shapes import Count, Moment

FILE = "ledger.jsonl"
SEEDS = 1_000_000_000
MOST_RECORDS = 10_000
Kind = Literal["lab", "prediction", "start", "run", "hand-in"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the ledger."""

    number: Count
    kind: Kind
    time: Moment
    previous: str
    """The hash of the record before; empty in the first."""
    body: dict[str, Any]
    hash: str = ""

    def digest(self) -> str:
        """Of everything but the hash itself."""
        content = {key: value for key, value in msgspec.to_builtins(self).items() if key != "hash"}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Chain:
    """The records so far, in order."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records

    @classmethod
    def read(cls, path: Path) -> Chain:
        """InputError where it is not a ledger at all. A broken chain is read: `problems` says where."""
        try:
            data = read_file(path, 64 << 20)
            if data is None:
                raise InputError(f"{path.parent} has no {FILE}: 'lockstep lab new NAME' makes a lab folder")
            lines = data.splitlines()
            if len(lines) > MOST_RECORDS:
                raise Damaged(f"{FILE}: more than {MOST_RECORDS:,} records")
            return cls([decode(line, Record, f"{FILE}, line {number}") for number, line in enumerate(lines, 1)])
        except Damaged as error:
            raise InputError(f"{path.parent}: {error}") from None

    def append(self, path: Path, kind: Kind, **body: Any) -> Record:
        with locked(path.with_suffix(".lock"), "writing the ledger"):
            if exists(path):  # another command may have written meanwhile
                self.records = Chain.read(path).records
            number = len(self.records)
            record = Record(number=number, kind=kind, time=self._now(), previous=self.head, body=body)
            record = msgspec.structs.replace(record, hash=record.digest())
            append_line(path, msgspec.to_builtins(record))
        self.records.append(record)
        return record

    def _now(self) -> float:
        """A clock that was set back does not make a record older than the one before it."""
        return max(time.time(), self.records[-1].time if self.records else 0.0)

    @property
    def head(self) -> str:
        return self.records[-1].hash if self.records else ""

    def of(self, kind: Kind, task: str | None = None) -> list[Record]:
        return [each for each in self.records if each.kind == kind and task in (None, each.body.get("task"))]

    def newest(self, kind: Kind, task: str) -> Record | None:
        found = self.of(kind, task)
        return found[-1] if found else None

    def seed(self, before: int | None = None) -> int:
        """The seed of a run whose record has the number `before` (of one that is made now, if unstated)."""
        upto = self.records[:before]
        found = [record for record in upto if record.kind in ("lab", "prediction")]
        if not found:
            raise InputError(f"{FILE} has no first record: make the lab folder anew with 'lockstep lab new'")
        return int(found[-1].hash[:15], 16) % SEEDS

    def problems(self) -> list[str]:
        """What shows that it was not only appended to."""
        found, previous, moment = [], "", 0.0
        if not self.records or self.records[0].kind != "lab":
            found.append(f"{FILE}: its first record is missing")
        for at, record in enumerate(self.records):
            where = f"{FILE}, record {at + 1} ({record.kind})"
            if record.hash != record.digest():
                found.append(f"{where}: it was changed: its hash does not fit its content")
            elif record.previous != previous or record.number != at:
                found.append(f"{where}: a record before it was changed, moved or taken out")
            elif record.time < moment:
                found.append(f"{where}: it is older than the one before it")
            previous, moment = record.hash, record.time
        return found[:3]


def nonce() -> str:
    """A random number, so that no two chains begin alike."""
    return os.urandom(16).hex()
