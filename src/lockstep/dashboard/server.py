"""The server: the standard library's, with a thread per connection. routes.py and security.py decide what is answered and to whom."""

from __future__ import annotations

import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from lockstep.dashboard.live import Event
from lockstep.dashboard.routes import JSON, SIGN_S, Answer, App, Request, Stream
from lockstep.dashboard.security import HEADERS, Guard, Refused
from lockstep.errors import InputError, LockstepError
from lockstep.report.vega.spec import for_page
from lockstep.report.views import AnyChart
from lockstep.text import printable

MOST_BODY = 4096
IDLE_S = 30.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "Lockstep"
    sys_version = ""
    timeout = IDLE_S
    server: Server

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        # One length, with at most as many digits as the limit: neither leading zeros nor a second header get past the limit.
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or not re.fullmatch("[0-9]{1,4}", lengths[0]) or int(lengths[0]) > MOST_BODY:
            self.rfile.read1(1 << 16)  # an unread body would cut off our answer
            self._refuse(Refused(413, f"send a body of at most {MOST_BODY} bytes, with its length"))
            return
        self._answer(self.rfile.read(int(lengths[0])))

    def _answer(self, body: bytes) -> None:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, keep_blank_values=True, max_num_fields=200, errors="surrogateescape")
            request = Request(self.command, parts.path, query, self.headers, body)
            answer = self.server.app.answer(request)
        except Refused as refused:
            self._refuse(refused)
        except LockstepError as error:
            self._refuse(Refused(409, str(error)))
        except ValueError:
            self._refuse(Refused(400, "not a valid address"))
        except Exception as error:
            self._refuse(Refused(500, self._note(error)))
        else:
            if isinstance(answer, Answer):
                self._send(answer)
            else:
                with closing(answer):
                    self._stream(answer)

    def _note(self, error: Exception) -> str:
        """A bug, or an unexpected run folder: print one line at the terminal and continue."""
        said = f"{type(error).__name__}: {error}"
        print(printable(f"lockstep dashboard: {self.path.partition('?')[0]}: {said}"), file=sys.stderr)
        return said

    def _refuse(self, refused: Refused) -> None:
        if self.path.startswith(("/api/", "/events/")):
            answer = Answer(msgspec.json.encode({"error": str(refused)}), JSON, refused.status)
        else:
            answer = Answer(f"{refused}\n".encode(), "text/plain; charset=utf-8", refused.status)
        self.close_connection = True
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        self._head(answer.status, answer.kind, {**answer.headers, "Content-Length": str(len(answer.body))})
        self.wfile.write(answer.body)

    def _head(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        closing = {"Connection": "close"} if self.close_connection else {}
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, **headers, **closing}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, stream: Stream) -> None:
        """Server-sent events, until the page is closed, the run has ended or the server ends."""
        self.close_connection = True
        self._head(200, "text/event-stream", {})
        sent = time.monotonic()
        try:
            for events in stream:
                frames = _frames(events)
                if not frames and time.monotonic() - sent > SIGN_S:
                    frames = b": still here\n\n"
                if frames:
                    self.wfile.write(frames)
                    sent = time.monotonic()
        except (ConnectionError, TimeoutError):
            return  # the page was closed
        except Exception as error:
            self._note(error)  # the page asks again by itself

    def log_message(self, format: str, *args: object) -> None:
        """No access log: a page sends requests all the time."""


def _frames(events: list[Event]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(_sent(data))) for name, data in events
    )


def _sent(data: object) -> object:
    """A chart with the spec that the page draws it from."""
    return for_page(data) if isinstance(data, AnyChart) else data


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, root: Path, host: str, port: int) -> None:
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            raise InputError(_why(host, port, error)) from None
        self.app = App(root, Guard(host, self.server_port))

    def server_bind(self) -> None:
        """Bind without a reverse DNS lookup, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def address(self) -> str:
        """The address to open, with the token in the fragment, which browsers do not send."""
        host = str(self.server_address[0])
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_port}/#token={self.app.guard.token}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A closed browser is not an error; everything else is answered in the handler."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def serve(self) -> None:
        """Until Ctrl-C or SIGTERM."""
        threading.Thread(target=self.app.warm, daemon=True).start()
        try:
            self.serve_forever(poll_interval=0.2)
        finally:
            self.app.ending.set()
            self.server_close()


def _why(host: str, port: int, error: Exception) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"--host {host}: no such address"
    if isinstance(error, OverflowError):
        return f"--port {port}: from 0 to 65535"
    said = error.strerror if isinstance(error, OSError) else str(error)
    return f"--host {host} --port {port}: {said}; choose another port, or 0 for any that is free"
