"""What is computed again of a hand-in's runs: `python -m lockstep.lab.again FOLDER`, a process of its own.

Of each run model.pt is loaded (weights only) and tested on the whole test set, and the first steps are trained again in one process, from the seed
that run.json says. The same recipe computes the same losses on every placement, so records that were made up, or made with another seed, differ.
FOLDER has request.json; answers.json is written beside it, anew after every run: what ends this process costs the run that it was at.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import DataError, LockstepError, first_line
from lockstep.files import write_atomically
from lockstep.lab.graded import lacking
from lockstep.run import Run

STEPS = 3
# Of processor time, for one run: on a busy machine no run has less of it.
LIMIT_S = 150
# For each run beside that: imports, and what a signal cannot interrupt.
MORE_S = 30


class Request(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[str]
    data_root: str | None = None


class Answer(msgspec.Struct, kw_only=True):
    """Of one run."""

    problem: str = ""
    """Why it could not be computed again."""
    unsettled: str = ""
    """The same, where it is no fault of the run: this machine has not the data or the time."""
    accuracy: float | None = None
    weights: str = ""
    """The digest of model.pt's weights, as its ranks have written down that of theirs."""
    losses: list[float] = []
    """The mean loss of a sample in each of the first steps."""
    train_samples: int = 0
    test_samples: int = 0
    """Of the data set, within the recipe's limits."""
    settled: int = 0
    """How many of these have to agree: the first alone, where a placement or a schedule changes the others."""


def main() -> None:
    folder = Path(sys.argv[1])
    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=Request)
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _too_long)
    answers = {}
    for at, name in enumerate(request.runs):
        answers[name] = _answer(Run(Path(name)), folder / f"again-{at}", request)
        write_atomically(folder / "answers.json", msgspec.json.encode(answers))


class TooLong(BaseException):
    """A run has used up its processor time. No `except Exception` on its way takes it for a fault of the run."""


def _too_long(number: int, frame: Any) -> None:
    raise TooLong


def _answer(run: Run, scratch: Path, request: Request) -> Answer:
    answer = Answer()
    try:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        _test(run, answer, request.data_root)
        _first_steps(run, answer, scratch, request.data_root)
    except TooLong:
        answer.unsettled = f"it takes more than {LIMIT_S} s of a processor here"
    except DataError as error:
        answer.unsettled = first_line(error)
    except Exception as error:  # torch raises many kinds for weights and settings that do not go together
        if lack := lacking(error):
            answer.unsettled = lack
        else:
            kind = "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "
            answer.problem = f"{kind}{first_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        shutil.rmtree(scratch, ignore_errors=True)
    return answer


def _test(run: Run, answer: Answer, data_root: str | None) -> None:
    import torch

    from lockstep.deploy.subject import CPU, load
    from lockstep.training.evaluate import evaluate
    from lockstep.training.loss import Loss
    from lockstep.training.precision import Precision
    from lockstep.training.state import digest

    state = torch.load(run.folder / "model.pt", weights_only=True, map_location="cpu")
    answer.weights = digest(state)
    subject = load(run, data_root)
    recipe, samples = subject.spec.recipe, subject.spec.plan.test_samples
    precision = Precision(recipe, CPU)
    found = evaluate(
        precision.prepare(subject.model),
        subject.test,
        samples,
        (0, samples),
        subject.spec.placement.eval_batch,
        precision,
        recipe=recipe,
        loss_of=Loss(recipe, subject.data.class_weights),
    )
    answer.accuracy = found.accuracy
    answer.train_samples, answer.test_samples = len(subject.data.train_labels), len(subject.data.test_labels)


def _first_steps(run: Run, answer: Answer, scratch: Path, data_root: str | None) -> None:
    import torch

    from lockstep.backends.ranks import Rank
    from lockstep.launch import prepare
    from lockstep.measure.records import mean_losses, read_steps
    from lockstep.placement import Placement, changes_mathematics
    from lockstep.recipe import global_terms
    from lockstep.run import Options
    from lockstep.training.assemble import assemble
    from lockstep.training.context import Context

    spec = run.spec()
    whole = changes_mathematics(spec.placement, spec.recipe) is None and spec.recipe.schedule.name == "constant"
    answer.settled = min(STEPS, spec.plan.total_steps) if whole else 1
    recipe = msgspec.structs.replace(
        global_terms(spec.recipe), max_steps=answer.settled, fused=False, compile=False, test_limit=1
    )
    alone = Placement(device="cpu", threads=1, pin=False)
    made, planned = prepare(recipe, alone, Options(save_model=False, data_root=data_root), scratch, "again")
    assemble(Context(made, planned, Rank(0, 1, 0, 1), torch.device("cpu"))).fit()
    answer.losses = [float(loss) for loss in mean_losses([read_steps(made.rank_folder(0) / "steps.bin")])]


def compare(run: Run, answer: Answer, rows: list[Any], recorded: dict[str, Any]) -> list[str]:
    """Where what was computed again is not what was handed in."""
    from lockstep.measure import phases
    from lockstep.measure.records import mean_losses
    from lockstep.plan import plan

    if answer.unsettled:
        return []
    if answer.problem:
        return [f"model.pt or the first steps could not be computed again: {answer.problem}"]
    found, spec = [], run.spec()
    planned = plan(spec.recipe, spec.placement, answer.train_samples, answer.test_samples)
    if planned != spec.plan:
        found.append("its plan was edited: it has other steps or samples than its recipe")
    if recorded.get("weights_sha256") != answer.weights:
        found.append("model.pt holds other weights than its ranks ended with: it is of another run, or was changed")
    told, coarse = recorded.get("test_accuracy"), spec.recipe.precision != "fp32" or spec.recipe.quantize != "off"
    # Rounding decides a few samples whose two best classes are nearly equal, more of them in 16 bits.
    allowed = max(2.0 / max(1, spec.plan.test_samples), 0.01 if coarse else 0.002)
    if told is None or answer.accuracy is None or abs(told - answer.accuracy) > allowed:
        shown = "none" if told is None else f"{told:.2%}"
        again = "nothing" if answer.accuracy is None else f"{answer.accuracy:.2%}"
        found.append(f"test_accuracy was edited: {shown} is written down, and model.pt, tested again, comes to {again}")
    for at, (ours, theirs) in enumerate(zip(answer.losses, mean_losses(phases.common(rows)), strict=False)):
        if not abs(ours - float(theirs)) <= (3e-2 if coarse else 1e-3) * abs(ours):
            found.append(
                f"step {at + 1} was not computed by this run: its loss is recorded as {float(theirs):.5g}, and with its seed it is {ours:.5g}"
            )
            break
    return found


if __name__ == "__main__":
    main()
