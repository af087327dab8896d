"""Naming a hang: which rank holds up the others, at which line, and what they wait for.

Each rank that has taken no step for a while says where it is (measure/callsite.py). Here those lines are laid side by side. Nobody is named who
only waits: a rank is named for being in no collective, or in another one than most, and where neither is certain, what each rank does is said.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lockstep.launch.stall import Beat, Stalled
from lockstep.process import stat_fields
from lockstep.run import HANG, Run, Spec, write_atomic
from lockstep.text import printable

# How long nothing moves before it is called a hang. Ranks report twice a second, from 1.5 s after their last step on.
HANG_S = 5.0
# A rank that computes is late, not lost, until its step takes this many times as long as the slowest one before it.
SLOWER = 3.0
SILENT_S = 6.0

Site = Mapping[str, Any]
# Calls whose content a rank cannot see, and calls between two ranks: ranks may differ in them without being wrong.
UNKNOWN = ("wait", "exchange of gradients", "send", "recv", "new_group")


class Hang(NamedTuple):
    text: str
    rank: int | None = None
    """The rank that holds up the others, where one can be named."""
    certain: bool = False
    """Whether no more waiting can help: the ranks' calls do not match, or a rank is gone."""


def diagnose(sites: Mapping[int, Site], gone: Iterable[int] = (), broken: str = "") -> Hang | None:
    """What keeps these ranks from going on; None where their places do not tell.

    `gone`: ranks that ended without a word. `broken`: how a backend said that the ranks' calls do not match; it need not show in their places.
    """
    waiting = {rank: site for rank, site in sites.items() if site.get("collective")}
    others = {rank: site for rank, site in sites.items() if not site.get("collective")}
    if not waiting:
        return None
    if lost := sorted(gone):
        text = f"{_ranks(lost)} ended without a word; {_wait(waiting)}"
        return Hang(text, lost[0] if len(lost) == 1 else None, certain=True)
    if others:
        held = "; ".join(f"rank {rank} {_does(site)}" for rank, site in _first(others))
        return Hang(f"{held}; {_wait(waiting)}", next(iter(others)) if len(others) == 1 else None)
    return _mismatch(waiting, broken)


def _mismatch(waiting: Mapping[int, Site], broken: str) -> Hang | None:
    """All are in collectives: are they the same?"""
    keys = {rank: _key(site) for rank, site in waiting.items()}
    counted = Counter(keys.values())
    if broken and (len(counted) < 2 or any("of" not in site for site in waiting.values())):
        text = ", ".join(f"rank {rank} in {_in(site)}" for rank, site in _first(waiting))
        return Hang(f"the ranks' collectives do not match ({broken}): {text}", None, certain=True)
    if len(counted) < 2:
        return None
    same_number = len({site.get("calls") for site in waiting.values()}) == 1
    if not same_number:
        waiting = {rank: {**site, "numbered": True} for rank, site in waiting.items()}
    known = all(site["collective"] not in UNKNOWN and not site.get("group") for site in waiting.values())
    if not same_number and len({key[:-1] for key in keys.values()}) == 1:
        # A rank leaves a collective when its own part has come, though what it sent may never arrive.
        lost = "what a rank sent may have been lost on its way, or a rank called once too often"
        return Hang(f"{_wait(waiting)}: {lost}", None)
    most, votes = counted.most_common(1)[0]
    if 2 * votes > len(keys):
        odd = {rank: site for rank, site in waiting.items() if keys[rank] != most}
        rest = {rank: site for rank, site in waiting.items() if keys[rank] == most}
        text = "; ".join(f"rank {rank} is in {_in(site)}" for rank, site in _first(odd))
        name = next(iter(odd)) if len(odd) == 1 else None
        return Hang(f"{text}; {_wait(rest)}", name, same_number and known)
    text = ", ".join(f"rank {rank} in {_in(site)}" for rank, site in _first(waiting))
    return Hang(f"ranks are in different collectives: {text}", None, same_number and known)


def _key(site: Site) -> tuple[Any, ...]:
    """What must be the same on all ranks, with the number of the call: the same one a call later is another one."""
    return site["collective"], site.get("of"), site.get("group"), site.get("calls")


def _does(site: Site) -> str:
    if site.get("silent"):
        return "gives no sign of life"
    return f"is in no collective{_at(site)}"


def _first(sites: Mapping[int, Site], most: int = 4) -> list[tuple[int, Site]]:
    return sorted(sites.items())[:most]


def _wait(waiting: Mapping[int, Site]) -> str:
    """What the others do, by the places in which they are."""
    places: dict[str, list[int]] = {}
    for rank, site in sorted(waiting.items()):
        places.setdefault(_in(site), []).append(rank)
    parts = [f"{_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {place}" for place, ranks in places.items()]
    return ", ".join(parts[:4])


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    return f"ranks {', '.join(shown)}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _in(site: Site) -> str:
    name = "an asynchronous collective" if site["collective"] == "wait" else site["collective"]
    name = f"the {name}" if name.startswith("exchange") else name
    of = f" of {site['of']}" if site.get("of") else ""
    group = f" of group {site['group']}" if site.get("group") else ""
    number = f"call {site['calls']}, " if site.get("numbered") else ""
    return printable(f"{number}{name}{of}{group}{_at(site)}")


def _at(site: Site) -> str:
    if not site.get("file"):
        return ""
    code = f" ({site['code']})" if site.get("code") else ""
    return printable(f" at {site['file']}:{site['line']}{code}")


class HangWatch:
    """Looks at what the ranks say of themselves; clocks of other hosts do not matter."""

    def __init__(self, run: Run, spec: Spec) -> None:
        self._run, self._ranks = run, spec.placement.ranks
        self._timeout_s = spec.placement.timeout_s
        # Contenders that take turns stand still most of the time.
        self._on = self._ranks > 1 and not spec.options.turns
        self._seen: dict[int, tuple[Any, float]] = {}
        self._beats: dict[int, tuple[Any, float]] = {}
        self._told, self._stood_at = "", 0

    def check(self, now: float, said: Sequence[Beat]) -> None:
        """Write down who holds up the others (hang.json), which the progress line shows; raise Stalled where waiting cannot help."""
        if not self._on:
            return
        beats = {int(beat["rank"]): beat for beat in said}
        found = self._look(beats, now)
        if found is None:
            if self._told and _steps(beats) > self._stood_at:  # it was a delay, and is over
                self._told = ""
                with suppress(OSError):
                    (self._run.folder / HANG).unlink(missing_ok=True)
            return
        hang, seconds = found
        if hang.certain:
            raise Stalled(hang.rank, hang.text)
        if hang.text != self._told:
            self._told, self._stood_at = hang.text, _steps(beats)
            text = f"no rank has made progress for {seconds:.0f} s: {hang.text}; the ranks give up after timeout_s={self._timeout_s:g}"
            with suppress(OSError):
                write_atomic(self._run.folder / HANG, {"text": text, "rank": hang.rank, "time": time.time()})

    def _look(self, beats: Mapping[int, Beat], now: float) -> tuple[Hang, float] | None:
        gone = [rank for rank, beat in beats.items() if _is_gone(beat) and not self._has_told(rank)]
        for rank, beat in beats.items():
            calls = (beat.get("site") or {}).get("calls")
            _note(self._seen, rank, (beat.get("step"), calls, beat["state"], rank in gone), now)
            _note(self._beats, rank, beat["time"], now)
        silent = [rank for rank, (_, since) in self._beats.items() if now - since > SILENT_S]
        sites = {
            rank: {"silent": True} if rank in silent else beat.get("site")
            for rank, beat in beats.items()
            if rank not in gone
        }
        known = {rank: site for rank, site in sites.items() if site}
        running = all(beats[rank]["state"] == "running" for rank in sites)
        if len(beats) < self._ranks or len(known) < len(sites) or not known or not running:
            return None
        if any(site.get("alone") for site in known.values()):
            return None
        still = now - max(since for _, since in self._seen.values())
        if still < HANG_S:
            return None
        hang = diagnose(known, gone)
        if hang is None or (not hang.certain and still < self._patience_s(beats)):
            return None
        return hang, still

    def _has_told(self, rank: int) -> bool:
        """Whether it, or the monitor beside it, has left an account of its end: then that is the cause."""
        folder = self._run.rank_folder(rank)
        return any((folder / name).exists() for name in ("failure.json", "exit.json"))

    def _patience_s(self, beats: Mapping[int, Mapping[str, Any]]) -> float:
        """Before a second step, also one after resuming, nobody knows how long one takes: data are read, code is compiled."""
        slowest = [float(beat.get("slowest_s") or 0.0) for beat in beats.values()]
        if not all(slowest):
            return max(HANG_S, self._timeout_s / 2)
        return max(HANG_S, SLOWER * max(slowest))


def _steps(beats: Mapping[int, Mapping[str, Any]]) -> int:
    """Of all ranks together."""
    return sum(int(beat.get("step") or 0) for beat in beats.values())


def _note(seen: dict[int, tuple[Any, float]], rank: int, what: Any, now: float) -> None:
    """Keep since when it is what it is."""
    if seen.get(rank, (None, 0.0))[0] != what:
        seen[rank] = what, now


def _is_gone(beat: Mapping[str, Any]) -> bool:
    """Whether the process of a rank that said it was running is no more. Only its own host can tell."""
    if beat["state"] != "running" or beat.get("host") != platform.node() or not beat.get("pid"):
        return False
    state = stat_fields(int(beat["pid"]))[:1]
    return state in ([], ["Z"])
