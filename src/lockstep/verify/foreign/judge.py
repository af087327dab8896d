"""The verdict on a foreign script: every step of its ranks against the same step of one process, and what differs first, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.units import counted
from lockstep.verify.checks import Check, Worst
from lockstep.verify.foreign.compared import gradient, update
from lockstep.verify.foreign.data import Samples
from lockstep.verify.foreign.exchange import exchanged, untouched
from lockstep.verify.foreign.finding import (
    BATCH,
    BETWEEN,
    BUFFERS,
    CLIPPING,
    EXCHANGE,
    LOSS,
    RANKS,
    SETTINGS,
    START,
    Finding,
)
from lockstep.verify.foreign.numbers import factor, listed
from lockstep.verify.foreign.records import Rank, Step
from lockstep.verify.foreign.shards import gathered, starts_alike
from lockstep.verify.foreign.tolerance import Tolerance

SAME, DIFFERENT, OPEN = "same", "different", "not proven"


@dataclass(frozen=True)
class Losses:
    """The loss of one step: of all ranks together, of the one process, and how far apart they may be."""

    step: int
    ranks: float | None
    one: float | None
    allowed: float


@dataclass
class Verdict:
    """What came of it. `sentence` is the answer."""

    verdict: str
    sentence: str
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    ranks: int = 0
    steps: int = 0
    batch: int = 0
    losses: list[Losses] = field(default_factory=list)
    compared: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    """For each check, by step: the difference, and what is allowed."""

    @property
    def reason(self) -> str:
        return self.findings[0].key if self.findings else ""


class Judge:
    """All steps of one script."""

    def __init__(self, many: list[Rank], one: Rank | None, twin: Rank | None, why_alone: str = "") -> None:
        """`one`: None where the script cannot be run as one process, `why_alone`. `twin`: the one process, with weights a few roundings away."""
        self._recorded = many
        """As they were recorded, each with its part of the parameters."""
        self._unknown = any(step.line.unknown for rank in many for step in rank)
        self._counts = [len(rank) for rank in many]
        if not self._unknown:
            many = gathered(many)
            one, twin = (each and gathered([each])[0] for each in (one, twin))
        self._many, self._one, self._why = many, one, why_alone
        self._world = len(many)
        self._steps = min(*self._counts, len(one)) if one is not None else min(self._counts)
        self._tolerance = Tolerance(one or [], twin or [])
        self._samples = Samples(many, one)
        self._worst: dict[str, Worst] = {}
        self._compared: dict[str, list[tuple[int, float, float]]] = {}
        self._at = 0
        self._twin = twin

    def verdict(self) -> Verdict:
        if self._unknown:
            why = (
                "not proven: every rank holds parts of the parameters, and which ones cannot be told (FullyShardedDataParallel flattens them): "
                "fully_shard, which divides their rows, can be proven"
            )
            return Verdict(OPEN, why, ranks=self._world, steps=self._steps)
        unseeded = self._unseeded()
        if unseeded:  # what the ranks do among themselves can still be judged
            return Judge(self._recorded, None, None, unseeded).verdict()
        findings = list(self._findings())
        findings.sort(key=lambda each: (each.open, each.step, each.place))
        alarms = [each for each in findings if not each.open]
        stop = min((each.step for each in findings if each.open), default=math.inf)
        # What comes after something open may be its consequence, unless it is among the ranks themselves.
        alarms = [each for each in alarms if each.step <= stop or each.place in _WITHIN]
        result = Verdict(SAME, "", alarms or findings, ranks=self._world, steps=self._steps)
        result.batch = sum(rank[0].rows for rank in self._many) if self._steps else 0
        result.checks = [worst.check(what, "") for what, worst in self._worst.items()]
        result.losses, result.compared = self._losses(), self._compared
        if self._one is None and not alarms:
            result.verdict, result.sentence = OPEN, f"not proven: {self._why}"
        elif alarms:
            result.verdict, result.sentence = DIFFERENT, f"NOT the same: {_when(alarms[0])} {alarms[0].text}"
        elif findings:
            result.verdict, result.sentence = OPEN, f"not proven: {_when(findings[0])} {findings[0].text}"
        else:
            result.sentence = self._proven()
        return result

    def _proven(self) -> str:
        rows = [sum(rank[at].rows for rank in self._many) for at in range(self._steps)]
        said = f", {max(rows)} samples a step" if any(rows) else ""
        unseen = sum(not self._samples.seen(at) for at in range(self._steps))
        if unseen:
            when = "" if unseen == self._steps else f" in {unseen} of them"
            said += f"; the samples that they took were not seen{when}"
        return f"the same: in {self._steps} of {self._steps} steps {self._world} ranks compute what one process computes{said}"

    def _unseeded(self) -> str:
        """Whether the one process computes something else each time."""
        one, twin = self._one, self._twin
        if not one or not twin:
            return ""
        what = ""
        if [t.origin for t in one[0].line.layout] != [t.origin for t in twin[0].line.layout]:
            what = "its starting weights"
        elif any(a.inputs != b.inputs for a, b in zip(one, twin, strict=False)):
            what = "the samples of a step, or their order"
        elif one[0].draws and not one[0].line.autocast and self._tolerance.share(0) > 0.05:
            what = "the random numbers of its forward pass (dropout)"
        return (
            f"as one process the script computes something else each time it runs ({what}): seed it, for example with torch.manual_seed(0)"
            if what
            else ""
        )

    def _note(self, what: str, difference: float, allowed: float, where: str) -> None:
        self._worst.setdefault(what, Worst()).add(difference, allowed, where)
        self._compared.setdefault(what, []).append((self._at + 1, difference, allowed))

    def _losses(self) -> list[Losses]:
        found, way = [], 0
        for at in range(self._steps):
            one = self._one[at].loss if self._one is not None else None
            ways = _ways([rank[at] for rank in self._many])
            if not at and one is not None and ways:  # whether they are a mean or a sum is a matter of the script
                way = min(range(len(ways)), key=lambda each: abs(ways[each] - one))
            allowed = self._tolerance.loss(at) * abs(one) if one is not None else 0.0
            found.append(Losses(at + 1, ways[min(way, len(ways) - 1)] if ways else None, one, allowed))
        return found

    def _findings(self) -> Iterator[Finding]:
        compare = self._one is not None
        yield from self._start()
        again = self._samples.same_order_again()
        if again:
            yield again
        for at in range(self._steps):
            here = list(self._step(at, compare))
            yield from here
            # What follows a difference is compared no more: it starts from other weights. What ranks do among themselves still is.
            compare = compare and not here
        yield from self._numbers_of_steps()

    def _numbers_of_steps(self) -> Iterator[Finding]:
        """All take as many steps as are asked for, or as the script has."""
        counts, step = self._counts, self._steps + 1
        short = counts.index(min(counts))
        if max(counts) > counts[short]:
            long = counts.index(max(counts))
            text = f"rank {long} takes {counted(counts[long], 'step')}, and rank {short} takes {counts[short]}"
            yield Finding(step, START, "steps", text)
        elif self._one is not None and len(self._one) != counts[0]:
            text = f"{self._world} ranks take {counted(counts[0], 'step')}, and one process takes {len(self._one)}"
            yield Finding(step, BATCH, "steps", text)

    def _start(self) -> Iterator[Finding]:
        if not self._steps:
            return
        first = [[t.before for t in rank[0].line.layout] for rank in self._many]
        names = [t.name for t in self._many[0][0].line.layout]
        for rank, found in enumerate(first[1:], 1):
            if found != first[0]:
                wrong = [
                    name for name, ours, theirs in zip(names, found, first[0], strict=False) if ours != theirs
                ] or names
                self._note("starting weights", len(wrong), 0, f"rank {rank}")
                text = f"rank {rank} starts from other weights than rank 0 ({listed(wrong)}): seed all ranks alike, or send them rank 0's"
                yield Finding(1, START, "start", text, once=True)
                return
        if self._one is not None and not starts_alike(self._many[0][0], self._one[0]):
            self._note("starting weights", 1, 0, "one process")
            text = "the ranks start from other weights than one process does: seed the weights by the same number, whatever the ranks"
            yield Finding(1, START, "start", text, once=True)
            return
        self._note("starting weights", 0, 0, "")

    def _step(self, at: int, compare: bool) -> Iterator[Finding]:
        self._at = at
        steps = [rank[at] for rank in self._many]
        one = self._one[at] if self._one is not None and compare else None
        where = f"step {at + 1}"
        found = self._samples.finding(at) if compare or self._one is None else None
        if (self._one is None or compare) and self._samples.seen(at):
            self._note("samples of every step", 1 if found else 0, 0, where if found else "")
        if found:
            yield found
            one = None
        if len({tuple(t.length for t in step.line.layout) for step in [*steps, *([one] if one else [])]}) > 1:
            text = (
                "the ranks and the one process do not update the same parameters in this step: they cannot be compared"
            )
            yield Finding(at + 1, START, "parameters", text, open=True)
            return
        yield from self._between(at)
        yield from self._buffers(at, steps)
        plain, scale = untouched(self._one[at]) if self._one is not None else (True, 1.0)
        exchange = None
        if plain:
            before = [rank[at - 1] for rank in self._many] if at else None
            scaled = [_times(step, 1 / scale) for step in steps] if scale != 1.0 else steps
            exchange = exchanged(scaled, before)
        if exchange is not None:
            self._note("exchanged gradient against the ranks' own", exchange.difference, exchange.allowed, where)
            if exchange.finding:
                yield exchange.finding
        if one is not None:
            yield from self._settings(at, steps, one)
        if one is not None and not (exchange and exchange.finding):
            wrong = gradient(steps, one, exchange.way if exchange else "", self._tolerance, at, self._note)
            if wrong:
                yield wrong
            else:
                yield from self._loss(at, steps, one)
                yield from self._clipping(at, steps, one)
                yield from update(steps[0], one, self._tolerance, at, self._note)
        yield from self._ranks(at, steps)

    def _between(self, at: int) -> Iterator[Finding]:
        """Weights that change between two steps, where those of one process do not."""
        if not at or self._changed(self._one, at):
            return
        for number, rank in enumerate(self._many):
            changed = self._changed(rank, at)
            self._note("weights that change between steps", len(changed), 0, f"before step {at + 1}" if changed else "")
            if changed:
                text = f"weights of rank {number} have changed since the step before ({listed(changed)})"
                yield Finding(at + 1, BETWEEN, "between steps", text)
                return

    @staticmethod
    def _changed(rank: Rank | None, at: int) -> list[str]:
        if rank is None:
            return []
        after = {t.name: t.after for step in rank[:at] for t in step.line.layout}
        return [t.name for t in rank[at].line.layout if t.name in after and after[t.name] != t.before]

    def _loss(self, at: int, steps: list[Step], one: Step) -> Iterator[Finding]:
        ways, right = _ways(steps), one.loss
        if right is None or not ways:
            return
        away = min(abs(way - right) for way in ways) / (abs(right) or 1.0)
        allowed = self._tolerance.loss(at)
        self._note("loss against one process", away, allowed, f"step {at + 1}")
        if not away <= allowed:
            text = f"the loss of all ranks is {ways[-1]:.6g}, and that of one process {right:.6g}, at the same gradient"
            yield Finding(at + 1, LOSS, "loss", text)

    def _clipping(self, at: int, steps: list[Step], one: Step) -> Iterator[Finding]:
        """How gradients are scaled on their way from the exchange to the update."""
        ours, rest = zip(*(factor(step.final, step.exchanged) for step in steps), strict=True)
        right, other = factor(one.final, one.exchanged)
        if max(*rest, other) > 1e-3:  # not one factor: clipped by value
            return
        allowed = self._tolerance.share(at)
        away = max(abs(each / (right or 1.0) - 1.0) for each in ours)
        if one.line.clips or any(step.line.clips for step in steps):
            self._note("clipping against one process", away, allowed, f"step {at + 1}")
        if away > allowed:
            said = " and ".join(f"{each:.4g}" for each in sorted(set(ours)))
            text = f"clipping scales the gradient by {said} on the ranks and by {right:.4g} in one process: it sees another norm"
            yield Finding(at + 1, CLIPPING, "clipping", text)

    def _settings(self, at: int, steps: list[Step], one: Step) -> Iterator[Finding]:
        for number, step in enumerate(steps):
            for ours, theirs in zip(step.line.settings, one.line.settings, strict=False):
                for key in sorted(ours.keys() & theirs.keys(), key=lambda key: (key != "lr", key)):
                    here, there = ours[key] or 0.0, theirs[key] or 0.0
                    away = abs(here - there) / (abs(there) or 1.0)
                    wrong = away > 1e-9
                    self._note(
                        "learning rate and other settings", away if wrong else 0.0, 1e-9, f"step {at + 1}, {key}"
                    )
                    if wrong:
                        yield Finding(at + 1, SETTINGS, *self._setting(at, number, key, here, there))
                        return

    def _setting(self, at: int, rank: int, key: str, here: float, there: float) -> tuple[str, str]:
        if key != "lr":
            return "settings", f"{key} is {here:.6g} on rank {rank} and {there:.6g} in one process"
        said = f"the learning rate is {here:.6g} on rank {rank} and {there:.6g} in one process"
        if self._often(at, rank):
            return "scheduler", f"{said}: the scheduler steps {self._world} times a step"
        times = here / there if there else math.inf
        for name, value in (
            ("the number of ranks", self._world),
            ("the root of the number of ranks", self._world**0.5),
        ):
            if math.isclose(times, value, rel_tol=1e-6):
                return "lr scaled", f"{said}: it is scaled by {name}, though the global batch is the same"
        return "lr", said

    def _often(self, at: int, rank: int) -> bool:
        """Whether the learning rate goes N times as fast: that of each step is the one process's of a step N times as late."""
        assert self._one is not None
        ours, theirs = ([step.line.settings[0].get("lr") for step in steps] for steps in (self._many[rank], self._one))
        pairs = [(ours[n], theirs[n * self._world]) for n in range(self._steps) if n * self._world < len(theirs)]
        return at < len(pairs) and all(a and b and math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)

    def _ranks(self, at: int, steps: list[Step]) -> Iterator[Finding]:
        for number, step in enumerate(steps[1:], 1):
            pairs = zip(steps[0].line.layout, step.line.layout, strict=True)
            apart = [ours.name for ours, theirs in pairs if ours.after != theirs.after]
            self._note("weights in which ranks differ", len(apart), 0, f"step {at + 1}" if apart else "")
            if apart:
                text = f"weights of rank {number} are not those of rank 0 after the step ({listed(apart)}): ranks drift apart"
                yield Finding(at + 1, RANKS, "ranks drift", text)
                return

    def _buffers(self, at: int, steps: list[Step]) -> Iterator[Finding]:
        """Those that a forward pass may have used: they come before the gradient. Batch norm's are a matter of its own."""
        if any(step.batch_norm for step in steps):
            return
        for number, step in enumerate(steps[1:], 1):
            pair = steps[0].line.buffers, step.line.buffers
            apart = [name for name in pair[0] if pair[1].get(name) != pair[0][name]]
            self._note("buffers in which ranks differ", len(apart), 0, f"step {at + 1}" if apart else "")
            if apart:
                text = f"buffers of rank {number} are not those of rank 0 ({listed(apart)}): they are not synchronised"
                yield Finding(at + 1, BUFFERS, "buffers", text)
                return


# What is found among the ranks themselves, whatever the one process does.
_WITHIN = (START, EXCHANGE, RANKS, BUFFERS)


def _times(step: Step, scale: float) -> Step:
    return replace(step, exchanged=step.exchanged * scale)


def _ways(steps: list[Step]) -> list[float]:
    """What the ranks' losses come to: their mean, their sum, their mean by samples. Nothing where one is not known."""
    losses = [step.loss for step in steps if step.loss is not None]
    if len(losses) < len(steps):
        return []
    numbers, rows = np.array(losses), np.array([step.rows for step in steps], dtype=np.float64)
    ways = [float(numbers.mean()), float(numbers.sum())]
    return [*ways, float(numbers @ rows / rows.sum())] if rows.sum() else ways


def _when(finding: Finding) -> str:
    return "at the start" if finding.place == START and finding.once else f"from step {finding.step} on,"
