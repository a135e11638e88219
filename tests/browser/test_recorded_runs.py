"""Runs that trained, in a real browser: what they agree by is drawn, and what is drawn is what their events say."""

import pytest

from support.dashboard.browser import ARGUMENTS, CHROMIUM, WHY_NOT, Dash, Watched
from support.dashboard.recorded import recorded
from support.processes.command import read_events

playwright = pytest.importorskip("playwright.sync_api", reason=WHY_NOT)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

KINDS = ("servers", "islands", "script")
TABS = ("curves", "timeline", "ranks", "agreement", "story")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A page on a dashboard of recorded runs."""
    paths = [recorded(kind, tmp_path_factory) for kind in KINDS]
    folder = tmp_path_factory.mktemp("recorded-seen")
    for path in paths:
        (folder / "runs").mkdir(exist_ok=True)
        path.rename(folder / "runs" / path.name)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        watched = Watched(browser)
        watched.enter(Dash(folder / "runs", folder / "cache"))
        watched.page.wait_for_function("() => document.querySelectorAll('tbody tr .completed').length === 3")
        rows = watched.page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"]
        watched.ids = {row["name"]: row["id"] for row in rows}
        watched.folder = folder / "runs"
        yield watched
        watched.end()
        assert watched.dash.end() == 0
        browser.close()
    for path in paths:
        (folder / "runs" / path.name).rename(path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_view_of_a_run_that_trained_is_drawn(seen, kind):
    for tab in TABS:
        seen.open(f"/run/{seen.ids[kind]}/{tab}")
        seen.page.wait_for_selector(f'#tab-{tab}[aria-selected="true"]')
        seen.page.wait_for_selector(".empty" if (kind, tab) in EMPTY else "main .card")
    seen.check()


EMPTY = {("script", "agreement")}


def charts(page):
    return set(page.locator("[data-curve]").evaluate_all("all => all.map((one) => one.dataset.curve)"))


def test_the_servers_of_a_run_are_seen_to_agree(seen):
    page, run = seen.page, seen.folder / "servers"
    seen.open(f"/run/{seen.ids['servers']}/agreement")
    page.wait_for_selector("[data-curve=Queues] .readout b")
    rows = page.locator("[data-table=staleness] tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["worker-0", "worker-1"]
    updates = [event for rank in (0, 1) for event in read_events(run, rank, "update")]
    known = {event["update"]: event for event in updates}
    assert sum(int(cell) for row in rows for cell in row.split()[1:-1]) == sum(
        len(event["workers"]) for event in known.values()
    )
    queues = [event for rank in (0, 1) for event in read_events(run, rank, "queues")]
    shown = page.locator("[data-curve=Queues] .readout b").evaluate_all(
        "all => all.map((one) => Number(one.dataset.value))"
    )
    newest = max(queues, key=lambda event: event["t"])
    assert shown == [newest[name] for name in ("todo", "in_hand", "waiting", "unapplied")]
    told = {int(path.stem[5:]): read_events(run, int(path.stem[5:])) for path in sorted((run / "events").iterdir())}
    views = [(rank, event) for rank, events in told.items() for event in events if event["kind"] == "view"]
    first, _ = min(views, key=lambda view: view[1]["t"])
    center = next(event["name"] for event in told[first] if event["kind"] == "placed")
    # The rows of who was there can be walked by keys, and say what they are: whichever center was elected comes first.
    page.locator(".gantt").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.gantt + p').textContent")
    assert page.locator(".gantt + p").inner_text().startswith(f"center · {center} · ")
    assert page.locator("[data-table=views] tbody tr").count() == len(views)
    seen.open(f"/run/{seen.ids['servers']}/ranks")
    page.wait_for_selector("[data-table=scores] tbody tr")
    assert "Waits on workers" in page.locator("[data-table=scores] thead").inner_text()
    seen.check()


def test_the_rounds_of_islands_are_seen(seen):
    page, run = seen.page, seen.folder / "islands"
    seen.open(f"/run/{seen.ids['islands']}/agreement")
    page.wait_for_selector("[data-curve='time of rounds'] .readout b")
    assert {"time of rounds", "Ratio"} <= charts(page)
    shown = float(page.locator("[data-curve=Ratio] .readout b").first.get_attribute("data-value"))
    newest = read_events(run, 0, "exchange")[-1]
    assert shown == pytest.approx(newest["dense_bytes"] / newest["sent_bytes"])
    seen.check()
