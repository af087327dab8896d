"""Samples a second while a run goes on: right for steps that are shorter and longer than from one look to the next."""

from __future__ import annotations

import pytest

from lockstep import shapes
from lockstep.measure.recorder import NOTHING, End, Pace
from lockstep.run import Run, read_json
from support import Cli, wait_for

SECOND = 1_000_000_000


def rates(step_s: float, steps_per_epoch: int = 10**9, between_s: float = 0.0, look_s: float = 0.5) -> list[float]:
    """What is shown in 20 s of steps of 32 samples, with an evaluation after each epoch."""
    pace, ends, now = Pace(), list[tuple[float, End, End]](), 0.0
    first = NOTHING
    for step in range(1, int(20 / step_s)):
        now += step_s
        end = (32 * step, int(now * SECOND))
        first = end if step % steps_per_epoch == 1 % steps_per_epoch else first
        ends.append((now, end, first))
        now += between_s if step % steps_per_epoch == 0 else 0.0
    found = []
    for look in range(1, int(now / look_s)):
        so_far = [(end, first) for when, end, first in ends if when <= look * look_s]
        if so_far and (rate := pace.look(*so_far[-1])):
            found.append(rate)
    return found


@pytest.mark.parametrize("step_s", [0.003, 0.2, 0.45, 0.55, 0.7, 1.3, 4.0])
def test_every_rate_is_that_of_the_steps(step_s: float) -> None:
    found = rates(step_s)
    assert len(found) > 5
    assert found == pytest.approx([32 / step_s] * len(found), rel=1e-6)


@pytest.mark.parametrize(("steps", "step_s"), [(10, 0.02), (40, 0.05), (6, 0.6)])
def test_an_evaluation_between_epochs_is_no_part_of_it(steps: int, step_s: float) -> None:
    found = rates(step_s, steps, between_s=0.8)
    assert found == pytest.approx([32 / step_s] * len(found), rel=1e-6)


def test_a_real_run_of_slow_steps_is_not_shown_as_fast(cli: Cli) -> None:
    """A step sleeps for 0.6 s, so no rate above 32 samples in that time is true, whatever else the machine does."""
    (cli.folder / "slow.py").write_text(
        "import time, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.linear = torch.nn.Linear(784, 10)\n"
        "    def forward(self, x):\n"
        "        time.sleep(0.6 if self.training else 0)\n"
        "        return self.linear(x.flatten(1))\n"
    )
    words = ("model=slow.py:Net", "data=embedded", "train_limit=192", "test_limit=100", "global_batch=32", "epochs=1")
    process = cli.start("run", *words, "threads=1", "--name", "slow")
    seen: list[float] = []
    beat = Run(cli.runs / "slow").rank_folder(0) / "status.json"

    def look() -> bool:
        found = read_json(beat, shapes.Beat) or {}
        if found.get("images_per_second"):
            seen.append(found["images_per_second"])
        return process.poll() is not None

    wait_for(look, what="the end of the run")
    assert process.returncode == 0, process.communicate()[1]
    assert seen
    assert max(seen) <= 32 / 0.6
