"""Runs torchrun and keeps its failure report as a file, so that nobody has to read it out of a log.

`python -m lockstep.launch.agent RUN_DIR HOST_INDEX TORCHRUN_ARGUMENTS…`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lockstep.errors import RunFailed
from lockstep.process import PARENT, die_with_parent, end_now, import_torch
from lockstep.run import Run


def main() -> None:
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # of the ranks that torchrun starts
    folder, host_index, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]

    import_torch()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    code = 0
    try:
        torchrun.main(words)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        Run(folder).write_final(folder / f"agent-{host_index}.json", {"failures": failures})
        code = RunFailed.exit_code
    if "--standalone" in words:
        end_now(code)
    # It may hold the hosts' meeting point: a server that leaves before its clients blocks its port for a minute.
    sys.exit(code)


if __name__ == "__main__":
    main()
