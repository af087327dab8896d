"""`lockstep demo`: the main job on one screen. One recipe, one process and two ranks, compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.output import console, json_option, note, print_json, styled, table
from lockstep.cli.run import data_root_option, runs_option

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\b
Examples:
  lockstep demo
  lockstep demo --data-root ~/datasets --runs /tmp/runs
"""

# Document D's net and optimizer. The global batch is 256, so that two ranks have something to share out, and the
# learning rate is D's, raised with the square root of the batch ratio (256 / 32).
RECIPE = {
    "model": "mnist-convnet",
    "global_batch": 256,
    "epochs": 3,
    "optimizer.name": "adam",
    "optimizer.lr": 1.4e-3,
    "optimizer.weight_decay": 5e-4,
    "seed": 123,
}
# Of a loss in the first 50 steps. Each step starts from weights that differ by rounding already, and Adam divides small gradients
# by small numbers, so differences grow; a wrong average shows at the size of the loss's own change. The proof is `lockstep verify`.
LOSS_TOLERANCE = 1e-3


@click.command("demo", epilog=EPILOG)
@runs_option
@data_root_option
@json_option
def command(runs: Path | None, data_root: Path | None, as_json: bool) -> None:
    """Train the published MNIST net with one process and with two ranks, and compare.

    Both compute the same recipe on the same data. A third run gives one process both cores, which is what two
    ranks really compete with.
    """
    from lockstep.cli.progress import ProgressLine
    from lockstep.launch import execute, prepare
    from lockstep.placement import cores
    from lockstep.run import Options
    from lockstep.settings import load

    data = _data_name(data_root)
    options = Options(data_root=str(data_root.absolute()) if data_root else None)
    wanted = [("1 process", {"ranks": 1, "threads": 1}), ("2 ranks", {"ranks": 2, "threads": 1})]
    if cores() >= 2:
        wanted.append(("1 process, 2 threads", {"ranks": 1, "threads": 2}))
    else:
        note("this machine has one core: two ranks will take turns on it")
    results = []
    for label, placement in wanted:
        recipe, where = load([], [], {**RECIPE, "data": data, **placement})
        run, spec = prepare(recipe, where, options, runs)
        progress = ProgressLine(label)
        note(f"{label}: {spec.plan.line()}")
        try:
            results.append((label, execute(run, spec, progress=progress)))
        finally:
            progress.clear()
    report = {**compare(results), "report": str(_write_page([run for _, run in results], runs))}
    if as_json:
        print_json(report)
    else:
        render(report, data, console())
        _open_page(Path(report["report"]))


def _write_page(results: list[Any], runs: Path | None) -> Path:
    """The same as one page with all curves, beside the runs."""
    from lockstep.report.document import report
    from lockstep.report.html import page
    from lockstep.report.subject import of_runs
    from lockstep.run import runs_root

    path = runs_root(runs) / "demo.html"
    path.write_text(page(report([of_runs(results)])), encoding="utf-8")
    return path


def _open_page(path: Path) -> None:
    from lockstep.cli.dashboard import has_desktop

    if has_desktop():
        import webbrowser

        webbrowser.open(path.absolute().as_uri())


def _data_name(data_root: Path | None) -> str:
    """MNIST where it can be had; else the embedded set, and a word about it."""
    from lockstep.data import open_data
    from lockstep.errors import DataError

    try:
        open_data("mnist", data_root)
    except DataError as error:
        note(str(error))
        note("MNIST cannot be had, so the demo uses the embedded set of drawn digits: accuracies are not MNIST's")
        return "embedded"
    return "mnist"


def compare(results: list[tuple[str, Any]]) -> dict[str, Any]:
    """The figures of the table and of the three lines below it, all from the run folders."""
    from lockstep.judge import step_losses
    from lockstep.measure.phases import phases_line, step_phases

    (_, one), (_, two) = results[0], results[1]
    base = one.summary()["train_seconds"]
    rows = []
    for label, run in results:
        summary = run.summary()
        known = [value for value in summary["memory_growth_bytes"] if value is not None]
        rows.append(
            {
                "placement": label,
                "seconds": summary["train_seconds"],
                "speed_up": base / summary["train_seconds"],
                "images_per_second": summary["images_per_second"],
                "test_accuracy": summary["test_accuracy"],
                "memory_bytes": sum(known) if len(known) == len(summary["memory_growth_bytes"]) else None,
                "run": str(run.folder),
            }
        )
    early = slice(0, 50)
    a, b = step_losses(one)[early], step_losses(two)[early]
    phases = step_phases(two)
    assert phases is not None
    return {
        "rows": rows,
        "loss_difference": float(abs(a - b).max() / abs(a).max()),
        "ranks_agree": two.summary()["ranks_agree"],
        "test_samples": two.summary()["test_samples"],
        "time_line": phases_line(phases),
    }


def render(report: dict[str, Any], data: str, out: Console) -> None:
    """The table and the three lines below it; docs/pictures.py draws the same."""
    rows = table(
        [f"mnist-convnet on {data}", "train time", "speed-up", "images/s", "test accuracy", "memory, all ranks"],
        [
            [
                row["placement"],
                f"{row['seconds']:.1f} s",
                f"{row['speed_up']:.2f}x",
                f"{row['images_per_second']:,.0f}",
                f"{row['test_accuracy']:.2%}",
                "unknown" if row["memory_bytes"] is None else f"+{row['memory_bytes'] / 1e6:.0f} MB",
            ]
            for row in report["rows"]
        ],
        right=(1, 2, 3, 4, 5),
    )
    out.print(rows)
    same = report["loss_difference"] <= LOSS_TOLERANCE and report["ranks_agree"]
    verdict = ("agrees", "green") if same else ("DIFFERS", "red")
    out.print(
        styled(
            "Mathematics ",
            verdict,
            ": over the first 50 steps the loss of 2 ranks and of 1 process differs by at most "
            f"{report['loss_difference']:.0e} (rounding); {report['test_samples']:,} test samples counted once each.",
        )
    )
    out.print(f"Where the time went, 2 ranks: {report['time_line']}.")
    out.print(
        "One run each, so a few per cent mean nothing. Next: lockstep show last --ranks, lockstep verify, lockstep run --help"
    )
    out.print(f"All curves, and where every step goes, as a page: {report['report']}", soft_wrap=True)
