"""What an exchange costs between two ranks of one machine: by MPI, by shared memory, by gloo, and in a training step.

Each pair of ranks runs all its rounds in one go (`benchmarks.mpi_pair`, `benchmarks.shm_pair`), the ways of a round in
turns, so a round here is a few hundred calls or 30 steps of every way.
"""

from __future__ import annotations

from typing import Any

from benchmarks import mpi_pair, shm_pair
from benchmarks.record import How, Measurement, Section, compare
from benchmarks.settings import Settings

ROUNDS_PER_REPEAT = 12
MPI, RAW = "all_reduce, mpi", "all_reduce, mpi4py itself"
SHM, BARE, GLOO, CALM = (
    "all_reduce, shm",
    "all_reduce, bare shared memory",
    "all_reduce, gloo as it comes",
    "all_reduce, gloo in Lockstep",
)
ALONE = "step, no exchange"
CALLS = {"bare": BARE, "shm": SHM, "gloo": GLOO, "gloo, batch": CALM}
STEPS = {
    "alone": ALONE,
    "meet": "step, ranks only meet",
    "ddp none": "step, ddp that exchanges nothing",
    "ddp shm": "step, ddp over shm",
    "flat shm": "step, flat over shm",
    "ddp gloo": "step, ddp over gloo",
    "flat gloo": "step, flat over gloo",
}
# Shares are of time, speeds are against the second one's: a step at 0.9 times the speed of one without exchange.
COMPARISONS: tuple[tuple[str, str, How, float | None], ...] = (
    (MPI, RAW, "share", 2.0),
    (SHM, BARE, "share", 3.0),
    (SHM, GLOO, "speed", 20.0),
    (SHM, CALM, "speed", None),
    (STEPS["ddp shm"], ALONE, "speed", 0.90),
    (STEPS["flat shm"], ALONE, "speed", 0.97),
    (STEPS["meet"], ALONE, "speed", None),
    (STEPS["ddp none"], ALONE, "speed", None),
    (STEPS["flat shm"], STEPS["meet"], "speed", None),
    (STEPS["ddp gloo"], ALONE, "speed", None),
    (STEPS["flat gloo"], ALONE, "speed", None),
)


def measure(settings: Settings) -> Section:
    """Both pairs, one after the other: four ranks at once would share two cores."""
    rounds = ROUNDS_PER_REPEAT * settings.repeats
    title = f"Exchange between two ranks: all_reduce of {mpi_pair.BYTES:,} bytes, and a step at batch 32 a rank"
    section = Section("exchange", title, "call or step", "milliseconds", [])
    by_mpi = mpi_pair.measure_pair(rounds)
    section.notes.append(f"mpi by {by_mpi['mpi']}, both ways in the same processes.")
    for key, name in (("ours", MPI), ("raw", RAW)):
        _add(section, name, mpi_pair.CALLS, by_mpi[f"{key}_us"], by_mpi[f"{key}_cpu_us"])
    raw = shm_pair.measure(rounds)["raw"]
    for way, name in CALLS.items():
        _add(section, name, shm_pair.CALLS[way], raw["calls_us"][way], raw["calls_cpu_us"][way])
    for way, name in STEPS.items():
        _add(section, name, shm_pair.STEPS, raw["steps_us"][way], raw["steps_cpu_us"][way])
    for ours, theirs, how, target in COMPARISONS:
        found = compare(section.measurements, ours, theirs, how, "wall", target)
        if found:
            section.comparisons.append(found)
    section.notes.append("CPU time is of one rank; ranks that wait by looking are busy all the time.")
    return section


def _add(section: Section, name: str, units: int, wall_us: list[float], cpu_us: list[float]) -> None:
    details: dict[str, Any] = {}
    for number, (wall, cpu) in enumerate(zip(wall_us, cpu_us, strict=True), 1):
        order = len(section.measurements) + 1
        section.measurements.append(
            Measurement(order, number, name, units, wall * units / 1e6, cpu * units / 1e6, details)
        )
