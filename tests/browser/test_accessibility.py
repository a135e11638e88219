"""The page for people who do not see it, or see it badly: checks of our own, and axe-core's where npm has installed it."""

import pytest

from support.dashboard.accessibility import CHECKS, SERIOUS, find_axe
from support.dashboard.browser import ARGUMENTS, CHROMIUM, WHY_NOT, Dash, Watched
from support.dashboard.synthetic import make_run

playwright = pytest.importorskip("playwright.sync_api", reason=WHY_NOT)
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT), pytest.mark.soak]

VIEWS = {
    "/": "tbody tr",
    "/run/{slow}/curves": "[data-curve=loss] .readout b",
    "/run/{slow}/timeline": ".empty",
    "/run/{slow}/ranks": "[data-table=scores]",
    "/run/{slow}/agreement": ".empty",
    "/run/{slow}/story": ".events li",
    "/compare?ids={slow},{plain}": ".compare h1",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accessible")
    make_run(folder / "runs" / "plain", ranks=2, steps=60)
    make_run(folder / "runs" / "slow", ranks=4, steps=60, slow=(2, 1.3), status="failed")
    return folder


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_can_be_used_without_a_mouse_and_read(browser, server, scheme, tmp_path):
    dash = Dash(server / "runs", tmp_path / "cache")
    watched = Watched(browser, color_scheme=scheme, bypass_csp=True)
    watched.enter(dash)
    rows = watched.page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"]
    ids = {row["name"]: row["id"] for row in rows}
    axe = find_axe()
    if axe is not None:
        watched.page.add_script_tag(path=axe)
    problems = {}
    for view, ready in VIEWS.items():
        watched.open(view.format(**ids))
        watched.page.wait_for_selector(ready)
        problems[view] = watched.page.evaluate(CHECKS) + (watched.page.evaluate(SERIOUS) if axe is not None else [])
    watched.end()
    assert dash.end() == 0
    assert {view: found for view, found in problems.items() if found} == {}


def test_the_checks_find_what_is_planted(browser):
    page = browser.new_page()
    page.set_content(
        "<h1>a</h1><h1>b</h1><p style='color: #aaa; background: #fff'>pale</p><button></button><i id=x></i><i id=x></i>"
        "<img src='data:,'><table><tr><td>1</table><canvas></canvas>"
    )
    found = " ".join(page.evaluate(CHECKS))
    for word in (
        "2 first headings",
        "contrast 2.3",
        "no name",
        "twice: x",
        "no alt",
        "no headings",
        "a picture without",
    ):
        assert word in found, (word, found)
    page.close()
