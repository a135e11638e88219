"""What is sent as it happens: rows that changed, and new points of curves, to every browser that listens.

Each message has a number, and the newest messages are kept: a browser that comes back says the last number that it has and gets
what it missed. Numbers count up from the time at which the server began, so one of an earlier server is below all of ours; then
there is nothing to go on from, and the browser is told to fetch everything again.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.files import STRANGE
from shoal.dashboard.runs.folder import RunFolder
from shoal.dashboard.runs.pyramid import finite_list
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.overview import run_row
from shoal.dashboard.views.plain import text
from shoal.dashboard.views.status import step_of

_KEPT = 500
_KEPT_BYTES = 4 << 20
_WAITING = 200
_ALIVE_SECONDS = 15.0
_MOST_CLIENTS = 64
_MOST_POINTS = 400
_CURVES = ("loss", "step_seconds", "tokens_per_s", "gradient_norm")
_MOST_ROWS_BYTES = 150_000


class TooMany(Exception):
    """There are as many listeners as are allowed."""


class Updates:
    """Messages, those who listen, and those that were sent last. Lives on one event loop."""

    def __init__(self, begin: float) -> None:
        self._next = int(begin * 1000)
        self._first = self._next
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._clients: set[asyncio.Queue[bytes | None]] = set()

    @property
    def num_clients(self) -> int:
        """Who listens."""
        return len(self._clients)

    def publish(self, messages: list[tuple[str, dict[str, Any]]]) -> None:
        """Send messages to all, and keep them for a while."""
        for kind, content in messages:
            number, self._next = self._next, self._next + 1
            data = _message(number, kind, content)
            self._kept.append((number, data))
            self._kept_bytes += len(data)
            while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
            for queue in list(self._clients):
                if queue.qsize() >= _WAITING:
                    # It hears too slowly: after what waits for it, it comes back and says what it has.
                    self._clients.discard(queue)
                    queue.put_nowait(None)
                else:
                    queue.put_nowait(data)

    def listen(self, since: int | None) -> AsyncIterator[bytes]:
        """Messages from here on, after those that were missed.

        Raises:
            TooMany: no more may listen.
        """
        if len(self._clients) >= _MOST_CLIENTS:
            raise TooMany
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for data in self._missed(since):
            queue.put_nowait(data)
        self._clients.add(queue)
        return self._send(queue)

    def _missed(self, since: int | None) -> list[bytes]:
        last = self._next - 1
        if since is None or since == last:
            return [_message(last, "hello", {"reset": False})]
        oldest = self._kept[0][0] if self._kept else self._next
        if since < oldest - 1 or since > last:
            return [_message(last, "hello", {"reset": True})]
        return [_message(since, "hello", {"reset": False}), *(data for number, data in self._kept if number > since)]

    async def _send(self, queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        try:
            yield b"retry: 1000\n\n"
            while True:
                try:
                    data = await asyncio.wait_for(queue.get(), _ALIVE_SECONDS)
                except TimeoutError:
                    data = b": alive\n\n"
                if data is None:
                    return
                yield data
        finally:
            self._clients.discard(queue)

    def close(self) -> None:
        """Let all go."""
        for queue in list(self._clients):
            queue.put_nowait(None)


def _message(number: int, kind: str, content: dict[str, Any]) -> bytes:
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(content, allow_nan=False)}\n\n".encode()


class Changes:
    """What changed in a folder of runs between two looks, as messages."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.rows: dict[str, dict[str, Any]] = {}
        """The table, by id."""
        self._versions: dict[str, int] = {}
        self._sent: dict[str, tuple[object, int]] = {}
        """Of each run: the table of steps of which rows were sent, and how many."""

    def look(self, now: float | None = None) -> list[tuple[str, dict[str, Any]]]:
        """The messages for what is new; the folder has to be held still."""
        now = time.time() if now is None else now
        messages: list[tuple[str, dict[str, Any]]] = []
        changed: list[dict[str, Any]] = []
        for run in self._folder.read_runs:
            try:
                self._compare(run, now, changed, messages)
            except STRANGE as error:
                self._folder.strange[run.id] = f"{type(error).__name__}: {error}"
        for known in [known for known in self.rows if known not in self._folder.runs]:
            del self.rows[known]
            self._versions.pop(known, None)
            self._sent.pop(known, None)
            messages.append(("gone", {"id": known}))
        self._folder.gone.clear()
        return [*(("runs", {"runs": rows, "now": now}) for rows in _parts(changed)), *messages]

    def _compare(
        self, run: Run, now: float, changed: list[dict[str, Any]], messages: list[tuple[str, dict[str, Any]]]
    ) -> None:
        """Add to the rows that changed, and to the messages, what is new of a run."""
        old = self.rows.get(run.id)
        is_same = self._versions.get(run.id) == run.version
        # What ended or is silent stays as it is; what runs may fall silent without a word.
        if is_same and old is not None and old["status"] != "running":
            return
        row = run_row(run, now)
        if old is None:
            # From here on: what there is already is fetched by whoever opens the run.
            self._points(run)
        elif not is_same:
            messages.append(("run", self._points(run)))
        if old is None or _without_time(row) != _without_time(old):
            changed.append(row)
        self.rows[run.id], self._versions[run.id] = row, run.version

    def _points(self, run: Run) -> dict[str, Any]:
        """New points of a run's main curves, and how its ranks are."""
        lead = run.lead()
        answer: dict[str, Any] = {"id": run.id, "step": step_of(run), "rank_states": rank_states(run), "curves": {}}
        if lead is None:
            return answer
        sent = self._sent.get(run.id)
        self._sent[run.id] = (lead.steps, lead.steps.rows)
        first = sent[1] if sent is not None and sent[0] is lead.steps else None
        if first is None or lead.steps.rows - first > _MOST_POINTS:
            return {**answer, "reset": True}
        if lead.steps.rows > first:
            answer["curves"] = _new_points(run, lead, first)
        return answer


def _new_points(run: Run, lead: EventFile, first: int) -> dict[str, list[list[float | int | None]]]:
    found = {}
    steps = lead.steps.column("step")[first:]
    for name in _CURVES:
        curve = run.curves.get(lead, name)
        if curve is None:
            continue
        # By their steps: a restart has taken back points of before, and the first new step says from where on.
        places = curve.axes["step"]
        start = int(np.searchsorted(places, steps.min()))
        x, y = finite_list(places[start:]), finite_list(curve.pyramid.values[start:])
        found[name] = [[one, other] for one, other in zip(x, y, strict=True)][:_MOST_POINTS]
    return found


def rank_states(run: Run) -> dict[str, str]:
    """How each rank is, by live.json."""
    ranks = (run.live or {}).get("ranks")
    if not isinstance(ranks, list):
        return {}
    found = {}
    for one in ranks[:1024]:
        if isinstance(one, dict):
            found[text(one.get("rank", one.get("name")), 100)] = text(one.get("state", ""), 20)
    return found


def _without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("updated", "eta_s", "memory_bytes")}


def _parts(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    parts: list[list[dict[str, Any]]] = []
    size = 0
    for row in rows:
        length = len(json.dumps(row))
        if not parts or size + length > _MOST_ROWS_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += length
    return parts
