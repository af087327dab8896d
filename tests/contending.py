"""Run the tests that need the machine to themselves (`-m alone`): each in a fresh process, with nothing beside it, at most three times.

They judge what was measured on a machine that others may share, so a failure may be a neighbour's; how often that was so is counted and
printed. Everything else in the suite is run once. `python tests/contending.py [PYTEST_ARGUMENT…]`
"""

from __future__ import annotations

import subprocess
import sys

TRIES = 3


def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pytest", "-n", "0", *arguments]
    return subprocess.run(argv, text=True, capture_output=True)


def main(arguments: list[str]) -> int:
    listed = pytest("--collect-only", "-q", "-m", "alone", *arguments)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if listed.returncode or not names:
        print(listed.stdout, listed.stderr)
        return listed.returncode or 1
    outcomes = {"passed": 0, "skipped": 0, "failed": 0}
    again: list[str] = []
    for name in names:
        for attempt in range(1, TRIES + 1):
            done = pytest("-q", name)
            passed = done.returncode == 0
            outcome = "failed" if not passed else "skipped" if " skipped" in done.stdout.splitlines()[-1] else "passed"
            print(f"{name} {outcome.upper()}" + (f" (try {attempt} of {TRIES})" if attempt > 1 else ""), flush=True)
            if passed:
                break
            print(done.stdout, flush=True)
            again += [name] * (attempt < TRIES)
        outcomes[outcome] += 1
    print(f"tests that had to be run again: {len(set(again))} of {len(names)}", *sorted(set(again)), sep="\n  ")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
