"""The planted causes: how each gets into a run, by which word `lockstep explain` has to name it, and how its true size is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
SIZES = (0.02, 0.05, 0.1, 0.2)
TWO = ("ranks=2", "threads=1", "backend=gloo")
HOSTS = ("hosts=emulated:2",)
RECIPE = (
    "data=mnist",
    "train_limit=10240",
    "test_limit=100",
    "epochs=8",
)
BATCH = "global_batch=512"
NET, MANY = (f"model={HERE / 'work.py'}:{name}" for name in ("net", "many"))


@dataclass(frozen=True)
class Cause:
    """`truth` says where the true size is from: the loop's own clock, turns with and without it in one run, or a race of two placements."""

    name: str
    named: tuple[str, ...]
    """What `explain` may call it."""
    truth: Literal["loop", "turns", "race"]
    placement: tuple[str, ...] = TWO
    """Of a loop of one's own (loop.py)."""
    words: tuple[tuple[str, ...], ...] = ()
    """Of a recipe: the settings that stand for each of the sizes."""
    without: tuple[str, ...] = ()
    """What is set differently without the cause."""
    measured: bool = False
    """Whether `explain` needs --measure to see it."""


CAUSES = (
    Cause("throttled rank", ("rank",), "turns"),
    Cause("throttled host", ("host",), "turns", (*TWO, *HOSTS)),
    Cause("slow loader", ("loader",), "loop"),
    Cause(
        "slow link",
        ("exchange",),
        "race",
        words=tuple((NET, *TWO, *HOSTS, BATCH, f"link=1gbit,{delay}us") for delay in (10, 60, 350, 1400)),
        # What an exchange costs over a link is all that it takes longer than one over shared memory, which is next to nothing.
        without=("hosts=1", "link=none", "backend=shm", "strategy=flat"),
    ),
    Cause(
        "tiny buckets",
        ("buckets",),
        "race",
        words=tuple((MANY, *TWO, BATCH, f"ddp.bucket_mb={size}") for size in (0.4, 0.15, 0.06, 0.025)),
        without=("ddp.bucket_mb=25",),
        measured=True,
    ),
    Cause(
        "too many threads",
        ("threads",),
        "race",
        # They get into each other's way less where each has more to do.
        words=tuple((NET, *TWO[::2], "threads=2", f"global_batch={batch}") for batch in (4096, 2048, 1024, 512)),
        without=("threads=1",),
        measured=True,
    ),
    Cause("busy neighbour", ("neighbour",), "turns"),
    # Over shared memory, where an exchange without the cause takes next to nothing.
    Cause(
        "slow collective",
        ("exchange",),
        "loop",
        (*TWO[:2], "backend=shm", f"strategy={HERE / 'slow_exchange.py'}:SlowExchange"),
    ),
    Cause("evaluation", ("evaluation",), "loop"),
    Cause("waiting log", ("besides",), "turns"),
)
NOTHING = Cause("nothing", (), "loop")
