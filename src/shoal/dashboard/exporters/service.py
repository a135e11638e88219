"""``shoal export``: a process that answers scrapes and sends to a collector, and reads run directories for that.

Training listens on nothing and waits for nobody: who scrapes too often, or a collector that hangs, slows this process alone.
"""

import asyncio
import hmac
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError, RunError
from shoal.dashboard.exporters.collect import Watched, collect
from shoal.dashboard.exporters.families import Snapshot
from shoal.dashboard.exporters.otlp import Collector, check_collector
from shoal.dashboard.exporters.prometheus import CONTENT_TYPE, render
from shoal.dashboard.opening import open_folder
from shoal.dashboard.runs.files import STRANGE
from shoal.dashboard.server.access import Access, own_names
from shoal.dashboard.views.overview import run_row
from shoal.serve.http import HttpServer, Limits, Request, Response
from shoal.serve.token import read_token

_FRESH_SECONDS = 1.0
"""Scrapes that come so soon after another get the same answer."""
_DRAIN_SECONDS = 5.0
_ONCE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What the user asked for."""

    folder: Path
    port: int | None = None
    """Of the endpoint; None for none."""
    host: str = "127.0.0.1"
    token_file: Path | None = None
    otlp: str | None = None
    every: float = 10.0
    once: bool = False
    limits: Limits = field(default_factory=lambda: Limits(connections=64))


class Gatherer:
    """Looks at the runs of a folder, for one at a time.

    Args:
        folder: of run directories.

    Raises:
        RequestError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = open_folder(folder)
        self._lock = threading.Lock()
        self._last: tuple[float, Snapshot] | None = None

    @property
    def num_runs(self) -> int:
        """Runs that there are."""
        return len(self._folder.runs)

    def snapshot(self) -> Snapshot:
        """The metrics as they are now, or were a moment ago."""
        with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > _FRESH_SECONDS:
                self._folder.look()
                now = time.time()
                watched = []
                for run in self._folder.runs.values():
                    try:
                        row = run_row(run, now)
                    except STRANGE:
                        # One whose files hold what nobody writes keeps no other from being exported.
                        continue
                    watched.append(Watched(run.name, run, str(row["kind"]), str(row["status"])))
                self._last = (time.monotonic(), collect(watched, now))
            return self._last[1]


class Endpoint:
    """What a request gets.

    Args:
        gatherer: of the metrics.
        token: that every scrape has to give; None for none.
        host: at which the server listens. Without a token it is called by its own names only, and not by a page in a browser.
    """

    def __init__(self, gatherer: Gatherer, token: str | None, host: str) -> None:
        self._gatherer, self._token = gatherer, token
        self._access = Access(port=0, token=token, session="", names=own_names(host))
        self.scrapes = 0
        self.refused = 0

    async def answer(self, request: Request) -> Response:
        """A scrape gets the metrics, and everything else a word why not."""
        status, why = self._judge(request)
        if status != 200:
            self.refused += 1
            return _text(status, f"{why}\n")
        text = await asyncio.to_thread(lambda: render(self._gatherer.snapshot().families))
        self.scrapes += 1
        return Response(status=200, body=text.encode(), content_type=CONTENT_TYPE)

    def _judge(self, request: Request) -> tuple[int, str]:
        if self._token is not None and not hmac.compare_digest(
            request.headers.get("authorization", "").encode(), f"Bearer {self._token}".encode()
        ):
            return 401, "give the token: Authorization: Bearer TOKEN"
        refusal = self._access.refusal_of_place(request.headers) if self._token is None else None
        if refusal is not None:
            return refusal.status, refusal.reason
        if request.path != "/metrics":
            return 404, "metrics are at /metrics"
        return (200, "") if request.method == "GET" else (405, "/metrics takes GET")


def _text(status: int, text: str) -> Response:
    return Response(status=status, body=text.encode(), content_type="text/plain; charset=utf-8")


def serve_metrics(request: ExportRequest, *, say: Callable[[str], None], show: Callable[[str], None]) -> dict[str, Any]:
    """Export metrics until SIGTERM or Ctrl-C, or once.

    Args:
        request: what the user asked for.
        say: takes lines for people.
        show: takes the text for Prometheus where it is to be printed.

    Returns:
        How often it was asked, and what was sent.

    Raises:
        RequestError: the request is wrong.
        RunError: a collector did not take what was to be sent once.
    """
    token = read_token(request.host, request.token_file)
    address = None if request.otlp is None else check_collector(request.otlp)
    if request.once and request.port is not None:
        raise RequestError(
            "--once prints the metrics or sends them to --otlp, and an endpoint goes on; leave one of them out"
        )
    gatherer = Gatherer(request.folder)
    if request.once:
        return _once(gatherer, address, show)
    endpoint = Endpoint(gatherer, token, request.host)
    collector = None if address is None else Collector(address, warn=say)
    try:
        asyncio.run(_run(request, gatherer, endpoint, collector, say))
    finally:
        if collector is not None:
            collector.close()
    found = {"runs": gatherer.num_runs, "scrapes": endpoint.scrapes, "refused": endpoint.refused}
    if collector is not None:
        found |= {"sent": collector.sent, "failed": collector.failed, "dropped": collector.dropped}
    return found


def _once(gatherer: Gatherer, address: str | None, show: Callable[[str], None]) -> dict[str, Any]:
    snapshot = gatherer.snapshot()
    if address is None:
        show(render(snapshot.families))
        return {"runs": gatherer.num_runs, "sent": 0}
    collector = Collector(address, warn=lambda line: None)
    collector.offer(snapshot)
    collector.close(within=_ONCE_SECONDS)
    if not collector.sent:
        reason = collector.reason or f"no answer in {_ONCE_SECONDS:g} s"
        raise RunError(
            f"{address} does not take the metrics: {reason}; is the collector there, and is this its address?"
        )
    return {"runs": gatherer.num_runs, "sent": collector.sent}


async def _run(
    request: ExportRequest,
    gatherer: Gatherer,
    endpoint: Endpoint,
    collector: Collector | None,
    say: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = HttpServer(endpoint.answer, request.limits)
    if request.port is not None:
        try:
            host, port = await server.listen(request.host, request.port)
        except OSError as error:
            raise RequestError(
                f"cannot listen on {request.host}:{request.port}: {error.strerror}; give another port, 0 for any"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        say(f"metrics of {gatherer.num_runs} runs at http://{shown}:{port}/metrics")
    if collector is not None:
        say(f"metrics of {gatherer.num_runs} runs go to {request.otlp} every {request.every:g} s")
    while not stop.is_set():
        if collector is not None:
            collector.offer(await asyncio.to_thread(gatherer.snapshot))
        try:
            async with asyncio.timeout(request.every if collector is not None else None):
                await stop.wait()
        except TimeoutError:
            continue
    await server.drain(_DRAIN_SECONDS)
