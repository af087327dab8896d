"""`lockstep comms`: real ranks that exchange real messages, planted faults, and the arithmetic around them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lockstep.backends.costs import choose, store
from lockstep.backends.costs.cells import Cell, lines, summarise
from lockstep.backends.costs.fit import fit
from lockstep.backends.costs.plan import COLLECTIVES, Task, bandwidths, message_bytes, missing, placement_for, sizes
from lockstep.backends.mpi import segments
from lockstep.comms.capabilities import published
from lockstep.comms.pool import BrokenPool, ProcessPool, left_early, unavailable
from lockstep.machine.cuda import cuda_present
from support import Cli, processes_of, wait_for


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The command line with a cache of its own: a test must not change what backend=auto chooses here."""
    result = Cli(tmp_path)
    result.environment["LOCKSTEP_DATA"] = str(tmp_path / "cache" / "data")
    return result


def measured(cli: Cli, *words: str, code: int = 0) -> dict[str, Any]:
    result = cli("comms", *words, "--json")
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def cell_of(document: dict[str, Any], collective: str, size: int, backend: str = "gloo") -> dict[str, Any]:
    cells = document["cells"]
    return next(c for c in cells if (c["collective"], c["bytes"], c["backend"]) == (collective, size, backend))


# ---------------------------------------------------------------- real measurements


def test_every_collective_on_gloo_is_measured_and_right(cli: Cli) -> None:
    document = measured(cli, "--quick", "--backend", "gloo", "--max-bytes", "17064", "--rounds", "1", "--out", "out")
    cells = document["cells"]
    assert {cell["collective"] for cell in cells} == set(COLLECTIVES)
    assert len(cells) == 3 * (len(COLLECTIVES) - 1) + 1, "three sizes, and a barrier has none"
    for cell in cells:
        assert (cell["state"], cell["reason"]) == ("ok", None), cell
        assert cell["n"] >= 3
        assert cell["checks"] >= 2 * cell["ranks"]
        assert 0 < cell["min_us"] <= cell["p5_us"] <= cell["median_us"] <= cell["p95_us"]
    all_reduce = cell_of(document, "all_reduce", 17_064)
    assert all_reduce["algorithm_gbs"] == pytest.approx(17_064 / all_reduce["median_us"] / 1e3)
    assert all_reduce["bus_gbs"] == pytest.approx(all_reduce["algorithm_gbs"]), "2 (n - 1) / n is 1 for two ranks"
    gather = cell_of(document, "gather", 17_064)
    assert gather["bus_gbs"] == pytest.approx(gather["algorithm_gbs"] / 2)
    assert cell_of(document, "all_gather", 4)["message_bytes"] == 8, "one float of each rank is the least"
    assert cell_of(document, "barrier", 0)["bus_gbs"] is None
    assert {line["collective"] for line in document["lines"]} == set(COLLECTIVES) - {"barrier"}
    # It is kept for backend=auto, and the folder that was asked for holds the same.
    assert document["kept_in"].startswith(str(cli.folder / "cache" / "comms"))
    assert len(json.loads(Path(document["kept_in"]).read_text())["cells"]) == len(cells)
    assert document["choices"][0]["why"].startswith("shm: "), "gloo alone was measured, which says nothing against shm"
    assert json.loads((cli.folder / "out" / "comms.json").read_text())["cells"] == cells
    assert json.loads((cli.folder / "out" / "status.json").read_text())["state"] == "done"
    assert not processes_of(cli.folder / "out")


def test_all_backends_of_this_machine_by_a_parent_without_torch(cli: Cli) -> None:
    code = "import sys; sys.modules['torch'] = None\nsys.argv = ['lockstep', *sys.argv[1:]]\nfrom lockstep.cli import main\nmain()"
    words = ["comms", "--quick", "--collective", "all_reduce", "--plot", "chart.svg"]
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env=cli.environment,
        cwd=cli.folder,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lefts = [name for name in ("gloo", "mpi", "shm") if f"{name} is left out: " in result.stderr]
    assert lefts in ([], ["mpi"]), result.stderr
    assert lefts or missing("mpi", "cpu") is None
    rows = [line.split() for line in result.stdout.splitlines() if "checks)" in line]
    for name in {"gloo", "mpi", "shm"} - set(lefts):
        assert [row[0] for row in rows if row[1] == name] == ["4", "1,024", "17,064", "1,048,576"], name
    assert "alpha µs" in result.stdout
    assert "all_reduce, 2 ranks, median  ── gloo" in result.stdout
    assert "backend=auto → " in result.stdout
    drawing = ElementTree.parse(cli.folder / "chart.svg")
    svg = "{http://www.w3.org/2000/svg}"
    lines = [group for group in drawing.iter(f"{svg}g") if group.get("class", "").startswith("mark-line")]
    assert len(lines) == 3 - len(lefts), "one line for each backend"
    chosen, why = choose.best(17_064, 2, cli.folder / "cache" / "comms")
    assert f"backend=auto → {why}" in result.stdout
    assert why.startswith(f"{chosen}: ")
    if lefts:
        pytest.skip(f"measured without mpi: {result.stderr.splitlines()[0]}")


FAULTS = """
import os, time
import torch.distributed as dist

calls = 0

def forgets(tensor):
    "Every 20th call leaves the others out: the check of a first call alone would not see it."
    global calls
    calls += 1
    if calls % 20:
        dist.all_reduce(tensor)

def hangs(tensor):
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(tensor)

def tells(tensor):
    "Leaves a sign that this rank is measuring."
    open(os.path.join(os.path.dirname(__file__), f"measuring-{dist.get_rank()}"), "w").close()
    dist.all_reduce(tensor)

def missing(tensor):
    raise NotImplementedError("all_reduce is not supported here")
"""


def own(cli: Cli, function: str, *words: str, code: int = 0) -> dict[str, Any]:
    (cli.folder / "faults.py").write_text(FAULTS)
    return measured(cli, "--own", f"faults.py:{function}", "--backend", "gloo", "--quick", *words, code=code)


def test_a_wrong_result_is_caught_and_never_used(cli: Cli) -> None:
    (cli.folder / "faults.py").write_text(FAULTS)
    short = ("--backend", "gloo", "--quick", "--max-bytes", "4", "--rounds", "4")
    result = cli("comms", "--own", "faults.py:forgets", *short)
    assert result.returncode == 3
    assert "WRONG: rank " in result.stdout
    assert "None" not in result.stdout, "one size is no curve"
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("lockstep: comms: 1 of 2 cells gave WRONG results, first own of 4 B on gloo with 2 ranks: ")
    assert " instead of " in last
    # Results and logs stay where they can be looked at.
    folder = Path(next(line for line in result.stderr.splitlines() if line.startswith("results and logs")).split()[-1])
    document = json.loads((folder / "comms.json").read_text())
    shutil.rmtree(folder)
    assert cell_of(document, "own", 4)["state"] == "WRONG"
    assert cell_of(document, "all_reduce", 4)["state"] == "ok"
    kept = json.loads(Path(document["kept_in"]).read_text())["cells"]
    assert {c["collective"] for c in kept} == {"all_reduce"}, "a user's own function says nothing about the backend"


def test_a_hang_does_not_end_the_measurement(cli: Cli) -> None:
    document = own(cli, "hangs", "--max-bytes", "1024", "--rounds", "2", "--cell-limit", "3", "--out", "out")
    assert [cell_of(document, "own", size)["state"] for size in (4, 1024)] == ["hang", "hang"]
    assert "no answer from rank 0, 1 within 3 s" in cell_of(document, "own", 4)["reason"]
    beside = cell_of(document, "all_reduce", 1024)
    assert len(beside["round_medians_us"]) == 2, "measured again after the hang, in fresh processes"
    assert not processes_of(cli.folder / "out")


def test_mpi_ranks_that_hang_leave_nothing_behind(tmp_path: Path) -> None:
    """MPI keeps its shared memory in files with names, which its library removes only after an orderly end."""
    reason = unavailable("mpi", "cpu", 2)
    if reason:
        pytest.skip(reason)
    (tmp_path / "faults.py").write_text(FAULTS)
    task = Task(placement=placement_for("mpi", "cpu", 2, 40), own=f"{tmp_path / 'faults.py'}:hangs")
    pool = ProcessPool(task, tmp_path / "pool")
    try:
        pool.start()
        pids = [int(path.read_text()) for path in tmp_path.glob("pool/ranks/*/pid")]
        assert not any(segments.of_process(pid) for pid in pids), "names are taken away when the ranks have met"
        with pytest.raises(BrokenPool) as lost:
            pool.measure("own", 64, calls=3, seed=1, limit_s=2)
    finally:
        pool.end(politely=False)
    assert lost.value.kind == "hang"
    assert not processes_of(tmp_path)


def test_only_files_of_our_own_ranks_are_removed(tmp_path: Path) -> None:
    """Ranks that were ended while they met leave files of MPI's. A process that has got the number of one is a stranger."""
    pool = ProcessPool(Task(placement=placement_for("gloo", "cpu", 2, 40)), tmp_path / "pool")
    code = "import mmap, os, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print('open', flush=True); input()"
    files = [Path(f"/dev/shm/mpich_shm_test{os.getpid()}{rank}") for rank in range(3)]
    processes = []
    try:
        for rank, (file, words) in enumerate(zip(files, ([str(pool.folder)], [], [str(pool.folder)]), strict=True)):
            file.write_bytes(bytes(4096))
            argv = [sys.executable, "-c", code, str(file), *words]
            processes.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert processes[-1].stdout.readline() == b"open\n"  # type: ignore[union-attr]
            (pool.folder / "ranks" / f"{rank:04d}").mkdir(parents=True)
            (pool.folder / "ranks" / f"{rank:04d}" / "pid").write_text(str(processes[-1].pid))
        files[2].unlink()
        files[2].write_bytes(bytes(4096))  # another file, under the same name
        pool.end(politely=False)
        assert [file.exists() for file in files] == [False, True, True]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        for file in files:
            file.unlink(missing_ok=True)


def test_what_is_not_supported_is_recorded_as_that(cli: Cli) -> None:
    document = own(cli, "missing", "--max-bytes", "4", "--rounds", "1")
    cell = cell_of(document, "own", 4)
    assert cell["state"] == "unsupported"
    assert cell["reason"] == "rank 0: NotImplementedError: all_reduce is not supported here"


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_whoever_stops_it_no_rank_is_left(cli: Cli, number: signal.Signals, code: int) -> None:
    (cli.folder / "faults.py").write_text(FAULTS)
    words = ("--own", f"{cli.folder / 'faults.py'}:tells", "--backend", "gloo", "--out", "out", "--rounds", "1000")
    process = cli.start("comms", *words)
    wait_for(lambda: len(list(cli.folder.glob("measuring-*"))) == 2, what="both ranks to measure")
    assert len(processes_of(cli.folder / "out")) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    wait_for(lambda: not processes_of(cli.folder / "out"), seconds=10, what="every rank to be gone")
    if code == 130:
        assert json.loads((cli.folder / "out" / "status.json").read_text())["state"] == "cancelled"
    assert not (cli.folder / "cache" / "comms").exists(), "half a measurement is not kept"


def test_capabilities_of_gloo_by_trying(cli: Cli) -> None:
    result = cli("comms", "--capabilities", "--backend", "gloo", "--json")
    assert result.returncode == 0, result.stderr
    answers = {(a["collective"], a["device"]): a for a in json.loads(result.stdout)["answers"]}
    for row in ("send_recv", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter", "barrier"):
        assert answers[row, "cpu"]["answer"] == "yes", row
        assert answers[row, "cpu"]["published"] == "yes"
    assert answers["reduce_scatter", "cpu"]["published"] == "no"
    if not cuda_present():
        assert answers["all_reduce", "cuda"]["answer"] == "–"
        assert answers["all_reduce", "cuda"]["reason"] == "no usable CUDA on this machine"


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "glo"], "--backend glo: unknown; there are gloo, mpi, shm, nccl"),
        (["--collective", "allreduce"], "--collective allreduce: unknown; there are all_reduce"),
        (["--max-bytes", "2"], "--max-bytes 2: the smallest message is 4 bytes"),
        (["--plot", "chart.png"], "--plot chart.png: the chart is written as SVG; name it chart.svg"),
        (["--plot", "nowhere/chart.svg"], "there is no folder"),
        (["--plot", "chart.svg", "--capabilities"], "--plot has nothing to draw"),
        (["--own", "nothing"], "--own nothing: write it as FILE.py:FUNCTION"),
        (["--own", "no.py:f"], "--own no.py:f: there is no file"),
        (["--out", "."], "--out . is there already"),
    ],
)
def test_wrong_words(cli: Cli, words: list[str], message: str) -> None:
    (cli.folder / "file").write_text("in the way")
    assert message in cli.error("comms", *words, code=2)


def test_an_own_function_that_is_not_there(cli: Cli) -> None:
    (cli.folder / "faults.py").write_text(FAULTS)
    message = cli.error("comms", "--own", "faults.py:hang", "--backend", "gloo", "--quick", code=2)
    assert "has no 'hang'; did you mean 'hangs'?" in message


def test_nccl_without_cuda(cli: Cli) -> None:
    if cuda_present():
        pytest.skip("this machine has CUDA")
    assert "--backend nccl: no usable CUDA on this machine" in cli.error("comms", "--backend", "nccl", code=2)


# ---------------------------------------------------------------- the arithmetic


def test_sizes() -> None:
    assert sizes() == [4, 16, 64, 256, 1024, 4096, 16384, 17064, 65536, 262144, 1048576, 4194304, 16777216, 67108864]
    assert sizes(20_000, quick=True) == [4, 1024, 17_064]
    assert message_bytes("all_gather", 4, 3) == 12
    assert message_bytes("all_gather", 17_064, 4) == 17_072
    assert message_bytes("send_recv", 17_064, 4) == 17_064


@pytest.mark.parametrize(
    ("collective", "algorithm", "bus"),
    [
        # 4 ranks, 8,000,000 bytes in 2 ms are 4 GB/s; times 2·3/4, 3/4 or 1
        ("all_reduce", 4.0, 6.0),
        ("own", 4.0, 6.0),
        ("all_gather", 4.0, 3.0),
        ("reduce_scatter", 4.0, 3.0),
        ("gather", 4.0, 3.0),
        ("scatter", 4.0, 3.0),
        ("all_to_all", 4.0, 3.0),
        ("broadcast", 4.0, 4.0),
        ("reduce", 4.0, 4.0),
        ("send_recv", 4.0, 4.0),
    ],
)
def test_bandwidths_by_hand(collective: str, algorithm: float, bus: float) -> None:
    assert bandwidths(collective, 8_000_000, 4, 0.002) == pytest.approx((algorithm, bus))
    assert bandwidths("barrier", 0, 4, 0.002) is None


def test_the_fit_finds_planted_alpha_and_beta() -> None:
    noise = random.Random(3)
    points = [(size, (20e-6 + size / 5e9) * noise.uniform(0.95, 1.05)) for size in sizes()]
    line = fit(points)
    assert line is not None
    assert line.alpha_us == pytest.approx(20, rel=0.05)
    assert line.beta_gbs == pytest.approx(5, rel=0.05)
    assert 0.005 < line.residual < 0.06
    exact = fit([(size, 20e-6 + size / 5e9) for size in sizes()])
    assert exact is not None
    assert (exact.alpha_us, exact.beta_gbs) == pytest.approx((20, 5))
    assert exact.residual < 1e-9
    flat = fit([(size, 1e-3 / size) for size in (4, 16, 64)])
    assert flat is not None
    assert flat.beta_gbs is None, "time that falls with size has no bandwidth"
    assert flat.alpha_us > 0
    assert fit([(4, 1e-6), (16, 1e-6)]) is None


def test_figures_of_a_cell() -> None:
    cell = Cell(backend="gloo", device="cpu", ranks=2, collective="all_reduce", bytes=1000)
    summarise(cell, [[1000 * k for k in range(1, 52)], [1000 * k for k in range(52, 102)]])
    assert (cell.n, cell.median_us, cell.min_us) == (101, 51.0, 1.0)
    assert (cell.p5_us, cell.p95_us) == pytest.approx((6.0, 96.0))
    assert cell.round_medians_us == [26.0, 76.5]
    assert lines([cell]) == [], "one size is no line"


def test_leaving_a_barrier_early_is_wrong() -> None:
    right = [{"moments": [10, 50]}, {"moments": [40, 51]}]
    assert left_early(right) is None
    assert left_early([{"moments": [1_000_000, 2_000_000]}, {"moments": [4_000_000, 5_000_000]}]) == (
        "rank 0 left the barrier 2.0 ms before rank 1 came to it"
    )


def test_the_published_table() -> None:
    assert published("reduce_scatter", "gloo", "cpu") == "no"
    assert published("reduce_scatter_list", "nccl", "cuda") == "yes"
    assert published("all_reduce", "mpi", "cuda") == "?"
    assert published("all_reduce", "shm", "cpu") is None


# ---------------------------------------------------------------- what backend=auto chooses


def planted(backend: str, size: int, median: float, **more: Any) -> Cell:
    fixed = {"device": "cpu", "ranks": 2, "collective": "all_reduce", "n": 9, "time": 1.8e9, "message_bytes": size}
    return Cell(backend=backend, bytes=size, median_us=median, **{**fixed, **more})


DAY = time.strftime("%Y-%m-%d", time.localtime(1.8e9))
CROSSING = [
    planted("gloo", 1_000, 300),
    planted("gloo", 1_000_000, 400),
    planted("shm", 1_000, 8),
    planted("shm", 1_000_000, 4_000),
]


def test_auto_takes_the_fastest_at_the_size_at_hand(tmp_path: Path) -> None:
    store.save(CROSSING, tmp_path)
    assert choose.best(1_000, 2, tmp_path) == (
        "shm",
        f"shm: 8.0 µs for 1,000 bytes with 2 ranks, gloo 300 µs; measured {DAY}",
    )
    assert choose.best(1_000_000, 2, tmp_path)[0] == "gloo"
    # Half way in the logarithm: the geometric means, 179 and 346 µs.
    name, why = choose.best(31_623, 2, tmp_path)
    assert name == "shm"
    assert "shm: 179 µs" in why
    assert "gloo 346 µs" in why
    assert "shm: 8.0 µs" in choose.best(4, 2, tmp_path)[1], "below the smallest size: its latency"
    assert "gloo: 4,000 µs" in choose.best(10_000_000, 2, tmp_path)[1], "above the largest: its bandwidth"
    assert choose.best(1_000, 2, tmp_path, among=("gloo",)) == (
        "gloo",
        f"gloo: 300 µs for 1,000 bytes with 2 ranks, the only one measured; measured {DAY}",
    )


def test_auto_without_measurements_takes_shared_memory_and_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose.best(17_064, 2, tmp_path) == (
        "shm",
        "shm: ranks of one host share its memory; it was not measured on this machine with 2 ranks: 'lockstep comms' lets auto choose by speed",
    )
    assert choose.best(17_064, 2, tmp_path, among=("gloo", "mpi"))[0] == "gloo"
    store.save([planted("gloo", 4, 100)], tmp_path)
    gloo_only = {"device": "cpu", "among": ("gloo",)}
    assert "nothing measured for 17,064 bytes" in choose.best(17_064, 2, tmp_path, **gloo_only)[1], "a latency only"
    store.save([planted("gloo", 17_064, 100)], tmp_path)
    assert choose.best(17_064, 2, tmp_path)[0] == "shm", "gloo's time says nothing against what was not measured"
    store.save([planted("shm", 4, 9)], tmp_path)
    assert "it was not measured for 17,064 bytes" in choose.best(17_064, 2, tmp_path)[1]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("platform.machine", lambda: "aarch64")
        assert choose.best(17_064, 2, tmp_path)[0] == "gloo"
    store.save([planted("shm", 17_064, 0, state="failed")], tmp_path)
    assert choose.best(17_064, 2, tmp_path)[0] == "gloo"
    assert choose.best(17_064, 4, tmp_path)[0] == "gloo", "what failed with two ranks is not trusted with four"
    store.path(tmp_path).unlink()
    store.save(CROSSING, tmp_path)
    assert "'lockstep comms --ranks 4'" in choose.best(17_064, 4, tmp_path)[1]
    assert choose.best(17_064, 2, tmp_path, device="cuda")[0] == "nccl"
    store.path(tmp_path).write_text('{"format": 1, "cells": [{"backend"')
    assert "it was not measured" in choose.best(17_064, 2, tmp_path)[1], "a damaged file is no measurement"


def test_auto_never_takes_a_backend_that_was_wrong(tmp_path: Path) -> None:
    store.save([*CROSSING, planted("shm", 17_064, 9, state="WRONG")], tmp_path)
    name, why = choose.best(1_000, 2, tmp_path)
    assert name == "gloo"
    assert "shm left out (its results were WRONG)" in why
    # Measured again and right, it is taken again: new cells replace old ones.
    store.save([planted("shm", 17_064, 9)], tmp_path)
    assert choose.best(1_000, 2, tmp_path)[0] == "shm"
    assert len(store.load(tmp_path)) == 5


def test_measurements_of_another_machine_are_not_used(tmp_path: Path) -> None:
    store.save(CROSSING, tmp_path)
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: there is no smaller machine to be")
    everything = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(everything)})
        assert "it was not measured" in choose.best(1_000, 2, tmp_path)[1]
    finally:
        os.sched_setaffinity(0, everything)
    assert choose.best(1_000, 2, tmp_path)[0] == "shm"
