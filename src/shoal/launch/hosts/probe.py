"""Whether two hosts reach each other, how long a message takes between them and how much goes through: one listens, one tries.

The listener is open for the time of a check, on the one address that it was given. Who does not begin with the token that the
coordinator has given both ends gets no byte and is hung up on.
"""

import contextlib
import hmac
import socket
import struct
import threading
import time

from shoal.launch.hosts.messages import Listening, Probed

_ROUNDS = 20
_CHUNK = bytes(256 * 1024)
_SEND_SECONDS, _MOST_BYTES = 0.5, 256 << 20
_COUNT = struct.Struct("<Q")
_FIRST_SECONDS = 5.0


def listen(address: str, token: str, seconds: float) -> Listening:
    """Listen for other hosts, in a thread of its own, for so long."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(16)
    except OSError as error:
        listener.close()
        return Listening(problem=f"cannot listen on {address}: {error}")
    listener.settimeout(0.2)
    threading.Thread(target=_serve, args=(listener, token.encode(), seconds), daemon=True).start()
    return Listening(port=listener.getsockname()[1])


def probe(address: str, port: int, token: str, seconds: float) -> Probed:
    """Measure the way to a host that listens."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(token.encode())
            trips = []
            for _ in range(_ROUNDS):
                started = time.perf_counter()
                line.sendall(b"p")
                _receive(line, 1)
                trips.append(time.perf_counter() - started)
            return Probed(round_trip=min(trips), bytes_per_second=_send(line))
    except OSError as error:
        return Probed(problem=str(error) or type(error).__name__)


def _send(line: socket.socket) -> float:
    line.sendall(b"b")
    started = time.perf_counter()
    sent = 0
    while sent < _MOST_BYTES and time.perf_counter() - started < _SEND_SECONDS:
        line.sendall(_CHUNK)
        sent += len(_CHUNK)
    line.shutdown(socket.SHUT_WR)
    (received,) = _COUNT.unpack(_receive(line, _COUNT.size))
    if received != sent:
        raise ConnectionError(f"{sent} bytes were sent and {received} arrived")
    return sent / (time.perf_counter() - started)


def _serve(listener: socket.socket, token: bytes, seconds: float) -> None:
    end = time.monotonic() + seconds
    with listener:
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                line, _ = listener.accept()
                # Not one after the other: a stranger that stays silent must not keep a host waiting.
                threading.Thread(target=_answer, args=(line, token, seconds), daemon=True).start()


def _answer(line: socket.socket, token: bytes, seconds: float) -> None:
    with line, contextlib.suppress(OSError):
        line.settimeout(_FIRST_SECONDS)
        if not hmac.compare_digest(_receive(line, len(token)), token):
            return
        line.settimeout(seconds)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(line, 1) == b"p":
            line.sendall(b"p")
        received = 0
        while data := line.recv(1 << 20):
            received += len(data)
        line.sendall(_COUNT.pack(received))


def _receive(line: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = line.recv(count - len(found))
        if not data:
            raise ConnectionError("the other side hung up")
        found += data
    return found
