"""Answers do not wait for each other: what a run that cannot be read holds up is that run's views alone."""

import asyncio
import threading

import pytest

from shoal.dashboard.runs.folder import RunFolder
from shoal.dashboard.server.access import Access, own_names
from shoal.dashboard.server.routes import Routes
from shoal.dashboard.server.updates import Changes, Updates
from shoal.serve.http import Request
from support.dashboard.synthetic import make_run


@pytest.fixture
def routes(tmp_path):
    run = make_run(tmp_path / "one", steps=3)
    (run / "logs").mkdir()
    (run / "logs" / "rank-000.log").write_text("hello")
    folder = RunFolder(tmp_path)
    folder.look(all_runs=True)
    changes = Changes(folder)
    changes.look()
    access = Access(port=1, token="t" * 16, session="s", names=own_names("127.0.0.1"))
    return Routes(folder, access, changes, Updates(1.0), lambda: None), folder


def ask(routes, path, **query):
    headers = {"host": "localhost", "authorization": f"Bearer {'t' * 16}"}
    return routes.answer(Request(method="GET", path=path, headers=headers, body=b"", query=query))


def test_a_run_that_does_not_come_to_an_end_holds_up_nothing_else(routes, monkeypatch):
    monkeypatch.setattr("shoal.dashboard.server.routes._WAIT_S", 0.3)
    routes, folder = routes
    (known,) = folder.runs
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with folder.reading():
            is_held.set()
            assert is_over.wait(60)

    async def scene():
        table = asyncio.create_task(ask(routes, "/api/runs"))
        await asyncio.sleep(0)
        page = await ask(routes, "/page/app.js")
        log = await ask(routes, f"/api/run/{known}/log", name="rank-000")
        assert not table.done(), "the table has to wait, and the others came before it"
        assert (page.status, log.status, (await table).status) == (200, 200, 503)
        is_over.set()
        holder.join()
        assert (await ask(routes, "/api/runs")).status == 200

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert is_held.wait(60)
        asyncio.run(scene())
    finally:
        is_over.set()
