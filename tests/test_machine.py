"""The machine is tried: machines that are broken in every way, by real child processes that really die, hang and lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.backends.costs import store
from lockstep.backends.ranks import SRUN
from lockstep.errors import InputError
from lockstep.files import locked
from lockstep.kernels import table
from lockstep.launch import prepare
from lockstep.launch.base import default_environment, worker_argv
from lockstep.machine import child, cpu, facts, formats, trial
from lockstep.machine.cores import measure
from lockstep.measure import environment
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import Run
from lockstep.settings import load
from lockstep.study import racing
from support import SHORT, Cli, wait_for

DOUBLE = Path(__file__).with_name("broken_machine.py")


def broken(*words: str) -> tuple[str, ...]:
    return (sys.executable, str(DOUBLE), *words)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is found out is kept where no other test looks."""
    for name in (*facts.VARIABLES, facts.CAPPED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "cache" / "data"))
    return tmp_path


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC", "AMD EPYC (family 25, model 17)"),
        ("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC", "AMD EPYC (family 26, model 2)"),
        (
            "cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.20GHz",
            "Intel(R) Xeon(R) CPU @ 2.20GHz (family 6, model 85)",
        ),
        (
            "cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7763 64-Core Processor",
            "AMD EPYC 7763 64-Core Processor",
        ),
        ("model name\t: AMD EPYC", "AMD EPYC"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd40", "aarch64 (implementer 0x41, part 0xd40)"),
    ],
)
def test_two_kinds_of_processor_with_one_name_are_two_machines(
    lines: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To whatever was measured: collectives, fits and checks, races, the trial of the machine, a layer's times."""
    keys = store.fingerprint, facts.path, partial(table.path, "avx2"), lambda: racing.machine_here()["cpu"]
    before = [key() for key in keys]
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: tuple(lines.splitlines()))
    monkeypatch.setattr(cpu.platform, "processor", lambda: "aarch64")
    assert cpu.cpu_model() == racing.machine_here()["cpu"] == name
    if name != before[-1]:
        assert not set(before) & {key() for key in keys}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("die", "end with SIGILL"),
        ("hang", "do not end within 0.5 s"),
        ("refuse", "fail (could not create a primitive)"),
        ("wrong", "give wrong numbers"),
    ],
)
def test_each_way_to_fail_is_an_answer(kind: str, words: str) -> None:
    """It is said of the case that fails, and of no other: what is broken in one process does not spoil the next."""
    found = trial.answers(os.environ, broken(kind))
    assert found["bf16 large matrix products"] == words
    assert found["int8 small linear layers"] == "fail (could not create a primitive)"
    assert [name for name, problem in found.items() if problem] == [
        "bf16 large matrix products",
        "int8 small linear layers",
    ]


def test_a_case_that_hangs_ends_with_the_child_that_tries_it() -> None:
    code = (
        "import os, time\n"
        "from lockstep.machine.child import IsolatedCall\n"
        "print(IsolatedCall(lambda: time.sleep(1000), 1000)._pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    case = Path(f"/proc/{int(child.stdout.readline())}")
    assert case.exists()
    child.kill()
    child.communicate()
    wait_for(lambda: not case.exists() or ") Z " in (case / "stat").read_text(), what="the case to be gone")


def test_a_child_that_cannot_even_start_is_an_answer_and_one_that_was_killed_is_none() -> None:
    assert trial.answers(os.environ, broken("import")) == {"everything": "ends with SIGILL"}
    assert trial.answers(os.environ, broken("silent"), seconds=1.0) == {"everything": "does not end within 1 s"}
    with pytest.raises(trial.NotKnown, match="exit code -9"):
        trial.answers(os.environ, broken("killed"))
    with pytest.raises(trial.NotKnown, match="No such file"):
        trial.answers(os.environ, ("/nowhere/python",))
    with pytest.raises(trial.NotKnown, match="ModuleNotFoundError"):
        trial.answers(os.environ, (sys.executable, "-c", "import no_such_torch"))
    assert facts.known() is None


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"])
def test_a_case_that_is_ended_from_outside_says_nothing_about_the_machine(name: str) -> None:
    """By hand, or for lack of memory: nothing is remembered, and the next one tries again."""
    with pytest.raises(trial.NotKnown, match=f"a case was ended by {name}, which says nothing about the machine"):
        facts.get(broken(name))
    assert facts.known() is None
    assert not trial.failed(facts.get(broken("import", "AVX2")).effective())


def test_who_waits_for_the_trial_of_another_process_says_so_once() -> None:
    code = f"from lockstep.machine import facts; print(facts.get({broken('import', 'AVX2')!r}).cap)"
    with locked(facts.path().with_suffix(".lock"), "holding it"):
        waiting = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert waiting.stderr
        assert waiting.stderr.readline() == "lockstep: waiting for another process that is trying out this machine\n"
        assert waiting.poll() is None
    out, err = waiting.communicate(timeout=60)
    assert (out, err) == ("{'ONEDNN_MAX_CPU_ISA': 'AVX2'}\n", "")


@pytest.mark.parametrize("cure", ["AVX512_CORE_FP16", "AVX512_CORE_VNNI", "AVX2"])
def test_the_highest_cap_that_cures_goes_to_the_ranks(cure: str) -> None:
    found = facts.get(broken("die", cure))
    assert found.cap == {"ONEDNN_MAX_CPU_ISA": cure}
    assert not trial.failed(found.effective())
    assert facts.known() == found
    assert default_environment(Placement(device="cpu"))["ONEDNN_MAX_CPU_ISA"] == cure
    assert "ONEDNN_MAX_CPU_ISA" not in default_environment(Placement(device="cpu", launcher="slurm")), "other machines"
    line = formats.cap_line(found)
    assert line == (
        f"ONEDNN_MAX_CPU_ISA={cure} is set for the ranks: without it bf16 large matrix products end with SIGILL on this machine"
    )
    recorded = environment.machine()
    assert recorded["instruction_cap"] == line
    assert recorded["number_formats"] == "fp32, bf16, fp16, int8 work here (tried in child processes)"
    resolve(Recipe(precision="bf16"), Placement(launcher="single", backend="gloo"))


def test_a_rank_knows_the_machine_by_the_name_that_its_launcher_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts.get(broken("import", "AVX2"))
    assert found.cap == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    for name, value in facts.rank_environment().items():
        monkeypatch.setenv(name, value)
    assert facts.known() == found
    assert environment.machine()["instruction_settings"] == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_a_cap_of_the_user_stays_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    facts.get(broken("die", "AVX512_CORE_FP16"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert facts.known() is None, "another setting is another machine"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    found = facts.get(broken("die"))
    assert found.cap == {}
    assert "ONEDNN_MAX_CPU_ISA" not in facts.rank_environment()
    with pytest.raises(
        InputError, match="precision=bf16: bf16 large matrix products end with SIGILL on this machine: choose"
    ):
        formats.check("precision=bf16", "bf16", "choose precision=fp32")


def test_what_no_cap_cures_is_refused_before_the_start(own_cache: Path) -> None:
    facts.get(broken("wrong"))
    placement = Placement(launcher="single", backend="gloo")
    for precision in ("bf16", "pure-bf16"):
        with pytest.raises(InputError) as error:
            resolve(Recipe(precision=precision), placement)  # type: ignore[arg-type]
        assert str(error.value) == (
            f"precision={precision}: bf16 large matrix products give wrong numbers on this machine under any "
            "ONEDNN_MAX_CPU_ISA: choose precision=fp32"
        )
    with pytest.raises(InputError, match="quantize=qat: int8 small linear layers fail"):
        resolve(Recipe(quantize="qat"), placement)
    resolve(Recipe(), placement)
    resolve(Recipe(precision="fp16"), placement)
    resolve(Recipe(precision="bf16"), Placement(launcher="slurm", hosts=1))
    # The same by the command line, which reads what is kept.
    cli = Cli(own_cache)
    cli.environment["LOCKSTEP_DATA"] = os.environ["LOCKSTEP_DATA"]
    assert "bf16 large matrix products give wrong numbers" in cli.error("run", *SHORT, "precision=bf16", code=2)
    shown = cli("doctor", "--json")
    found = [each for each in json.loads(shown.stdout) if each["area"] == "number formats"]
    assert found[0]["what"].startswith("fp32, fp16 work here")
    assert found[1]["what"] == "bf16 large matrix products give wrong numbers on this machine"


def on_a_node(folder: Path, *words: str) -> tuple[Run, int]:
    """One rank, started as srun starts it on a node; what the node is known for is in the cache."""
    run, _ = prepare(*load([], [*SHORT, "launcher=slurm", "train_limit=48", "test_limit=48", *words]), runs=folder)
    place = dict(zip(SRUN, ("0", "1", "0", "1"), strict=True))
    done = subprocess.run(worker_argv(run.folder), env={**os.environ, **place}, timeout=120)
    return run, done.returncode


def test_a_node_of_a_cluster_asks_itself(own_cache: Path) -> None:
    """The machine that submits may be another one: it refuses nothing and caps nothing."""
    assert facts.known() is None
    run, code = on_a_node(own_cache)
    assert code == 0
    assert facts.known() is not None, "a node that nobody has tried is tried before it trains"
    facts.path().unlink()
    facts.get(broken("die", "AVX2"))
    run, code = on_a_node(own_cache, "precision=bf16")
    assert code == 0
    seen = json.loads((run.folder / "environment.json").read_text())
    assert seen["instruction_settings"] == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    facts.path().unlink()
    facts.get(broken("die"))
    run, code = on_a_node(own_cache, "precision=bf16")
    assert code == InputError.exit_code
    account = json.loads((run.rank_folder(0) / "failure.json").read_text())
    assert account["message"].startswith("precision=bf16: bf16 large matrix products end with SIGILL on this machine")


def test_it_is_found_out_once_by_one_of_many(own_cache: Path) -> None:
    """Four processes ask at the same time; the child leaves a mark each time that it is started."""
    marks = own_cache / "marks"
    double = own_cache / "double.py"
    double.write_text(
        f"import os, sys\nopen({str(marks)!r}, 'a').write('x')\n"
        f"os.execv(sys.executable, [sys.executable, {str(DOUBLE)!r}, 'die', 'AVX512_CORE_FP16'])\n"
    )
    code = f"import sys; from lockstep.machine import facts; print(facts.get((sys.executable, {str(double)!r})).cap)"
    asking = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(4)
    ]
    said = {process.communicate(timeout=120)[0] for process in asking}
    assert said == {"{'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE_FP16'}\n"}
    assert marks.read_text() == "xx", "once as it is, once under the first cap"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_record_is_found_out_again(content: str) -> None:
    found = facts.get(broken("die"))
    facts.path().write_text(content)
    assert facts.known() is None
    assert facts.get(broken("die")).answers == found.answers


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "file" / "data"))
    assert facts.get(broken("die", "AVX2")).cap == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_instructions_that_a_cap_takes_away_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2", "avx512_bf16", "amx_bf16", "avx512_vnni"}))
    assert formats.cpu_support() == {"bf16": ["AVX512-BF16", "AMX-BF16"], "fp16": [], "int8": ["AVX512-VNNI"]}
    facts.get(broken("die", "AVX512_CORE_FP16"))
    assert formats.cpu_support()["bf16"] == ["AVX512-BF16"], "AMX is what traps"
    assert formats.precision_line("bf16", Placement()) == "precision bf16: works here (tried); this CPU has AVX512-BF16"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert formats.cpu_support()["bf16"] == []
    assert "computed through fp32" in formats.precision_line("bf16", Placement())


def test_the_first_run_has_it_found_out_in_its_background(own_cache: Path) -> None:
    """The real child, on this machine: fp32 works (the tests run on it), and every case has an answer."""
    facts.start_in_background()
    deadline = time.monotonic() + 200
    while (found := facts.known()) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found is not None
    assert list(found.answers) == list(child.cases())
    assert formats.problem("fp32", found) is None, found.answers
    assert found.machine["torch"].startswith("2.")


def test_the_child_sees_a_wrong_result() -> None:
    """Each comparison can fail: a result that is off by one, and one that is not a number."""
    import torch

    def off(left: Any, right: Any) -> Any:
        result = left @ right
        return result if result.dtype == torch.float64 else result + (result.detach() == result.detach().max())

    def not_a_number(left: Any, right: Any) -> Any:
        return left @ right * (1.0 if left.dtype == torch.float64 else float("nan"))

    left, right = child.numbers(8, 16), child.numbers(16, 4)
    child._check(torch.matmul, "bf16", left, right)
    for work in (off, not_a_number):
        with pytest.raises(child.WrongNumbers):
            child._check(work, "bf16", left, right)


def test_cores_are_measured() -> None:
    found = measure(0.05)
    assert 0 < found.granted <= found.usable
    assert 0 <= found.stolen <= 1


def test_nothing_but_the_child_imports_torch() -> None:
    code = (
        "import sys, lockstep, lockstep.machine.formats, lockstep.machine.cores, lockstep.machine.child;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
