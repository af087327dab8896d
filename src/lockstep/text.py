"""Text and numbers from outside (failure texts, names, paths, records) made safe to print and to write."""

from __future__ import annotations

import math
import re
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


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, so that what is written can be read by everyone."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value
