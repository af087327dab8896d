"""Who may ask, and which files may be read. Every request passes through here first.

A page of another site must be able to neither read nor change anything, even if its name leads to this address (DNS rebinding);
nothing outside of the folder of runs is read, even if a link in a run folder leads there.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

TOKEN_HEADER = "X-Lockstep-Token"
# Only our own files; no inline script, style or handler; not in a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(Exception):
    """A request that is not answered, with its status and one line for the person who made it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class Guard:
    """What a request must carry. Changes need the token; beyond loopback, reading needs a cookie that the token gives."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host.lower()
        self.open = not is_loopback(self.host)
        self.token = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)
        # Cookies ignore ports: two dashboards of one host must not use each other's.
        self._cookie_name = f"lockstep-{port}"

    def check_host(self, headers: Message) -> None:
        """A name that an attacker has pointed at this address shows in the Host header; an IP address cannot be pointed elsewhere."""
        given = headers.get_all("Host") or []
        name = _host_name(given[0]) if len(given) == 1 else None
        if name is None or not self._known(name):
            raise Refused(421, "this name is not the dashboard's: use the address that it printed")

    def _known(self, name: str) -> bool:
        if not self.open:
            return is_loopback(name)
        return _address(name) is not None or name in ("localhost", self.host, socket.gethostname().lower())

    def check_same_site(self, headers: Message) -> None:
        """Browsers state the origin of a request; requests from pages of other sites are refused."""
        if headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "asked for by a page of another site")

    def may_look(self, headers: Message) -> bool:
        return not self.open or self._has_cookie(headers)

    def check_change(self, headers: Message) -> None:
        """The request must come from our own page and carry the token. A form of another site can do neither."""
        origin = urlsplit(headers.get("Origin", ""))
        if origin.scheme not in ("http", "https") or origin.netloc != headers.get("Host"):
            raise Refused(403, "only the dashboard's own page may change anything")
        if headers.get_content_type() != "application/json":
            raise Refused(415, "send application/json")
        given = headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refused(403, "wrong token: open the address that 'lockstep dashboard' printed, or paste its token")

    def cookie(self) -> str:
        return f"{self._cookie_name}={self._session}; HttpOnly; SameSite=Strict; Path=/"

    def _has_cookie(self, headers: Message) -> bool:
        try:
            found = SimpleCookie(headers.get("Cookie", "")).get(self._cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._session.encode())


def _host_name(value: str) -> str | None:
    try:
        parts = urlsplit(f"//{value}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return None
    return name if name and parts.netloc == value and "@" not in value else None


def check_folder(root: Path, folder: Path) -> None:
    """A run folder may come from anywhere: no link in it leads out of the root, and nothing in it would block a reader."""
    top = root.resolve()
    if not leads_inside(folder, top):
        raise Refused(403, "this folder is not below the folder of runs")
    for path in _everything(folder):
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # replaced or removed since it was listed: runs go on
        if stat.S_ISLNK(mode) and not leads_inside(path, top):
            raise Refused(403, f"{path.relative_to(folder)} is a link that leads out of the folder of runs: not read")
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise Refused(403, f"{path.relative_to(folder)} is neither a file nor a folder: not read")


def _everything(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):  # does not follow links
        yield from (Path(here, name) for name in (*folders, *files))


def leads_inside(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return False


def read_at(root: Path, path: Path, offset: int, most: int) -> bytes | None:
    """Bytes of a file that may be growing; None if it is missing, not a regular file, or outside of the root."""
    try:
        if not leads_inside(path.parent, root):
            return None
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.pread(handle, most, offset) if stat.S_ISREG(os.fstat(handle).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(handle)
