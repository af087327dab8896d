"""`lockstep preflight`: every node, core and link of an allocation, tried before anything trains there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lockstep.cli.options import complete_key, json_option, real, runs_option
from lockstep.cli.output import console, next_step, note, place, print_json, print_records, styled
from lockstep.errors import RunFailed
from lockstep.report.progress import StatusLine
from lockstep.run import runs_root, write_atomic
from lockstep.units import counted, digits

if TYPE_CHECKING:
    from lockstep.preflight.judge import Finding
    from lockstep.preflight.seen import Node, Seen

EPILOG = """\b
Examples:
  lockstep preflight                                        this machine, or the allocation that this is in
  salloc -N4 lockstep preflight
  lockstep preflight launcher=slurm hosts=4 threads=16 slurm.partition=debug
  lockstep preflight hosts=emulated:3 link=1gbit

Exit codes: 0 nothing is slow or wrong, 2 wrong input, 3 something is.
"""


@click.command("preflight", epilog=EPILOG)
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_key)
@click.option(
    "--limit", type=real(1.0, 3600.0), default=60.0, help="Seconds until a node that does not answer counts as silent."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Keep figures and logs in this new folder, which the nodes share."
)
@runs_option
@json_option
def command(words: tuple[str, ...], limit: float, out: Path | None, runs: Path | None, as_json: bool) -> None:
    """Try every node, core and link for some seconds, and name what is slow or wrong.

    Matrix products on every core, memory bandwidth, messages between every two nodes, clocks, versions, the shared folder
    (where runs are kept), free space. Nodes are compared with each other, round by round: what is noise accuses nobody.
    """
    from lockstep.launch.workplace import workplace
    from lockstep.preflight.asked import placed
    from lockstep.preflight.examine import examine
    from lockstep.preflight.judge import judge

    placement = placed(words)
    within = runs_root(runs).absolute()
    with workplace(out, note, name="preflight", within=within) as folder:
        with StatusLine() as line:
            seen = examine(placement, folder, limit, line.show)
        findings = judge(seen)
        document = _document(seen, findings)
        if out:
            write_atomic(folder / "preflight.json", document)
    if as_json:
        print_json(document)
    else:
        _print(document["answer"], seen, findings)
        asked = f" {' '.join(words)}" if words else ""
        if findings:
            next_step(f"lockstep preflight{asked}{place(runs)} (again, when it is mended)")
        else:
            next_step(_go_on(words, len(seen.nodes)))
    if findings:
        raise RunFailed(
            f"preflight: {counted(len(findings), 'thing')} slow or wrong, first: {findings[0].where} {findings[0].text}"
        )


def _go_on(words: Sequence[str], nodes: int) -> str:
    if nodes == 1:
        return "lockstep comms (what an exchange costs here)"
    asked = " ".join(words) or f"hosts={nodes}"
    return f"lockstep comms {asked} (what an exchange costs between them)"


def _document(seen: Seen, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "answer": _answer(seen, findings),
        "findings": [finding._asdict() for finding in findings],
        **msgspec.to_builtins(seen, str_keys=True),
    }


def _answer(seen: Seen, findings: Sequence[Finding]) -> str:
    cores, links = sum(len(node.cores) for node in seen.nodes), sum(bool(link.gbit) for link in seen.links)
    tried = f"{counted(len(seen.nodes), 'node')}, {counted(cores, 'core')}"
    tried += f" and {counted(links // 2, 'link')}" if len(seen.nodes) > 1 else ""
    tried += f" were tried in {seen.seconds:.0f} s"
    if not findings:
        return f"Nothing is slow or wrong: {tried}."
    names = list(dict.fromkeys(finding.where for finding in findings))
    told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{counted(len(findings), 'thing')} slow or wrong ({told}): {tried}."


def _print(answer: str, seen: Seen, findings: Sequence[Finding]) -> None:
    out = console()
    out.print(styled((answer, "bold")), soft_wrap=True)
    for finding in findings:
        out.print(styled((finding.where, "bold"), f" {finding.text}: {finding.fix}."), soft_wrap=True)
    print_records([_row(node, seen) for node in seen.nodes], right=range(1, 12), spare=(11, 10, 8, 7, 9, 6, 2))
    known = [node.facts for node in seen.nodes if node.facts]
    for name in ("cpu", "lockstep", "torch", "python"):
        values = dict.fromkeys(str(facts[name]) for facts in known)
        if values:
            out.print(f"{name}: {', '.join(values)}", soft_wrap=True)
    out.print(
        f"Medians of {counted(seen.rounds, 'round')}; a node is slow if it is slower than the median of the others in every round.",
        soft_wrap=True,
    )


def _row(node: Node, seen: Seen) -> dict[str, str]:
    rates = [statistics.median(each) for each in node.cores.values()]
    sends = [statistics.median(link.gbit) for link in seen.links if link.source == node.rank and link.gbit]
    waits = [statistics.median(link.latency_us) for link in seen.links if link.source == node.rank and link.latency_us]
    facts, several = node.facts, len(seen.nodes) > 1
    between = {"sends Gbit/s": _number(sends), "latency µs": _number(waits)} if several else {}
    skew = {"clock ms": "–" if node.skew_s is None else f"{node.skew_s * 1e3:+.1f}"} if several else {}
    return {
        "node": node.name,
        "cores": str(len(node.cores) or "–"),
        "GFLOP/s of a core": _number(rates),
        "memory GB/s": _number(node.memory),
        **between,
        **skew,
        "writes MB/s": _number(node.write),
        "new file ms": _number(node.create_ms),
        "disk free GiB": _gib(facts.get("disk_free_bytes")),
        "/dev/shm GiB": _gib(facts.get("shm_free_bytes")),
        "memory GiB": _gib(facts.get("memory_bytes")),
    }


def _number(values: Sequence[float]) -> str:
    """The median, and where several differ their range."""
    if not values:
        return "–"
    return digits(statistics.median(values), 3)


def _gib(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**30:.1f}"
