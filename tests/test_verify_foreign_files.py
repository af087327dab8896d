"""`lockstep verify -- COMMAND`: the user's files are as they were, however many save at a path, and whoever is killed."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.errors import RunFailed
from lockstep.files import locked
from lockstep.inside.saved import KEPT, kept
from lockstep.process import stat_fields
from lockstep.verify.foreign import observe as observing
from lockstep.verify.foreign.observe import Watched, observe
from lockstep.verify.foreign.undo import LOCK, left, undo
from support import Cli, processes_of, wait_for
from test_verify_foreign_code import BEGIN, begun, made, tree


def started(records: Path, home: Path, code: str) -> subprocess.Popen[str]:
    """A process of the command."""
    words = [sys.executable, "-c", f"{BEGIN}os.chdir({str(home)!r})\n{code}", str(records)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_several_processes_save_at_the_same_paths(tmp_path: Path) -> None:
    """The first to come has copied what was there before another overwrites it."""
    before = {f"{n}.pt": f"mine {n} " * 20000 for n in range(40)}
    made(tmp_path / "home", before)
    records = begun(tmp_path)
    save = "for n in range(40):\n    save('x', f'{n}.pt'); save('x', f'new-{n}.pt')\n    shutil.copyfile(f'{n}.pt', f'copy-{n}.pt')"
    processes = [started(records, tmp_path / "home", save) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert len(tree(tmp_path / "home")) == 120
    assert undo(records) == []
    assert tree(tmp_path / "home") == before


def test_a_process_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    before = {f"{n}.pt": f"mine {n} " * 20000 for n in range(40)}
    made(tmp_path / "home", before)
    records = begun(tmp_path)
    save = "print(flush=True)\nfor n in range(40):\n    save('x', f'{n}.pt'); save('x', 'tmp'); os.replace('tmp', f'new-{n}.pt')"
    for _ in range(8):
        process = started(records, tmp_path / "home", save)
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
        assert undo(records) == []
        assert tree(tmp_path / "home") == before
        (records / "settings.json").write_text("{}")  # the next run begins


@pytest.mark.parametrize("lost", ["path", "copy"])
def test_whoever_undoes_may_be_killed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """In the middle of deleting an entry, where what is left of it could say something else."""
    made(tmp_path / "home", {"a.pt": "mine", "b.pt": "mine"})
    records = begun(tmp_path)
    assert started(records, tmp_path / "home", "save('1', 'a.pt'); save('1', 'b.pt')").wait(60) == 0

    def killed(folder: Path) -> None:
        (folder / lost).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            undo(records)
    assert undo(records) == []
    assert tree(tmp_path / "home") == {"a.pt": "mine", "b.pt": "mine"}
    assert not Path(kept(str(records))).exists()


def test_nothing_is_written_when_all_is_undone(tmp_path: Path) -> None:
    """A rank on another host may come late."""
    made(tmp_path / "home", {"a.pt": "mine"})
    records = begun(tmp_path)
    process = started(records, tmp_path / "home", "sys.stdin.readline(); save('1', 'a.pt'); print('saved')")
    (records / "over").touch()
    assert (process.communicate(timeout=60)[0], process.returncode) == ("", 0)
    assert tree(tmp_path / "home") == {"a.pt": "mine"}


def command(home: Path, code: str) -> list[str]:
    """As a whole command."""
    begin = BEGIN.replace("sys.argv[1]", "os.environ['LOCKSTEP_VERIFY']")
    return [sys.executable, "-c", f"{begin}os.chdir({str(home)!r})\n{code}"]


def test_what_cannot_be_put_back_is_said_and_kept(tmp_path: Path) -> None:
    made(tmp_path / "home", {"a.pt": "mine", "b.pt": "mine"})
    code = "save('1', 'b.pt'); os.remove('a.pt'); os.mkdir('a.pt')\nwith open('a.pt/x', 'w') as f:\n    f.write('1')"
    with pytest.raises(RunFailed) as failed:
        observe("2 ranks", command(tmp_path / "home", code), tmp_path / "proof/ranks", Watched(8))
    path, _, copy = str(failed.value).partition(": Is a directory; what it was is in ")
    assert path == f"verify: a file could not be put back: {tmp_path / 'home/a.pt'}"
    assert Path(copy).read_text() == "mine"
    assert tree(tmp_path / "home") == {"a.pt/x": "1", "b.pt": "mine"}


def test_what_was_left_when_all_were_killed_is_said_by_the_next_proof(tmp_path: Path) -> None:
    made(tmp_path / "home", {"a.pt": "mine", "b.pt": "mine"})
    records = begun(tmp_path).rename(tmp_path / "ranks")
    (tmp_path / ".verify-1").mkdir()
    records = records.rename(tmp_path / ".verify-1/ranks")
    assert started(records, tmp_path / "home", "save('1', 'a.pt'); save('1', 'new.pt')").wait(60) == 0
    copy = next(Path(kept(str(records))).glob("*/copy"))
    with locked(tmp_path / ".verify-1" / LOCK, "undoing"):
        assert list(left(tmp_path)) == [], "it is under way"
    folder = f"when you have looked, delete {kept(str(records))}"
    assert sorted(left(tmp_path)) == [
        f"a proof that was killed has changed {tmp_path / 'home/a.pt'}: what it was is in {copy}; {folder}",
        f"a proof that was killed has left {tmp_path / 'home/new.pt'}; {folder}",
    ]
    assert copy.read_text() == "mine"


@pytest.mark.cold
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_the_files_are_put_back_though_lockstep_is_killed(cli: Cli, sign: signal.Signals) -> None:
    """The ranks are ended, and then what they did is undone, by whoever is left."""
    made(cli.folder / "home", {"a.pt": "mine"})
    script = BEGIN.replace("sys.argv[1]", "os.environ['LOCKSTEP_VERIFY']")
    script += "import time\nos.chdir('home'); save('1', 'a.pt'); save('1', 'new.pt'); open('../saved', 'w').close(); time.sleep(1000)"
    (cli.folder / "train.py").write_text(script)
    process = cli.start("verify", "--", sys.executable, "train.py", "{ranks}")
    wait_for((cli.folder / "saved").exists, what="a checkpoint")
    assert tree(cli.folder / "home") == {"a.pt": "1", "new.pt": "1"}
    process.send_signal(sign)
    process.communicate(timeout=60)
    wait_for(lambda: tree(cli.folder / "home") == {"a.pt": "mine"}, what="what was there")
    wait_for(lambda: not list(cli.runs.glob(f"*{KEPT}")), what="the end of it")
    wait_for(lambda: not processes_of(cli.folder), what="the end of all processes")


def test_a_command_that_waits_for_ever_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "home", {"a.pt": "mine"})
    output = tmp_path / "proof/ranks" / observing.OUTPUT
    later = itertools.count(step=2 * observing.SILENT_S)  # once it has spoken, time flies
    clock = SimpleNamespace(monotonic=lambda: next(later) if output.exists() and output.read_text() else 0.0)
    code = "import time; save('1', 'a.pt'); print('still', os.getpid(), flush=True); time.sleep(1000)"
    monkeypatch.setattr(observing, "time", clock)
    said = "for 30 minutes the command has taken no step and said nothing, after 0 steps of all ranks; its last words: still"
    with pytest.raises(RunFailed, match=said) as failed:
        observe("2 ranks", command(tmp_path / "home", code), tmp_path / "proof/ranks", Watched(8))
    assert stat_fields(int(str(failed.value).split()[-1]))[:1] in ([], ["Z"])
    assert tree(tmp_path / "home") == {"a.pt": "mine"}
