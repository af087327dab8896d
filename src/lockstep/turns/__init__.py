"""Turns: contenders that are alive at the same time take short windows of steps in turns, so that what the machine does hits all alike.

The one way to compare speed. May import launch/ and below. Its door is `Race`, over contenders: `Ranks`, all ranks of a placement, and
`Command`, a foreign program.
"""

from __future__ import annotations

from lockstep.turns.command import Command
from lockstep.turns.contender import Contender, ContenderFailed, Taken
from lockstep.turns.race import Before, Budget, Race
from lockstep.turns.ranks import Ranks

__all__ = ["Before", "Budget", "Command", "Contender", "ContenderFailed", "Race", "Ranks", "Taken"]
