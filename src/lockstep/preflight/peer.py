"""One node talks to another: round trips of a byte, then bytes in each direction, over one TCP connection.

No process group is made for it: one node that does not answer would keep all of them from meeting.
"""

from __future__ import annotations

import hmac
import socket
import statistics
import struct
import time
from typing import Any

LIMIT_S = 10.0
PINGS = 25
# Sent to find out how much takes about as long as asked for.
PROBE, LEAST, MOST = 128 << 10, 64 << 10, 256 << 20
CHUNK = 1 << 18
_PING, _UP, _DOWN, _END = b"p", b"u", b"d", b"q"


def listen(address: str) -> socket.socket:
    return socket.create_server((address, 0), backlog=4)


def serve(listener: socket.socket, token: str) -> dict[str, Any]:
    """Answer the caller who knows the token of this meeting, until it has had enough."""
    try:
        with _expected(listener, token.encode()) as line:
            while (what := _exactly(line, 1)) != _END:
                if what == _PING:
                    line.sendall(_PING)
                    continue
                (count,) = struct.unpack("!Q", _exactly(line, 8))
                if what == _UP:
                    _drain(line, count)
                    line.sendall(_PING)
                else:
                    _pour(line, count)
    except OSError as error:
        return {"problem": _said(error)}
    return {}


def _expected(listener: socket.socket, token: bytes) -> socket.socket:
    """Strangers are hung up on, and so is a caller of an earlier meeting who came too late."""
    until = time.monotonic() + LIMIT_S
    while True:
        listener.settimeout(max(0.001, until - time.monotonic()))
        line, _ = listener.accept()
        try:
            _ready(line)
            if hmac.compare_digest(_exactly(line, len(token)), token):
                return line
        except OSError:
            pass
        line.close()


def call(address: str, port: int, token: str, seconds: float) -> dict[str, Any]:
    """Half a round trip in microseconds, and Gbit/s to the other node and back."""
    try:
        with socket.create_connection((address, port), timeout=LIMIT_S) as line:
            _ready(line)
            line.sendall(token.encode())
            trips = [_ping(line) for _ in range(PINGS)]
            trip = statistics.median(trips[1:])
            rates = [_rate(line, direction, trip, seconds) for direction in (_UP, _DOWN)]
            line.sendall(_END)
    except OSError as error:
        return {"problem": _said(error)}
    return {"latency_us": trip / 2 * 1e6, "out_gbit": rates[0], "back_gbit": rates[1]}


def _rate(line: socket.socket, direction: bytes, trip: float, seconds: float) -> float:
    probe = _moved(line, direction, PROBE, trip)
    size = int(min(MOST, max(LEAST, PROBE * seconds / probe)))
    return size * 8 / _moved(line, direction, size, trip) / 1e9


def _moved(line: socket.socket, direction: bytes, size: int, trip: float) -> float:
    """Seconds to move N bytes one way, without the round trip around them."""
    begin = time.perf_counter()
    line.sendall(direction + struct.pack("!Q", size))
    if direction == _UP:
        _pour(line, size)
        _exactly(line, 1)
    else:
        _drain(line, size)
    took = time.perf_counter() - begin
    return max(took - trip, 0.1 * took)


def _ping(line: socket.socket) -> float:
    begin = time.perf_counter()
    line.sendall(_PING)
    _exactly(line, 1)
    return time.perf_counter() - begin


def _ready(line: socket.socket) -> None:
    line.settimeout(LIMIT_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _pour(line: socket.socket, count: int) -> None:
    data = memoryview(bytes(CHUNK))
    while count:
        sent = line.send(data[: min(CHUNK, count)])
        count -= sent


def _drain(line: socket.socket, count: int) -> None:
    buffer = bytearray(CHUNK)
    while count:
        got = line.recv_into(buffer, min(CHUNK, count))
        if not got:
            raise ConnectionError("the connection was closed")
        count -= got


def _exactly(line: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (more := line.recv(count - len(found))):
            raise ConnectionError("the connection was closed")
        found += more
    return found


def _said(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {LIMIT_S:g} s"
    return error.strerror or str(error)
