"""Text and numbers from outside (failure texts, names, paths, records) made safe to print and to write."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

# Terminal escapes, other control characters, half characters (bytes that are not UTF-8), and marks that turn the direction of what follows.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Control characters as visible escapes: a failure text neither moves the cursor nor ends in an encoding error."""
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text.replace("\r\n", "\n"))


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: names of files may hold any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def file_part(text: str, most: int) -> str:
    """As a part of a file's name: letters, digits, '-' and '_'; whatever else is in it is a '-'. At most N characters."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in text)[:most]


def last_line(text: str) -> str:
    """The last line that says something; "" where none does."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def some(names: Sequence[str], most: int = 2) -> str:
    """'a', 'b' and 3 more."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, so that what is written can be read by everyone."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value
