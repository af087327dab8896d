"""How long the windows are in which hooks are on or off (switch.py), and how many steps a script takes for so many of them."""

from __future__ import annotations

WARM_UP = 40
# The first two steps of a window are those in which a clock starts anew, and are not counted.
WINDOW, UNCOUNTED = 20, 2


def steps_of(windows: int) -> int:
    return WARM_UP + windows * (WINDOW + UNCOUNTED) + 1
