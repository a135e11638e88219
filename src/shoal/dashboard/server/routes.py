"""The routes: what each address answers. Reads only; whatever a request says is looked up, and never becomes a path."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.dashboard.runs.files import STRANGE, why
from shoal.dashboard.runs.folder import Busy, RunFolder
from shoal.dashboard.runs.run import Run
from shoal.dashboard.server.access import Access
from shoal.dashboard.server.pages import list_pages, type_of
from shoal.dashboard.server.updates import Changes, TooMany, Updates
from shoal.dashboard.views.agreement import agreement_answer
from shoal.dashboard.views.compare import MOST_RUNS, compare_answer
from shoal.dashboard.views.curves import curve_answer
from shoal.dashboard.views.logs import PIECE, log_answer
from shoal.dashboard.views.overview import run_answer, runs_answer
from shoal.dashboard.views.ranks import ranks_answer
from shoal.dashboard.views.story import story_answer
from shoal.dashboard.views.timeline import timeline_answer
from shoal.serve.http import Request, Response

_SAFETY = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_WAIT_S = 5.0
_API = {**_SAFETY, "cache-control": "no-store"}
_PAGE = {**_SAFETY, "cache-control": "no-cache"}

Query = Mapping[str, str]
RunView = Callable[[Run, Query], dict[str, Any] | None]


class Routes:
    """Answers requests.

    Args:
        folder: the runs.
        access: who may ask.
        changes: has the table of runs.
        updates: what is sent as it happens.
        on_entered: called when a browser came in with the code.
    """

    def __init__(
        self, folder: RunFolder, access: Access, changes: Changes, updates: Updates, on_entered: Callable[[], None]
    ) -> None:
        self._folder, self._access, self._changes, self._updates = folder, access, changes, updates
        self._on_entered = on_entered
        self._pages = list_pages()

    async def answer(self, request: Request) -> Response:
        """What a request gets."""
        refusal = self._access.refusal_of_place(request.headers)
        if refusal is not None:
            return _error(refusal.status, refusal.reason)
        if request.method != "GET":
            return _error(405, "the dashboard is read-only", {"allow": "GET"})
        if request.path == "/enter":
            return self._enter(request.query)
        if not self._access.has_key(request.headers):
            return _error(401, "open the address that `shoal dash` printed; its code works once")
        if request.path in self._pages:
            return self._page(self._pages[request.path])
        if request.path == "/api/stream":
            return self._listen(request)
        if not request.path.startswith("/api/"):
            return _error(404, "there is no such page")
        # In a thread: a search through a log, eight runs beside each other, or a file server that is away hold nobody else up.
        return await asyncio.to_thread(self._answer_api, request)

    def _answer_api(self, request: Request) -> Response:
        try:
            return self._api(request.path, request.query)
        except BadQuery as error:
            return _error(400, str(error))
        except Busy:
            return _error(503, "a run is being read and its files do not answer; try again", {"retry-after": "2"})
        except STRANGE as error:
            return _error(500, f"this run's files hold what cannot be shown ({type(error).__name__})")
        except OSError as error:
            return _error(500, f"this run's files could not be read ({why(error)})")

    def _enter(self, query: Query) -> Response:
        cookie = self._access.enter(query.get("code", ""))
        if cookie is None:
            return _error(401, "this code was used before, or never was one; `shoal dash` has printed a new address")
        self._on_entered()
        return Response(status=303, content={}, headers={**_API, "location": "/", "set-cookie": cookie})

    def _page(self, path: Path) -> Response:
        try:
            return Response(status=200, body=path.read_bytes(), content_type=type_of(path), headers=_PAGE)
        except OSError:
            return _error(404, "this file of the page is gone")

    def _listen(self, request: Request) -> Response:
        since = request.headers.get("last-event-id") or request.query.get("since")
        try:
            number = int(since) if since and since.isascii() and since.isdigit() and len(since) < 19 else None
            chunks = self._updates.listen(number)
        except TooMany:
            return _error(503, "too many pages are open", {"retry-after": "5"})
        return Response(status=200, chunks=chunks, content_type="text/event-stream", headers=_API)

    def _api(self, path: str, query: Query) -> Response:
        now = time.time()
        _, _, rest = path.partition("/api/run/")
        name, _, view = rest.partition("/")
        run = self._folder.runs.get(name)
        if view == "log" and run is not None:
            # It stands in a file of its own, and nothing that is followed changes with it.
            return _found(_log(run, query))
        with self._folder.reading(_WAIT_S):
            if path == "/api/runs":
                offset = int(number_in(query, "offset", 0))
                return _json(runs_answer(self._folder, self._changes.rows, now, offset))
            if path == "/api/compare":
                return self._compare(query, now)
            if run is None:
                return _error(404, "there is no such run, or no such address")
            return _found(
                run_answer(run, now) if not view else RUN_VIEWS[view](run, query) if view in RUN_VIEWS else None
            )

    def _compare(self, query: Query, now: float) -> Response:
        ids = [name for name in query.get("ids", "").split(",") if name]
        if not 2 <= len(ids) <= MOST_RUNS:
            raise BadQuery(f"{len(ids)} runs were given; 2 to {MOST_RUNS} can be compared")
        runs = [self._folder.runs[name] for name in ids if name in self._folder.runs]
        if len(runs) < len(ids):
            return _error(404, "one of these runs is not there")
        return _json(compare_answer(runs, now))


class BadQuery(Exception):
    """A query that cannot be answered."""


def number_in(query: Query, name: str, default: float | None = None) -> float:
    """A number of a query.

    Raises:
        BadQuery: it is none.
    """
    given = query.get(name, "")
    if not given and default is not None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadQuery(f"{name} is {given[:40]!r} and no number")
    return value


def limit_in(query: Query, name: str) -> float | None:
    """A number of a query; None where it is left out.

    Raises:
        BadQuery: it is none.
    """
    return number_in(query, name) if query.get(name) else None


def _curve(run: Run, query: Query) -> dict[str, Any] | None:
    return curve_answer(
        run,
        query.get("name", "loss"),
        axis=query.get("x", "step"),
        first=limit_in(query, "from"),
        last=limit_in(query, "to"),
        points=int(number_in(query, "points", 1000)),
        rank=int(number_in(query, "rank")) if query.get("rank") else None,
    )


def _ranks(run: Run, query: Query) -> dict[str, Any] | None:
    bins = int(number_in(query, "bins", 120))
    return ranks_answer(run, first=limit_in(query, "from"), last=limit_in(query, "to"), bins=bins)


def _timeline(run: Run, query: Query) -> dict[str, Any] | None:
    step, rank = limit_in(query, "step"), limit_in(query, "rank")
    return timeline_answer(run, None if step is None else int(step), None if rank is None else int(rank))


def _agreement(run: Run, query: Query) -> dict[str, Any] | None:
    return agreement_answer(run)


def _story(run: Run, query: Query) -> dict[str, Any] | None:
    return story_answer(
        run,
        time.time(),
        level=query.get("level", "info"),
        search=query.get("search", ""),
        after=int(number_in(query, "after", 0)),
        kind=query.get("kind", ""),
    )


def _log(run: Run, query: Query) -> dict[str, Any] | None:
    at = int(number_in(query, "at", -PIECE))
    return log_answer(run, query.get("name", ""), at, query.get("search", "")[:200])


RUN_VIEWS: dict[str, RunView] = {
    "curve": _curve,
    "ranks": _ranks,
    "timeline": _timeline,
    "agreement": _agreement,
    "story": _story,
}
"""What follows a run's id in an address."""


def _found(content: dict[str, Any] | None) -> Response:
    return _error(404, "this run has nothing of that name") if content is None else _json(content)


def _json(content: dict[str, Any]) -> Response:
    # A curve is thousands of numbers, which the standard library writes ten times as slowly. What is not finite becomes null.
    return Response(status=200, body=msgspec.json.encode(content) + b"\n", headers=_API)


def _error(status: int, reason: str, more: Mapping[str, str] | None = None) -> Response:
    return Response(status=status, content={"error": reason}, headers={**_API, **(more or {})})
