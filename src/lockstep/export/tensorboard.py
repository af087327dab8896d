"""Runs as a folder that TensorBoard opens, with settings and results in its HParams tab.

    DIR/RUN/                  the run's settings (a session of the HParams tab), its curves over all ranks, its results
    DIR/ranks/RUN/rank0000/   the event files of each rank, as they were written

The ranks have a separate folder, because HParams makes a column of every curve below a session, and there may be a thousand
ranks. It derives the columns from what it finds, so runs may be added to the folder later.
"""

from __future__ import annotations

import shlex
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

from lockstep.export.facts import LOGGED, Chosen, Facts, Point, facts
from lockstep.export.writers import Store
from lockstep.files import write_atomically
from lockstep.measure.events import FIRST, field, record, scalars, varint
from lockstep.units import counted

RANKS = "ranks"
# A fixed name for what is written here, so that exporting again replaces it.
_NAME = "events.out.tfevents.0.lockstep-export"
_START, _END = "_hparams_/session_start_info", "_hparams_/session_end_info"
_SUCCESS, _FAILURE = 1, 2
# An empty tensor: TensorBoard wants a value beside the metadata, and only the metadata counts.
_NOTHING = bytes.fromhex("080112021200")


def write(chosen: Sequence[Chosen], folder: Path) -> Store:
    """One folder per run."""
    for one in chosen:
        found = facts(one)
        place = folder / found.id
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / _NAME, events_of(found))
        written = one.run.folder / "tensorboard"
        if written.is_dir():  # missing if a run failed before its first step
            shutil.copytree(written, folder / RANKS / found.id, dirs_exist_ok=True)
    return Store(f"{counted(len(chosen), 'run')} in {folder}", f"tensorboard --logdir {shlex.quote(str(folder))}")


def events_of(found: Facts) -> bytes:
    """The whole event file of one run."""
    records = [record(0, FIRST, found.started), record(0, _plugin(_START, field(3, _start(found))), found.started)]
    records += [record(point.step, scalars(_tags(point)), point.at) for point in found.curve]
    final = {f"final/{key}": value for key, value in found.final.values.items()}
    if final:
        records.append(record(found.final.step, scalars(final), found.final.at))
    if found.ended is not None:
        records.append(record(0, _plugin(_END, field(4, _end(found))), found.ended))
    return b"".join(records)


def _tags(point: Point) -> dict[str, float]:
    """Named like the ranks' own curves, so that TensorBoard draws them into one plot: test_loss is test/loss."""

    def tag(key: str) -> str:
        if key.startswith(LOGGED):
            return key
        shared = key in ("train_loss", "train_accuracy") or (key.startswith("test_") and key != "test_samples")
        return key.replace("_", "/", 1) if shared else f"epoch/{key}"

    return {tag(key): value for key, value in point.values.items()}


def _plugin(tag: str, content: bytes) -> bytes:
    """The body of an event for the HParams tab."""
    metadata = field(1, field(1, b"hparams") + field(2, content))
    return field(5, field(1, field(1, tag.encode()) + field(8, _NOTHING) + field(9, metadata)))


def _start(found: Facts) -> bytes:
    shown: dict[str, bool | float | str] = {
        **{key: found.labels[key] for key in ("study", "cell") if key in found.labels},
        **found.settings,
    }
    entries = (field(1, field(1, key.encode()) + field(2, _value(value))) for key, value in shown.items())
    return b"".join(entries) + b"\x29" + struct.pack("<d", found.started)


def _end(found: Facts) -> bytes:
    status = _SUCCESS if found.state == "done" else _FAILURE
    return b"\x08" + varint(status) + b"\x11" + struct.pack("<d", found.ended)


def _value(value: bool | float | str) -> bytes:
    """protobuf's Value: a boolean, a number or a string."""
    if isinstance(value, bool):
        return b"\x20" + varint(value)
    if isinstance(value, str):
        return field(3, value.encode())
    return b"\x11" + struct.pack("<d", value)
