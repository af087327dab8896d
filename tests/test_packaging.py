"""What people install: a wheel and a source archive, in an empty environment, far from this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def call(*argv: str | Path, cwd: Path) -> str:
    constraint = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    usual = {key: value for key, value in os.environ.items() if not key.startswith(("LOCKSTEP", "PYTHON", "COV"))}
    done = subprocess.run(argv, cwd=cwd, env={**usual, **constraint}, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    built = tmp_path / "dist"
    call(sys.executable, "-m", "build", "--outdir", built, ROOT, cwd=tmp_path)
    (wheel,) = built.glob("lockstep_bench-*.whl")
    (archive,) = built.glob("lockstep_bench-*.tar.gz")
    with zipfile.ZipFile(wheel) as content:
        packed = {name.removeprefix("lockstep/") for name in content.namelist() if name.startswith("lockstep/")}
    source = ROOT / "src" / "lockstep"
    wanted = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted - packed == set(), "a file of the package is not in the wheel"
    with tarfile.open(archive) as content_of_archive:
        names = content_of_archive.getnames()
    assert any(name.endswith("/src/lockstep/worker.py") for name in names)

    home = tmp_path / "empty"
    venv.create(home, with_pip=True)
    python, lockstep = home / "bin" / "python", home / "bin" / "lockstep"
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    call(python, "-m", "pip", "install", "-q", torch, cwd=tmp_path)
    call(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    assert "lockstep, version" in call(lockstep, "--version", cwd=away)
    assert "lockstep, version" in call(python, "-m", "lockstep", "--version", cwd=away)
    call(lockstep, "run", "data=embedded", "train_limit=320", "test_limit=100", "epochs=1", "ranks=2", cwd=away)
    assert "ranks" in call(lockstep, "show", "last", cwd=away)
    call(lockstep, "report", "last", "-o", "report.html", cwd=away)
    assert "published/d-mnist" in call(lockstep, "recipes", cwd=away)
    assert "batch-size" in call(lockstep, "study", "list", cwd=away)
