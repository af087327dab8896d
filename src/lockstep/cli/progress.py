"""The live line of a run: in place on a terminal, plain lines in a log."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress

from lockstep import shapes
from lockstep.placement import ranks_per_host
from lockstep.run import Run, Spec, read_json
from lockstep.text import printable
from lockstep.ways import ROUND_FILE

PLAIN_EVERY_S = 10.0


class ProgressLine:
    """Follows a run through its folder; every line goes to stderr, so that stdout stays the command's own."""

    def __init__(self, label: str = "") -> None:
        self._tty = sys.stderr.isatty()
        self._label = f"{label}: " if label else ""
        self._epochs_shown = 0
        self._next_plain = time.monotonic() + PLAIN_EVERY_S
        self._began: tuple[float, int] | None = None
        self._live = False
        self._told_cores = False

    def __call__(self, run: Run, spec: Spec) -> None:
        if not self._told_cores:
            self._told_cores = True
            if cores_are_taken(run, spec):
                self._line(
                    f"{self._label}warning: other runs hold cores that this one needs, so its ranks are not pinned"
                )
        epochs = run.epochs()
        for record in epochs[self._epochs_shown :]:
            tested = "" if record["test_accuracy"] is None else f"test accuracy {record['test_accuracy']:.2%}  "
            self._line(
                f"{self._label}epoch {record['epoch']}{_of(spec.recipe.epochs, spec)}  train loss {_loss(record['train_loss'])}  "
                f"{tested}{record['images_per_second']:,.0f} images/s  {record['train_seconds']:.1f} s"
            )
        self._epochs_shown = len(epochs)
        beat = read_json(run.rank_folder(0) / "status.json", shapes.Beat)
        text = (
            self._text(beat, spec) if beat and "epoch" in beat else f"{self._label}starting {spec.plan.ranks} rank(s) …"
        )
        if self._tty:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\x1b[2K" + printable(text)[:width])
            sys.stderr.flush()
            self._live = True
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + PLAIN_EVERY_S
            self._line(text)

    def _text(self, beat: dict[str, float], spec: Spec) -> str:
        step, total = int(beat["step"]), spec.plan.total_steps
        if self._began is None:
            self._began = (time.monotonic(), step)
        seconds, steps = time.monotonic() - self._began[0], step - self._began[1]
        left = f"{_clock((total - step) * seconds / steps)} left" if steps > 0 else "…"
        left = "" if spec.options.script else left
        rate = f"{beat['images_per_second']:,.0f} images/s  " if beat.get("images_per_second") else ""
        loss = f"loss {beat['loss']:.4f}  " if beat.get("loss") is not None else ""
        epochs, steps_in_all = _of(spec.recipe.epochs, spec), _of(total, spec)
        return f"{self._label}epoch {int(beat['epoch'])}{epochs}  step {step}{steps_in_all}  {rate}{loss}{left}"

    def _line(self, text: str) -> None:
        self.clear()
        print(printable(text), file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._live:
            self._live = False
            with suppress(OSError):
                sys.stderr.write("\r\x1b[2K")


def cores_are_taken(run: Run, spec: Spec) -> bool:
    """Whether there are enough cores, and other runs have them (launch/cores.py)."""
    placement = spec.placement
    text = str(run.recorded_status().get("cores") or "")
    local = placement.ranks if placement.emulated else ranks_per_host(placement)
    return text.startswith("any:") and local * (placement.threads or 1) <= len(text.split(","))


def _loss(value: float | None) -> str:
    """A number, or what a record has in the place of one that is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def _of(total: int, spec: Spec) -> str:
    """How many there will be, where that is known: the loop of a script knows it alone."""
    return "" if spec.options.script else f"/{total}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProbeLine:
    """Follows a probe, which has rounds instead of epochs."""

    def __init__(self, label: str) -> None:
        self._tty, self._label, self._shown = sys.stderr.isatty(), label, 0.0

    def __call__(self, run: Run, spec: Spec) -> None:
        beat = read_json(run.rank_folder(0) / ROUND_FILE, shapes.Round) or {}
        text = f"round {beat['round']}/{beat['rounds']}" if "round" in beat else f"starting {spec.plan.ranks} rank(s) …"
        if self._tty:
            sys.stderr.write(f"\r\x1b[2K{self._label}: {text}")
            sys.stderr.flush()
        elif time.monotonic() - self._shown > PLAIN_EVERY_S:
            self._shown = time.monotonic()
            sys.stderr.write(f"{self._label}: {text}\n")

    def clear(self) -> None:
        if self._tty:
            with suppress(OSError):
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()
