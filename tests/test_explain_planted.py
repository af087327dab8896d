"""Causes that were really planted: each has to be the first verdict. Real ranks, a real link, a rank that is really throttled."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.run import Run
from lockstep.ways import BESIDE, read
from support import SHORT, Cli, wait_for

# They judge by time, so nothing else may take the machine.
pytestmark = pytest.mark.alone
BATCH = ("train_limit=6000", "global_batch=256", "epochs=2")


def explained(cli: Cli, run: str, *words: str) -> dict[str, Any]:
    result = cli("explain", run, *words, "--json")
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def first(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["findings"][0]
    return found


class Throttle(threading.Thread):
    """Lets a rank have its processor for half of the time only: stopped and let go, 5 ms each."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid

    def run(self) -> None:
        with suppress(ProcessLookupError):
            while True:
                os.kill(self._pid, signal.SIGSTOP)
                time.sleep(0.005)
                os.kill(self._pid, signal.SIGCONT)
                time.sleep(0.005)


def test_a_throttled_rank_is_the_first_verdict(cli: Cli) -> None:
    # Steps that take longer than the rank is stopped for: of shorter ones many are stopped within the exchange, where they look like it.
    words = ("ranks=2", "train_limit=6000", "global_batch=1024", "epochs=40")
    process = cli.start("run", *SHORT, *words, "--name", "slow")
    run = Run(cli.runs / "slow")
    ranks = wait_for(lambda: (found := run.rank_statuses()) and len(found) == 2 and found, what="both ranks")
    Throttle(int(ranks[1]["pid"])).start()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = first(explained(cli, "slow"))
    assert found["question"] == "straggler", found
    assert "rank 1" in found["verdict"]


@pytest.mark.skipif(os.geteuid() != 0, reason="emulated hosts need root")
def test_a_slow_link_is_the_first_verdict(cli: Cli) -> None:
    words = ("ranks=2", "hosts=emulated:2", "link=20mbit,5ms", "max_steps=40")
    run = cli.run(*SHORT, *words)
    found = first(explained(cli, run["id"], "--measure", "--seconds", "3"))
    assert found["question"] == "speed-up", found
    assert found["figures"]["largest"] == ["exchange"]
    timed = found["figures"]["parts_s"]["exchange"] + found["figures"]["parts_s"]["waiting"]
    assert timed == pytest.approx(found["figures"]["beyond_apart_s"], rel=0.5), "two ways to see the same"
    assert not (Path("/run/netns").exists() and any(Path("/run/netns").glob("lockstep*")))


def test_a_slow_loader_is_the_first_verdict(cli: Cli) -> None:
    (cli.folder / "tiny.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    heavy = ("augment.rotation=20", "augment.crop=3", "augment.jitter=0.3", "model=tiny.py:net")
    run = cli.run(*SHORT, *BATCH, *heavy)
    found = first(explained(cli, run["id"], "--measure", "--seconds", "2"))
    assert (found["question"], found["figures"]["cause"]) == ("limits", "loader"), found
    assert "augment.rotation" in found["next"]


def test_a_tiny_batch_is_the_first_verdict(cli: Cli) -> None:
    """Many small layers take as long for one sample as for two, on any processor; DDP's own work would come near to that."""
    (cli.folder / "deep.py").write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    layers = [layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.Tanh())]\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), *layers, nn.Linear(16, 10))\n"
    )
    small = ("model=deep.py:net", "ranks=2", "backend=shm", "strategy=flat", "global_batch=2", "max_steps=100")
    run = cli.run(*SHORT, *small)
    found = first(explained(cli, run["id"], "--measure", "--seconds", "6"))
    assert (found["question"], found["figures"].get("cause")) in (("limits", "batch"), ("speed-up", "batch")), found


def test_too_many_threads_are_the_first_verdict(cli: Cli) -> None:
    cores = len(os.sched_getaffinity(0))
    run = cli.run(*SHORT, *BATCH, "ranks=2", f"threads={2 * cores}", "epochs=1")
    document = explained(cli, run["id"], "--measure", "--seconds", "4")
    found = first(document)
    assert (found["question"], found["figures"]["cause"]) == ("limits", "threads"), document["findings"]
    assert found["next"] == f"threads={max(1, cores // 2)}"


def test_the_probe_measures_every_way_and_leaves_the_run_as_it_was(cli: Cli) -> None:
    run = cli.run(*SHORT, "ranks=2", "regularize.batch_norm=synchronised")
    before = (cli.runs / run["id"] / "summary.json").read_bytes()
    document = explained(cli, run["id"], "--measure", "--seconds", "2")
    speed = next(each for each in document["findings"] if each["question"] == "speed-up")
    parts = speed["figures"]["parts_s"]
    assert sum(parts.values()) == pytest.approx(speed["figures"]["step_s"])
    assert (cli.runs / run["id"] / "summary.json").read_bytes() == before
    listed = json.loads(cli("runs", "--json").stdout)
    assert len(listed) == 1, "the probe is no run of its own in the list"


def test_the_probe_takes_whole_rounds_of_local_sgd(cli: Cli) -> None:
    """Seven steps belong together. Of part of them some rounds would have an exchange and others none, and the median would be of those."""
    run = cli.run(*SHORT, "ranks=2", "epochs=1", "strategy=local-sgd", "local_sgd.every=7")
    explained(cli, run["id"], "--measure", "--seconds", "1")
    steps = {name: way.steps for name, way in read(cli.runs / run["id"] / BESIDE).items()}
    assert {name: count % 7 for name, count in steps.items() if name in ("together", "no-data", "double")} == {
        "together": 0,
        "no-data": 0,
        "double": 0,
    }


@pytest.mark.slow
def test_the_probe_measures_ranks_with_a_hook_each_by_itself(cli: Cli) -> None:
    """In groups of their own: a hook that exchanged over the world would wait there for ranks that do something else."""
    run = cli.run(*SHORT, "ranks=2", "epochs=1", "strategy=ddp", "ddp.hook=bf16", "backend=gloo")
    document = explained(cli, run["id"], "--measure", "--seconds", "1")
    assert next(each for each in document["findings"] if each["question"] == "speed-up")["figures"]["parts_s"]


def test_a_run_that_did_not_end_well_is_refused_and_a_study_of_nothing_too(cli: Cli) -> None:
    run = cli.run(*SHORT, "epochs=1", "--name", "cut")
    (cli.runs / run["id"] / "status.json").write_text('{"state": "failed"}')
    assert "is failed: only a run that has ended well" in cli.error("explain", "cut", code=2)
