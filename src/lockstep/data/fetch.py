"""Download of one file over http(s): goes on where it was cut, gives up at once when hopeless.

What has arrived is kept as `*.part`, a name that nothing ever reads as data, and becomes the file in one
rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.data.voice import Voice

_CHUNK = 1 << 18
_LARGEST = 512 << 20  # far above every known file: a server that sends without end must not fill the disk
_HOPELESS = {errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES}


@dataclass(frozen=True)
class Patience:
    """How long to insist. Only attempts that got no further than any before count, so a slow, unsteady line gets through."""

    attempts: int = 4
    most: int = 200  # attempts in all, however little each brings
    backoff: float = 0.5  # seconds before the second attempt; doubles each time
    timeout: float = 20.0  # seconds without a byte


class Unreachable(Exception):
    """The file cannot be had here; `host_down` says that no other file of this host can be had either."""

    def __init__(self, reason: str, host_down: bool = False) -> None:
        super().__init__(reason)
        self.host_down = host_down


class _Again(Exception):
    """This attempt failed in a way that another one may mend."""


def download(url: str, target: Path, voice: Voice, patience: Patience) -> bool:
    """Fetch `url` into `target`; returns whether it went on from an earlier part."""
    part = part_of(url, target)
    resumed = part.exists() and part.stat().st_size > 0
    failures, attempts, furthest = 0, 0, _size(part)
    while True:
        try:
            _attempt(url, part, voice, patience)
            break
        except _Again as error:
            # A server that begins anew each time may be cut here and there in turns: that is no progress.
            attempts += 1
            failures = 1 if _size(part) > furthest else failures + 1
            furthest = max(furthest, _size(part))
            if failures >= patience.attempts or attempts >= patience.most:
                raise Unreachable(f"{error} (after {attempts} attempts)") from None
            voice.note(f"{url}: {error}; trying again")
            time.sleep(patience.backoff * 2 ** (failures - 1))
        resumed = resumed or _size(part) > 0
    part.replace(target)
    _note_file(part).unlink(missing_ok=True)
    return resumed


def part_of(url: str, target: Path) -> Path:
    """Where an unfinished download is kept: one per address, so that two mirrors are never mixed."""
    mark = hashlib.sha256(url.encode()).hexdigest()[:8]
    return target.with_name(f"{target.name}.{mark}.part")


def _attempt(url: str, part: Path, voice: Voice, patience: Patience) -> None:
    have = _size(part)
    headers = {"User-Agent": "lockstep", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        validator = _read_note(part)
        if validator:  # the server then sends the rest only if the file is still the same, else all of it
            headers["If-Range"] = validator
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=patience.timeout) as response:
            _receive(response, url, part, have, voice)
    except urllib.error.HTTPError as error:
        _http_error(error, part)
    except (http.client.HTTPException, OSError) as error:
        _line_error(error, url)


def _receive(response: Any, url: str, part: Path, have: int, voice: Voice) -> None:
    if response.status != 206 or _range_start(response) != have:
        have = 0
    length = response.headers.get("Content-Length")
    total = have + int(length) if re.fullmatch("[0-9]{1,15}", length or "") else None
    if total is not None and total > _LARGEST:
        raise Unreachable(f"{total:,} bytes, far too large")
    with _open(part, have) as stream:
        _write_note(part, response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
        with voice.progress(f"fetching {url}", have, total) as update:
            count = have
            while chunk := response.read(_CHUNK):
                _write(stream, chunk, part)
                count += len(chunk)
                if count > _LARGEST:
                    raise Unreachable("sends without end")
                update(count)
    if total is not None and count < total:
        raise _Again(f"the connection was cut at {count:,} of {total:,} bytes")


def _open(part: Path, have: int) -> Any:
    try:
        return part.open("ab" if have else "wb")
    except OSError as error:
        raise Unwritable(part, error) from None


def _write(stream: Any, chunk: bytes, part: Path) -> None:
    try:
        stream.write(chunk)
    except OSError as error:
        raise Unwritable(part, error) from None


class Unwritable(Exception):
    """Our own disk, not the line, is the trouble."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"cannot write {path}: {error.strerror or error}")


def _http_error(error: urllib.error.HTTPError, part: Path) -> None:
    with contextlib.closing(error):
        if error.code == 416:  # what we have is longer than the file: begin again
            part.unlink(missing_ok=True)
            raise _Again("the server refused to go on from the earlier part")
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _Again(f"HTTP {error.code} {error.reason}")
        raise Unreachable(f"HTTP {error.code} {error.reason}")


def _line_error(error: Exception, url: str) -> None:
    """Sort what went wrong on the line: hopeless (say so at once), or worth another attempt."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    host = urlsplit(url).hostname
    if isinstance(cause, socket.gaierror):
        raise Unreachable(f"host {host} does not resolve", host_down=True)
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise Unreachable(f"certificate of {host} is not valid: {cause.verify_message}", host_down=True)
    if isinstance(cause, OSError) and cause.errno in _HOPELESS:
        raise Unreachable(f"{host}: {cause.strerror}", host_down=True)
    if isinstance(cause, OSError) and "Tunnel connection failed" in str(cause):
        raise Unreachable(f"the proxy refuses {host}: {cause}", host_down=True)
    if isinstance(error, urllib.error.URLError) and isinstance(cause, TimeoutError):
        raise Unreachable(f"{host} does not answer", host_down=True)  # while connecting; once is enough
    if isinstance(cause, http.client.IncompleteRead):
        raise _Again("the connection was cut")
    text = " ".join(str(cause).split())
    raise _Again(text or type(cause).__name__)


def _range_start(response: Any) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    return int(match[1]) if match else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _note_file(part: Path) -> Path:
    return part.with_name(part.name + ".tag")


def _read_note(part: Path) -> str:
    try:
        text = _note_file(part).read_text("latin1").strip()
    except OSError:
        return ""
    return "" if text.startswith("W/") else text  # a weak tag must not be used for ranges


def _write_note(part: Path, validator: str) -> None:
    _note_file(part).write_text(validator.replace("\n", " "), "latin1")
