"""A client of the dashboard, one that listens, and what a process has cost so far."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class Address:
    """Where a dashboard is.

    Args:
        host: of the server.
        port: of the server.
        entrance: the path with the code, which works once.
    """

    host: str
    port: int
    entrance: str

    @property
    def base(self) -> str:
        """Its first page."""
        return f"http://{self.host}:{self.port}"


class Dash:
    """A browser, as far as the server can tell.

    Args:
        address: of the server.
    """

    def __init__(self, address: Address) -> None:
        self.host, self.port = address.host, address.port
        self._connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        self._connection.request("GET", address.entrance)
        answer = self._connection.getresponse()
        answer.read()
        self.cookie = str(answer.getheader("set-cookie")).partition(";")[0]

    def ask(self, path: str) -> bytes:
        """The body of an answer."""
        self._connection.request("GET", path, headers={"cookie": self.cookie})
        answer = self._connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, answer.status, body[:200])
        return body

    def get(self, path: str) -> Any:
        """What an answer holds."""
        return json.loads(self.ask(path))


class Listening:
    """A client of the stream: when it first heard of each step, by wall time."""

    def __init__(self, dash: Dash) -> None:
        self.at: dict[int, float] = {}
        self.ready = False
        self._socket = socket.create_connection((dash.host, dash.port), timeout=120)
        head = f"GET /api/stream HTTP/1.1\r\nhost: {dash.host}:{dash.port}\r\ncookie: {dash.cookie}\r\n\r\n"
        self._socket.sendall(head.encode())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._socket.makefile("rb"):
                self.ready = True
                if line.startswith(b"data: "):
                    content = json.loads(line[6:])
                    for step, _ in content.get("curves", {}).get("loss", ()):
                        self.at.setdefault(int(step), time.time())
        except (OSError, ValueError):
            pass

    def close(self) -> None:
        """Go away."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


def listen(dash: Dash) -> Listening:
    """A client that listens from now on."""
    return Listening(dash)


def wait_for(condition: Callable[[], Any], seconds: float, every: float = 0.1) -> Any:
    """What a condition gives when it is met."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(every)
    raise TimeoutError(f"it did not happen in {seconds:g} s")


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def peak_bytes(pid: int) -> int:
    """The most memory that a process and its children have had."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with open(f"/proc/{process.pid}/status") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024
    return total
