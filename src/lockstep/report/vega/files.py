"""Plots as files, drawn by vl_convert: no browser is needed."""

from __future__ import annotations

from pathlib import Path

from lockstep.report.vega.spec import with_data
from lockstep.report.views import AnyChart

# PNG files have twice the dots of the plot.
DOTS = 2


def svg(chart: AnyChart) -> str:
    import vl_convert

    return str(vl_convert.vegalite_to_svg(with_data(chart)))


def png(chart: AnyChart, path: Path) -> None:
    import vl_convert

    path.write_bytes(vl_convert.vegalite_to_png(with_data(chart), scale=DOTS))
