"""Our backends on PyTorch's own distributed tests: what gloo passes of them on this machine, shm and mpi pass too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.launch import mpirun
from test_mpi import mpirun_of

PROGRAM = Path(__file__).with_name("torch_suite.py")
# With torch 2.13: 91, and two of ours. Far fewer would mean that the reference is broken, not that we are good.
AT_LEAST = 80


@pytest.mark.slow
@pytest.mark.cold
# One of them gives a group one second to meet: three ranks on two cores have to have them to themselves.
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.alone)])
def test_what_gloo_passes_passes(tmp_path: Path, ranks: int) -> None:
    with_mpi = mpirun.library_kind() is not None and bool(mpirun.installed())
    backends = ["gloo", "shm", *(["mpi"] if with_mpi else [])]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def argv(rank: str) -> list[str]:
        return [sys.executable, str(PROGRAM), str(tmp_path), str(store.port), rank, str(ranks), *backends]

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
        assert len(told[0][backend]) >= AT_LEAST
