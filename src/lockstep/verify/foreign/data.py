"""The samples of a step: those of all ranks together against those of the one process, and what makes them differ."""

from __future__ import annotations

from collections import Counter

from lockstep.verify.foreign.finding import BATCH, ORDER_OF, SAMPLES, Finding
from lockstep.verify.foreign.records import Rank


class Samples:
    """What the ranks and the one process saw."""

    def __init__(self, many: list[Rank], one: Rank | None) -> None:
        self._many, self._one = many, one
        self._ranks = len(many)

    def seen(self, at: int) -> bool:
        """Whether the samples of this step (from 0) are known: a model may be called with what are no tensors."""
        ranks = self._many if self._one is None else [*self._many, self._one]
        return all(rank[at].inputs for rank in ranks)

    def finding(self, at: int) -> Finding | None:
        """What is wrong with the samples of this step (from 0), if anything is."""
        step = at + 1
        inputs = [rank[at].inputs for rank in self._many]
        ours = Counter(sample for each in inputs for sample in each)
        if self._one is None:
            return self._alone(step, inputs)
        theirs = Counter(self._one[at].inputs)
        if not ours or not theirs:
            return None
        if ours == theirs:
            return self._labels(at)
        if self._all_alike(inputs):
            return self._same(step, len(inputs[0]))
        rows, expected = ours.total(), theirs.total()
        extra, missing = ours - theirs, theirs - ours
        before = Counter(s for rank in self._many for each in rank[:at] for s in each.inputs)
        if rows > expected and not missing and all(before[s] or ours[s] > 1 for s in extra):
            text = (
                f"the sampler pads: {extra.total()} {_samples(extra.total())} of this epoch {_come(extra.total())} once more, so that "
                f"every rank has as many ({rows} instead of {expected}); drop_last=True leaves them out"
            )
            return Finding(step, SAMPLES, "padding", text)
        if rows != expected:
            stated = rows == expected * self._ranks
            hint = f"; {self._batch_hint(rows)}" if stated else ""
            text = f"{self._ranks} ranks take {rows} samples a step, and one process takes {expected}{hint}"
            return Finding(step, BATCH, "batch", text, open=stated)
        if all(ours[s] > 1 for s in extra):
            count = extra.total()
            text = f"{count} {_samples(count)} of a step {_come(count)} twice, and {count} of the one process's {_are(count)} missing"
            return Finding(step, SAMPLES, "twice", text)
        elsewhere = {s for rank in [*self._many, self._one] for each in rank[:at] for s in each.inputs}
        if self._labels_alike(at) and not elsewhere & extra.keys():
            text = (
                "the labels of a step are the same and the inputs are not: they are changed by random numbers of each rank's own "
                "(augmentation); draw them from a seed of the sample"
            )
            return Finding(step, SAMPLES, "augmentation", text)
        strange = [number for number, each in enumerate(inputs) if not any(theirs[s] for s in each)]
        if 0 < len(strange) < self._ranks and extra.total() == sum(len(inputs[number]) for number in strange):
            text = f"the inputs of rank {strange[0]} are not those of one process, and the others' are: it changes them, or takes other samples"
            return Finding(step, SAMPLES, "inputs", text)
        return self._order(at, ours, theirs)

    def _order(self, at: int, ours: Counter[str], theirs: Counter[str]) -> Finding:
        """Other samples than the one process has: drawn otherwise, or by every rank for itself."""
        assert self._one is not None
        steps = min(len(rank) for rank in self._many)
        window = [Counter(s for each in rank[:steps] for s in each.inputs) for rank in self._many]
        once = max(Counter(s for each in self._one for s in each.inputs).values(), default=1)
        both = [s for s, count in sum(window, Counter()).items() if count > once]
        if both:
            text = (
                f"each rank draws an order of its own: {len(both)} samples came more than once within {steps} steps; "
                "use a DistributedSampler with one seed for all ranks"
            )
            return Finding(at + 1, SAMPLES, "own order", text)
        common = (ours & theirs).total()
        text = (
            f"the ranks see other samples than one process does ({common} of {theirs.total()} in common): the order is drawn otherwise, or "
            "inputs are changed; shuffle by one seed whatever the number of ranks, or do not shuffle for the proof"
        )
        return Finding(at + 1, SAMPLES, ORDER_OF, text, open=True)

    def _labels(self, at: int) -> Finding | None:
        assert self._one is not None
        ours = Counter(label for rank in self._many for label in rank[at].labels)
        theirs = Counter(self._one[at].labels)
        if ours == theirs or not ours or ours.total() != theirs.total():
            return None
        count = (ours - theirs).total()
        return Finding(
            at + 1, SAMPLES, "labels", f"{count} labels of the step differ from the one process's, at the same inputs"
        )

    def _labels_alike(self, at: int) -> bool:
        """So many equal labels are no accident, if they are not all of one kind."""
        assert self._one is not None
        ours = Counter(label for rank in self._many for label in rank[at].labels)
        return len(ours) > 1 and ours == Counter(self._one[at].labels)

    def _all_alike(self, inputs: list[list[str]]) -> bool:
        return bool(inputs[0]) and all(sorted(each) == sorted(inputs[0]) for each in inputs[1:])

    def _same(self, step: int, count: int) -> Finding:
        text = f"{_all(self._ranks)} ranks see the same {count} samples: there is no DistributedSampler, or it does not know the ranks"
        return Finding(step, SAMPLES, "same samples", text)

    def _alone(self, step: int, inputs: list[list[str]]) -> Finding | None:
        """Without a process to compare with."""
        return self._same(step, len(inputs[0])) if self._all_alike(inputs) else None

    def _batch_hint(self, batch: int) -> str:
        return (
            f"its batch is stated per rank and does not come from a DataLoader that could be given another: write {{batch}} where the "
            f"command states it, with --batch {batch}"
        )

    def same_order_again(self) -> Finding | None:
        """A sampler that shuffles by its epoch, and is never told of a new one."""
        rank = self._many[0]
        if not rank:
            return None
        seen: dict[int, int] = {}
        for epoch, at in rank[-1].line.epochs:
            first = seen.setdefault(epoch, at)
            if first < at < len(rank) and self._repeats(rank, first, at):
                text = (
                    f"the order of an earlier epoch comes again (step {first + 1}): the sampler shuffles by its epoch, and "
                    "set_epoch(epoch) is not called"
                )
                return Finding(at + 1, SAMPLES, "set_epoch", text)
        return None

    def _repeats(self, rank: Rank, first: int, at: int) -> bool:
        same_labels = len(set(rank[at].labels)) > 1 and rank[at].labels == rank[first].labels
        return rank[at].inputs == rank[first].inputs or same_labels


def _all(ranks: int) -> str:
    return "both" if ranks == 2 else f"all {ranks}"


def _samples(count: int) -> str:
    return "sample" if count == 1 else "samples"


def _come(count: int) -> str:
    return "comes" if count == 1 else "come"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
