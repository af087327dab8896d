"""One reader for everything that was written and is read back: it answers with what it should be, with nothing, or with `Damaged`.

Files of a run folder may be cut, emptied, replaced, of another version, or no files at all (a FIFO would hang whoever opens it). Whoever reads
them gets records of the shapes below, or one error that names the file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lockstep.errors import InputError
from lockstep.text import is_text

T = TypeVar("T")
# No file of ours that is read as a whole is nearly as large.
LARGEST = 1 << 30


class Damaged(InputError):
    """Something that was written cannot be read back; the message names the file and says why."""


def read_file(path: Path, most: int = LARGEST) -> bytes | None:
    """The contents of a regular file; None where there is none. Never waits: neither for a writer nor for a device."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise Damaged(f"{path.name}: {error.strerror}") from None
    except ValueError:
        raise Damaged(f"{path.name}: not a valid name of a file") from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path.name}: not a file")
        if found.st_size > most:
            raise Damaged(f"{path.name}: {found.st_size / 1e6:,.0f} MB are more than any such file has")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(most)
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    finally:
        os.close(handle)


def read_end(path: Path, most: int = 1 << 16) -> str:
    """The last part of a log, which may be of any length."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        return file.read(most).decode(errors="replace")


# These say no of a name that nothing can have (too long, with a zero byte, a loop of links), where the methods of Path raise.
is_file = os.path.isfile
is_dir = os.path.isdir
exists = os.path.lexists


def decode(data: bytes, shape: type[T], name: str) -> T:
    """JSON of a shape."""
    try:
        try:
            return msgspec.json.decode(data, type=shape)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # Older versions wrote NaN, which JSON does not have.
            return msgspec.convert(_with_nan(data), shape)
    except msgspec.ValidationError as error:
        raise Damaged(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end, numbers without end
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0][:200]
        raise Damaged(f"{name}: {said}") from None


def _with_nan(data: bytes) -> Any:
    value = json.loads(data, parse_constant=lambda _: None)
    if not is_text(json.dumps(value, ensure_ascii=False)):
        raise ValueError("half a character in a text")
    return value


def read_shape(path: Path, shape: type[T]) -> T | None:
    """A JSON file as a value of a shape (a Struct, say); None where there is no such file."""
    data = read_file(path)
    return None if data is None else decode(data, shape, path.name)


def read_record(path: Path, shape: Any) -> dict[str, Any] | None:
    """A JSON object whose known keys are of their shape; keys that the shape does not know are kept as they are."""
    data = read_file(path)
    return None if data is None else checked(data, shape, path.name)


def read_records(path: Path, shape: Any) -> list[dict[str, Any]]:
    """The records of a JSONL file. A last line without its end was cut off by a kill, and is passed over."""
    whole, _, last = (read_file(path) or b"").rpartition(b"\n")
    lines = [line for line in whole.split(b"\n") if line.strip()]
    found = [checked(line, shape, f"{path.name}, line {number}") for number, line in enumerate(lines, 1)]
    with suppress(Damaged):
        found.append(checked(last, shape, path.name))
    return found


def checked(data: bytes, shape: Any, name: str) -> dict[str, Any]:
    """A JSON object, as `read_record` gives it."""
    found = decode(data, dict[str, Any], name)
    try:
        msgspec.convert(found, shape)
    except msgspec.ValidationError as error:
        raise Damaged(f"{name}: {error}") from None
    return found
