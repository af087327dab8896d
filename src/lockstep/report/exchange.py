"""What an exchange costs on this machine: latency and bandwidth over message size, from what `lockstep comms` has kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.backends.costs import store
from lockstep.backends.costs.cells import Cell
from lockstep.report.subject import Subject
from lockstep.report.views import Axis, Lines, Series, short, shorts
from lockstep.units import counted

SECTION = "exchange"
COLLECTIVE = "all_reduce"
COLOURS = {"gloo": "c0", "mpi": "c1", "shm": "c2", "nccl": "c3"}


def charts(subject: Subject) -> list[Lines]:
    """Only beside runs of a machine like this one, where the measurements are from."""
    ranks = sorted({run.spec().plan.ranks for run in subject.runs} - {1})
    here = store.machine()
    if not ranks or not any(_alike(run.environment(), here) for run in subject.runs):
        return []
    return of_cells([cell for cell in store.load() if cell.ranks in ranks or cell.ranks == 2])


def of_cells(cells: Sequence[Cell]) -> list[Lines]:
    known = _known(cells, COLLECTIVE)
    if not known:
        return []
    return [
        *latency(cells, COLLECTIVE, "Time of an all-reduce"),
        Lines(
            id="exchange-bandwidth",
            section=SECTION,
            title="Bus bandwidth of an all-reduce",
            says="Bus bandwidth as nccl-tests defines it: bytes that each rank must move, divided by the median time.",
            x=Axis(label="message", unit="binary", log=True),
            y=Axis(label="bus bandwidth", unit="bandwidth", log=True),
            series=[_bandwidth(name, part) for name, part in _groups(known).items()],
        ),
    ]


def latency(cells: Sequence[Cell], collective: str, title: str) -> list[Lines]:
    """The plot of one collective, for the report and for `lockstep comms`; none where nothing was measured."""
    groups = _groups(_known(cells, collective))
    if not groups:
        return []
    return [
        Lines(
            id="exchange-latency",
            section=SECTION,
            title=title,
            says="Median time of a call over message size, with the middle 90 % as a band; measured by 'lockstep comms' on this machine.",
            x=Axis(label="message", unit="binary", log=True),
            y=Axis(label="time of a call", unit="seconds", log=True),
            series=[_latency(name, part) for name, part in groups.items()],
        )
    ]


def _known(cells: Sequence[Cell], collective: str) -> list[Cell]:
    able = [c for c in cells if c.collective == collective and c.state == "ok" and c.message_bytes and c.median_us]
    return sorted(able, key=lambda cell: (cell.backend, cell.ranks, cell.message_bytes))


def _alike(environment: Mapping[str, object], here: Mapping[str, object]) -> bool:
    return all(environment.get(key) == here[key] for key in ("cpu", "torch"))


def _groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    several = len({cell.ranks for cell in cells}) > 1
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(f"{cell.backend}, {counted(cell.ranks, 'rank')}" if several else cell.backend, []).append(cell)
    return found


def _latency(name: str, cells: Sequence[Cell]) -> Series:
    return Series(
        name=name,
        colour=COLOURS.get(cells[0].backend, "c4"),
        dash=cells[0].ranks > 2,
        x=shorts(cell.message_bytes for cell in cells),
        y=[_us(cell.median_us) for cell in cells],
        low=[_us(cell.p5_us) for cell in cells],
        high=[_us(cell.p95_us) for cell in cells],
    )


def _bandwidth(name: str, cells: Sequence[Cell]) -> Series:
    known = [cell for cell in cells if cell.bus_gbs]
    return Series(
        name=name,
        colour=COLOURS.get(cells[0].backend, "c4"),
        dash=cells[0].ranks > 2,
        x=shorts(cell.message_bytes for cell in known),
        y=shorts(cell.bus_gbs for cell in known),
    )


def _us(value: float | None) -> float | None:
    return None if value is None else short(value / 1e6)
