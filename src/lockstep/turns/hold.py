"""A race from the names of its contenders to its result on disk: what `lockstep race` and `lockstep.race` both do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from lockstep.errors import InputError, RunCancelled
from lockstep.reading import exists
from lockstep.turns.entries import check, contender, entries
from lockstep.turns.folder import RaceFolder, Record, opening, state_of
from lockstep.turns.race import Budget, Race


class Spectator(AbstractContextManager["Spectator"], Protocol):
    """Who is shown how a race goes."""

    def __call__(self, race: Race) -> None: ...


def hold(
    contenders: Sequence[str],
    common: str,
    budget: Budget,
    runs: Path | None,
    name: str | None,
    data_root: str | None,
    spectator: Callable[[Record], Spectator],
) -> tuple[RaceFolder, Record]:
    """Race until it is settled or the budget is spent. Stopped or not, what was measured is in the folder."""
    if len(contenders) < 2:
        raise InputError("race: name two or more contenders, each in quotes: lockstep race 'ranks=1 threads=2' ranks=2")
    named = entries(contenders, common, runs)
    check(named)
    folder = RaceFolder.create(runs, name)
    record = opening(named, common, budget)
    folder.write(record)
    racing = [
        contender(entry, folder.starts / str(number), data_root, budget.seconds)
        for number, entry in enumerate(named, 1)
    ]
    live = spectator(record)
    race = Race(racing, budget, folder.keep, live)
    over = False
    try:
        with live:
            race.run()
        over = True
    except KeyboardInterrupt:
        raise RunCancelled(f"stopped; what was measured is in {folder.path}") from None
    except InputError:
        folder.forget_unless_measured()
        raise
    finally:
        if exists(folder.path):
            folder.write(record := state_of(race, record, over))
    return folder, record
