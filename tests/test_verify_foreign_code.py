"""`lockstep verify -- COMMAND`: ordinary checkpoint code works as always, and afterwards the user's files are as they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lockstep.inside.saved import kept
from lockstep.verify.foreign.undo import undo

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
