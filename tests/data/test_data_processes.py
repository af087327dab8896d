"""Real processes: one prepares, the others wait; a kill leaves nothing that would be used."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import datahelp as h


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def test_many_processes_download_and_decode_once(cache: Path, tmp_path: Path, web: h.Web) -> None:
    count = tmp_path / "count"
    processes = [h.start_opener(cache, web.base, str(count), "slow") for _ in range(5)]
    ends = [_finish(process) for process in processes]
    assert len({out for out, _ in ends}) == 1
    assert count.read_text() == "decoded\n"
    assert set(web.requests.values()) == {1}
    waiting = [err for _, err in ends if "waiting for another process that is preparing mini" in err]
    assert len(waiting) == 4


def _stuck(cache: Path, count: Path, web: h.Web) -> subprocess.Popen[str]:
    """A process that has written everything, the last file only by half, and goes no further."""
    process = h.start_opener(cache, web.base, str(count), "stuck")
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    return process


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_kill_while_writing_leaves_nothing_and_the_next_one_cleans_up(cache: Path, tmp_path: Path, web: h.Web) -> None:
    count = tmp_path / "count"
    _kill(_stuck(cache, count, web))
    assert len(list((cache / ".tmp" / "mini").rglob("*.npy"))) == 4
    assert not (cache / "mini").exists()
    second = _stuck(cache, count, web)  # has removed what the first one left
    assert len(list((cache / ".tmp" / "mini").rglob("*.npy"))) == 4
    waiting = h.start_opener(cache, web.base, str(count))
    assert waiting.stderr is not None
    assert any("waiting for another process that is preparing mini" in line for line in waiting.stderr)
    _kill(second)
    out, _ = _finish(waiting)
    assert out.startswith("(40, 1, 6, 5)")
    assert not list((cache / ".tmp").iterdir())
    assert sorted(path.name for path in (cache / "mini").iterdir()) == [
        "meta.json", "test-images.npy", "test-labels.npy", "train-images.npy", "train-labels.npy",
    ]  # fmt: skip
    assert count.read_text() == "decoded\n" * 3


def test_kill_between_two_files_leaves_no_set(cache: Path, tmp_path: Path, web: h.Web) -> None:
    count = tmp_path / "count"
    dead = h.start_opener(cache, web.base, str(count), "fatal")
    dead.communicate(timeout=60)
    assert dead.returncode == -signal.SIGKILL
    assert (cache / "mini" / "train-images.npy").exists()
    assert not (cache / "mini" / "meta.json").exists()
    assert list((cache / ".tmp" / "mini").iterdir())
    out, err = _finish(h.start_opener(cache, web.base, str(count)))
    assert out.startswith("(40, 1, 6, 5)")
    assert "warning" not in err
    assert not list((cache / ".tmp").iterdir())


def test_kill_in_the_middle_of_a_download_then_it_goes_on(cache: Path, tmp_path: Path, web: h.Web) -> None:
    name = "train-images-idx3-ubyte.gz"
    whole = len(web.files[name])
    web.cut_after, web.cuts = whole // 2, 1
    seen = []

    def hang() -> None:
        seen.append(1)
        if len(seen) == 2:  # the second request is the one that would go on
            time.sleep(3)

    web.before = hang
    process = h.start_opener(cache, web.base, str(tmp_path / "count"))
    while len(seen) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [path.stat().st_size for path in (cache / ".downloads").rglob(f"{name}.*.part")] == [whole // 2]
    web.before = lambda: None
    out, _ = _finish(h.start_opener(cache, web.base, str(tmp_path / "count")))
    assert out.startswith("(40, 1, 6, 5)")
    assert (name, f"bytes={whole // 2}-") in web.ranges


def test_user_data_is_made_once_for_all_ranks(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import numpy as np, time, pathlib\n"
        "def load():\n"
        "    with open(pathlib.Path(__file__).with_name('calls'), 'a') as f: f.write('x')\n"
        "    time.sleep(0.5)\n"
        "    train = np.arange(96, dtype='uint8').reshape(6, 4, 4)\n"
        "    return train, np.arange(6), train[:2], np.zeros(2, int)\n"
    )
    code = (
        "import sys; from pathlib import Path; from lockstep.data import open_data\n"
        f"data = open_data('{source}:load', scratch=Path('{tmp_path / 'run' / 'data'}'))\n"
        "print(data.classes, int(data.train_images.sum()), 'torch' in sys.modules)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert {_finish(process)[0] for process in processes} == {"6 4560 False\n"}
    assert (tmp_path / "calls").read_text() == "x"
