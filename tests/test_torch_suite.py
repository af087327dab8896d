"""Our backends on PyTorch's own distributed tests: what gloo passes of them on this machine, shm and mpi pass too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import torch_suite
from lockstep.backends import group
from lockstep.launch import mpirun
from test_mpi import mpirun_of

PROGRAM = Path(__file__).with_name("torch_suite.py")
# With torch 2.13: 91. Far fewer would mean that the reference is broken, not that we are good.
AT_LEAST = {"test_": 80, "test_ours_": 3}


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_start_that_failed_does_not_spoil_the_tests_after_it(backend: str) -> None:
    """Ranks find each other by the group's name, so it must not depend on what failed before in one of them."""
    name, timeout = group._registered(backend), timedelta(seconds=0.3)
    with pytest.raises(RuntimeError, match=r"Timed out|timeout"):
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=2, timeout=timeout)
    torch_suite.leave()
    try:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        assert dist.distributed_c10d._get_default_group().group_name == "0"
    finally:
        torch_suite.leave()


@pytest.mark.slow
@pytest.mark.cold
# One of PyTorch's own gives a group one second to meet: its ranks have to have the machine to themselves.
@pytest.mark.parametrize(
    ("ranks", "prefix"),
    [*(pytest.param(ranks, "test_", marks=pytest.mark.alone) for ranks in (2, 3)), (4, "test_ours_")],
)
def test_what_gloo_passes_passes(tmp_path: Path, ranks: int, prefix: str) -> None:
    with_mpi = mpirun.library_kind() is not None and bool(mpirun.installed())
    backends = ["gloo", "shm", *(["mpi"] if with_mpi else [])]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def argv(rank: str) -> list[str]:
        return [sys.executable, str(PROGRAM), str(tmp_path), str(store.port), rank, str(ranks), prefix, *backends]

    launcher, environment = mpirun_of("auto", ranks) if with_mpi else ([], dict(os.environ))
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[*launcher, *argv("-")]] if with_mpi else [argv(str(rank)) for rank in range(ranks)]
    with (tmp_path / "log.txt").open("w") as log:
        processes = [subprocess.Popen(words, env=environment, stdout=log, stderr=log) for words in commands]
        codes = [process.wait(200) for process in processes]
    told = [json.loads((tmp_path / f"results-{rank}.json").read_text()) for rank in range(ranks)]
    assert not any(codes), (tmp_path / "log.txt").read_text()[-4000:]
    for backend in backends[1:]:
        failed = {
            f"{name}, rank {rank}": why.strip()[-1500:]
            for rank, results in enumerate(told)
            for name, (outcome, why) in results[backend].items()
            if outcome == "failed"
        }
        assert not failed, f"{backend} fails {sorted(failed)}:\n" + "\n\n".join(failed.values())
        # What gloo ran was run, and not skipped.
        for name in told[0][backend]:
            for results in told:
                assert results[backend][name][0] == results["gloo"][name][0], (backend, name)
        assert len(told[0][backend]) >= AT_LEAST[prefix]
