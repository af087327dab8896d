"""`lockstep race`, with real ranks: that they take windows when asked, are parked in between, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lockstep.launch import prepare
from lockstep.launch.emulated import network as emulate
from lockstep.report.race import disturbed
from lockstep.run import write_atomic
from lockstep.settings import load
from lockstep.turns import Command, ContenderFailed, Ranks
from lockstep.turns.folder import RaceFolder
from support import SHORT, Cli, processes_of, wait_for

TINY = [*SHORT, "threads=1"]


def ranks(folder: Path, *words: str, name: str = "one") -> Ranks:
    return Ranks(name, *load([], [*TINY, *words]), folder / name)


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    contender = ranks(tmp_path, *request.param)
    contender.start(1)
    try:
        contender.ready()
        yield contender
    finally:
        contender.end()
    assert processes_of(tmp_path) == []


def used_seconds(folder: Path) -> float:
    """Processor time of all ranks so far."""
    ticks = 0
    for process in processes_of(folder):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    "started", [["ranks=1"], ["ranks=2", "backend=gloo"], ["ranks=2", "backend=shm"]], indirect=True
)
def test_ranks_take_windows_and_are_parked_in_between(started: Ranks, tmp_path: Path) -> None:
    first, second = started.take(2, 10), started.take(2, 40)
    assert 0 < first.wall < second.wall
    assert second.cpu > 0
    assert sum(second.phases.values()) <= second.wall
    before = used_seconds(tmp_path)
    time.sleep(1.5)
    # A heartbeat, and whatever the system counts: a rank that spins would use a second and a half.
    assert used_seconds(tmp_path) - before < 0.1


@pytest.mark.parametrize(
    ("started", "together"),
    [(["ranks=2", "strategy=diloco", "local_sgd.every=7"], 7), (["ranks=1", "local_sgd.every=7"], 1)],
    indirect=["started"],
)
def test_ranks_say_how_many_of_their_steps_belong_together(started: Ranks, together: int) -> None:
    assert started.whole_steps == together


@pytest.mark.parametrize("started", [["ranks=2", "backend=gloo"]], indirect=True)
def test_a_rank_that_is_killed_between_two_windows_is_named(started: Ranks, tmp_path: Path) -> None:
    started.take(1, 2)
    status = json.loads(next(tmp_path.glob("one/*/ranks/0001/status.json")).read_text())
    os.kill(status["pid"], signal.SIGKILL)
    with pytest.raises(ContenderFailed, match="rank 1 was killed by SIGKILL"):
        started.take(1, 2)


@pytest.mark.slow
def test_every_window_of_a_race_is_kept(cli: Cli) -> None:
    words = ["global_batch=96", "global_batch=48", "--all", " ".join([*TINY, "model=tied-conv", "data=embedded"])]
    found = cli("race", *words, "--budget", "30s", "--until", "10%", "--json", "--name", "mine", timeout=100)
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert [entry["name"] for entry in document["entries"]] == words[:2]
    assert document["budget"] == {"seconds": 30, "margin": 0.1}
    folder = RaceFolder.find("mine", cli.runs)
    assert folder is not None
    windows = folder.windows()
    assert {window.contender for window in windows} == set(words[:2])
    assert document["starts"] == len({window.start for window in windows})
    assert document["ratios"][0]["rounds"] >= 4 * document["starts"]
    assert folder.read().over
    assert not any(path.is_dir() for path in folder.starts.glob("*/*")), "what ended well leaves no folder"


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.skipif(emulate.problem() is not None, reason=f"emulated hosts: {emulate.problem()}")
def test_emulated_hosts_race_and_their_delay_is_in_their_windows(cli: Cli) -> None:
    """A ring of two hosts waits for its link twice in every step; the other contender waits for nobody."""
    words = ["ranks=1", "ranks=2 hosts=emulated:2 link=1gbit,20ms backend=gloo strategy=flat"]
    found = cli("race", *words, "--all", " ".join([*TINY, "data=embedded"]), "--budget", "30s", "--json", timeout=150)
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["failures"] == {}
    folder = RaceFolder.find("last", cli.runs)
    assert folder is not None
    far = [window.wall / window.steps for window in folder.windows() if window.contender == words[1]]
    assert len(far) >= 4
    assert min(far) > 2 * 20e-3, "no step is shorter than what the link takes"
    assert processes_of(cli.folder) == []


@pytest.mark.slow
@pytest.mark.cold
def test_six_contenders_fit_into_two_gigabytes(tmp_path: Path) -> None:
    """Memory that processes share counts once."""
    words = ("ranks=1", "model=mnist-convnet", "data=embedded", "global_batch=32")
    six = [ranks(tmp_path, *words, name=str(number)) for number in range(6)]
    try:
        for contender in six:
            contender.start(1)
        for contender in six:
            contender.ready()
        for contender in six:
            contender.take(2, 10)
        shares = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes_of(tmp_path)]
        found = re.findall(r"^Pss: +(\d+) kB", "".join(shares), re.MULTILINE)
        assert len(found) >= 6
        assert sum(map(int, found)) << 10 < 2 << 30
    finally:
        for contender in six:
            contender.end()
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_a_contender_that_cannot_run_is_a_result(cli: Cli) -> None:
    (cli.folder / "nets.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.linear = torch.nn.Linear(784, 10)\n        self.calls = 0\n"
        "    def forward(self, x):\n        self.calls += 1\n"
        "        if self.calls > 30:\n            raise RuntimeError('no more')\n        return self.linear(x.flatten(1))\n"
    )
    common = " ".join([*TINY, "data=embedded"])
    found = cli("race", "ranks=1", "model=nets.py:Net", "ranks=1", "--all", common, "--budget", "20s", timeout=100)
    assert found.returncode == 0, found.stderr
    assert "RuntimeError: no more" in found.stdout
    assert "ranks=1 (2)" in found.stdout


SCRIPT = """
import sys
import torch
import lockstep

with lockstep.session() as s:
    model = s.wrap(torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(480, 784), torch.randint(0, 10, (480,))
    for epoch in range(1, int(sys.argv[1])):
        for step in s.steps(480, batch=48, epoch=epoch):
            loss = torch.nn.functional.cross_entropy(model(images[step.mine]), labels[step.mine], reduction="sum")
            step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        with s.evaluation() as net:
            net(images)
        s.end_epoch()
"""


@pytest.mark.slow
def test_loops_of_ones_own_race_and_one_that_ends_is_out(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(SCRIPT)
    words = [
        "train.py ranks=1 threads=1 -- 1000000",
        "train.py ranks=2 threads=1 -- 1000000",
        "train.py threads=1 -- 3",
    ]
    found = cli("race", *words, "--budget", "25s", "--json", timeout=100)
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert list(document["failures"]) == words[2:]
    assert document["failures"][words[2]].endswith("train.py came to its end in mid-race: let it train longer")
    assert [ratio["contender"] for ratio in document["ratios"]] == words[1:2]
    assert document["ratios"][0]["effect"] > 0
    folder = RaceFolder.find("last", cli.runs)
    assert folder is not None
    assert {window.samples / window.steps for window in folder.windows()} == {48}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ranks=2"], "race: name two or more contenders"),
        (["ranks=1", "ranks=two"], "race: 'ranks=two': ranks"),
        (["ranks=1", "rnaks=2"], "race: 'rnaks=2':"),
        (["ranks=1", "no-such-run"], "race: 'no-such-run':"),
        (["ranks=1", "train.py rnaks=2"], "race: 'train.py rnaks=2':"),
        (["ranks=1", "'"], "race: ''': No closing quotation"),
        (["ranks=1", "  "], "race: '  ': it is empty"),
        (
            ["ranks=1", "launcher=slurm ranks=2"],
            "race: 'launcher=slurm ranks=2': contenders share their cores, and jobs do not",
        ),
        (["ranks=1", "ranks=100000"], "race: 2 contenders with 100,001 ranks"),
        (["ranks=1", "$ "], "race: '$ ': there is no command after '$'"),
        (["ranks=1", "images=0 $ python"], "write it as images=6400 $ COMMAND"),
        (["ranks=1", "images=many $ python"], "could not convert string to float"),
        (["ranks=1", "$ python 'x"], "No closing quotation"),
    ],
)
def test_wrong_input_is_one_line(cli: Cli, words: list[str], said: str) -> None:
    assert said in cli.error("race", *words, "--all", "data=embedded", code=2)
    assert processes_of(cli.folder) == []


PROGRAM = """
import sys, time
print("starting")
for step in range(int(sys.argv[2])):
    until = time.process_time() + float(sys.argv[1])
    while time.process_time() < until:
        pass
    print("step", step, end=sys.argv[3])
"""


def program(folder: Path, step: float = 0.002, steps: int = 1_000_000, end: str = "\n") -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    return [sys.executable, str(folder / "program.py"), str(step), str(steps), end]


@pytest.mark.cold
@pytest.mark.parametrize("end", ["\n", "\r"])
def test_a_foreign_program_is_frozen_between_windows(tmp_path: Path, end: str) -> None:
    contender = Command("one", program(tmp_path, end=end), images=64)
    contender.start(1)
    try:
        contender.ready()
        taken = contender.take(2, 50)
        lines, rest = divmod(taken.samples, 64)
        assert (lines >= 50, rest) == (True, 0), "on a busy machine several lines may be read at once"
        assert taken.wall > 0.05, "fifty steps of two milliseconds of processor time, less the last one's rest"
        assert 0 < taken.cpu <= taken.used
        before = used_seconds(tmp_path)
        assert before > 0
        time.sleep(0.5)
        assert used_seconds(tmp_path) == before
        contender.take(2, 5)
    finally:
        contender.end()
    assert processes_of(tmp_path) == []


def ready_and_take(contender: Command) -> None:
    contender.ready()
    contender.take(2, 10)


@pytest.mark.cold
def test_programs_that_end_fail_or_say_nothing_are_named(tmp_path: Path) -> None:
    cases = {
        "let it train longer": program(tmp_path, steps=3),
        "exit code 3: no more": [sys.executable, "-c", "import sys; print('go'); print('no more'); sys.exit(3)"],
        "printed nothing for 1 s": [sys.executable, "-c", "import time; time.sleep(60)"],
        "cannot start no-such-program: No such file": ["no-such-program"],
    }
    for said, argv in cases.items():
        contender = Command("one", argv, start_s=1.0)
        contender.start(1)
        try:
            with pytest.raises(ContenderFailed, match=said):
                ready_and_take(contender)
        finally:
            contender.end()


@pytest.mark.cold
def test_programs_beside_our_python_are_found_where_nothing_is_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    contender = Command("one", ["python", *program(tmp_path)[1:]])
    contender.start(1)
    try:
        ready_and_take(contender)
    finally:
        contender.end()


@pytest.mark.cold
def test_a_killed_race_leaves_nothing_of_a_foreign_program(cli: Cli) -> None:
    """Also of what the program itself has started, in a session of its own, and of what is frozen."""
    inner = shlex.join(program(cli.folder))
    (cli.folder / "outer.py").write_text(
        f"import subprocess, shlex, sys\nsubprocess.Popen(shlex.split({inner!r}), start_new_session=True).wait()\n"
    )
    words = [f"$ {sys.executable} {cli.folder}/outer.py {number}" for number in (1, 2)]
    race = cli.start("race", *words, "--budget", "60s")
    wait_for(lambda: any(cli.runs.glob("races/*/windows.jsonl")), what="the first window")
    race.kill()
    race.communicate()
    wait_for(lambda: not processes_of(cli.folder), seconds=10, what="every process to be gone")


@pytest.mark.slow
@pytest.mark.cold
def test_foreign_programs_race(cli: Cli) -> None:
    slow, fast = (f"$ {shlex.join(program(cli.folder, step))}" for step in (0.004, 0.002))
    found = cli("race", slow, fast, "--budget", "30s", timeout=100)
    assert found.returncode == 0, found.stderr
    assert "lines/s" in found.stdout
    folder = RaceFolder.find("last", cli.runs)
    assert folder is not None
    (ratio,) = folder.read().ratios
    assert ratio.effect is not None
    assert ratio.effect < 0.9, "half the work a line"
    again = ratio.verdict == "not settled" or disturbed(folder.windows())
    assert ("next: lockstep race " if again else f"next: {fast.removeprefix('$ ')}") in found.stderr, found.stderr
    assert processes_of(cli.folder) == []
    guarded = cli("race", fast, slow, "--budget", "30s", "--fail-if-slower", timeout=100)
    folder = RaceFolder.find("last", cli.runs)
    assert folder is not None
    (ratio,) = folder.read().ratios
    assert guarded.returncode == (1 if ratio.verdict == "slower" else 0)
    assert (f"race: slower than '{fast}'" in guarded.stderr) == (ratio.verdict == "slower")
    mixed = cli("race", "$ python train.py", "ranks=1", "--all", "data=embedded")
    assert mixed.returncode == 2
    assert mixed.stderr.strip().endswith("is not known: write images=N $ COMMAND")


def test_a_budget_that_starting_spends_is_one_line(cli: Cli) -> None:
    (cli.folder / "train.py").write_text("import time\ntime.sleep(1.5)\n" + SCRIPT)
    said = cli.error("race", "train.py -- 10", "train.py threads=1 -- 10", "--budget", "1s", code=2)
    assert "race: the budget of 1 s was spent before the first round" in said
    assert processes_of(cli.folder) == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--budget=soon", "'soon' is not a time, such as 1s."),
        ("--until=200%", "'200%' is out of range: from 0.01% to 50%."),
    ],
)
def test_options_take_units(cli: Cli, option: str, said: str) -> None:
    found = cli("race", "ranks=1", "threads=1", option)
    assert found.returncode == 2
    assert said in found.stderr


@pytest.mark.cold
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_race_that_is_stopped_keeps_what_was_measured_and_leaves_no_process(cli: Cli, sign: int) -> None:
    process = cli.start("race", "ranks=1", "ranks=2", "--all", " ".join([*TINY, "data=embedded"]), "--name", "mine")
    kept = cli.runs / "races/mine/windows.jsonl"
    until = time.monotonic() + 60
    while not kept.exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(sign)
    _, errors = process.communicate(timeout=30)
    if sign == signal.SIGINT:
        assert process.returncode == 130
        assert "what was measured is in" in errors
    until = time.monotonic() + 10
    while processes_of(cli.folder) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes_of(cli.folder) == []
    folder = RaceFolder.find("last", cli.runs)
    assert folder is not None
    assert folder.windows()
    assert not folder.read().over


def test_contenders_of_one_race_share_its_cores(tmp_path: Path) -> None:
    """Each would be pinned to cores of its own otherwise, or to none."""
    both = [ranks(tmp_path, "ranks=1", name=name) for name in ("a", "b")]
    for contender in both:
        contender.start(1)
    try:
        for contender in both:
            contender.ready()
        cores = [os.sched_getaffinity(pid) for name in ("a", "b") for pid in processes_of(tmp_path / name)]
    finally:
        for contender in both:
            contender.end()
    assert len(cores) == 2
    assert cores[0] == cores[1]


@pytest.mark.slow
@pytest.mark.cold
def test_the_action_for_pull_requests_races_both_branches(cli: Cli) -> None:
    """The shell text of the action, in a clone whose branch makes the script twice as slow. No GitHub runner is here."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which Sphinx brings: make docs")
    action = yaml.safe_load((Path(__file__).parents[1] / ".github/actions/race/action.yml").read_text())
    step = next(step for step in action["runs"]["steps"] if step.get("name") == "race")
    assert set(re.findall(r"inputs\.(\w+)", json.dumps(action["runs"]))) == set(action["inputs"])
    origin, clone = cli.folder / "origin", cli.folder / "clone"

    def git(*words: str, where: Path = clone) -> None:
        person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *person, *words], cwd=where, check=True, capture_output=True)

    def commit(step: float, where: Path) -> None:
        (where / "train.py").write_text(f"import sys\nsys.argv[1:] = ['{step}', '1000000', '\\n']\n{PROGRAM}")
        git("add", ".", where=where)
        git("commit", "-m", "a step", where=where)

    origin.mkdir()
    git("init", "-b", "main", where=origin)
    commit(0.002, origin)
    git("clone", str(origin), str(clone), where=cli.folder)
    git("switch", "-c", "slower")
    commit(0.004, clone)
    told = {"SCRIPT": "train.py", "ARGUMENTS": "", "UNTIL": "2%", "BUDGET": "30s", "GITHUB_BASE_REF": "main"}
    paths = {"RUNNER_TEMP": str(cli.folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
        cwd=clone,
        env={**cli.environment, **told, **paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    folder = RaceFolder.find("last", cli.runs)
    assert folder is not None
    (ratio,) = folder.read().ratios
    assert ratio.effect is not None, done.stderr
    assert ratio.effect > 1.1, "twice the work a line"
    assert done.returncode == (1 if ratio.verdict == "slower" else 0), done.stderr
    assert processes_of(cli.folder) == []


def test_a_run_races_as_what_it_was(cli: Cli) -> None:
    """Settings for all cannot hold for it, and a command that was attached to has none."""
    run, _ = prepare(*load([], [*SHORT, "max_steps=1"]), runs=cli.runs, name="one")
    said = cli.error("race", "one", "ranks=1", "--all", "global_batch=64", code=2)
    assert "race: 'one': a run states all its settings itself, so 'global_batch=64' cannot hold for it" in said
    spec = run.spec()
    attached = msgspec.structs.replace(
        spec, options=msgspec.structs.replace(spec.options, attached=["python", "a b.py"])
    )
    write_atomic(run.folder / "run.json", msgspec.to_builtins(attached))
    assert "race its command: '$ python 'a b.py''" in cli.error("race", "one", "ranks=1", code=2)
