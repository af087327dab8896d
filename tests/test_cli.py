"""The command line as a user meets it: through a shell, with right and with wrong words."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import models
from lockstep.cli import verify
from lockstep.cli.commands import COMMANDS, call
from lockstep.errors import InputError
from lockstep.recipe import Recipe
from lockstep.run import Run
from support import SHORT, Cli, wait_for

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"


# ---------------------------------------------------------------- help


def test_help_imports_neither_torch_nor_numpy_nor_rich() -> None:
    code = (
        "import sys, click\nfrom lockstep.cli.commands import cli, COMMANDS\n"
        "from click.testing import CliRunner\n"
        "for words in [[]] + [[name] for name in COMMANDS]:\n"
        "    result = CliRunner().invoke(cli, [*words, '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
        "    assert 'Example' in result.output, words\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'rich', 'PIL'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_lockstep_does_not_import_torch() -> None:
    code = "import sys, lockstep; lockstep.Recipe; lockstep.Placement; lockstep.Run; print('torch' in sys.modules, len(lockstep.__all__))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "13"]


def test_reading_runs_works_without_torch(cli: Cli, alone: dict[str, Any]) -> None:
    """A laptop that looks at a cluster's runs need not have torch."""
    cli.environment["LOCKSTEP_RUNS"] = str(Path(alone["run"]).parent)
    code = "import sys; sys.modules['torch'] = None\nsys.argv = ['lockstep', *sys.argv[1:]]\nfrom lockstep.cli import main\nmain()"
    for words in (["runs"], ["show", "last", "--ranks"], ["show", "last", "--json"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env=cli.environment, cwd=cli.folder
        )
        assert result.returncode == 0, result.stderr


def test_an_unknown_command_names_the_nearest(cli: Cli) -> None:
    result = cli("verfy")
    assert result.returncode == 2
    assert "Did you mean 'verify'?" in result.stderr


def test_version_and_every_command_is_listed(cli: Cli) -> None:
    assert re.match(r"lockstep, version \d", cli("--version").stdout)
    text = cli("--help").stdout
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(cli: Cli, shell: str) -> None:
    result = cli("completion", shell)
    assert result.returncode == 0
    assert "_LOCKSTEP_COMPLETE" in result.stdout


def test_bash_completes_by_its_script(cli: Cli) -> None:
    """What Tab does: bash calls the function that the script has registered, and takes what it leaves."""
    cli.environment["PATH"] = f"{Path(cli.argv()[0]).parent}:{cli.environment['PATH']}"

    def tab(*words: str) -> list[str]:
        press = (
            "source <(lockstep completion bash)\n"
            "compopt() { echo compopt $*; }\n"
            f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}\n"
            "$(complete -p lockstep | sed 's/.*-F \\([^ ]*\\).*/\\1/') lockstep\n"
            "printf '%s\\n' ${COMPREPLY[@]}\n"
        )
        argv = ["bash", "-c", press]
        pressed = subprocess.run(argv, env=cli.environment, cwd=cli.folder, capture_output=True, text=True, check=True)
        assert not pressed.stderr
        return pressed.stdout.splitlines()

    assert tab("lockstep", "ve") == ["verify"]
    assert tab("lockstep", "run", "optimizer.l") == ["compopt -o nospace", "optimizer.lr="]
    assert tab("lockstep", "run", "ranks=2", "glob") == ["compopt -o nospace", "global_batch="]


@pytest.mark.skipif(not shutil.which("fish"), reason="there is no fish: apt-get install fish")
def test_fish_completes_by_its_script(cli: Cli) -> None:
    cli.environment["PATH"] = f"{Path(cli.argv()[0]).parent}:{cli.environment['PATH']}"

    def tab(line: str) -> list[str]:
        press = f"lockstep completion fish | source; complete -C {shlex.quote(line)}"
        argv = ["fish", "--no-config", "-c", press]
        pressed = subprocess.run(argv, env=cli.environment, cwd=cli.folder, capture_output=True, text=True, check=True)
        assert not pressed.stderr
        return [found.partition("\t")[0] for found in pressed.stdout.splitlines()]

    assert tab("lockstep ve") == ["verify"]
    assert tab("lockstep run ranks=2 glob") == ["global_batch="]
    assert "--plot" in tab("lockstep show --")


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh: apt-get install zsh")
@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("lockstep ve", "lockstep verify "),
        ("lockstep run optimizer.l", "lockstep run optimizer.lr="),
        ("lockstep run ranks=2 glob", "lockstep run ranks=2 global_batch="),
    ],
)
def test_zsh_completes_by_its_script(cli: Cli, typed: str, line: str) -> None:
    """A real zsh at a terminal: Tab, then a key that writes down what the line has become."""
    cli.environment["PATH"] = f"{Path(cli.argv()[0]).parent}:{cli.environment['PATH']}"
    started = (
        "autoload -Uz compinit; compinit -u -D; source <(lockstep completion zsh)\n"
        "tell() { print -rn -- $BUFFER > line.part; mv line.part line }; zle -N tell; bindkey '^T' tell; : > ready\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cli.folder)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**cli.environment, "TERM": "xterm"})
    try:
        os.write(terminal, started.encode())
        wait_for(lambda: (cli.folder / "ready").exists(), what="zsh to know the script")
        os.write(terminal, f"{typed}\t\x14".encode())
        wait_for(lambda: (cli.folder / "line").exists(), what="the line")
        assert (cli.folder / "line").read_text() == line
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_completion_knows_commands_and_keys(cli: Cli) -> None:
    def complete(words: str, at: int) -> str:
        return cli(_LOCKSTEP_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(at)).stdout

    assert "verify" in complete("lockstep ve", 1)
    assert "global_batch=" in complete("lockstep run glob", 2)
    assert "optimizer.lr=" in complete("lockstep run optimizer.l", 2)


# ---------------------------------------------------------------- wrong input: one line, exit code 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["epoch=3"], "unknown key 'epoch': did you mean 'epochs'?"),
        (["epochs=many"], "epochs=many: expected a whole number"),
        (["global_batch=50", "ranks=4"], "global_batch=50 does not divide by ranks=4: choose global_batch=48 or 52"),
        (["global_batch=0"], "global_batch=0: expected a whole number >= 1"),
        (["ranks=-1"], "ranks=-1: expected a whole number >= 1"),
        (["optimizer.lr=-0.1"], "optimizer.lr=-0.1: expected a number > 0"),
        (["model=mnist-convnt"], "model=mnist-convnt: no such model; did you mean 'mnist-convnet'?"),
        (["data=mnits"], "did you mean 'mnist'?"),
        (["device=cuda"], "device=cuda, but this machine has no usable CUDA"),
        (["nonsense"], "'nonsense' is not key=value"),
        (["missing.toml"], "recipe file missing.toml: No such file or directory"),
        (["--name", "../out"], "a run's name is one plain word"),
    ],
)
def test_wrong_words(cli: Cli, words: list[str], message: str) -> None:
    import torch

    if torch.cuda.is_available() and "device=cuda" in words:
        pytest.skip("this machine has CUDA")
    assert message in cli.error("run", *SHORT, *words, code=2)
    assert not cli.runs.exists(), "nothing is left behind"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("attach --btch 3 -- python train.py", "attach: no such option '--btch'. Did you mean '--batch'?"),
        ("attach --batch 0 -- python train.py", "attach: invalid value for '--batch': 0 is not in the range 1<=x<="),
        ("study run", "study run: missing argument 'FILE|NAME'"),
        ("export --format cvs last", "export: invalid value for '--format': 'cvs' is not one of 'csv', "),
        ("atach", "No such command 'atach'. Did you mean 'attach'?"),
        ("attach --runs /proc/nowhere -- sh -c true", "cannot write the run folder /proc/nowhere/"),
    ],
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert call(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"lockstep: {message}")
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "net.py:Net", "net.py"),
        ("import nothing_like_this", "net.py:Net", "nothing_like_this"),
        ("def Net(: pass", "net.py:Net", "net.py line 1"),
        ("class Nett: pass", "net.py:Net", "has no 'Net'"),
        ("Net = 3", "net.py:Net", "not something that can be called"),
        ("def Net(): return 3", "net.py:Net", "returned int, not a torch.nn.Module"),
        ("def Net(a): return 3", "net.py:Net", "missing 1 required positional argument: 'a'"),
        ("def Net(): raise KeyError('boom')", "net.py:Net", "could not be built: KeyError: 'boom'"),
        (
            "import torch\ndef Net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 10))",
            "net.py:Net",
            "cannot take the 1x28x28 images of data=embedded",
        ),
        (
            "import torch\ndef Net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 7))",
            "net.py:Net",
            "answers 7 classes, but data=embedded has labels 0 to 9",
        ),
        ("import torch\ndef Net(): return torch.nn.Flatten()", "net.py:Net", "has no parameters to train"),
    ],
)
def test_a_model_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, name: str, message: str
) -> None:
    """What a rank does with it before the first step."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "net.py").write_text(content)
    recipe = Recipe(model=name, data="embedded")
    with pytest.raises(InputError) as caught:
        models.check_fits(models.build(recipe), recipe, torch.zeros(2, 1, 28, 28), 10)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_built_is_one_line_to_the_user(cli: Cli) -> None:
    (cli.folder / "net.py").write_text("def Net(): raise KeyError('boom')")
    assert "could not be built: KeyError: 'boom'" in cli.error("run", *SHORT, "model=net.py:Net", code=2)


def test_an_image_shape_that_the_model_cannot_take(cli: Cli) -> None:
    message = cli.error("run", *SHORT, "model=cifar-vgg", code=2)
    assert "cannot take the 1x28x28 images of data=embedded: it takes 3x32x32; choose data=cifar10" in message


def test_labels_out_of_range(cli: Cli) -> None:
    (cli.folder / "sets.py").write_text(
        "import numpy as np\ndef load():\n    images = np.zeros((20, 1, 28, 28), np.uint8)\n"
        "    labels = np.full(20, -1)\n    return images, labels, images, labels\n"
    )
    assert "sets.py:load" in cli.error("run", "data=sets.py:load", code=2)


def test_a_data_file_cut_in_half(cli: Cli) -> None:
    root = cli.folder / "root" / "MNIST" / "raw"
    root.mkdir(parents=True)
    (root / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03" + b"\x00" * 1000)
    result = cli(
        "run",
        "data=mnist",
        "--data-root",
        "root",
        LOCKSTEP_OFFLINE="1",
        LOCKSTEP_DATA=str(cli.folder / "empty"),
        PATH="/nowhere",
    )
    assert result.returncode == 4, result.stderr
    assert "Traceback" not in result.stderr
    assert "train-images-idx3-ubyte" in result.stderr
    assert (root / "train-images-idx3-ubyte").exists(), "never deleted silently"


def test_data_that_cannot_be_had_lists_every_place(cli: Cli) -> None:
    result = cli("run", "data=mnist", LOCKSTEP_OFFLINE="1", LOCKSTEP_DATA=str(cli.folder / "empty"))
    assert result.returncode == 4
    assert str(cli.folder / "empty") in result.stderr
    assert "LOCKSTEP_OFFLINE" in result.stderr


# ---------------------------------------------------------------- warnings that do not stop


def test_more_ranks_than_cores_warns_and_runs(cli: Cli) -> None:
    import os

    ranks = 2 * len(os.sched_getaffinity(0))
    result = cli("run", *SHORT, f"global_batch={12 * ranks}", f"ranks={ranks}", "max_steps=3", "--json")
    assert result.returncode == 0, result.stderr
    assert "warning: " in result.stderr
    assert "take turns" in result.stderr
    assert json.loads(result.stdout)["ranks_agree"]


def test_a_setting_without_effect_is_a_warning(cli: Cli) -> None:
    result = cli("run", *SHORT, "optimizer.momentum=0.9", "--dry-run")
    assert result.returncode == 0
    assert "warning: optimizer.momentum=0.9 has no effect with optimizer.name=adam" in result.stderr


# ---------------------------------------------------------------- dry run, show, runs


def normalised(text: str, cli: Cli) -> str:
    """A dry run's text without what differs between machines: the folder, the id, the interpreter."""
    text = text.replace(str(cli.runs), "RUNS").replace(sys.executable, "PYTHON")
    return re.sub(r"\d{8}-\d{6}-([\w-]+)-[0-9a-f]{4}", r"TIME-\1-RANDOM", text)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("spawn", ["ranks=2", "threads=1", "accumulation=2"]),
        ("torchrun", ["ranks=2", "threads=1", "launcher=torchrun"]),
        ("two-hosts", ["ranks=4", "hosts=2", "threads=1", "rendezvous=10.0.0.1:29500", "--name", "both"]),
    ],
)
def test_dry_run_against_golden_text(cli: Cli, name: str, words: list[str]) -> None:
    result = cli("run", *SHORT, *words, "--dry-run")
    assert result.returncode == 0, result.stderr
    golden = GOLDEN / f"dry-run-{name}.txt"
    assert normalised(result.stdout, cli) == golden.read_text()
    assert not cli.runs.exists(), "a dry run leaves nothing behind"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "data=embedded", "ranks=2", "--name", "a b"], "lockstep run data=embedded ranks=2 --name 'a b'"),
        (["run", "--quiet", "loop.py", "--", "--width", "64"], "lockstep run --quiet -- loop.py --width 64"),
        (
            ["study", "run", "mine.toml", "epochs=1", "--repeats", "2"],
            "lockstep study run mine.toml epochs=1 --repeats 2",
        ),
    ],
)
def test_a_dry_run_ends_with_the_command_that_does_it(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(cli.folder)
    monkeypatch.setenv("LOCKSTEP_RUNS", str(cli.runs))
    Path("loop.py").write_text("import lockstep\nlockstep.session()\n")
    Path("mine.toml").write_text('about = "a"\nrecipe.data = "embedded"\n[factors]\nranks = [1, 2]\n')
    at = words.index("--") if "--" in words else len(words)
    assert call([*words[:at], "--dry-run", *words[at:]]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"next: {said}"


def test_a_dry_run_can_be_saved_and_run(cli: Cli) -> None:
    text = cli("run", *SHORT, "max_steps=4", "ranks=2", "threads=1", "--dry-run").stdout
    settings = text.split("# global batch")[0]
    (cli.folder / "saved.toml").write_text(settings)
    document = cli.run("saved.toml")
    assert document["steps"] == 4
    assert document["placement"]["ranks"] == 2


def test_json_is_one_document_and_the_rest_goes_to_stderr(cli: Cli) -> None:
    result = cli("run", *SHORT, "--json")
    document = json.loads(result.stdout)
    assert {"run", "state", "train_seconds", "train_cpu_seconds", "train_images", "images_per_second", "epochs"} <= set(
        document
    )
    assert "epoch 2/2" in result.stderr
    listed = json.loads(cli("runs", "--json").stdout)
    assert [row["state"] for row in listed] == ["done"]
    shown = cli("show", "last", "--ranks")
    assert "a step takes" in shown.stdout
    assert "\x1b[" not in shown.stdout, "NO_COLOR"
    # A folder that is being written, or was cut off, is listed and does not stop the list.
    broken = cli.runs / "99990101-000000-broken"
    broken.mkdir()
    (broken / "run.json").write_text('{"recipe": ')
    other = cli.runs / "99990101-000001-other"
    other.mkdir()
    (other / "run.json").write_text('{"plan": {}, "recipe": []}')
    os.mkdir(os.fsencode(cli.runs) + b"/99990101-\xff")  # noqa: PTH102
    Path(os.fsdecode(os.fsencode(cli.runs) + b"/99990101-\xff/run.json")).write_text("{}")
    assert cli("runs").stdout.count("damaged") == 2
    assert "run.json" in cli.error("show", broken.name, code=2)


def test_finding_a_run(cli: Cli) -> None:
    assert "no runs in" in cli.error("show", "last", code=2)
    cli.run(*SHORT, "max_steps=1", "--name", "one")
    shutil.copytree(cli.runs / "one", cli.runs / "other")
    assert "exists already" in cli.error("run", *SHORT, "max_steps=1", "--name", "one", code=2)
    assert "fits 2 runs" in cli.error("show", "o", code=2)
    assert "no run 'x'" in cli.error("show", "x", code=2)
    assert "one  done" in cli("show", "on").stdout
    assert "one  done" in cli("show", str(cli.runs / "one")).stdout
    assert "other  done" in cli("show", "her").stdout, "the end of an id"
    cli.run(*SHORT, "max_steps=1", "--name", "newest")
    assert "newest  done" in cli("show", "last").stdout
    assert "other  done" in cli("show", "last~1").stdout, "of two runs of one moment, the name decides"
    assert "'last~2' is the oldest" in cli.error("show", "last~3", code=2)
    assert "stands for the newest run" in cli.error("run", *SHORT, "--name", "last~1", code=2)


def test_a_closed_pipe_is_not_an_error(cli: Cli) -> None:
    result = subprocess.run(
        f"{cli.argv()[0]} recipes --json | head -c 1", shell=True, capture_output=True, text=True, env=cli.environment
    )
    assert result.stdout == "["
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_models_and_doctor(cli: Cli) -> None:
    listed = {row["name"]: row for row in json.loads(cli("models", "--json").stdout)}
    assert listed["mnist-convnet"]["parameters"] == 4_266
    assert listed["cifar-vgg"]["parameters"] == 2_625_962
    # conv 1→4 and 4→8 at 28x28 and 14x14, 9 taps, and the linear layer; a multiply-add is two
    assert listed["mnist-convnet"]["flops"] == 2 * (4 * 9 * 784 + 4 * 8 * 9 * 196 + 392 * 10)
    findings = json.loads(cli("doctor", "--json").stdout)
    areas = {"number formats", "machine", "torch", "backends", "launchers", "data", "runs"}
    assert areas == {f["area"] for f in findings}
    assert all(f["fix"] for f in findings if f["state"] == "missing")


# ---------------------------------------------------------------- one's own model and data, and the demo


def test_the_examples_run(cli: Cli) -> None:
    document = cli.run(
        f"model={ROOT / 'examples/own_model.py'}:Net", f"data={ROOT / 'examples/own_data.py'}:stripes", "model_args.width=4",
        "ranks=2", "global_batch=50", "epochs=6", "optimizer.lr=0.005",
    )  # fmt: skip
    assert document["test_accuracy"] > 0.9
    assert document["test_samples"] == 500
    assert not (Path(document["run"]) / "data").exists(), "the copy of the user's data is gone with the run"
    assert [p.name for p in cli.runs.iterdir()] == [document["id"]], "nothing else is left"
    plan = cli("run", str(ROOT / "examples/mnist-two-ranks.toml"), "data=embedded", "--dry-run")
    assert "global batch 64 = 2 ranks x 32 micro batch x 1 accumulation" in plan.stdout


def test_a_users_data_set_is_called_once_for_all_ranks(cli: Cli) -> None:
    (cli.folder / "sets.py").write_text(
        "import numpy as np, os\ndef load():\n    with open('calls.txt', 'a') as f: f.write('x')\n"
        "    g = np.random.default_rng(0); images = g.integers(0, 255, (60, 1, 28, 28)).astype(np.uint8)\n"
        "    labels = np.arange(60) % 10\n    return images, labels, images, labels\n"
    )
    cli.run("data=sets.py:load", "ranks=2", "global_batch=20", "epochs=1", "threads=1")
    assert (cli.folder / "calls.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "lockstep race ranks=1 ranks=2"),
        (
            ("my.toml", "data=embedded", "ranks=2", "backend=shm"),
            "lockstep race ranks=1 'ranks=2 backend=shm' --all 'my.toml data=embedded' --runs 'my runs' --data-root here",
        ),
    ],
)
def test_the_race_after_a_proof_has_the_words_of_the_proof(words: tuple[str, ...], said: str) -> None:
    where = (Path("my runs"), "here") if words else (None, None)
    assert verify.race_of(words, 2, *where) == said


@pytest.mark.slow
def test_demo_without_a_network_uses_the_embedded_set_and_says_so(cli: Cli) -> None:
    result = cli("demo", timeout=200, LOCKSTEP_OFFLINE="1", LOCKSTEP_DATA=str(cli.folder / "empty"))
    assert result.returncode == 0, result.stderr
    assert "uses the embedded set" in result.stderr
    assert "Mathematics agrees" in result.stdout
    assert "Where the time went" in result.stdout
    assert "lockstep race ranks=1 ranks=2 --all data=embedded" in result.stderr
    assert "lockstep verify data=embedded ranks=2" in result.stderr
    assert len(result.stdout.splitlines()) < 24, "one screen"
    states = {Run(folder).status()["state"] for folder in cli.runs.iterdir() if folder.is_dir()}
    assert states == {"done"}
    assert (cli.runs / "demo.html").read_text().startswith("<!doctype html>")
    assert str(cli.runs / "demo.html") in result.stdout


def test_the_python_interface(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import lockstep

    recipe = lockstep.Recipe(data="embedded", train_limit=96, test_limit=50, global_batch=48, epochs=1)
    run = lockstep.run(recipe, lockstep.Placement(ranks=2, threads=1), runs=cli.runs)
    assert run.status()["state"] == "done"
    summary = run.summary()
    assert summary is not None
    assert summary["steps"] == 2
    with pytest.raises(lockstep.InputError, match="does not divide"):
        lockstep.run(recipe, lockstep.Placement(ranks=5), runs=cli.runs)


@pytest.mark.cold
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams_are_no_reason_to_fail(cli: Cli, closed: str) -> None:
    """Some daemons start a process without standard output."""
    for words, code in ((("--version",), 0), (("show", "nothing"), 2)):
        done = subprocess.run(["bash", "-c", f'"$@" {closed}', "-", *cli.argv(*words)], capture_output=True, text=True)
        assert done.returncode == code
        assert "Traceback" not in done.stdout + done.stderr
