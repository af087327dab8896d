"""Which instruction set our kernels use: none that is forbidden, none that was seen to fail; and one choice for all ranks of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from lockstep.kernels import build, native, trial
from lockstep.machine import cpu, facts
from lockstep.machine.native_code import CannotBuild, has_compiler
from support import SHORT, Cli

BROKEN = Path(__file__).with_name("broken_machine.py")
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A processor with everything, of which nothing was tried yet."""
    for name in (*facts.VARIABLES, facts.CAPPED, "LOCKSTEP_KERNELS_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "cache" / "data"))
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2", "fma", *build.TARGETS["avx512"].needs}))
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "best"),
    [
        ("", "avx512"),
        ("ONEDNN_MAX_CPU_ISA=AVX512_CORE", "avx512"),
        ("ONEDNN_MAX_CPU_ISA=avx2_vnni_2", "avx2"),
        ("ONEDNN_MAX_CPU_ISA=AVX2", "avx2"),
        ("DNNL_MAX_CPU_ISA=AVX2", "avx2"),
        ("ONEDNN_MAX_CPU_ISA=SSE41", "portable"),
        ("ATEN_CPU_CAPABILITY=avx512", "avx512"),
        ("ATEN_CPU_CAPABILITY=avx2", "avx2"),
        ("ATEN_CPU_CAPABILITY=default", "portable"),
    ],
)
def test_a_lowered_instruction_set_holds_for_our_kernels_too(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, setting: str, best: str
) -> None:
    if setting:
        monkeypatch.setenv(*setting.split("="))
    names = ["avx512", "avx2", "portable"]
    assert build.able() == names[names.index(best) :]


def test_the_cap_that_the_machine_needs_holds_for_our_kernels_too(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts.get((sys.executable, str(BROKEN), "die", "AVX2"))
    assert build.able() == ["avx2", "portable"]
    monkeypatch.setenv("LOCKSTEP_KERNELS_ISA", "avx512")
    with pytest.raises(CannotBuild, match="LOCKSTEP_KERNELS_ISA=avx512 cannot run here: choose one of avx2, por"):
        trial.best_target()
    # A rank goes by what its launcher gave it, known or not at that time: so all ranks of a run do the same.
    monkeypatch.setenv("LOCKSTEP_KERNELS_OF_RUN", str(own_cache / "kernels.json"))
    assert "avx512" in build.able()
    for name, value in facts.rank_environment().items():
        monkeypatch.setenv(name, value)
    assert build.able() == ["avx2", "portable"]


@pytest.fixture
def compiled(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is compiled: these tests are about the child that tries."""
    monkeypatch.setattr(build, "library", lambda name: own_cache / name)
    return own_cache


def planted(folder: Path, code: str) -> tuple[str, ...]:
    """A child that tries: it leaves a mark, and then does what `code` says to the target `name`."""
    script = folder / "child.py"
    script.write_text(
        f"import json, os, sys, time\nname = sys.argv[1]\nopen({str(folder / 'marks')!r}, 'a').write(name + ' ')\n{code}\n"
    )
    return sys.executable, str(script)


DIES = "if name == 'avx512': os.kill(os.getpid(), {})\njson.dump({{'fp32 direct kernels': ''}}, sys.stdout)"


def test_a_child_that_dies_is_an_answer_and_the_next_lower_is_taken(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "CHILD", planted(compiled, DIES.format(int(signal.SIGILL))))
    for _ in range(2):
        with pytest.warns(UserWarning, match="avx2 kernels: with avx512, everything ends with SIGILL on this machine"):
            assert trial.best_target() == "avx2"
    assert (compiled / "marks").read_text() == "avx512 avx2 ", "each is tried once"
    monkeypatch.setenv("LOCKSTEP_KERNELS_ISA", "avx512")
    with pytest.raises(CannotBuild, match="with avx512, everything ends with SIGILL on this machine"):
        trial.best_target()


def test_a_child_that_was_killed_is_no_answer_and_is_not_kept(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CHILD", planted(compiled, DIES.format(int(signal.SIGKILL))))
    for _ in range(2):
        with pytest.raises(CannotBuild, match=r"whether the avx512 kernels work could not be tried: .* code -9"):
            trial.best_target()
    assert (compiled / "marks").read_text() == "avx512 avx512 "


def test_wrong_numbers_are_an_answer(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "json.dump({'fp32 direct kernels': '', 'bf16 direct kernels': 'give wrong numbers'}, sys.stdout)"
    monkeypatch.setattr(trial, "CHILD", planted(compiled, wrong))
    with pytest.raises(CannotBuild, match="with avx512, bf16 direct kernels give wrong numbers on this machine"):
        trial.best_target()


CALL = """
import torch
from lockstep.kernels import FusedConvReLU, native
conv = FusedConvReLU(1, 4, 3, padding=1)
x = torch.randn(2, 1, 28, 28)
assert torch.allclose(conv(x), torch.relu(torch.nn.functional.conv2d(x, conv.weight, conv.bias, padding=1)), atol=1e-5)
print(native.load().isa)
"""


@needs_compiler
@pytest.mark.slow
def test_a_library_that_traps_does_not_end_the_process_that_wants_it(tmp_path: Path) -> None:
    """A compiler that builds, for the best target, a library of one trapping instruction; the real child meets it."""
    able = build.able()
    if len(able) < 2:
        pytest.skip("this processor has one target only")
    if native.load() is None:
        pytest.skip("the kernels do not work here")
    best, lower = able[:2]
    trap, compiler = tmp_path / "trap.c", tmp_path / "compiler"
    names = [f"lockstep_{layer}{way}" for layer in ("", "linear_") for way in ("forward", "backward")]
    trap.write_text("".join(f"int {name}() {{ __builtin_trap(); }}\n" for name in names))
    flag = build.TARGETS[best].flags[0]
    compiler.write_text(
        "#!/bin/sh\nfor last; do :; done\n"
        f'case "$*" in *{flag}*) echo trap > "$last";;\n'
        f'*-shared*) if grep -q trap "$2"; then exec cc -shared -fPIC {trap} -o "$last"; fi; cp {build.library(lower)} "$last";;\n'
        '*) : > "$last";; esac\n'
    )
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        env={**os.environ, "LOCKSTEP_DATA": str(tmp_path / "data"), "CXX": str(compiler)},
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [lower]
    assert f"uses its {lower} kernels: with {best}, fp32 direct kernels end with SIG" in done.stderr


# A net whose every timing is disturbed, and says the opposite of the timing before. What was chosen is written down.
MODEL = """
import os
import sys
from pathlib import Path
from torch import nn
from lockstep.kernels import dispatch, timing
from lockstep.kernels.table import Row

HERE = Path(__file__).parent
choose = dispatch.choose

def measure(layer):
    with (HERE / "timed").open("a+") as file:
        file.write(".")
        file.flush()
        fast = file.tell() % 2
    times = {"plain": 1.0, "torch": 1.02, "direct": 0.5 if fast else 1.2}
    return Row(layer, times, times if layer.learns else {}, disturbed=True)

def noted(layer):
    ways = choose(layer)
    with (HERE / "chosen").open("a") as file:
        file.write(f"{sys.argv[-1]}|{os.getpid()}|{layer}|{ways}\\n")
    return ways

timing.measure, dispatch.choose = measure, noted

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 10))
"""


def choices(folder: Path) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Of each run and layer: which process chose which ways."""
    found = defaultdict(list)
    for line in (folder / "chosen").read_text().splitlines():
        run, process, layer, ways = line.split("|")
        found[run, layer].append((process, ways))
    return found


@needs_compiler
@pytest.mark.slow
def test_the_ranks_of_one_run_choose_the_same(cli: Cli) -> None:
    (cli.folder / "net.py").write_text(MODEL)
    cli.environment["LOCKSTEP_DATA"] = str(cli.folder / "cache" / "data")
    words = [*SHORT, "model=net.py:Net", "fused=true", "epochs=1", "ranks=2", "launcher=spawn"]
    for name in ("one", "two"):
        cli.run(*words, "--name", name)
    found = choices(cli.folder)
    assert any(len({process for process, _ in each}) == 2 for each in found.values()), "both ranks meet a layer"
    for each in found.values():
        assert len({ways for _, ways in each}) == 1, each
    assert len((cli.folder / "timed").read_text()) == len(found), "a later run times again what was disturbed"


@needs_compiler
@pytest.mark.slow
def test_a_repeat_has_the_same_bits_whatever_the_machine_was_busy_with(cli: Cli) -> None:
    (cli.folder / "net.py").write_text(MODEL)
    cli.environment["LOCKSTEP_DATA"] = str(cli.folder / "cache" / "data")
    done = cli("verify", *SHORT, "model=net.py:Net", "fused=true", "ranks=2", "launcher=spawn", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
