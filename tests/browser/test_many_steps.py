"""A run of a million steps in a real browser: nothing of it is lost on the way to the screen."""

import time

import pytest

from support.dashboard.browser import ARGUMENTS, CHROMIUM, WHY_NOT, Dash, Watched
from support.dashboard.synthetic import make_run

playwright = pytest.importorskip("playwright.sync_api", reason=WHY_NOT)
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT), pytest.mark.soak, pytest.mark.timeout(600)]

STEPS, SPIKE = 1_000_000, 765_432


def test_a_spike_in_a_million_steps_is_seen_at_every_zoom(tmp_path):
    make_run(tmp_path / "runs" / "long", steps=STEPS, spike_at=SPIKE)
    dash = Dash(tmp_path / "runs", tmp_path / "cache")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        watched = Watched(browser)
        page = watched.page
        page.goto(dash.entrance)
        watched.dash = dash
        page.wait_for_selector("tbody tr")
        page.wait_for_function(
            f"() => document.querySelector('tbody .c-step')?.innerText.startsWith('{STEPS:,}')", timeout=240_000
        )
        identity = page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"][0]["id"]
        for width in (STEPS, 200_000, 20_000, 2_000, 100):
            first = max(1, SPIKE - width // 3)
            begin = time.monotonic()
            watched.open(f"/run/{identity}/curves?from={first}&to={min(STEPS, first + width)}")
            page.reload()
            value = page.locator("[data-curve=loss] .readout b")
            value.wait_for()
            assert time.monotonic() - begin < 20
            card = page.locator("[data-curve=loss]")
            card.locator("summary").click()
            card.get_by_role("button", name="Table").click()
            rows = [row.split("\t") for row in card.locator("tbody tr").all_inner_texts()]
            assert len(rows) < 1600 and max(float(row[4]) for row in rows) == 1000.0, width
        watched.check()
        watched.end()
        browser.close()
    assert dash.end() == 0
