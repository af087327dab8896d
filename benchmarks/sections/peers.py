"""Document D's job by Lockstep and by its peers: batch 32, one thread, one core, one epoch.

The frameworks are fed ready tensors, the fastest ordinary way to feed them. "+transforms" feeds them as their
own tutorials do, "+fused" sets fused Adam, "+tuned" adds channels-last memory: what Lockstep sets by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import machine, ours, stats
from benchmarks.environment import peers_python
from benchmarks.processes import ContenderFailed, last_core, parse_line, run
from benchmarks.record import Measurement, Section, compare
from benchmarks.rounds import Contender, Span, interleave
from benchmarks.settings import Settings

OURS = "lockstep"
BATCH = 32
TRANSFORMS = ("--transforms",)
FUSED = ("--fused",)
TUNED = ("--fused", "--channels-last")
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Peer:
    """A peer's module, its flags, and how many times its speed we have to reach (None: no target)."""

    module: str
    target: float | None
    flags: tuple[str, ...] = ()


# The peers that have a target, and a plain loop with Lockstep's settings: what is left is the loop.
PEERS: dict[str, Peer] = {
    "report_loop": Peer("report_loop", None),
    "tensor_loader": Peer("tensor_loader", 4.0),
    "lightning": Peer("lightning_trainer", 6.0),
    "fabric": Peer("fabric", 4.0),
    "accelerate": Peer("accelerate_loop", 4.0),
    "tensor_loader+tuned": Peer("tensor_loader", 2.0, TUNED),
}
EXTRAS: dict[str, Peer] = {
    "tensor_loader+fused": Peer("tensor_loader", None, FUSED),
    "report_loop+tuned": Peer("report_loop", None, TUNED),
    "lightning+transforms": Peer("lightning_trainer", None, TRANSFORMS),
    "lightning+tuned": Peer("lightning_trainer", None, TUNED),
    "fabric+transforms": Peer("fabric", None, TRANSFORMS),
    "fabric+tuned": Peer("fabric", None, TUNED),
    "accelerate+transforms": Peer("accelerate_loop", None, TRANSFORMS),
    "accelerate+tuned": Peer("accelerate_loop", None, TUNED),
}


def names() -> list[str]:
    """Every contender that `--only` knows."""
    return [OURS, *PEERS, *EXTRAS]


def measure(settings: Settings) -> Section:
    """The rounds, the comparisons, and the check that everyone computed the same."""
    wanted = select(settings)
    outcome = interleave("peers", build(settings, wanted), settings.repeats, settings.seed)
    section = Section("peers", "Lockstep and its peers on document D's job", "images", "rate", outcome.measurements)
    for name, peer in wanted.items():
        for clock, target in (("wall", peer.target), ("cpu", None)):
            found = compare(outcome.measurements, OURS, name, "speed", clock, target)  # type: ignore[arg-type]
            if found:
                section.comparisons.append(found)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    check_mathematics(section)
    check_versions(section, machine.installed("torch"))
    return section


def select(settings: Settings) -> dict[str, Peer]:
    """The peers that were asked for: those of the issue, or the named ones, or all."""
    if settings.only:
        return {name: peer for name, peer in (PEERS | EXTRAS).items() if name in settings.only}
    return PEERS | EXTRAS if settings.extras else PEERS


def build(settings: Settings, wanted: Mapping[str, Peer]) -> dict[str, Contender]:
    """Each contender as a function that runs it once; all of them use the same core."""
    core = last_core()
    result: dict[str, Contender] = {}
    if settings.chosen(OURS):
        result[OURS] = partial(ours.train, BATCH, 1, 1, settings.samples, core)
    if wanted:
        python, folder = peers_python(), settings.data or resident_folder()
        for name, peer in wanted.items():
            result[name] = partial(run_peer, peer, python, folder, settings.samples, core)
    return result


def resident_folder() -> Path:
    """Where Lockstep keeps MNIST as arrays; it is fetched on first use."""
    from lockstep.data import open_data
    from lockstep.errors import LockstepError

    try:
        return Path(open_data("mnist").folder)
    except LockstepError as error:
        raise ContenderFailed(f"MNIST cannot be had: {error}") from None


def run_peer(peer: Peer, python: Path, folder: Path, samples: int | None, core: int) -> Span:
    """Run one peer in a fresh process of its own environment."""
    command = [str(python), "-m", f"benchmarks.peers.{peer.module}", str(folder), *peer.flags]
    if samples is not None:
        command += ["--samples", str(samples)]
    document = parse_line(run(command, core, threads=1))
    try:
        details = {key: document[key] for key in ("loss", "accuracy", "versions", "python")}
        return Span(document["images"], document["seconds"], document["cpu_seconds"], details)
    except KeyError as error:
        raise ContenderFailed(f"its JSON lacks {error}") from None


def check_mathematics(section: Section) -> None:
    """Same start, same order, same arithmetic: the epoch's mean loss has to be the same up to rounding."""
    losses = {one.contender: one.details["loss"] for one in section.measurements}
    counts = {one.units for one in section.measurements}
    if len(counts) > 1:
        section.refuse(f"contenders trained on different numbers of images: {sorted(counts)}")
    if not losses:
        section.refuse("nothing was measured")
        return
    spread = max(stats.relative_spread(group) for group in _losses_by_round(section.measurements))
    text = ", ".join(f"{name} {loss:.6f}" for name, loss in sorted(losses.items()))
    section.notes.append(f"Mean training loss of the epoch: {text}. Largest difference in a round: {spread:.1e}.")
    if spread > LOSS_TOLERANCE:
        section.refuse(f"losses differ by {spread:.1e}, more than {LOSS_TOLERANCE:.0e}: not the same mathematics")


def _losses_by_round(measurements: Sequence[Measurement]) -> list[list[float]]:
    rounds: dict[int, list[float]] = {}
    for one in measurements:
        rounds.setdefault(one.round, []).append(one.details["loss"])
    return list(rounds.values())


def check_versions(section: Section, own_torch: str) -> None:
    """Note the peers' versions; with another torch this would be a comparison of two PyTorches."""
    versions: dict[str, str] = {}
    for one in section.measurements:
        versions |= one.details.get("versions", {})
    if versions:
        text = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
        section.notes.append(f"The peers' environment: {text}.")
    if any(one.contender == OURS for one in section.measurements) and versions.get("torch", own_torch) != own_torch:
        section.refuse(f"the peers have torch {versions['torch']}, Lockstep has {own_torch}")
