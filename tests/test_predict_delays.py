"""How many delays gloo's collectives take between hosts: as the model counts them, and as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.emulated import network
from lockstep.placement import Placement
from lockstep.predict.protocol import protocol_of

DELAY_S = 0.02
GLOO = protocol_of("gloo")


def expected(collective: str, size: int, ranks: int) -> float:
    if size == 0:
        return 0
    return GLOO.down(ranks) if collective == "broadcast" else GLOO.around(collective, ranks, size)


@pytest.mark.alone
@pytest.mark.skipif(network.problem() is not None, reason=str(network.problem()))
@pytest.mark.parametrize("ranks", [3, 6])
def test_gloo_takes_as_many_delays_as_the_model_says(ranks: int, tmp_path: Path) -> None:
    sizes = (4, 16, 24, 40, 960)
    asked = [("all_reduce", size) for size in (0, *sizes)]
    asked += [(name, 4 * 12 * ranks) for name in ("all_gather", "reduce_scatter")] + [("broadcast", 96)]
    placement = Placement(hosts=ranks, ranks=ranks, emulated=True, link=f"{round(1e3 * DELAY_S)}ms")
    with network.network(placement) as made:
        words = [str(ranks), str(tmp_path / "meeting"), json.dumps(asked)]
        program = str(Path(__file__).with_name("gloo_delays.py"))
        started = [
            subprocess.Popen(
                [*host.prefix, sys.executable, program, str(rank), *words],
                stdout=subprocess.PIPE,
                env=os.environ | {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank, host in enumerate(made.hosts)
        ]
        answers = [process.communicate(timeout=180)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks
    took = [seconds / DELAY_S for seconds in json.loads(answers[0].splitlines()[-1])]
    seen = {question: round(one, 2) for question, one in zip(asked, took, strict=True)}
    off = {question: (expected(*question, ranks), one) for question, one in seen.items()}
    # A busy machine adds to each, and takes from none.
    assert all(-0.2 < one - told < 0.8 + 0.05 * told for told, one in off.values()), off
