"""The folder of a measurement, and its end: done, failed or cancelled, with nothing left behind."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.errors import InputError, LockstepError, RunCancelled
from lockstep.launch.ending import signals_as_interrupt
from lockstep.reading import exists, is_dir
from lockstep.run import write_atomic


@contextmanager
def workplace(
    out: Path | None, tell: Callable[[str], None], name: str = "comms", within: Path | None = None
) -> Iterator[Path]:
    """The folder of a measurement: the user's, or one that goes away when all went well. Ctrl-C and SIGTERM end in order.

    `within`: where to make it; nodes of a cluster see no folder for temporary files of ours.
    """
    if out is not None and exists(out) and (not is_dir(out) or any(out.iterdir())):
        raise InputError(f"--out {out} is there already: choose a new folder")
    new = within is not None and not exists(within)
    try:
        if within is not None and out is None:
            within.mkdir(parents=True, exist_ok=True)
        prefix = f".{name}-" if within else f"lockstep-{name}-"
        folder = (out or Path(tempfile.mkdtemp(prefix=prefix, dir=within))).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "status.json", {"state": "running", "since": time.time()})
    except OSError as error:
        raise InputError(f"{f'--out {out}' if out else f'--runs {within}'}: {error.strerror}") from None
    state, cause = "failed", None
    try:
        with signals_as_interrupt():
            yield folder
        state = "done"
    except KeyboardInterrupt:
        state = "cancelled"
        raise RunCancelled("stopped; nothing of this measurement is kept") from None
    except LockstepError as error:
        cause = str(error)
        raise
    finally:
        write_atomic(folder / "status.json", {"state": state, "since": time.time(), "cause": cause})
        if out is None and state == "failed":
            tell(f"results and logs are in {folder}")
        elif out is None:
            shutil.rmtree(folder, ignore_errors=True)
        if new and out is None and within is not None:
            with suppress(OSError):
                within.rmdir()
