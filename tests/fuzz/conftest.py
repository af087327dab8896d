"""The fuzzer's own summary: how many inputs each target had."""

from __future__ import annotations

from typing import Any

import harness
from harness import nothing_starts

__all__ = ["nothing_starts"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not harness.COUNTS:
        return
    terminalreporter.section("inputs")
    for target, count in harness.COUNTS.items():
        terminalreporter.line(f"{count:7,}  {target}")
    codes = ", ".join(f"{code}: {count:,}" for code, count in sorted(harness.CODES_SEEN.items()))
    terminalreporter.line(
        f"{sum(harness.COUNTS.values()):7,}  in all, {harness.CALLS['calls']:,} calls: {harness.FAILED['tracebacks']} tracebacks, {harness.FAILED['hangs']} hangs "
        f"(commands by exit code: {codes})"
    )
