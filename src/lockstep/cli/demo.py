"""`lockstep demo`: the main job on one screen. One recipe, one process and two ranks, compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import data_root_option, json_option, runs_option
from lockstep.cli.output import console, next_step, note, place, print_json, print_records, styled
from lockstep.errors import DataError
from lockstep.run import Options, runs_root
from lockstep.units import text

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
def command(runs: Path | None, data_root: str | None, as_json: bool) -> None:
    """Train the published MNIST net with one process and with two ranks, and compare.

    Both compute the same recipe on the same data. A third run gives one process both cores, which is what two
    ranks really compete with.
    """
    from lockstep.cli.dashboard import open_browser
    from lockstep.launch import execute, prepare
    from lockstep.machine.cores import cores
    from lockstep.report.progress import ProgressLine
    from lockstep.settings import load

    data = _data_name(data_root)
    options = Options(data_root=data_root)
    wanted = [("1 process", {"ranks": 1, "threads": 1}), ("2 ranks", {"ranks": 2, "threads": 1})]
    if cores() >= 2:
        wanted.append(("1 process, 2 threads", {"ranks": 1, "threads": 2}))
    else:
        note("this machine has one core: two ranks will take turns on it")
    results = []
    for label, placement in wanted:
        recipe, where = load([], [], {**RECIPE, "data": data, **placement})
        run, spec = prepare(recipe, where, options, runs)
        note(f"{label}: {spec.plan.line()}")
        with ProgressLine(label) as progress:
            results.append((label, execute(run, spec, progress=progress)))
    report = {**compare(results), "report": str(_write_page([run for _, run in results], runs))}
    if as_json:
        print_json(report)
    else:
        render(report, data, console())
        kept = place(runs, data_root)
        next_step(
            f"lockstep race ranks=1 ranks=2 --all data={data}{kept} (settles which is faster); "
            f"lockstep verify data={data} ranks=2{kept} (proves that they compute the same)"
        )
        open_browser(Path(report["report"]).absolute().as_uri())


def _write_page(results: list[Any], runs: Path | None) -> Path:
    """The same as one page with all curves, beside the runs."""
    from lockstep.report.document import report
    from lockstep.report.html import page
    from lockstep.report.subject import of_runs

    path = runs_root(runs) / "demo.html"
    path.write_text(page(report([of_runs(results)])), encoding="utf-8")
    return path


def _data_name(data_root: str | None) -> str:
    """MNIST where it can be had; else the embedded set, and a word about it."""
    from lockstep.data import open_data

    try:
        open_data("mnist", data_root)
    except DataError as error:
        note(str(error))
        note("MNIST cannot be had, so the demo uses the embedded set of drawn digits: accuracies are not MNIST's")
        return "embedded"
    return "mnist"


def compare(results: list[tuple[str, Any]]) -> dict[str, Any]:
    """The figures of the table and of the three lines below it, all from the run folders."""
    from lockstep.measure.phases import phases_line
    from lockstep.measure.view import view
    from lockstep.metrics import value
    from lockstep.verify.records import step_losses

    (_, one), (_, two) = results[0], results[1]
    base = one.summary()["train_seconds"]
    rows = [
        {
            "placement": label,
            "seconds": run.summary()["train_seconds"],
            "speed_up": base / run.summary()["train_seconds"],
            "images_per_second": value(view(run), "images_per_second", None),
            "test_accuracy": value(view(run), "accuracy", None),
            "memory_bytes": value(view(run), "memory", None),
            "run": str(run.folder),
        }
        for label, run in results
    ]
    early = slice(0, 50)
    a, b = step_losses(one)[early], step_losses(two)[early]
    seen = view(two)
    phases = seen.phases()
    assert phases is not None
    return {
        "rows": rows,
        "loss_difference": float(abs(a - b).max() / abs(a).max()),
        "ranks_agree": two.summary()["ranks_agree"],
        "test_samples": two.summary()["test_samples"],
        "time_line": f"a step takes {phases_line(phases, seen.split())}",
    }


def render(report: dict[str, Any], data: str, out: Console) -> None:
    """The table and the three lines below it; docs/pictures.py draws the same."""
    from lockstep.metrics import METRICS

    seconds, rate, accuracy, memory = (METRICS[name] for name in ("seconds", "images_per_second", "accuracy", "memory"))
    rows = [
        {
            f"mnist-convnet on {data}": row["placement"],
            seconds.label: seconds.text(row["seconds"]),
            "speed-up": text(row["speed_up"], "times"),
            rate.heading: rate.text(row["images_per_second"]),
            accuracy.label: accuracy.text(row["test_accuracy"]),
            memory.label: memory.text(row["memory_bytes"]),
        }
        for row in report["rows"]
    ]
    print_records(rows, right=range(1, 6), out=out)
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
    out.print(f"All curves, and where every step goes, as a page: {report['report']}", soft_wrap=True)
    out.print("One run each, so a few per cent mean nothing.")
