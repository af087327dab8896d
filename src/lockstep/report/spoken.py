"""The name of a cell or contender as people say it: `ranks=2 backend=gloo` is "2 ranks over gloo"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.placement import Placement
from lockstep.units import counted

# How a key is said, in the order of speech: the word that joins it to what stands before it, and what it is. {} stands for the value.
SAID = {
    "model": ("", "{}"),
    "optimizer.name": ("", "{}"),
    "ranks": ("", "rank"),
    "hosts": ("on", "host"),
    "threads": ("", "thread"),
    "global_batch": ("", "batch {}"),
    "batch_per_rank": ("", "batch {} per rank"),
    "micro_batch": ("", "micro batch {}"),
    "epochs": ("", "epoch"),
    "optimizer.lr": ("", "learning rate {}"),
    "data": ("on", "{}"),
    "backend": ("over", "{}"),
    "strategy": ("with", "strategy {}"),
    "launcher": ("by", "{}"),
    "precision": ("in", "{}"),
    "seed": ("with", "seed {}"),
}
COUNTED = ("ranks", "hosts", "threads", "epochs")
SWITCHES = {
    "fused": {"true": "fused kernels", "false": "PyTorch's own kernels"},
    "compile": {"true": "torch.compile", "false": "no torch.compile"},
}
# What goes without saying where the ranks are said.
UNSAID = ("none", "single", "spawn")
# A longer name of the baseline would drown what is said about it.
LONG = 40


class Name(NamedTuple):
    """What a sentence calls it."""

    text: str
    several: bool = False
    """Whether its verb is a plural: "2 ranks train"."""

    def begins(self) -> str:
        """At the beginning of a sentence. Names of things (gloo, adam) stay as they are."""
        first = self.text.partition(" ")[0]
        said = [said for _, said in SAID.values() if said[0] != "{"] + [SWITCHES["fused"]["true"]]
        ours = any(first == each.partition(" ")[0] for each in said) and " " in self.text
        return self.text[0].upper() + self.text[1:] if ours else self.text


def names(found: Sequence[str], base: str) -> dict[str, tuple[Name, Name]]:
    """Each of them and the baseline, by what they are called in tables. What both have in common is not said.

    Where two would be said alike, all stay as they are.
    """
    spoken = {name: (_name(name, base), _name(base, name)) for name in found if name != base}
    alike = len({who.text for who, _ in spoken.values()}) < len(spoken)
    same = any(who.text == than.text for who, than in spoken.values())
    return {name: (_plain(name), _plain(base)) for name in spoken} if alike or same else spoken


def _name(name: str, other: str) -> Name:
    if name.startswith("$ ") or " $ " in name:
        return Name(f"'{name.partition('$ ')[2]}'")
    pieces = [piece for piece in _pieces(name) if piece not in _pieces(other) or "=" not in piece]
    keys = {key: value for key, equals, value in (piece.partition("=") for piece in pieces) if equals}
    if keys.get("ranks") == "1":  # one rank exchanges nothing
        keys.pop("backend", None)
    if not keys:
        return _plain(name)
    phrases = [("", piece) for piece in pieces if "=" not in piece]
    unsaid = UNSAID if "ranks" in keys else UNSAID[:1]
    phrases += [_phrase(key, keys[key]) for key in sorted(keys, key=_place) if keys[key].lower() not in unsaid]
    text = phrases[0][1] if phrases else name
    for joined, said in phrases[1:]:
        text += f" {joined} {said}" if joined else f", {said}"
    return Name(text, _several(text))


def placed(placement: Placement) -> str:
    """A placement in a sentence: 2 ranks over gloo. One rank exchanges nothing, whatever it could do it with."""
    threads = placement.threads or 1
    text = counted(placement.ranks, "rank")
    text += f" of {counted(threads, 'thread')}" if threads > 1 else ""
    text += f" on {counted(placement.hosts, 'host')}" if placement.hosts > 1 else ""
    return text + (f" over {placement.backend}" if placement.ranks > 1 else "")


def _pieces(name: str) -> list[str]:
    return [word for piece in name.split(", ") for word in (piece.split() if "=" in piece else [piece])]


def _place(key: str) -> int:
    return list(SAID).index(key) if key in SAID else len(SAID)


def _phrase(key: str, value: str) -> tuple[str, str]:
    if key in SWITCHES:
        return "with", SWITCHES[key].get(value.lower(), f"{key}={value}")
    joined, said = SAID.get(key, ("", f"{key}={{}}"))
    if key not in COUNTED:
        return joined, said.format(value)
    emulated, count = value.startswith("emulated:"), value.removeprefix("emulated:")
    return joined, counted(int(count), f"emulated {said}" if emulated else said) if count.isdigit() else value


def _plain(name: str) -> Name:
    """As it was named; of several words one would not see where it ends, but for "1 rank" and its like."""
    return Name(name, _several(name)) if re.fullmatch(r"\S+|\d+ \w+", name) else Name(f"'{name}'")


def _several(text: str) -> bool:
    return bool(re.match(r"(?!1 )\d[\d,]* (?:emulated )?\w*s\b|(fused|PyTorch's own) kernels\b", text))
