"""`lockstep tune`: the fastest way to train a recipe here, found by racing the ways that there are.

May import turns/, predict/ and what is below them. Its doors are `Search` and `Found`.
"""

from __future__ import annotations

from lockstep.tune.found import Found, Otherwise
from lockstep.tune.stages import Search

__all__ = ["Found", "Otherwise", "Search"]
