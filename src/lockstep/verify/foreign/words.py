"""The words of a launch command: how many ranks it starts, and the same command for one process or for another batch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import InputError

RANKS, BATCH = "{ranks}", "{batch}"
# By launcher: the options that say how many ranks there are, and those that one process does not take.
OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torchrun": (("--nproc-per-node", "--nproc_per_node"), ()),
    "accelerate": (("--num_processes", "--num-processes"), ("--multi_gpu", "--multi-gpu", "--multi_cpu")),
    "mpirun": (("-n", "-np", "--n", "--np"), ()),
    "srun": (("-n", "--ntasks"), ()),
}
PROGRAMS = {"torchrun": "torchrun", "accelerate": "accelerate", "mpirun": "mpirun", "mpiexec": "mpirun", "srun": "srun"}
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate": "accelerate",
}


def ranks_of(argv: Sequence[str], stated: int | None) -> int:
    """How many ranks the command starts: as its launcher is told, or as the user has told us for `{ranks}`."""
    found = _place(argv)
    if any(RANKS in word for word in argv):
        return stated or 2
    if stated is not None:
        raise InputError("--ranks: says what {ranks} stands for, and the command has no {ranks}")
    if found is None:
        raise InputError(
            "verify: it is not known how many ranks the command starts: write {ranks} where it says so, for example: "
            "lockstep verify --ranks 2 -- python train.py --devices {ranks}"
        )
    place, start = found
    word = argv[place][start:]
    if not word.isdigit():
        option = argv[place][: start - 1] if start else argv[place - 1]
        raise InputError(
            f"verify: {option} {word}: how many ranks that is, the launcher finds out itself: write the number"
        )
    if int(word) < 2:
        raise InputError(f"verify: the command starts '{word}' ranks: there is nothing to compare; choose 2 or more")
    return int(word)


def command(argv: Sequence[str], ranks: int, of: int, batch: int | None) -> list[str]:
    """The command for this many of `of` ranks. `{batch}` is the global batch divided by them."""
    if batch is not None and not any(BATCH in word for word in argv):
        raise InputError("--batch: says what {batch} stands for, and the command has no {batch}")
    if batch is None and any(BATCH in word for word in argv):
        raise InputError("verify: {batch}: --batch N says how large the global batch is")
    if batch is not None and batch % of:
        raise InputError(f"--batch {batch}: does not divide by the {of} ranks")
    words, found = list(argv), _place(argv)
    if found is not None and not any(RANKS in word for word in argv):
        place, start = found
        words[place] = f"{words[place][:start]}{ranks}"
    launcher = _launcher(argv)
    left_out = OPTIONS[launcher[0]][1] if launcher and ranks == 1 else ()
    end = _script(argv)
    words = [word for at, word in enumerate(words) if at >= end or word not in left_out]
    share = "" if batch is None else str(batch // ranks)
    return [word.replace(RANKS, str(ranks)).replace(BATCH, share) for word in words]


def _launcher(argv: Sequence[str]) -> tuple[str, int] | None:
    """The launcher, and where its words begin."""
    for at, word in enumerate(argv[: _script(argv)]):
        name = PROGRAMS.get(Path(word).name) if at == 0 or argv[at - 1] != "-m" else MODULES.get(word)
        if name:
            return name, at + 1 + (argv[at + 1 : at + 2] == ["launch"])
    return None


def _script(argv: Sequence[str]) -> int:
    """Where the user's own script begins: what follows is not the launcher's."""
    starts = (
        at
        for at, word in enumerate(argv)
        if at and (word.endswith(".py") or (argv[at - 1] == "-m" and word not in MODULES))
    )
    return next(starts, len(argv))


def _place(argv: Sequence[str]) -> tuple[int, int] | None:
    """Where the number of ranks stands: the word, and the character in it. What follows the program is its own, also where it is no script
    in Python."""
    launcher = _launcher(argv)
    if launcher is None:
        return None
    options = OPTIONS[launcher[0]][0]
    for at in range(launcher[1], _script(argv)):
        if _is_program(argv, at, launcher[1]):
            return None
        if argv[at] in options and at + 1 < len(argv):
            return at + 1, 0
        if (match := re.match(r"(--?[\w-]+)=", argv[at])) and match[1] in options:
            return at, match.end()
    return None


def _is_program(argv: Sequence[str], at: int, begin: int) -> bool:
    """No option, and no value of one: whether an option has a value is not known, so what could be started is no value."""
    word = argv[at]
    follows_option = at > begin and argv[at - 1].startswith("-") and "=" not in argv[at - 1]
    return not word.startswith("-") and (not follows_option or shutil.which(word) is not None)
