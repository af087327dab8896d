"""Numbers on the command line: whole ones that memory and patience can bear, others that are finite."""

from __future__ import annotations

import math
from typing import Any

import click

from lockstep.recipe import MOST

MOST_FLOAT = 1e9


def whole(least: int = 1, most: int = MOST) -> click.IntRange:
    return click.IntRange(least, most)


class Finite(click.FloatRange):
    """click takes NaN for a number within every range, and infinity for one without an upper end."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def real(least: float, most: float = MOST_FLOAT, open_: bool = False) -> Finite:
    return Finite(least, most, min_open=open_)
