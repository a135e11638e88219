"""``shoal dash`` from its first line to its end: the folder, the thread that follows it, the address, and the server."""

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.dashboard.runs.cache import ColumnCache, default_folder
from shoal.dashboard.runs.folder import RunFolder
from shoal.dashboard.server.access import Access, own_names, session_key
from shoal.dashboard.server.routes import Routes
from shoal.dashboard.server.updates import Changes, Updates
from shoal.serve.http import HttpServer, Limits
from shoal.serve.token import is_loopback, read_token

DEFAULT_PORT = 6100
_LOOK_EVERY_S = 0.5
_PORTS_TRIED = 20
_DRAIN_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class DashRequest:
    """What the user asked for."""

    runs: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    cache: Path | None = None
    """Where columns and the session's key are kept; None for the user's cache folder."""
    limits: Limits = field(default_factory=lambda: Limits(body_bytes=0, connections=256))


def check(request: DashRequest) -> str | None:
    """Refuse what cannot be served, and give the token.

    Raises:
        RequestError: the request is wrong.
    """
    if request.runs.exists() and not request.runs.is_dir():
        raise RequestError(f"{request.runs} is a file; give a run directory, or a folder of them")
    if request.runs.is_dir() and not os.access(request.runs, os.R_OK | os.X_OK):
        raise RequestError(f"{request.runs} may not be read by this user; give another folder")
    return read_token(request.host, request.token_file)


class Follower:
    """A thread that looks at the runs again and again, and says what changed.

    Args:
        folder: the runs.
        changes: finds what is new.
        tell: takes the messages; called on the thread.
    """

    def __init__(
        self, folder: RunFolder, changes: Changes, tell: Callable[[list[tuple[str, dict[str, Any]]]], None]
    ) -> None:
        self._folder, self._changes, self._tell = folder, changes, tell
        self._stop = threading.Event()
        self._said_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dashboard-follower", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the block that is being read."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            try:
                # A folder of many runs takes seconds to read for the first time: those that were read are shown meanwhile.
                self._folder.look(stop=self._stop.is_set, after_run=self._say_now_and_then)
                self._say()
                self._folder.trouble = ""
            except Exception as error:
                # This thread is all that follows runs: whatever it meets, it says so on the page and looks again.
                self._folder.trouble = f"{type(error).__name__}: {error}"
            self._stop.wait(max(_LOOK_EVERY_S - (time.monotonic() - begin), 0.05))

    def _say_now_and_then(self) -> None:
        if time.monotonic() - self._said_at >= _LOOK_EVERY_S:
            self._say()

    def _say(self) -> None:
        with self._folder.reading():
            messages = self._changes.look()
        self._said_at = time.monotonic()
        if messages:
            self._tell(messages)


async def _listen(server: HttpServer, request: DashRequest) -> tuple[str, int]:
    """The address; where the port is taken, that of the next one that is free."""
    ports = [request.port] if request.port == 0 else range(request.port, min(request.port + _PORTS_TRIED, 65536))
    for port in ports:
        try:
            return await server.listen(request.host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RequestError(
                    f"cannot listen on {request.host}:{port}: {error.strerror}; give another --port"
                ) from error
    raise RequestError(
        f"ports {ports[0]} to {ports[-1]} of {request.host} are all in use; give another --port, 0 for any"
    )


async def _run(request: DashRequest, token: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    cache = request.cache or default_folder()
    folder = RunFolder(request.runs, ColumnCache(cache))
    changes, updates = Changes(folder), Updates(time.time())
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    routes: list[Routes] = []
    server = HttpServer(lambda received: routes[0].answer(received), request.limits)
    host, port = await _listen(server, request)
    access = Access(port=port, token=token, session=session_key(cache), names=own_names(request.host))

    def address() -> str:
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/enter?code={access.new_code()}"

    routes.append(
        Routes(folder, access, changes, updates, lambda: say(f"a browser came in; for another one: {address()}"))
    )
    folder.find()

    def tell(messages: list[tuple[str, dict[str, Any]]]) -> None:
        loop.call_soon_threadsafe(updates.publish, messages)

    follower = Follower(folder, changes, tell)
    if request.port not in (0, port):
        say(f"port {request.port} is in use; this is the next one that is free")
    if not folder.runs:
        say(f"there is no run in {request.runs} yet; the page shows runs as they come")
    say(f"dashboard of {_count(len(folder.runs))} in {request.runs} at {address()}")
    if not is_loopback(request.host):
        say("others can reach this; what they send is not encrypted: prefer `ssh -L` and leave --host out")
    follower.start()
    try:
        await stop.wait()
    finally:
        updates.close()
        await server.drain(_DRAIN_SECONDS)
        await asyncio.to_thread(follower.stop)
    return {"host": host, "port": port, "runs": len(folder.runs), "evicted": server.evicted}


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def dash(request: DashRequest, say: Callable[[str], None]) -> dict[str, Any]:
    """Serve the dashboard until SIGTERM or Ctrl-C.

    Args:
        request: what the user asked for.
        say: takes lines for the user, the address among them.

    Raises:
        RequestError: the request is wrong, or no port is free.
    """
    return asyncio.run(_run(request, check(request), say))
