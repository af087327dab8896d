"""The clock of a training that was not written for it: regions that hooks enter and leave, and the gaps between them.

Every nanosecond from the end of one optimizer step to the end of the next goes to exactly one part, so the parts add up to the step. A region
within another one takes its time out of it: an exchange within backward is exchange. A gap belongs to a part by what stands on its two sides
(`GAPS`), else to "other", or to the framework whose loop it is. What may come anywhere (a value that is read, a log, the garbage collector) is
an inset: it says nothing about the gap that it is in. Evaluation and checkpoints are not part of a step and are counted beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns

DATA, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, OTHER, EVALUATION, CHECKPOINT = range(8)
TIMED = 5  # the first of them are those of a row
READING, LOGGING, PROGRESS, SCHEDULE, CALLBACKS, COLLECTING, FRAMEWORK, ZEROING = range(8, 16)
KINDS = 16
BESIDE = slice(READING, ZEROING)
"""The parts of "other" that have a name (layout.BESIDE). What zeroing gradients takes is the optimizer's."""

GAPS = {
    (DATA, FORWARD): DATA,  # the batch goes to its device, and into shape
    (FORWARD, FORWARD): FORWARD,
    (FORWARD, EXCHANGE): FORWARD,
    (FORWARD, BACKWARD): FORWARD,  # a loss that is a function
    (DATA, BACKWARD): FORWARD,  # a model that is a function
    (OPTIMIZER, BACKWARD): FORWARD,
    (BACKWARD, EXCHANGE): EXCHANGE,  # gradients are collected, exchanged and divided by hand
    (BACKWARD, OPTIMIZER): OPTIMIZER,  # clipping, the scale of mixed precision
    (OPTIMIZER, OPTIMIZER): OPTIMIZER,
}
# So many steps of other optimizers without one of the optimizer that ends a step: it is not used any more.
LEAD_LOST = 16
# What writing a row costs is looked at in every N-th step: asking for processor time takes as long as writing one. Never in the first, which
# opens the files.
LOOKED_AT = 8
# How far a pass of a model that was never trained has come to be an evaluation (`evaluate`).
NONE, SEEN, NEXT_BATCH = range(3)

Finished = Callable[[int, "list[int]", int, "list[int]", bool], None]
"""Start, the phases of a row, total, the named parts of other and the number of values read, and whether the row replaces the one before."""


class Clock:
    """Where the time of one thread goes. A few additions per event, about half a microsecond."""

    def __init__(self, finished: Finished, aside: Callable[[int, int], None]) -> None:
        """`finished` takes a step; `aside` the nanoseconds of evaluation and checkpoints so far."""
        self._finished, self._aside = finished, aside
        self.thread = 0
        """The thread that trains; 0: nobody is timed."""
        self.busy = False
        """Within a region in which module calls are of no interest: nearly all of them come from within another one."""
        self.steps = self.events = self.passed = self.own = 0
        """Steps; and what this costs: regions, calls of modules within them, and processor time of writing rows, in nanoseconds."""
        self.backwards = self.collectives = 0
        """Backward passes; and collectives by hand between backward and the update."""
        self.exchanged = self.updates = 0
        """Backward passes that exchanged gradients (DDP); and calls of optimizer.step(), of all optimizers."""
        self.evaluations = 0
        """Calls of models that evaluate."""
        self.ready = 0
        """When the newest gradient of a wrapped model was there."""
        self.exchanges = False
        """The next backward pass ends with an exchange of gradients (DDP)."""
        self.rest = OTHER
        """What a gap is that belongs to no part: "other", or the framework's while a framework's own loop runs."""
        self.reads = 0
        """Values that were read out of tensors in this step."""
        self.stack: list[int] = []
        self._phases = [0] * KINDS
        self._gap = 0
        self._last = self._evaluated = self._saved = 0
        self._before = OPTIMIZER
        self._begun = self._worked = self._evaluating = False
        self._fetched = 0
        self._strange = NONE
        self._row: tuple[list[int], int, list[int]] = ([], 0, [])
        self._lead, self._others = 0, 0
        self._optimizers: set[int] = set()

    def adopt(self, thread: int) -> None:
        """Another thread trains."""
        self.thread = thread
        self.stack = []
        self._restart()

    def _restart(self) -> None:
        """Before the first step: it begins with the last batch that is fetched before something learns from one."""
        if not self.stack:
            self._phases, self._begun, self._gap, self.reads = [0] * KINDS, False, 0, 0

    @property
    def evaluating(self) -> bool:
        return self._evaluating

    @property
    def after_backward(self) -> bool:
        return self._before == BACKWARD and not self.stack

    @property
    def between(self) -> bool:
        """Not within a region; or within an optimizer's step, but in the passes that it asks for, as Lightning has them."""
        return not self.stack or (self.stack[-1] == OPTIMIZER and self._before == FORWARD)

    def enter(self, kind: int) -> None:
        now = perf_counter_ns()
        stack = self.stack
        if stack and stack[-1] == CHECKPOINT:  # the collectives of a checkpoint that all ranks write
            self._phases[CHECKPOINT] += now - self._last
            kind = CHECKPOINT
        elif self._evaluating:
            self._phases[stack[-1] if stack else EVALUATION] += now - self._last
            kind = kind if kind == CHECKPOINT else EVALUATION
        elif stack and (stack[-1] != OPTIMIZER or kind not in (FORWARD, BACKWARD)):
            self._phases[stack[-1]] += now - self._last
        elif self._begun:  # a gap; also before the passes that an optimizer asks for, as L-BFGS and Lightning have them
            self._phases[GAPS.get((self._before, kind), self.rest)] += self._gap + now - self._last
            self._gap = 0
        self._begun = True
        stack.append(kind)
        self.busy = kind != OPTIMIZER
        if kind == OPTIMIZER:
            self._before = kind
        self.events += 1
        self._last = now

    def inset(self, kind: int) -> None:
        """Enter what may come anywhere: which part the gap around it is stays open until the next region."""
        now = perf_counter_ns()
        stack = self.stack
        if stack and stack[-1] != OPTIMIZER:
            self._phases[stack[-1]] += now - self._last
        elif self._evaluating:
            self._phases[EVALUATION] += now - self._last
        elif self._begun:
            self._gap += now - self._last
        stack.append(EVALUATION if self._evaluating else kind)
        self.events += 1
        self._last = now

    def collected(self, nanoseconds: int) -> None:
        """The garbage collector has run, which may be anywhere: its time is taken out of whatever it was in."""
        if not self._evaluating and not (self.stack and self.stack[-1] in (EVALUATION, CHECKPOINT)):
            self._phases[COLLECTING] += nanoseconds
            self._last += nanoseconds

    def leave(self) -> None:
        if not self.stack:  # an interrupt hit between the two
            return
        now = perf_counter_ns()
        kind = self.stack.pop()
        self._phases[kind] += now - self._last
        if kind == OPTIMIZER:
            self._phases[kind] += self._gap
            self._gap = 0
        self._last = now
        self.busy = bool(self.stack) and self.stack[-1] != OPTIMIZER
        if kind < EXCHANGE or kind == OPTIMIZER:
            self._before = kind
        elif EVALUATION <= kind <= CHECKPOINT and self.steps:
            self._aside(self._evaluated + self._phases[EVALUATION], self._saved + self._phases[CHECKPOINT])

    def fetch(self) -> None:
        """A batch is asked for. In an evaluation, it may be the first one of the training that follows."""
        if self.stack and self.stack[-1] == OPTIMIZER:  # an error ended that step, and the script went on
            self.stack.clear()
        if not self.steps and not self._worked:
            self._restart()
        self.enter(DATA)
        if self._strange == SEEN:
            self._strange = NEXT_BATCH
        if self._evaluating and not self._fetched:
            self._fetched = self._last

    def no_more_batches(self) -> None:
        """That was the end of the set that was evaluated."""
        self._fetched = 0

    def work(self, kind: int) -> None:
        """Enter what only training does: a model is called that learns from it, backward, the optimizer."""
        if self._evaluating or not self._worked:
            self._train()
        self.enter(kind)

    def evaluate(self, known: bool) -> None:
        """A model is called that does not learn from it. `known`: it is one that is trained, in evaluation mode.

        Another one may be a teacher, whose pass is a part of the step, or an average of weights that is evaluated, batch after batch. So may
        one that is trained, in training mode: it makes a GAN's fakes or labels for its own step.
        """
        known = known or (self._strange == NEXT_BATCH and not self._worked)
        if self._evaluating:
            self._fetched = 0
        elif known and self.steps:
            self._evaluating, self._fetched = True, 0
            if not self._worked:
                self._move_to_evaluation()
        else:
            self._strange = SEEN
        self.evaluations += self._evaluating
        self.enter(FORWARD)

    def _move_to_evaluation(self) -> None:
        """What came since the last step belongs to the evaluation too; a checkpoint remains one."""
        phases = [0] * KINDS
        phases[CHECKPOINT] = self._phases[CHECKPOINT]
        phases[EVALUATION] = sum(self._phases) + self._gap - phases[CHECKPOINT]
        self._phases, self._gap, self.reads = phases, 0, 0

    def _train(self) -> None:
        """What comes now is training: an evaluation is over, and the batch that was fetched since its last pass is for training."""
        if not self.steps and not self._worked and self._before != DATA:
            self._restart()
        self._worked = True
        if not self._evaluating:
            return
        self._evaluating = False
        self._before = OPTIMIZER
        if self._fetched:
            taken = self._last - self._fetched
            self._phases[EVALUATION] -= taken
            self._phases[DATA] += taken
            self._before = DATA

    def enter_backward(self) -> None:
        if BACKWARD not in self.stack:
            self.backwards += 1
            self.ready = 0
        self.work(BACKWARD)

    def leave_backward(self) -> None:
        """What follows the last gradient, until all are exchanged, is exposed exchange."""
        if BACKWARD in self.stack[:-1]:  # a part of the model is computed again, within another backward pass
            self.leave()
            return
        if self.exchanges and self.ready and self.stack and self.stack[-1] == BACKWARD:
            began = max(self.ready, self._last)  # the last gradient may have come within another pass, which was timed
            self._phases[BACKWARD] += began - self._last
            self._last = began
            self.stack[-1] = EXCHANGE
            self.leave()
            self._before = BACKWARD
        else:
            self.leave()
        if self.exchanges and self.ready:  # else it was a backward pass of another model
            self.exchanged += 1
            self.exchanges = False

    def leave_optimizer(self, optimizer: int) -> None:
        """Of several optimizers, a step ends with the one that came last when each had its first turn."""
        self.leave()
        if self.stack:  # an optimizer within another one
            return
        self.updates += 1
        if optimizer == self._lead:
            self._finish(again=False)
        elif optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._lead = optimizer
            self._finish(again=self.steps > 0)
        else:
            self._others += 1
            if self._others > LEAD_LOST:
                self._lead = optimizer
                self._finish(again=False)

    def _finish(self, again: bool) -> None:
        phases = self._phases
        phases[OPTIMIZER] += phases[ZEROING]
        row, beside = phases[:TIMED], phases[BESIDE]
        total = sum(row) + phases[OTHER] + sum(beside)
        beside.append(self.reads)
        self._evaluated += phases[EVALUATION]
        self._saved += phases[CHECKPOINT]
        start = self._last - total
        if again:
            row = [one + more for one, more in zip(self._row[0], row)]  # noqa: B905  # Python 3.9 has no strict
            beside = [one + more for one, more in zip(self._row[2], beside)]  # noqa: B905
            total += self._row[1]
        else:
            self.steps += 1
        self._row = row, total, beside
        self._phases, self.reads = [0] * KINDS, 0
        self._worked, self._strange, self._others = False, NONE, 0
        if self.steps % LOOKED_AT:
            self._finished(start, row, max(total, 1), beside, again)
        else:
            begin = thread_time_ns()  # the processor's: on a busy machine, others run meanwhile
            self._finished(start, row, max(total, 1), beside, again)
            self.own += LOOKED_AT * (thread_time_ns() - begin)
        self._last = perf_counter_ns()  # what is ours is nobody's
