"""What each task is worth, from what was found of its run, its claim, its answer or its code."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.lab import figures
from lockstep.lab.definition import CODE, Task
from lockstep.lab.folder import ANSWERS
from lockstep.lab.graded import Graded, Mark
from lockstep.lab.hand_in import Submission
from lockstep.lab.inspect import Inspected
from lockstep.lab.own_code import Speed, Verdict
from lockstep.text import printable


class Marks:
    """The marks of one hand-in; what a teacher has to look at goes to `graded`. `changed` says of files what is wrong with them."""

    def __init__(
        self,
        handed: Submission,
        runs: Mapping[str, Inspected],
        verdicts: Mapping[str, Verdict],
        changed: Mapping[str, str],
        graded: Graded,
    ) -> None:
        self._handed, self._runs, self._verdicts = handed, runs, verdicts
        self._changed, self._graded = changed, graded

    def of(self, task: Task) -> Mark:
        if task.kind in CODE:
            return self._mark_code(task)
        mark = self._mark_of_runs(task)
        unsettled = [
            found.unsettled for name in (task.name, *task.runs) if (found := self._runs.get(name)) and found.unsettled
        ]
        if mark.outcome == "right" and unsettled:
            mark.outcome = "not settled"
            mark.lines += unsettled
        return mark

    def _mark_of_runs(self, task: Task) -> Mark:
        by_kind = {"run": self._mark_run, "predict": self._mark_prediction, "claim": self._mark_claim}
        return by_kind.get(task.kind, self._mark_answer)(task)

    def _mark_run(self, task: Task) -> Mark:
        found = self._runs.get(task.name)
        if found is None:
            return Mark(task.name, "missing", 0.0, task.points, ["no run of this task was handed in"])
        if found.problems:
            return Mark(task.name, "wrong", 0.0, task.points, list(found.problems))
        told = [f"{len(found.rows[0])} steps on {len(found.rows)} ranks; {_accuracy(found)}"]
        if not found.unsettled:
            told[0] += ", found again"
        return Mark(task.name, "right", task.points, task.points, told)

    def _mark_prediction(self, task: Task) -> Mark:
        ledger = self._handed.chain
        record = ledger.newest("prediction", task.name)
        if record is None or not isinstance(record.body.get("value"), int | float):
            return Mark(task.name, "missing", 0.0, task.points, ["no prediction was committed"])
        number = float(record.body["value"])
        begun = [one for name in task.runs for one in ledger.of("start", name)]
        if any(one.number < record.number for one in begun):
            return Mark(task.name, "wrong", 0.0, task.points, ["the prediction came after the measurement"])
        told = f"predicted {figures.shown(number, task.unit)}"
        try:
            found = self._figure(task)
        except ValueError as error:
            return Mark(task.name, "wrong", 0.0, task.points, [f"{told}; not measured: {error}"])
        return Mark(
            task.name,
            "right",
            task.points,
            task.points,
            [f"{told}, before measuring {figures.shown(found, task.unit)}"],
        )

    def _mark_claim(self, task: Task) -> Mark:
        if task.name not in self._handed.claims:
            return Mark(task.name, "missing", 0.0, task.points, ["nothing is claimed in answers.toml"])
        if ANSWERS in self._changed:
            return Mark(task.name, "wrong", 0.0, task.points, [f"{ANSWERS} {self._changed[ANSWERS]}"])
        claimed = self._handed.claims[task.name]
        try:
            found = self._figure(task)
        except ValueError as error:
            return Mark(task.name, "wrong", 0.0, task.points, [f"it cannot be computed: {error}"])
        told = (
            f"claimed {figures.shown(claimed, task.unit)}, and the step records say {figures.shown(found, task.unit)}"
        )
        if abs(claimed - found) <= task.within * max(abs(found), 1.0 if task.minus else 0.0):
            return Mark(task.name, "right", task.points, task.points, [told])
        return Mark(task.name, "wrong", 0.0, task.points, [told])

    def _figure(self, task: Task) -> float:
        """ValueError where a run of it is missing or wrong."""
        for name in task.runs:
            if name not in self._runs:
                raise ValueError(f"there is no run '{name}'")
            if self._runs[name].problems:
                raise ValueError(f"the records of run '{name}' are not sound")
        parts = {name: self._runs[name].measured for name in task.runs}
        try:
            return figures.value(task.figure, parts[task.of], parts.get(task.over), parts.get(task.minus))
        except ZeroDivisionError:
            raise ValueError(f"that of '{task.over}' is 0") from None

    def _mark_answer(self, task: Task) -> Mark:
        text = self._handed.answers.get(task.name)
        if not text:
            return Mark(task.name, "missing", 0.0, task.points, ["answers.toml has no answer"])
        return Mark(task.name, "by hand", 0.0, task.points, [printable(text)[:5000]])

    def _mark_code(self, task: Task) -> Mark:
        code = self._handed.code(task.file)
        if not code.is_file():
            return Mark(
                task.name,
                "missing",
                0.0,
                task.worth,
                [f"{task.file} {self._changed.get(task.file, 'was not handed in')}"],
            )
        if task.file in self._changed:
            return Mark(task.name, "wrong", 0.0, task.worth, [f"{task.file} {self._changed[task.file]}"])
        verdict = self._verdicts[task.name]
        if not verdict.settled:
            self._graded.notes.append(f"'{task.name}' is not settled, and has its points: {verdict.why}")
            return Mark(task.name, "not settled", task.worth, task.worth, [verdict.why])
        mark = Mark(task.name, "right" if verdict.right else "wrong", 0.0, task.worth, [verdict.why])
        if not verdict.right:
            return mark
        mark.points = task.points
        if task.speed:
            speed = verdict.speed or Speed()
            mark.lines.append(speed.sentence(task.speed))
            if speed.unmeasured:
                self._graded.flags.append(f"'{task.name}': {speed.sentence(task.speed)}")
            if speed.loses(task.speed):
                mark.outcome = "wrong"
            else:
                mark.points += task.speed_points
        return mark


def _accuracy(found: Inspected) -> str:
    return "no accuracy" if found.test_accuracy is None else f"{found.test_accuracy:.2%} test accuracy"
