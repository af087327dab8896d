"""`--link measured`: what `lockstep comms` has measured between hosts, in place of a stated rate and delay."""

from __future__ import annotations

from lockstep.backends.costs import between
from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.predict.exchange import Between, Software
from lockstep.predict.fit import Fit
from lockstep.predict.model import Case, sent

MEASURED = "measured"
# Of fewer sizes nothing is known of how a time grows with them.
FEWEST_SIZES = 2


def measured_between(fit: Fit, placement: Placement, every: int | None) -> Between:
    """The newest measurement of the fit's backend: between hosts like the placement's where these are stated, else between whichever."""
    reached = placement.emulated or placement.launcher == "slurm"
    stated = placement if placement.hosts > 1 and reached else None
    kind = between.kind_of(stated) if stated else None
    found = [one for one in between.load() if one.hosts > 1 and kind in (None, one.kind)]
    known = [softwares for one in found if (softwares := _softwares(one, fit))]
    if not known:
        raise InputError(
            f"--link measured: nothing was measured between hosts with {_where(fit, kind)}: {_command(fit, stated)}"
        )
    needed = {"all_reduce", *(message.collective for message in sent(fit, Case(micro=1, hosts=2, every=every)))}
    for one in known:
        if needed <= {software.collective for software in one.software}:
            return one
    lacking = sorted(needed - {software.collective for software in known[0].software})
    words = f"{found[0].words} --backend {fit.placement.backend}" + "".join(f" --collective {name}" for name in lacking)
    raise InputError(
        f"--link measured: {', '.join(lacking)} was not {known[0].name}: 'lockstep comms {words}' measures it"
    )


def _softwares(one: between.Measured, fit: Fit) -> Between | None:
    """The collectives of one measurement that were measured on the fit's backend and device; None where there are none."""
    backend, device = fit.placement.backend, fit.placement.device
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in one.cells:
        if (cell.backend, cell.device, cell.state) == (backend, device, "ok") and cell.median_us and cell.message_bytes:
            points.setdefault(cell.collective, []).append((float(cell.message_bytes), cell.median_us / 1e6))
    software = tuple(
        Software(backend=backend, collective=name, ranks=one.ranks, points=sorted(some))
        for name, some in points.items()
        if len(some) >= FEWEST_SIZES
    )
    return Between(one.text(), software) if software else None


def _where(fit: Fit, kind: str | None) -> str:
    return f"backend={fit.placement.backend}" + (f" ({kind})" if kind else "")


def _command(fit: Fit, stated: Placement | None) -> str:
    words = between.words_of(stated) if stated else "launcher=slurm hosts=2"
    return f"'lockstep comms {words} --backend {fit.placement.backend}' measures it"
