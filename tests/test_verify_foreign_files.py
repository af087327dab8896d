"""`lockstep verify -- COMMAND`: checkpoint code works as always, and afterwards the user's files are as they were, whoever is killed."""

from __future__ import annotations

import itertools
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

# What a process of the command has before anything else. `save` writes as torch does, in C, where Python tells nobody.
BEGIN = """
import ctypes, glob, os, pathlib, shutil, sys, tempfile
from lockstep.inside.saved import Saved

def write(text, f):
    if hasattr(f, "write"):
        f.write(text)
        return
    libc = ctypes.CDLL(None)
    file = libc.open(os.fsencode(f), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    assert file >= 0
    libc.write(file, text.encode(), len(text))
    libc.close(file)

records = sys.argv[1]
saved = Saved(records, os.stat(records + "/settings.json").st_ctime_ns)
saved.watch()
save = saved.saves(write)
"""
# Ordinary checkpoint code: what is there before, what the script does, and what else is there after the run.
CODE: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "saves at a path that was there, and at a new one": (
        {"old.pt": "mine"},
        "save('1', 'old.pt'); save('2', 'old.pt'); save('1', f='new.pt'); save('2', pathlib.Path('new.pt'))\n"
        "assert open('old.pt').read() == open('new.pt').read() == '2'",
        {},
    ),
    "copies the best, as the ImageNet example does": (
        {"model_best.pth": "mine"},
        "save('1', 'checkpoint.pth'); shutil.copyfile('checkpoint.pth', 'model_best.pth')\n"
        "shutil.copy('checkpoint.pth', 'other_best.pth'); shutil.copy2('model_best.pth', 'third.pth')\n"
        "assert open('model_best.pth').read() == open('third.pth').read() == '1'",
        {},
    ),
    "looks at what it has saved": (
        {},
        "save('1', 'a.pt'); assert os.path.exists('a.pt') and os.path.getsize('a.pt') == 1 and glob.glob('*.pt') == ['a.pt']",
        {},
    ),
    "keeps the last two": (
        {"1.pt": "mine", "2.pt": "mine, too"},
        "for n in (3, 4):\n    save('x', f'{n}.pt')\n    os.remove(sorted(glob.glob('*.pt'))[0])\n"
        "save('x', '5.pt'); pathlib.Path('3.pt').unlink(); assert sorted(glob.glob('*.pt')) == ['4.pt', '5.pt']",
        {},
    ),
    "moves, with every way to say so": (
        {"a": "mine", "b": "mine", "c": "mine", "d": "mine", "sub/e": "mine"},
        "for n, move in enumerate((lambda: os.replace(src='new', dst='a'), lambda: os.rename(src='new', dst='b'),\n"
        "        lambda: pathlib.Path('new').replace('c'), lambda: shutil.move('new', 'd'),\n"
        "        lambda: os.replace('new', 'e', dst_dir_fd=os.open('sub', os.O_RDONLY)))):\n"
        "    save(str(n), 'new'); move()\nassert not os.path.exists('new') and open('sub/e').read() == '4'",
        {},
    ),
    "keeps the one before under another name": (
        {"last.pt": "mine", "before.pt": "mine before"},
        "for n in range(2):\n    os.replace('last.pt', 'before.pt'); save(str(n), 'last.pt')\nassert open('before.pt').read() == '0'",
        {},
    ),
    "keeps the one before where there was none": ({"a": "mine"}, "os.rename('a', 'b'); save('1', 'a')", {}),
    "writes aside with open, and moves": (
        {"last.pt": "mine"},
        "with open('tmp', 'w') as f:\n    save('1', f)\nos.replace('tmp', 'last.pt'); assert open('last.pt').read() == '1'\n"
        "with open('tmp', 'w') as f:\n    save('1', f)\nos.replace('tmp', 'new.pt')\n"
        "file, name = tempfile.mkstemp(dir='.')\nsave('1', name); os.replace(name, 'third.pt')",
        {},
    ),
    "opens the file itself": ({"a.pt": "mine"}, "with open('a.pt', 'w') as f:\n    save('1', f)", {}),
    "overwrites without torch.save": (
        {"weights.txt": "mine"},
        "pathlib.Path('weights.txt').write_text('1'); pathlib.Path('other.txt').write_text('1')",
        {"other.txt": "1"},
    ),
    "moves a folder with all that is in it": (
        {},
        "os.mkdir('tmp')\nwith open('tmp/config.json', 'w') as f:\n    f.write('{}')\nos.mkdir('tmp/sub'); save('1', 'tmp/sub/x.pt')\n"
        "save('1', 'tmp/x.pt'); os.rename('tmp', 'ckpt')\nassert sorted(os.listdir('ckpt')) == ['config.json', 'sub', 'x.pt']",
        {},
    ),
    "moves a folder in place of another": (
        {"ckpt/x.pt": "mine", "ckpt/sub/config.json": "mine"},
        "for n in range(2):\n    os.makedirs('tmp'); save(str(n), 'tmp/x.pt'); os.rename('ckpt', f'before-{n}'); os.rename('tmp', 'ckpt')\n"
        "assert open('before-1/x.pt').read() == '0' and open('before-0/sub/config.json').read() == 'mine'",
        {},
    ),
    "removes an old folder": (
        {"step-1/x.pt": "mine", "step-1/sub/y.json": "mine"},
        "os.makedirs('step-2'); save('1', 'step-2/x.pt'); open('step-2/state.json', 'w').close(); shutil.rmtree('step-1')\n"
        "assert not os.path.exists('step-1')",
        {},
    ),
    "points at the latest": (
        {"1.pt": "mine", "latest": "-> 1.pt"},
        "save('2', '2.pt'); os.symlink('2.pt', 'tmp'); os.replace('tmp', 'latest'); os.symlink('2.pt', 'new')\n"
        "assert open('latest').read() == '2'",
        {},
    ),
    "saves through a link": ({"1.pt": "mine", "latest": "-> 1.pt"}, "save('2', 'latest')", {}),
    "links before it overwrites": (
        {"a.pt": "mine"},
        "os.link('a.pt', 'b.pt'); save('1', 'a.pt'); os.unlink('b.pt')",
        {},
    ),
    "touches before it overwrites": (
        {"a.pt": "mine", "b.pt": "mine"},
        "os.utime('a.pt'); save('1', 'a.pt'); os.chmod('b.pt', 0o600); os.remove('b.pt')",
        {},
    ),
    "writes a log": (
        {"log.txt": "mine", "run/x": "mine"},
        "for name in ('log.txt', 'run/y'):\n    with open(name, 'a') as f:\n        f.write(' and more')",
        {"log.txt": "mine and more", "run/y": " and more"},
    ),
    "rotates a log": (
        {"log": "new", "log.1": "old"},
        "with open('log', 'a') as f:\n    f.write('er')\nos.remove('log.1'); os.rename('log', 'log.1'); open('log', 'w').close()",
        {"log": "newer"},
    ),
    "gets data": (
        {},
        "os.mkdir('part'); os.mkdir('empty')\nwith open('part/a', 'w') as f:\n    f.write('data')\nos.rename('part', 'data')\n"
        "with open('part', 'w') as f:\n    f.write('more')\nos.rename('part', 'more')",
        {"data/a": "data", "more": "more"},
    ),
}


def tree(folder: Path) -> dict[str, str]:
    """Every file with its content, every link with its target, and folders that are empty."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"-> {path.readlink()}"
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_text()
        elif not any(path.iterdir()):
            found[str(path.relative_to(folder))] = "empty"
    return found


def made(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
        else:
            path.write_text(text)


def begun(tmp_path: Path) -> Path:
    """The records of a run that begins now."""
    records = tmp_path / "proof/ranks"
    records.mkdir(parents=True)
    (records / "settings.json").write_text("{}")
    return records


def test_checkpoint_code_works_as_always_and_its_files_are_as_before(tmp_path: Path) -> None:
    for name, (before, _, _) in CODE.items():
        made(tmp_path / "home" / name, before)
    records = begun(tmp_path)
    script = BEGIN + "".join(
        f"os.chdir({str(tmp_path / 'home' / name)!r})\nprint({name!r}, flush=True)\n{code}\n"
        for name, (_, code, _) in CODE.items()
    )
    done = subprocess.run([sys.executable, "-c", script, str(records)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert undo(records) == []
    for name, (before, _, more) in CODE.items():
        assert tree(tmp_path / "home" / name) == {**before, **more}, name
    assert not Path(kept(str(records))).exists()


# --- whoever is killed, and however many there are -------------------------------------------------------------------------------


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
