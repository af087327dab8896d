"""Install with pip, showing how far it is: `install.py LABEL PIP_ARGUMENT…`.

pip's own words, warnings included, go to `.venv/install.log`; on the terminal there is one line, which counts packages. Where pip fails,
its last lines are shown.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

SHOWN_ON_FAILURE = 15


def count(packages: int) -> str:
    return f"{packages} package{'s' * (packages != 1)}"


def main(label: str, arguments: list[str]) -> int:
    log = Path(sys.prefix) / "install.log"
    live = sys.stdout.isatty()
    begin, found, words = time.monotonic(), 0, ""
    argv = [sys.executable, "-m", "pip", "install", "--no-color", "--progress-bar", "off", *arguments]
    with log.open("a", encoding="utf-8") as file:
        print(*argv, file=file, flush=True)
        pip = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        assert pip.stdout
        for line in pip.stdout:
            file.write(line)
            file.flush()
            step, _, rest = line.strip().partition(" ")
            if step == "Collecting":
                found += 1
                words = rest.partition(" ")[0]
            elif step == "Downloading" or line.startswith("Installing collected"):
                words = line.strip()
            else:
                continue
            if live:
                print(f"\r\033[K{label}: {count(found)}, {words:.60}", end="", flush=True)
            elif step == "Installing" or (step == "Collecting" and found % 10 == 1):
                print(f"{label}: {count(found)}{', unpacking' if step == 'Installing' else ''} …", flush=True)
        code = pip.wait()
    seconds = time.monotonic() - begin
    print(
        "\r\033[K" if live else "",
        f"{label}: ",
        "done" if code == 0 else "failed",
        f" in {seconds:.0f} s",
        sep="",
        flush=True,
    )
    if code:
        print(
            *log.read_text(encoding="utf-8").splitlines()[-SHOWN_ON_FAILURE:],
            f"(all of it: {log})",
            sep="\n",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
