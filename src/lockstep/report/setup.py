"""What was run, where, and how to do it again: settings that differ, settings that do not, environment, commands."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.report.subject import Subject
from lockstep.report.views import Cell, Command, Table
from lockstep.run import Spec
from lockstep.settings import changed, dotted
from lockstep.study import builtin
from lockstep.units import counted, text

ENVIRONMENT = {
    "host": "host",
    "system": "system",
    "cpu": "processor",
    "cores_machine": "cores",
    "memory_bytes": "memory",
    "cpu_capability": "instructions",
    "gpu": "GPU",
    "python": "Python",
    "torch": "torch",
    "numpy": "numpy",
    "lockstep": "Lockstep",
    "load_1min": "load at the start (1 min)",
}
MOST_COMMANDS = 60


_ALWAYS = (
    "model",
    "data",
    "global_batch",
    "epochs",
    "optimizer.name",
    "optimizer.lr",
    "launcher",
    "ranks",
    "threads",
    "backend",
    "strategy",
)
MOST_COLUMNS = 8
# Cells whose values are named one by one in a line.
MOST_VALUES = 3


def settings(subject: Subject) -> tuple[Table | None, Table]:
    """What differs between the cells, and what they share (only what is not as usual)."""
    specs = {group.name: group.spec for group in subject.groups if group.samples or group.measured}
    cells = {name: dotted(*spec.known()) for name, spec in specs.items()}
    differing = _differing(cells)
    usual, first = dotted(Recipe(), Placement()), next(iter(cells.values()), {})
    shared = [key for key in first if key not in differing and (key in _ALWAYS or first[key] != usual.get(key))]
    columns = ["setting", "of", *cells]
    rows = [_row(key, [cell.get(key) for cell in cells.values()]) for key in differing]
    if len(cells) > MOST_COLUMNS:  # more cells than a screen is wide: a row for each
        columns = ["cell", *differing]
        rows = [
            [Cell(text=text) for text in (name, *(_word(cell.get(key)) for key in differing))]
            for name, cell in cells.items()
        ]
    differ = Table(id="settings", title="What differs between the cells", says="", columns=columns, rows=rows)
    same = Table(
        id="settings-shared",
        title="What all cells share" if len(cells) > 1 else "Settings",
        says="Settings that are left out are as Lockstep sets them.",
        columns=["setting", "of", "value"],
        rows=[_row(key, [first[key]]) for key in shared if first[key] is not None],
    )
    return (differ if differing else None), same


def differences(subject: Subject) -> str:
    """What differs between runs whose names do not say it: each key with the values of the cells in their order, of many cells the keys alone."""
    measured = [group for group in subject.groups if group.samples]
    cells = {group.name: dotted(*group.spec.known()) for group in measured}
    if subject.kind != "runs" or len(cells) < 2 or any("=" in name for name in cells):
        return ""
    values = {key: [_word(cell.get(key)) for cell in cells.values()] for key in _differing(cells)}
    if len(cells) > MOST_VALUES:
        return ", ".join(values)
    return ", ".join(f"{key} {' / '.join(found)}" for key, found in values.items())


def _differing(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for cell in cells.values() for key in cell)
    return [key for key in keys if key != "seed" and len({_word(cell.get(key)) for cell in cells.values()}) > 1]


def _row(key: str, values: Sequence[Any]) -> list[Cell]:
    owner = "placement" if key.partition(".")[0] in Placement.__struct_fields__ else "recipe"
    return [Cell(text=text) for text in (key, owner, *map(_word, values))]


def _word(value: Any) -> str:
    """As `key=value` takes it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def environment(subject: Subject) -> Table | None:
    """What the runs ran on; where they differ, each value with how many runs had it."""
    seen = [found for run in subject.runs if (found := run.environment())]
    rows = []
    for key, label in ENVIRONMENT.items():
        values = [found[key] for found in seen if found.get(key) is not None]
        counts = Counter(_environment_value(key, value) for value in values)
        if key == "load_1min" and len(counts) > 1:
            counts = Counter({f"{min(values):.2f} to {max(values):.2f}": len(values)})
        if counts:
            one = len(counts) == 1
            rows.append(
                [
                    Cell(text=label),
                    Cell(text="; ".join(v if one else f"{v} ({counted(n, 'run')})" for v, n in counts.items())),
                ]
            )
    if not rows:
        return None
    return Table(id="environment", title="Environment", says="What the runs ran on.", columns=["", "value"], rows=rows)


def _environment_value(key: str, value: Any) -> str:
    if key == "memory_bytes":
        return text(float(value), "bytes")
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def commands(subject: Subject) -> list[Command]:
    """The words that run it again, and for a single run also the processes that were started."""
    found = []
    if subject.study:
        study = subject.study.read().study
        words = study_words(subject.study.name, study.name, study.repeats)
        if words:
            found.append(Command(name="the whole study", lines=[shlex.join(words)]))
    for group in subject.begun[:MOST_COMMANDS]:
        specs = [each.spec for each in group.samples if each.own] or [each.spec for each in group.samples]
        seeds = sorted({spec.recipe.seed for spec in specs})
        name = group.name if len(seeds) == 1 else f"{group.name} (seeds {', '.join(map(str, seeds))})"
        found.append(Command(name=name, lines=[shlex.join(run_words(specs[0]))]))
    if subject.kind == "run" and subject.groups[0].samples[0].spec.command:
        spec = subject.groups[0].samples[0].spec
        found.append(Command(name="processes that it started", lines=[shlex.join(words) for words in spec.command]))
    return found


def study_words(folder: str, study: str, repeats: int) -> list[str]:
    """The command of a built-in study and its quick form; of others it cannot be known which file they came from."""
    if study not in builtin.names() or folder.removeprefix(study) not in ("", "-quick"):
        return []
    return ["lockstep", "study", "run", study, *(["--quick"] if folder != study else []), "--repeats", str(repeats)]


def run_words(spec: Spec) -> list[str]:
    """`lockstep run` with every setting that is not as usual: what was resolved for one machine is stated for all."""
    if spec.options.attached is not None:
        batch = ["--batch", str(spec.plan.global_batch)] if spec.plan.global_batch else []
        return ["lockstep", "attach", *batch, "--", *spec.options.attached]
    words = ["lockstep", "run"]
    if spec.options.script:
        words.append(spec.options.script)
    words += [f"{key}={_word(value)}" for key, value in _stated(spec).items() if value is not None]
    if spec.options.script and spec.options.script_args:
        words += ["--", *spec.options.script_args]
    for flag, value in (("--trace", spec.options.trace), ("--profile", spec.options.profile)):
        words += [flag, str(value)] if value else []
    return words


def _stated(spec: Spec) -> dict[str, Any]:
    found = {**changed(spec.recipe, spec.placement), "seed": spec.recipe.seed}
    if spec.recipe.batch_per_rank:
        found.pop("global_batch", None)
    if found.pop("emulated", False):
        found["hosts"] = f"emulated:{spec.placement.hosts}"
    return found
