"""`lockstep predict RUN` of an attached command: from what was seen, with the step that was seen as its anchor, and refusals in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.errors import InputError
from lockstep.launch.emulated.link import parse_link
from lockstep.measure.view import RunView
from lockstep.placement import Placement
from lockstep.predict.assumed import bounds
from lockstep.predict.attached import CONTENTION, Shown, assembled, remarks, shown
from lockstep.predict.document import document_of_attached
from lockstep.predict.exchange import Software
from lockstep.predict.messages import Gradient
from lockstep.predict.scaling import Ask, judge, table
from lockstep.recipe import Recipe
from lockstep.run import Run
from support import Cli
from test_attach import DDP, attach, torchrun, write

SOFTWARE = [Software(backend="gloo", ranks=2, points=[(4.0, 1e-4), (1e6, 1e-3), (1e7, 1e-2)])]
PARTS = {"data": 0.001, "forward": 0.01, "backward": 0.02, "optimizer": 0.003, "other": 0.001}


def seen(ranks: int = 1, exchange: float = 0.0, waiting: float = 0.0, passes: float = 1.0, **more: Any) -> Shown:
    total = sum(PARTS.values()) + exchange + waiting
    chosen: dict[str, Any] = {
        "name": "run",
        "ranks": ranks,
        "steps": 64,
        "step": {**PARTS, "exchange": exchange, "waiting": waiting, "total": total},
        "late": (0.02 * np.random.default_rng(0).normal(size=(ranks, 64))).tolist(),
        "passes": passes,
        "batch": 32,
        "gradients": [Gradient(bytes=4_000_000, ready=1.0), Gradient(bytes=2_000_000, ready=0.5)],
        "timed": True,
        "recipe": Recipe(model="train.py", data="not known"),
        "placement": Placement(ranks=ranks, threads=1, device="cpu", backend="gloo", strategy="ddp", pin=False),
        "cores": 2,
        "cpu": "",
        "created": 0.0,
    }
    return Shown(**{**chosen, **more})


def predicted(of: Shown, *counts: int, accumulation: int | None = None) -> dict[int, dict[str, Any]]:
    host = replace(of.placement, ranks=2)
    fit = assembled(of, host, SOFTWARE, accumulation)
    ask = Ask(batch=int(fit.compute.alone[0].samples), weak=True, per_host=2, link=parse_link("10gbit,50us"))
    rows = table(fit, ask, counts)
    for row in rows:
        low, high = bounds(fit, of, row)
        assert row.step
        assert low <= row.step.seconds <= high
    found = document_of_attached(of, fit, ask, rows, judge(fit, ask, rows), remarks(of, accumulation), [])
    return {row["ranks"]: row for row in found["rows"]}


def test_the_ranks_that_were_seen_take_what_was_seen_and_more_ranks_differ_by_the_model() -> None:
    of = seen(ranks=2, exchange=0.02, waiting=0.004)
    rows = predicted(of, 2, 4, 8)
    assert rows[2]["step_ms"] == pytest.approx(1e3 * of.step["total"], rel=1e-6)
    assert rows[2]["images_per_second"] == pytest.approx(64 / of.step["total"], rel=1e-6)
    # What is neither exchange nor waiting, without what ranks that fill a host take from each other.
    assert rows[1]["step_ms"] == pytest.approx(35.0 / (1 + CONTENTION))
    assert predicted(seen(ranks=2, exchange=0.02, cores=4), 2)[1]["step_ms"] == pytest.approx(35.0), "half of the cores"
    assert rows[2]["step_ms"] < rows[4]["step_ms"] < rows[8]["step_ms"]
    slow = predicted(replace_step(of, exchange=0.05), 2, 4)
    added = [one[4]["exchange_ms"] - one[2]["exchange_ms"] for one in (rows, slow)]
    assert added[0] == pytest.approx(added[1]), "the difference is the model's, whatever was seen"


def replace_step(of: Shown, **parts: float) -> Shown:
    return seen(ranks=of.ranks, **{"waiting": of.step["waiting"], **parts})


def test_one_process_says_what_it_cannot_know() -> None:
    of = seen(batch=None)
    rows = predicted(of, 2)
    assert rows[2]["compute_ms"] == pytest.approx(35.0)
    assert rows[2]["contention_ms"] == pytest.approx(35.0 * CONTENTION)
    assert rows[2]["exchange_ms"] > 0
    assert (rows[2]["images_per_second"], rows[2]["global_batch"]) == (None, None)
    said = " ".join(remarks(of, None))
    assert "The global batch is not known" in said
    assert "neither DDP's own work" in said
    assert "fill this host" in " ".join(remarks(seen(placement=Placement(threads=2)), None))


def test_the_steps_of_another_machine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that was kept before it had its kind may be this machine's."""
    here = "AMD EPYC (family 26, model 2)"
    monkeypatch.setattr("lockstep.predict.attached.cpu_model", lambda: here)

    def named(cpu: str) -> bool:
        return f"The steps are those of another machine ({cpu}), the all-reduce is this one's ({here})." in remarks(
            seen(cpu=cpu), None
        )

    others = "AMD EPYC (family 25, model 17)", "AMD EPYC 7763", "AMD"
    assert [named(cpu) for cpu in (*others, "AMD EPYC", here, "")] == [True, True, True, False, False, False]


def test_accumulation_adds_passes_and_no_exchange() -> None:
    once, twice = (predicted(seen(), 2, accumulation=count)[2] for count in (1, 2))
    assert twice["compute_ms"] == pytest.approx(2 * (35.0 - 3.0) + 3.0)
    assert twice["exchange_ms"] == pytest.approx(once["exchange_ms"])
    assert predicted(seen(passes=2.0), 2, accumulation=1)[1]["compute_ms"] == pytest.approx(0.5 * (35.0 - 3.0) + 3.0)


@pytest.mark.timeout(300)
def test_a_real_command_and_what_has_no_basis(cli: Cli) -> None:
    write(cli, "ddp", DDP)
    assert attach(cli, *torchrun("ddp.py", "x.pt"), options=("--batch", "64", "--name", "two")).returncode == 0
    answer = cli("predict", "two", "--ranks", "2,4", "--link", "1gbit,1ms", "--json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    run = RunView(cli.runs / "two")
    mean = 1e3 * float(np.mean([parts["total"] for parts in run.split()]))
    assert {row["ranks"]: row for row in found["rows"]}[2]["step_ms"] == pytest.approx(mean, rel=1e-6)
    sizes = run.gradients()
    assert sum(sizes["bytes"]) == 4 * (128 * 512 + 512 + 512 * 10 + 10)
    assert len(sizes["ready"]) == len(sizes["bytes"])
    assert max(sizes["ready"]) == 1.0
    text = cli("predict", "two", "--ranks", "2").stdout
    assert "From what was seen" in text
    assert "The global batch is not known" not in text

    for words, said in (
        (("--batch", "4"), "only the steps that were seen are known"),
        (("optimizer.lr=1",), "nothing can be changed but accumulation=N"),
    ):
        refused = cli("predict", "two", *words)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
        assert said in refused.stderr
    for name, change, said in (
        ("dp", {"strategy": "dp"}, "nn.DataParallel"),
        ("fsdp", {"strategy": "fsdp"}, "FSDP"),
        ("silent", {"strategy": None, "collectives": 0}, "exchanged no gradients"),
    ):
        with pytest.raises(InputError, match=said):
            shown(RunView(changed(cli.runs, name, change)))
    (cli.runs / "two/ranks/0000/gradients.json").unlink()
    assert "how large its gradients are was not seen" in cli("predict", "two").stderr


def changed(runs: Path, name: str, change: dict[str, Any]) -> Path:
    """The run with other facts told by its first rank."""
    shutil.copytree(runs / "two", runs / name)
    path = Run(runs / name).rank_folder(0) / "status.json"
    beat = json.loads(path.read_text())
    beat["attached"] |= change
    path.write_text(json.dumps(beat))
    return runs / name
