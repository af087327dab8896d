"""A run's records, read without trusting them: every figure comes from the steps, and whatever disagrees with them is named.

A run that was trained by `lockstep lab run` and left alone has no problem here, on a machine that was busy, too: time that a
thread could have run and had no processor is on record, and is not held against it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from lockstep import offered
from lockstep.lab.again import Answer
from lockstep.lab.definition import Lab, Task
from lockstep.lab.figures import Measured, Rows
from lockstep.measure.records import PHASES, check_steps
from lockstep.plugins import is_spec
from lockstep.reading import Damaged
from lockstep.run import Options, Run, Spec, read_json
from lockstep.settings import dotted

PRINTS = {"numbers": ("loss_sum", "correct"), "moments": ("start_ns", "total_ns")}
# What two sums of the same numbers may differ by: the order of addition.
ROUNDING = 1e-6
# Clocks are read one after the other: a step may seem to begin this long before the one before it has ended.
SLACK_NS = 1_000_000
# Of the time in which a rank neither waited for others nor for a processor, this share has to be processor time.
LEAST_BUSY = 0.5
# Less than this many idle seconds can be the first touch of a page or a slow disk.
LEAST_IDLE_S = 0.25
# What the student's machine decides where a task leaves it open (resolve/). Nothing else of a recipe or a placement is decided there.
DECIDED = ("device", "backend", "launcher", "strategy", "threads", "memory_format")
# An epoch's seconds against the span of its steps: what comes before the first and after the last.
EPOCH_SLACK, EPOCH_SLACK_S = 0.05, 0.5


@dataclass
class Inspected:
    """One run of a hand-in."""

    task: str
    run: Run
    spec: Spec | None = None
    rows: list[Rows] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Each of them makes the run worth nothing."""
    notes: list[str] = field(default_factory=list)
    """What a teacher may want to know."""
    again: Answer | None = None
    """What computing it again has come to."""
    unsettled: str = ""
    """Why it could not be computed again on this machine, through no fault of the run."""
    asked_for: bool = False
    """It is what its task asks for. Nothing of any other run is computed again: a recipe may name code to be imported."""
    test_accuracy: float | None = None
    """As recorded, once testing model.pt again has come to the same, within rounding."""

    @property
    def measured(self) -> Measured:
        return Measured.of(self.run, self.rows, self.test_accuracy)

    @property
    def tested(self) -> bool:
        """Whether its model.pt was tested again."""
        return self.again is not None and self.again.accuracy is not None

    def fingerprints(self) -> set[str]:
        """Of the numbers that were computed, and of the moments at which they were. No two students' runs share one, whatever they are called:
        their seeds differ. Runs of one student may share the numbers, on two placements, but never the moments."""
        return {f"{name} {self._digest(*columns)}" for name, columns in PRINTS.items()} if self.rows else set()

    def moments(self) -> str:
        return self._digest(*PRINTS["moments"]) if self.rows else ""

    def _digest(self, *columns: str) -> str:
        digest = hashlib.sha256()
        for rows in self.rows:
            for column in columns:
                digest.update(np.ascontiguousarray(rows[column]).tobytes())
        return digest.hexdigest()


def inspect(task: str, run: Run) -> Inspected:
    """Everything that shows without computing anything again."""
    found = Inspected(task, run)
    try:
        found.spec = run.spec()
        found.rows = [check_steps(run.rank_folder(rank) / "steps.bin") for rank in range(found.spec.plan.ranks)]
        if damage := run.damage():
            raise Damaged(damage[0])
        epochs = run.epochs()
        found.problems += _steps(found.spec, found.rows, epochs)
        if not found.problems:
            found.problems += _clocks(found.rows)
            found.problems += _epochs(run, found.spec, found.rows, epochs)
            found.problems += _summary(run, epochs)
            found.problems += _sleeps(run, found.spec, found.rows, epochs)
    except Damaged as error:
        found.problems.append(str(error))
    had = (run.summary() or {}).get("cores_had")
    if had is not None and had < 0.9:
        found.notes.append(f"the machine was busy: the run had {had:.0%} of its cores, and its times are slower for it")
    return found


def fits(lab: Lab, task: Task, spec: Spec, seed: int) -> list[str]:
    """Where a run is not what its task asks for."""
    recipe, placement = lab.settings(task)
    wanted, found = dotted(recipe, placement), dotted(spec.recipe, spec.placement)
    stated, problems = lab.stated(task), []
    for key, value in wanted.items():
        if key in ("seed", *task.free):
            continue
        is_ours = key in DECIDED and key not in stated and value in ("auto", None) and not is_spec(str(found.get(key)))
        if not is_ours and not _is(key, found.get(key), value):
            problems.append(f"{key}={found.get(key)}, and the task asks for {key}={value}")
    problems += [f"{key}={found[key]}, and the task has no {key}" for key in found if key not in wanted]
    if spec.recipe.seed != seed:
        problems.append(
            f"seed={spec.recipe.seed}, and its ledger gives seed={seed}: it was not trained after these predictions, or is another student's"
        )
    if msgspec.structs.replace(spec.options, sleep_to_wait=False) != Options():
        problems.append("it was not made by 'lockstep lab run': it has options that no task has")
    return problems


def _is(key: str, found: Any, wanted: Any) -> bool:
    """A name that a package offers is recorded as what it stands for."""
    if found == wanted or key not in offered.GROUPS:
        return bool(found == wanted)
    offer = offered.find(key, str(wanted))
    return offer is not None and offer.spec == found


def _steps(spec: Spec, ranks: list[Rows], epochs: list[dict[str, Any]]) -> Iterator[str]:
    """Every step that the plan asks for, with all its samples."""
    plan = spec.plan
    lengths = {len(rows) for rows in ranks}
    taken = max(lengths)
    early = 0 < taken < plan.total_steps and taken == len(epochs) * plan.steps_per_epoch and _stopped(spec, epochs)
    if len(lengths) > 1 or (taken != plan.total_steps and not early):
        yield f"its step records are cut: {min(lengths)} of {plan.total_steps} steps are there"
        return
    for rows in ranks:
        if not np.array_equal(rows["step"], np.arange(1, taken + 1)):
            yield "its step records are not the steps 1, 2, 3, …"
            return
        if not np.array_equal(rows["epoch"], (rows["step"] - 1) // plan.steps_per_epoch + 1):
            yield "its step records have steps in the wrong epoch"
            return
    last = np.arange(1, taken + 1) % plan.steps_per_epoch == 0
    wanted = np.where(last, plan.last_batch, plan.global_batch)
    if not np.array_equal(np.sum([rows["samples"] for rows in ranks], axis=0), wanted):
        yield "its step records have other batches than its plan"
    if any((rows["correct"] < 0).any() or (rows["correct"] > rows["samples"]).any() for rows in ranks):
        yield "its step records have more right answers than samples"


def _stopped(spec: Spec, epochs: list[dict[str, Any]]) -> bool:
    """Whether early stopping had a reason to, by the rule that training has."""
    if not spec.recipe.early_stopping.patience:
        return False
    from lockstep.training.evaluate import Evaluation
    from lockstep.training.stopping import Stopping

    rule = Stopping(spec.recipe.early_stopping)
    for record in epochs:
        # A result that is not a number is written down as none.
        loss, accuracy = (
            math.nan if (found := record.get(key)) is None else float(found) for key in ("test_loss", "test_accuracy")
        )
        rule.better(record["epoch"], Evaluation(loss, {"accuracy": accuracy}, spec.plan.test_samples))
    return rule.reason() is not None


def _clocks(ranks: list[Rows]) -> Iterator[str]:
    """A step begins when the one before it has ended, and its phases are parts of it."""
    for number, rows in enumerate(ranks):
        ends = rows["start_ns"] + rows["total_ns"]
        if (rows["start_ns"][1:] + SLACK_NS < ends[:-1]).any():
            yield f"times were edited: a step of rank {number} begins before the one before it has ended"
            return
        if (np.sum([rows[f"{phase}_ns"] for phase in PHASES], axis=0) > rows["total_ns"] + SLACK_NS).any():
            yield f"times were edited: the phases of a step of rank {number} take longer than the step"
            return


def _epochs(run: Run, spec: Spec, ranks: list[Rows], epochs: list[dict[str, Any]]) -> Iterator[str]:
    """What was written down of each epoch, against its steps."""
    taken = len(ranks[0])
    if [record["epoch"] for record in epochs] != list(range(1, -(-taken // spec.plan.steps_per_epoch) + 1)):
        yield "its epochs.jsonl has other epochs than its step records"
        return
    for record in epochs:
        ours = [rows[rows["epoch"] == record["epoch"]] for rows in ranks]
        samples = sum(int(rows["samples"].sum()) for rows in ours)
        for key, column in (("train_loss", "loss_sum"), ("train_accuracy", "correct")):
            true = sum(float(rows[column].sum()) for rows in ours) / samples
            told = record.get(key)
            if told is None or not math.isclose(told, true, rel_tol=ROUNDING, abs_tol=1e-12):
                if told is None and not math.isfinite(true):
                    continue
                yield f"{key} of epoch {record['epoch']} was edited: {told} is written down, and the steps come to {true:.6g}"
                return
        span = max(float(rows["start_ns"][-1] + rows["total_ns"][-1] - rows["start_ns"][0]) / 1e9 for rows in ours)
        seconds, logging = float(record.get("train_seconds") or 0), float(record.get("logging_seconds") or 0)
        slack = EPOCH_SLACK_S + sum(_delayed(run, rank, record["epoch"]) or 0.0 for rank in range(len(ranks)))
        if not span * (1 - EPOCH_SLACK) - logging - slack <= seconds <= span * (1 + EPOCH_SLACK) + slack:
            yield f"times were edited: epoch {record['epoch']} is said to take {seconds:.2f} s, and its steps take {span:.2f} s"
            return


def _summary(run: Run, epochs: list[dict[str, Any]]) -> Iterator[str]:
    """The summary against the epochs. No figure is taken from it, but one that was edited says something."""
    summary = run.summary()
    if summary is None:
        yield "it has no summary.json: the run did not end well"
        return
    for key in ("test_accuracy", "test_loss", "train_accuracy", "train_loss"):
        told = summary.get(key)
        if told is not None and all(record.get(key) != told for record in epochs):
            yield f"{key} was edited: {told} in summary.json is that of no epoch"
            return
    seconds = math.fsum(float(record.get("train_seconds") or 0) for record in epochs)
    if not math.isclose(float(summary.get("train_seconds") or 0), seconds, rel_tol=1e-3, abs_tol=1e-3):
        yield f"train_seconds was edited: {summary.get('train_seconds')} in summary.json, and its epochs come to {seconds:.3f}"
    weights = {summary.get("weights_sha256")}
    for rank in run.rank_folders():
        weights.add((read_json(rank / "summary.json") or {}).get("weights_sha256"))
    if len(weights) > 1:
        yield "its ranks ended with different weights"


def _sleeps(run: Run, spec: Spec, ranks: list[Rows], epochs: list[dict[str, Any]]) -> Iterator[str]:
    """Whether its ranks did nothing for much of their time: neither computed, nor waited for others, nor for a processor."""
    if spec.placement.device != "cpu":
        return
    wall = 0.0
    for number, rows in enumerate(ranks):
        own = run.epochs(number)
        delayed = [_delayed(run, number, record["epoch"]) for record in own]
        if None in delayed:  # the system does not count it, and a busy machine is not blamed
            return
        seconds = math.fsum(float(record.get("train_seconds") or 0) for record in own)
        # A rank by itself waits for nobody, whatever its records call its time.
        waited = float(rows["exchange_ns"].sum()) / 1e9 if len(ranks) > 1 else 0.0
        # On a busy machine most of the time may be waiting for a processor: what is left of it is what has to be used.
        wall += seconds - waited - math.fsum(delay for delay in delayed if delay is not None)
    cpu = math.fsum(float(record.get("train_cpu_seconds") or 0) for record in epochs)
    idle = wall - cpu
    if wall > 0 and idle > LEAST_IDLE_S and idle > (1 - LEAST_BUSY) * wall:
        yield (
            f"it sleeps: of {wall:.1f} s in which its steps waited neither for a processor nor for other ranks they "
            f"computed {cpu:.1f} s, and did nothing for {idle:.1f} s"
        )


def _delayed(run: Run, rank: int, epoch: int) -> float | None:
    """Seconds of an epoch in which a rank could have run and had no processor; None where that was not counted."""
    found = next((record.get("delayed_seconds") for record in run.epochs(rank) if record["epoch"] == epoch), None)
    return None if found is None else float(found)
