"""Downloads one file over http(s): resumes where it was cut, retries while that helps, gives up at once when it cannot.

What has arrived is kept as `*.part`, a name that nothing ever reads as data, and becomes the file in one rename.

Not by pooch, which begins again after a cut, limits no size, and retries a host that does not exist; all of that would be left
to write around it, at the price of requests and two more packages.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.data.logger import Logger

_CHUNK = 1 << 18
_MOST_BYTES = 512 << 20  # far above every known file: a server that sends without end must not fill the disk
_FINAL_ERRORS = {errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES}


@dataclass(frozen=True)
class RetryPolicy:
    """How often to retry. Only attempts that got no further than all before count, so a slow, unreliable connection succeeds."""

    attempts: int = 4
    most: int = 200  # attempts in all, however little each one adds
    backoff: float = 0.5  # seconds before the second attempt; doubles each time
    timeout: float = 20.0  # seconds without a byte


class Unreachable(Exception):
    """The file cannot be downloaded; `host_down` says that no other file of this host can be either."""

    def __init__(self, reason: str, host_down: bool = False) -> None:
        super().__init__(reason)
        self.host_down = host_down


class _Retry(Exception):
    """This attempt failed, and another one may succeed."""


def download(url: str, target: Path, logger: Logger, policy: RetryPolicy) -> bool:
    """Download `url` to `target`; returns whether it was resumed."""
    part = part_of(url, target)
    resumed = part.exists() and part.stat().st_size > 0
    failures, attempts, furthest = 0, 0, _size(part)
    while True:
        try:
            _attempt(url, part, logger, policy)
            break
        except _Retry as error:
            # A server that begins again each time and is cut at varying positions makes no progress.
            attempts += 1
            failures = 1 if _size(part) > furthest else failures + 1
            furthest = max(furthest, _size(part))
            if failures >= policy.attempts or attempts >= policy.most:
                raise Unreachable(f"{error} (after {attempts} attempts)") from None
            logger.info(f"{url}: {error}; trying again")
            time.sleep(policy.backoff * 2 ** (failures - 1))
        resumed = resumed or _size(part) > 0
    part.replace(target)
    _validator_file(part).unlink(missing_ok=True)
    return resumed


def part_of(url: str, target: Path) -> Path:
    """Where an unfinished download is kept: one per address, so that two mirrors are never mixed."""
    mark = hashlib.sha256(url.encode()).hexdigest()[:8]
    return target.with_name(f"{target.name}.{mark}.part")


def _attempt(url: str, part: Path, logger: Logger, policy: RetryPolicy) -> None:
    have = _size(part)
    headers = {"User-Agent": "lockstep", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        validator = _read_validator(part)
        if validator:  # the server then sends the rest only if the file is still the same, else all of it
            headers["If-Range"] = validator
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=policy.timeout) as response:
            _receive(response, url, part, have, logger)
    except urllib.error.HTTPError as error:
        _http_error(error, part)
    except (http.client.HTTPException, OSError) as error:
        _connection_error(error, url)


def _receive(response: Any, url: str, part: Path, have: int, logger: Logger) -> None:
    if response.status != 206 or _range_start(response) != have:
        have = 0
    length = response.headers.get("Content-Length")
    total = have + int(length) if re.fullmatch("[0-9]{1,15}", length or "") else None
    if total is not None and total > _MOST_BYTES:
        raise Unreachable(f"{total:,} bytes, far too large")
    with _errors_of(part):
        stream = part.open("ab" if have else "wb")
    with stream:
        _write_validator(part, response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
        with logger.progress(f"fetching {url}", have, total) as update:
            count = have
            while chunk := response.read(_CHUNK):
                with _errors_of(part):
                    stream.write(chunk)
                count += len(chunk)
                if count > _MOST_BYTES:
                    raise Unreachable("sends without end")
                update(count)
    if total is not None and count < total:
        raise _Retry(f"the connection was cut at {count:,} of {total:,} bytes")


class Unwritable(Exception):
    """The disk failed, not the connection."""


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(f"cannot write {path}: {error.strerror or error}") from None


def _http_error(error: urllib.error.HTTPError, part: Path) -> None:
    with contextlib.closing(error):
        if error.code == 416:  # what we have is longer than the file: begin again
            part.unlink(missing_ok=True)
            raise _Retry("the server refused to go on from the earlier part")
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _Retry(f"HTTP {error.code} {error.reason}")
        raise Unreachable(f"HTTP {error.code} {error.reason}")


def _connection_error(error: Exception, url: str) -> None:
    """Raise `Unreachable` for what no retry can change, else `_Retry`."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    host = urlsplit(url).hostname
    if isinstance(cause, socket.gaierror):
        raise Unreachable(f"host {host} does not resolve", host_down=True)
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise Unreachable(f"certificate of {host} is not valid: {cause.verify_message}", host_down=True)
    if isinstance(cause, OSError) and cause.errno in _FINAL_ERRORS:
        raise Unreachable(f"{host}: {cause.strerror}", host_down=True)
    if isinstance(cause, OSError) and "Tunnel connection failed" in str(cause):
        raise Unreachable(f"the proxy refuses {host}: {cause}", host_down=True)
    if isinstance(error, urllib.error.URLError) and isinstance(cause, TimeoutError):
        raise Unreachable(f"{host} does not answer", host_down=True)  # while connecting; once is enough
    if isinstance(cause, http.client.IncompleteRead):
        raise _Retry("the connection was cut")
    text = " ".join(str(cause).split())
    raise _Retry(text or type(cause).__name__)


def _range_start(response: Any) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    return int(match[1]) if match else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _validator_file(part: Path) -> Path:
    return part.with_name(part.name + ".tag")


def _read_validator(part: Path) -> str:
    try:
        text = _validator_file(part).read_text("latin1").strip()
    except OSError:
        return ""
    return "" if text.startswith("W/") else text  # a weak tag must not be used for ranges


def _write_validator(part: Path, validator: str) -> None:
    _validator_file(part).write_text(validator.replace("\n", " "), "latin1")
