"""Tables as files: CSV and JSON by the standard library, Parquet by pyarrow; and what is said of everything that was written."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from lockstep.errors import InputError
from lockstep.export.tables import Row, columns_of
from lockstep.files import replacing


class Store(NamedTuple):
    """What another tool opens, as it was written."""

    done: str
    """What is in it, for people."""
    next: str
    """What to type to open it."""


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with whole_file(path) as file:
        writer = csv.DictWriter(file, columns_of(rows))
        writer.writeheader()
        writer.writerows(rows)


def write_json(rows: Sequence[Row], path: Path) -> None:
    with whole_file(path) as file:
        json.dump(list(rows), file, indent=1)
        file.write("\n")


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError("--format parquet needs pyarrow: pip install 'lockstep-bench[export]'") from None
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns_of(rows)})
    with replacing(path) as temporary:
        parquet.write_table(table, temporary)


WRITERS: dict[str, Callable[[Sequence[Row], Path], None]] = {
    "csv": write_csv,
    "json": write_json,
    "parquet": write_parquet,
}


@contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """The file appears when it is complete, or not at all."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file
