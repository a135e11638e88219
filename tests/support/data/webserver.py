"""A web server on loopback that serves files by ranges, counts who asks, and misbehaves as it is told."""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Web:
    """The files of a server, and what goes wrong with its next answers."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.versions: dict[str, str] = {}
        self.faults: deque[str] = deque()
        self.asked: Counter[str] = Counter()
        self.ranges: list[str | None] = []
        self.has_ranges = True
        self.release = threading.Event()
        self.note: Path | None = None
        self.address = ""

    def fail(self, *faults: str) -> None:
        """The next answers to GET: 500, half, wrong, hang, slow, no-length, changed; whole for a good one."""
        self.faults.extend(faults)


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    """A server of these files until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(is_head=True)

        def do_GET(self) -> None:
            self._answer(is_head=False)

        def _answer(self, *, is_head: bool) -> None:
            path = self.path.lstrip("/")
            fault = "whole" if is_head or not web.faults else web.faults.popleft()
            if not is_head:
                web.asked[path] += 1
                web.ranges.append(self.headers["Range"])
                if web.note is not None:
                    with web.note.open("a") as file:
                        file.write(f"{path}\n")
            if fault == "500":
                self.send_response(500)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if path not in web.files:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = web.files[path]
            if fault == "hang":
                web.release.wait(20)
                self.close_connection = True
                return
            if fault == "changed":
                web.versions[path] = web.versions.get(path, "1") + "x"
                content = web.files[path] = bytes(reversed(content))
            wanted = self.headers["Range"]
            start, end = 0, len(content)
            if wanted and web.has_ranges:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(len(content), int(last) + 1 if last else len(content))
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            else:
                self.send_response(200)
            if fault != "no-length":
                self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", f'"{web.versions.get(path, "1")}"')
            self.end_headers()
            if is_head:
                return
            body = content[start:end]
            if fault == "wrong":
                body = bytes(each ^ 0x20 for each in body)
            if fault in ("half", "no-length"):
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return
            if fault == "slow":
                for at in range(0, len(body), max(1, len(body) // 4)):
                    self.wfile.write(body[at : at + max(1, len(body) // 4)])
                    self.wfile.flush()
                    time.sleep(0.02)
                return
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients of these tests give up on purpose."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    web.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield web
    finally:
        web.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
