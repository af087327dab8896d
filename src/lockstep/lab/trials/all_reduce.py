"""An all-reduce of the student's own: its sums checked on two and three ranks, sizes even and odd, then a race against the reference."""

from __future__ import annotations

from pathlib import Path

from lockstep.backends.costs.plan import OWN, OWN_WITHIN, Task, placement_for
from lockstep.comms.pool import BrokenPool, ProcessPool, wrong_result
from lockstep.errors import InputError
from lockstep.lab.own_code import Request
from lockstep.lab.trials import Failed
from lockstep.lab.trials.racing import REFERENCE, YOURS
from lockstep.process import stat_fields
from lockstep.turns import Contender, ContenderFailed, Taken
from lockstep.turns.guard import TICKS_S

# Bytes, four for each number: fewer numbers than ranks, as many, sizes that no number of ranks divides, and as large as a small net.
SIZES = (4, 8, 12, 20, 28, 4 * 64, 4 * 1001, 17_064, 4 * 65_537, 1 << 20)
RANKS = (2, 3)
# Calls take milliseconds. One that takes this long waits for a message that nobody sends.
HANGS_S = 25.0
CALLS = 3
RACE_SIZE = 1 << 20


def judge(request: Request, folder: Path) -> tuple[str, str]:
    """What is wrong, or what was found right."""
    checks = 0
    for ranks in RANKS:
        pool = ProcessPool(_task(request.file, request.object, ranks), folder / f"ranks-{ranks}")
        over = False
        try:
            pool.start()
            for size in SIZES:
                # One call first: a rank that finds its sum wrong makes no more, and the others would wait for it.
                for case, calls in ((OWN, 0), (OWN_WITHIN, 0), (OWN, CALLS)):
                    answers = pool.measure(case, size, calls, seed=size, limit_s=HANGS_S)
                    if wrong := wrong_result(answers, pool.task.placement):
                        return f"wrong on {ranks} ranks, for a tensor of {size // 4} numbers: {wrong}", ""
                    checks += sum(answer["checks"] for answer in answers)
            over = True
        except BrokenPool as broken:
            said = "it hangs" if broken.kind == "hang" else "it fails"
            raise Failed(f"{said} on {ranks} ranks: {broken.reason}") from None
        except InputError as error:
            return str(error).removeprefix("--own "), ""
        finally:
            pool.end(politely=over)
    return "", f"the sums of 2 and of 3 ranks are right for {len(SIZES)} sizes, {checks} checks"


def contenders(request: Request, folder: Path) -> list[Contender]:
    return [
        Pooled(name, file, request.object, folder / f"race-{name}")
        for name, file in ((REFERENCE, request.reference), (YOURS, request.file))
    ]


def _task(file: str, name: str, ranks: int) -> Task:
    placement = placement_for("gloo", "cpu", ranks, 2 * HANGS_S)
    return Task(placement=placement, own=f"{file}:{name}", messages_alone=True)


class Pooled:
    """A contender of two ranks that call one function again and again; between windows they sleep."""

    whole_steps = 1

    def __init__(self, name: str, file: str, function: str, folder: Path) -> None:
        self.name = name
        self._task, self._folder = _task(file, function, 2), folder
        self._pool: ProcessPool | None = None
        self._seed = 0

    def start(self, number: int) -> None:
        self._pool = ProcessPool(self._task, self._folder / str(number))

    def ready(self) -> None:
        assert self._pool is not None
        try:
            self._pool.start()
        except BrokenPool as broken:
            raise ContenderFailed(broken.reason) from None

    def take(self, lead: int, steps: int) -> Taken:
        assert self._pool is not None
        self._seed += 1
        before = self._used()
        try:
            answers = self._pool.measure(OWN, RACE_SIZE, lead + steps, self._seed, HANGS_S + 0.5 * (lead + steps))
        except BrokenPool as broken:
            raise ContenderFailed(broken.reason) from None
        if wrong := wrong_result(answers, self._task.placement):
            raise ContenderFailed(f"a result was wrong: {wrong}")
        # A call is over when the last rank has finished it.
        times = [max(each) for each in zip(*(answer["times_ns"] for answer in answers), strict=True)][lead:]
        used = self._used() - before
        return Taken(samples=float(len(times)), wall=max(sum(times), 1) / 1e9, cpu=used, used=used)

    def end(self) -> None:
        if self._pool is not None:
            self._pool.end(politely=False)
            self._pool = None

    def _used(self) -> float:
        """Processor seconds of its ranks."""
        assert self._pool is not None
        pids = [int(path.read_text() or 0) for path in self._pool.folder.glob("ranks/*/pid")]
        return sum(sum(map(int, fields[11:13])) / TICKS_S for pid in pids if (fields := stat_fields(pid)))
