"""Strategies over a slow link: the same recipe between two emulated hosts, 100 Mbit/s and 20 ms apart.

Time and test accuracy go together here: local-sgd and diloco send less because they compute something else. Every round has
another seed, the same for all contenders, so accuracies differ from round to round as they would for anyone.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from itertools import count

from benchmarks import ours, stats
from benchmarks.processes import ContenderFailed, run
from benchmarks.record import Measurement, Section, compare
from benchmarks.rounds import Contender, Span, interleave
from benchmarks.settings import Settings

LINK = "100mbit,20ms"
EPOCHS = 3
GLOBAL_BATCH = 256
FIRST_SEED = 123
DDP = "ddp"
LOCAL_8 = "local-sgd, every 8"
LOCAL_32 = "local-sgd, every 32"
DILOCO = "diloco, every 32"
ALONE = "one rank, no link"
BETWEEN_HOSTS = ("ranks=2", "backend=gloo", "hosts=emulated:2", f"link={LINK}")
PLACEMENTS: dict[str, tuple[str, ...]] = {
    DDP: (*BETWEEN_HOSTS, "strategy=ddp"),
    LOCAL_8: (*BETWEEN_HOSTS, "strategy=local-sgd", "local_sgd.every=8"),
    LOCAL_32: (*BETWEEN_HOSTS, "strategy=local-sgd", "local_sgd.every=32"),
    DILOCO: (*BETWEEN_HOSTS, "strategy=diloco", "local_sgd.every=32"),
    # For honesty: what the same job takes where nothing is sent at all.
    ALONE: ("ranks=1",),
}
# The first epoch's mean loss: ddp and one rank are the same mathematics, up to rounding.
LOSS_TOLERANCE = 1e-3


def measure(settings: Settings) -> Section:
    """Three epochs of MNIST each time: enough for an accuracy that says something."""
    contenders: dict[str, Contender] = {
        name: partial(_train, words, settings.samples, count(FIRST_SEED)) for name, words in PLACEMENTS.items()
    }
    outcome = interleave("slow_link", contenders, settings.repeats, settings.seed)
    title = f"Strategies over a link of {LINK.replace(',', ' and ')}, global batch {GLOBAL_BATCH}, {EPOCHS} epochs"
    section = Section("slow_link", title, "images", "rate", outcome.measurements)
    for faster in (LOCAL_8, LOCAL_32, DILOCO, ALONE):
        found = compare(outcome.measurements, faster, DDP, "speed", "wall")
        if found:
            section.comparisons.append(found)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    _check(section)
    return section


def _train(words: tuple[str, ...], samples: int | None, seeds: count[int]) -> Span:
    """One run in a fresh process, each with the next seed; loss and accuracy are of the test set."""
    limit = () if samples is None else (f"train_limit={samples}",)
    chosen = ("threads=1", f"global_batch={GLOBAL_BATCH}", f"epochs={EPOCHS}", "shuffle=true", f"seed={next(seeds)}")
    recipe = (*ours.RECIPE, *chosen, "optimizer.lr=0.001", "optimizer.weight_decay=0", *limit)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as runs:
        output = run([ours.executable(), "run", *recipe, *words, "--runs", runs, "--json"], None, 1)
    try:
        document = json.loads(output)
        return Span(
            int(document["train_images"]),
            float(document["train_seconds"]),
            float(document["train_cpu_seconds"]),
            {
                "loss": float(document["test_loss"]),
                "accuracy": float(document["test_accuracy"]),
                "first_epoch_loss": float(document["epochs"][0]["train_loss"]),
                "seconds": float(document["train_seconds"]),
            },
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ContenderFailed(f"lockstep's JSON is not as expected: {type(error).__name__} {error}") from None


def _check(section: Section) -> None:
    """Say what each has learnt in what time, and refuse figures of a ddp that is not one process."""
    if not section.measurements:
        section.refuse("nothing was measured")
        return
    section.notes.append("Loss and accuracy in the table are of the test set, after the last round's seed.")
    for name in PLACEMENTS:
        mine = [one for one in section.measurements if one.contender == name]
        if mine:
            section.notes.append(_line(name, mine))
    for number in {one.round for one in section.measurements}:
        losses = [
            one.details["first_epoch_loss"]
            for one in section.measurements
            if one.round == number and one.contender in (DDP, ALONE)
        ]
        if len(losses) == 2 and stats.relative_spread(losses) > LOSS_TOLERANCE:
            section.refuse(f"round {number}: ddp and one rank differ in the first epoch's loss by more than rounding")


def _line(name: str, mine: list[Measurement]) -> str:
    accuracies = [one.details["accuracy"] for one in mine]
    seconds = stats.median([one.details["seconds"] for one in mine])
    return (
        f"{name}: {seconds:.1f} s of training (median), test accuracy {stats.median(accuracies):.2%} "
        f"({min(accuracies):.2%} to {max(accuracies):.2%}, n = {len(mine)} seeds)."
    )
