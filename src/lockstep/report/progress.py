"""How far a command is: a line in place on a terminal, plain lines in a log, an output that changes in a notebook.

On a terminal and in a log all of it goes to stderr: stdout stays the command's own.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from lockstep import shapes
from lockstep.placement import ranks_per_host
from lockstep.report.notebook import CellOutput, in_notebook
from lockstep.report.terminal import console, note
from lockstep.run import HANG, Run, Spec, read_json
from lockstep.text import printable
from lockstep.units import clock, counted
from lockstep.ways import ROUND_FILE

if TYPE_CHECKING:
    from rich.live import Live as RichLive

    from lockstep.turns import Race
    from lockstep.turns.folder import Record

PLAIN_EVERY_S = 10.0


class StatusLine:
    """One line that is replaced by the next one; in a log, a line every ten seconds. It is gone when the block ends."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._in_place = quiet, sys.stderr.isatty()
        self._cell = CellOutput() if in_notebook() and not quiet else None
        self._next_plain = time.monotonic() + PLAIN_EVERY_S
        self._is_there = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        if self._quiet:
            return
        if self._cell:
            self._cell.show(text)
        elif self._in_place:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\x1b[2K" + printable(text)[:width])
            sys.stderr.flush()
            self._is_there = True
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + PLAIN_EVERY_S
            note(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        if self._quiet:
            return
        if self._cell:
            self._cell.say(text)
        else:
            note(text)

    def clear(self) -> None:
        if self._cell:
            self._cell.show("")
        if self._is_there:
            self._is_there = False
            with suppress(OSError):
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()


class ProgressLine(StatusLine):
    """Follows a run through its folder."""

    def __init__(self, label: str = "", quiet: bool = False) -> None:
        super().__init__(quiet)
        self._label = f"{label}: " if label else ""
        self._epochs_shown = 0
        self._began: tuple[float, int] | None = None
        self._told_cores, self._told_hang = False, ""

    def __call__(self, run: Run, spec: Spec) -> None:
        if not self._told_cores:
            self._told_cores = True
            if cores_are_taken(run, spec):
                self.say(
                    f"{self._label}warning: other runs hold cores that this one needs, so its ranks are not pinned"
                )
        hang = (read_json(run.folder / HANG, shapes.Hang) or {}).get("text", "")
        if hang != self._told_hang:
            self._told_hang = hang
            self.say(f"{self._label}warning: {hang}")
        epochs = run.epochs()
        for record in epochs[self._epochs_shown :]:
            where = f"{self._label}epoch {record['epoch']}{_of(spec.recipe.epochs, spec)}"
            self.say(f"{where}  {_figures(record)}")
        self._epochs_shown = len(epochs)
        beat = read_json(run.rank_folder(0) / "status.json", shapes.Beat)
        self.show(self._label + (self._text(beat, spec) if beat and "epoch" in beat else _starting(spec)))

    def _text(self, beat: dict[str, float], spec: Spec) -> str:
        step, total = int(beat["step"]), spec.plan.total_steps
        if self._began is None:
            self._began = (time.monotonic(), step)
        seconds, steps = time.monotonic() - self._began[0], step - self._began[1]
        left = f"{clock((total - step) * seconds / steps)} left" if steps > 0 else "…"
        left = "" if spec.options.script else left
        rate = f"{beat['images_per_second']:,.0f} samples/s  " if beat.get("images_per_second") else ""
        loss = f"loss {beat['loss']:.4f}  " if beat.get("loss") is not None else ""
        epochs, steps_in_all = _of(spec.recipe.epochs, spec), _of(total, spec)
        return f"epoch {int(beat['epoch'])}{epochs}  step {step}{steps_in_all}  {rate}{loss}{left}"


class ProbeLine(StatusLine):
    """Follows a probe, which has rounds instead of epochs."""

    def __init__(self, label: str, quiet: bool) -> None:
        super().__init__(quiet)
        self._label = label

    def __call__(self, run: Run, spec: Spec) -> None:
        beat = read_json(run.rank_folder(0) / ROUND_FILE, shapes.Round)
        self.show(f"{self._label}: " + (f"round {beat['round']}/{beat['rounds']}" if beat else _starting(spec)))


class RaceLive:
    """The race as it goes: a table in place on a terminal and in a notebook, a line for each start elsewhere."""

    def __init__(self, record: Record, quiet: bool = False, in_place: bool = True) -> None:
        self._record, self._quiet, self._starts, self._told, self._next = record, quiet, 0, 0, 0.0
        self._cell = CellOutput() if in_notebook() and not quiet else None
        self._live: RichLive | None = None
        if in_place and not quiet and not self._cell and console().is_terminal:
            from rich.live import Live as RichLive

            self._live = RichLive(console=console(), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        begins = (
            f"{counted(len(self._record.entries), 'contender')}, up to {self._record.budget.seconds:g} s: starting …"
        )
        if self._live:
            self._live.__enter__()
        elif self._cell:
            self._cell.show(begins)
        elif not self._quiet:
            note(begins)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.__exit__(*error)
        if self._cell:  # the result has all else
            self._cell.show(f"{counted(self._starts, 'start')} of {counted(len(self._record.entries), 'contender')}")

    def __call__(self, race: Race) -> None:
        """Drawing takes a processor from the contenders, so it is done between rounds, and not after each."""
        now, self._starts = time.monotonic(), race.starts
        if now < self._next or self._quiet:
            return
        from lockstep.report.race import speed, table
        from lockstep.report.terminal import table_text
        from lockstep.turns.folder import state_of

        self._next = now + 1.0
        if self._live or self._cell:
            record = state_of(race, self._record, over=False)
            text = table_text(table(record, race.windows), console())
            text.append(
                f"\n{counted(race.starts, 'start')} done, {race.elapsed:.0f} of {self._record.budget.seconds:g} s",
                style="dim",
            )
            if self._live:
                self._live.update(text, refresh=True)
            elif self._cell:
                self._cell.show(text.plain)
        elif race.starts > self._told:
            self._told = race.starts
            found = "; ".join(f"{ratio.contender}: {speed(ratio)}" for ratio in race.ratios())
            note(f"{race.elapsed:.0f} s, {counted(race.starts, 'start')}: {found}")


def _starting(spec: Spec) -> str:
    return f"starting {counted(spec.plan.ranks, 'rank')} …"


def cores_are_taken(run: Run, spec: Spec) -> bool:
    """Whether there are enough cores, and other runs have them (launch/cores.py)."""
    placement = spec.placement
    text = str(run.recorded_status().get("cores") or "")
    local = placement.ranks if placement.emulated else ranks_per_host(placement)
    return text.startswith("any:") and local * (placement.threads or 1) <= len(text.split(","))


def _figures(record: dict[str, Any]) -> str:
    """What an epoch came to; a loss that is not finite stands in a record as none."""
    from lockstep.metrics import recorded

    loss = record.get("train_loss")
    found = [f"train loss {'not finite' if loss is None else recorded('train_loss').text(loss)}"]
    tested = [name for name in record if name.startswith("test_") and name not in ("test_loss", "test_samples")]
    if record.get("test_accuracy") is None:
        tested.insert(0, "test_loss")
    others = [name for name in (*tested, "images_per_second", "train_seconds") if record.get(name) is not None]
    return "  ".join([*found, *(f"{recorded(name).label} {recorded(name).text(record[name])}" for name in others)])


def _of(total: int, spec: Spec) -> str:
    """How many there will be, where that is known: the loop of a script knows it alone."""
    return "" if spec.options.script else f"/{total}"
