"""Launching, without ranks: a run's folder comes first, belongs to who made it, and is gone where nothing is going to start."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from lockstep.errors import DataError, InputError
from lockstep.launch import join, prepare, specify
from lockstep.run import DATA, FolderExists, Options, Run, Spec
from lockstep.settings import load
from support import SHORT

SETS = """
import numpy as np
def load():
    open(__file__ + ".calls", "a").write("x")
    images, labels = np.zeros((20, 1, 8, 8), "uint8"), np.arange(20) % 2
    return images, labels, images, labels
def stopped():
    raise KeyboardInterrupt
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's own data set, which is laid out anew for every run."""
    (tmp_path / "sets.py").write_text(SETS)
    return tmp_path / "sets.py"


def asked(own: Path, *words: str, what: str = "load") -> Any:

    return load([], [f"data={own}:{what}", "global_batch=4", "threads=1", "ranks=1", *words])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_is_made_first_and_holds_the_users_own_data(own: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run, spec = prepare(*asked(own), runs=runs, name="mine")
    assert run.made_here
    assert run.status()["state"] == "planned"
    assert run.spec() == spec
    assert (run.folder / DATA).is_dir()
    assert {path.name for path in runs.iterdir()} == {"mine"}, "nothing lies beside it"
    assert Path(f"{own}.calls").read_text() == "x"


def test_a_name_that_is_taken_leaves_the_other_run_as_it_is(own: Path, tmp_path: Path) -> None:
    """Its data above all: its ranks may be about to read them."""
    runs = tmp_path / "runs"
    run, _ = prepare(*asked(own), runs=runs, name="mine")
    before = contents(run.folder)
    with pytest.raises(FolderExists, match="exists already: choose another --name"):
        prepare(*asked(own), runs=runs, name="mine")
    assert contents(run.folder) == before
    assert Path(f"{own}.calls").read_text() == "x", "the user's code was not called for nothing"


@pytest.mark.parametrize("there", [False, True])
def test_what_does_not_start_leaves_no_folder(
    own: Path, tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    if there:
        runs.mkdir()

    def refuse(spec: Spec) -> None:
        assert (runs / "mine" / DATA).is_dir()
        raise InputError("not like this")

    with pytest.raises(InputError, match="not like this"):
        prepare(*asked(own), runs=runs, name="mine", check=refuse)
    with pytest.raises(InputError, match="does not divide"):
        prepare(*asked(own, "micro_batch=3"), runs=runs, name="mine")
    with pytest.raises(KeyboardInterrupt):
        prepare(*asked(own, what="stopped"), runs=runs, name="mine")
    with pytest.raises(InputError, match="rendezvous"):
        prepare(*asked(own, "launcher=torchrun", "rendezvous=192.0.2.1:29500"), runs=runs, name="mine")
    with pytest.raises(InputError, match="stands for the newest run"):
        prepare(*asked(own), runs=runs, name="last")
    nowhere = Options(data_root=str(tmp_path / "nowhere"))
    monkeypatch.setenv("LOCKSTEP_OFFLINE", "1")
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "cache"))
    with pytest.raises((DataError, InputError)):
        prepare(*load([], ["data=cifar10"]), nowhere, runs=runs, name="mine")
    assert runs.exists() == there
    assert not there or not list(runs.iterdir())


def test_what_is_only_described_leaves_nothing_at_all(own: Path, tmp_path: Path) -> None:
    folder, spec = specify(*asked(own), runs=tmp_path / "runs", name="mine")
    assert folder == tmp_path / "runs" / "mine"
    assert spec.plan.train_samples == 20
    assert spec.command
    assert not (tmp_path / "runs").exists()


def of_two_hosts(tmp_path: Path, host: int | None, *words: str, name: str | None = "pair") -> tuple[Run, Spec]:
    settings = load([], [*SHORT, "ranks=2", "hosts=2", "rendezvous=127.0.0.1:29517", *words])
    return prepare(*settings, runs=tmp_path / "runs", name=name, host_index=host)


def test_hosts_that_share_a_folder_join_it_whichever_comes_first(tmp_path: Path) -> None:
    made, spec = of_two_hosts(tmp_path, 1)
    joined, same = of_two_hosts(tmp_path, 0, "threads=3")
    assert (made.made_here, joined.made_here) == (True, False)
    assert joined.folder == made.folder
    assert (same.plan, same.created) == (spec.plan, spec.created)
    assert (spec.placement.threads, same.placement.threads) == (1, 3), "hosts may differ in cores"
    with pytest.raises(FolderExists, match=r"host 0 of run .* was started before"):
        of_two_hosts(tmp_path, 0)
    with pytest.raises(InputError, match="another recipe or placement"):
        of_two_hosts(tmp_path, 0, "epochs=7")
    for host, name in ((None, "pair"), (0, None)):
        with pytest.raises(InputError, match="every host starts its own command"):
            of_two_hosts(tmp_path, host, name=name)


def test_a_host_that_joins_fetches_into_its_own_cache_and_is_checked_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts share the run's folder, and not always the cache: ranks must not be the first to look for the data."""
    settings = load([], [*SHORT, "ranks=2", "hosts=2", "rendezvous=127.0.0.1:29517"])
    checked: list[Spec] = []
    for host in (0, 1):
        cache = tmp_path / f"cache of host {host}"
        monkeypatch.setenv("LOCKSTEP_DATA", str(cache))
        prepare(*settings, runs=tmp_path / "runs", name="pair", host_index=host, check=checked.append)
        assert list(cache.rglob("train-images*")), f"host {host} has the data"
    assert len(checked) == 2, "what is checked before the start is checked on every host"

    def refuse(spec: Spec) -> None:
        raise InputError("not on this host")

    prepare(*settings, runs=tmp_path / "runs", name="again", host_index=0)
    with pytest.raises(InputError, match="not on this host"):
        prepare(*settings, runs=tmp_path / "runs", name="again", host_index=1, check=refuse)
    assert not (tmp_path / "runs" / "again" / "host-1").exists(), "its place is still free"


def test_a_folder_that_is_no_run_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "pair").mkdir(parents=True)
    monkeypatch.setattr(join, "SEEN_S", 0.2)
    with pytest.raises(InputError, match="is not a run folder"):
        of_two_hosts(tmp_path, 0)


@pytest.mark.parametrize("state", ["done", "failed", "stalled", "cancelled"])
def test_a_run_that_has_ended_is_not_joined(tmp_path: Path, state: str) -> None:
    run, _ = of_two_hosts(tmp_path, 0)
    run.write_status(state)
    before = contents(run.folder)
    for host in (0, 1):
        with pytest.raises(FolderExists, match=rf"has ended \({state}\): choose another --name"):
            of_two_hosts(tmp_path, host)
    assert contents(run.folder) == before


# ---------------------------------------------------------------- the command for each host


def given(option: click.Option) -> list[str]:
    """An option with a value that is not its default, whatever options there are."""
    if option.is_flag:
        return [option.opts[-1]]
    kind = option.type
    if isinstance(kind, click.IntRange | click.types.IntParamType):
        return [option.opts[-1], "7"]
    return [option.opts[-1], "7.25" if isinstance(kind, click.FloatRange) else "seven"]


@pytest.mark.parametrize("words", [(), ("train.py", "--width", "64", "a b"), ("epochs=2",)])
def test_the_command_for_each_host_has_every_option(tmp_path: Path, words: tuple[str, ...]) -> None:
    from lockstep.cli.plan import repeated_options
    from lockstep.cli.run import command
    from lockstep.launch.describe import host_commands

    options = [option for option in command.params if isinstance(option, click.Option)]
    assert len(options) > 10
    dashes = ["--"] if words else []
    typed = command.make_context("run", [*(word for option in options for word in given(option)), *dashes, *words])
    _, spec = specify(*load([], [*SHORT, "ranks=2", "hosts=2", "rendezvous=127.0.0.1:29517"]), runs=tmp_path)
    chosen = Options(data_root="/data", resume_from="/elsewhere/runs/earlier")
    spec = msgspec.structs.replace(spec, options=chosen)
    printed = host_commands(words, repeated_options(typed, tmp_path / "mine", spec), 2)
    for host, line in enumerate(printed):
        program, name, *rest = shlex.split(line)
        assert (program, name) == ("lockstep", "run")
        again = command.make_context("run", rest)
        assert again.params["words"] == words
        changed = {"name": "mine", "runs": tmp_path, "host_index": host, "dry_run": False, "as_json": False}
        changed |= {"data_root": "/data", "resume": "/elsewhere/runs/earlier"}
        assert again.params == typed.params | changed
    # Nothing is made up: what was not given is not there.
    bare = repeated_options(command.make_context("run", list(words[:1])), tmp_path / "mine", specless(spec))
    assert bare == ["--name", "mine", "--runs", str(tmp_path)]


def specless(spec: Spec) -> Spec:
    return msgspec.structs.replace(spec, options=Options())
