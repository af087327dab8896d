"""Cells, lines and capabilities as the rows of tables."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.backends.costs.cells import Cell, Fitted
from lockstep.comms.capabilities import COLUMNS, ROWS, Answer
from lockstep.units import digits

CELL_HEADERS = ["bytes", "backend", "median µs", "5–95 % µs", "min µs", "n", "alg GB/s", "bus GB/s", "result"]
CELL_RIGHT = (0, 2, 3, 4, 5, 6, 7)
LINE_HEADERS = ["collective", "ranks", "backend", "alpha µs", "beta GB/s", "residual", "sizes"]
LINE_RIGHT = (1, 3, 4, 5, 6)


def cell_row(cell: Cell) -> list[str]:
    result = f"ok ({cell.checks} checks)" if cell.state == "ok" else f"{cell.state}: {cell.reason}"
    spread = f"{number(cell.p5_us)}–{number(cell.p95_us)}" if cell.n else "–"
    size = f"{cell.message_bytes:,}" if cell.collective != "barrier" else "–"
    return [
        size,
        cell.backend,
        number(cell.median_us),
        spread,
        number(cell.min_us),
        str(cell.n) if cell.n else "–",
        number(cell.algorithm_gbs),
        number(cell.bus_gbs),
        result,
    ]


def line_row(fitted: Fitted) -> list[str]:
    line = fitted.line
    return [
        fitted.collective,
        str(fitted.ranks),
        fitted.backend,
        number(line.alpha_us),
        number(line.beta_gbs),
        f"{line.residual:.0%}",
        str(line.n),
    ]


def number(value: float | None) -> str:
    return "–" if value is None else digits(value, 3)


def capability_table(answers: Sequence[Answer]) -> tuple[list[str], list[list[str]], list[str]]:
    """Headers, rows and notes: one column per backend and device, one note per different reason."""
    known = {(a.collective, a.backend, a.device): a for a in answers}
    columns = [column for column in COLUMNS if any((a.backend, a.device) == column for a in answers)]
    notes: list[str] = []
    rows = []
    for row in ROWS:
        texts = [row.replace("_list", ", list form").replace("send_recv", "send, recv")]
        for backend, device in columns:
            texts.append(_capability(known[row, backend, device], notes))
        rows.append(texts)
    headers = ["collective", *(f"{backend} {'GPU' if device == 'cuda' else 'CPU'}" for backend, device in columns)]
    return headers, rows, [f"({i}) {note}" for i, note in enumerate(notes, 1)]


def _capability(answer: Answer, notes: list[str]) -> str:
    text = answer.answer
    if answer.reason:
        if answer.reason not in notes:
            notes.append(answer.reason)
        text += f" ({notes.index(answer.reason) + 1})"
    return f"{text}, was {answer.published}" if answer.differs else text
