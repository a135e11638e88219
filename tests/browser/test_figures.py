"""A picture of the guide beside the page as it is: the same numbers still make the same picture, roughly.

The one of ranks is of made-up numbers, so it can be made again; the others are of runs that trained (``figures.py``).
"""

import io

import numpy as np
import pytest
from PIL import Image

from browser.figures import PICTURES, make_slow
from support.dashboard.browser import ARGUMENTS, CHROMIUM, WHY_NOT, Dash, Watched
from support.processes.command import ROOT

playwright = pytest.importorskip("playwright.sync_api", reason=WHY_NOT)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

MOST = 2.0
"""Of 255, the mean difference of luminance: fonts and times differ between machines, and cards do not move."""


def luminance(image):
    """Fields of 20 by 20 pixels, as how light each is."""
    image = Image.open(image).convert("L")
    small = image.resize((image.width // 20, image.height // 20), Image.Resampling.BOX)
    return np.asarray(small, np.float64)


def difference(page, figure):
    shown, kept = luminance(io.BytesIO(page.screenshot())), luminance(figure)
    assert shown.shape == kept.shape
    return float(np.abs(shown - kept).mean())


def test_the_picture_of_the_ranks_is_that_of_the_guide(tmp_path):
    make_slow(tmp_path / "runs" / "eight-ranks")
    dash = Dash(tmp_path / "runs", tmp_path / "cache")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        watched = Watched(browser, color_scheme="dark")
        watched.enter(dash)
        page = watched.page
        page.set_viewport_size({"width": 1280, "height": 760})
        (row,) = page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"]
        place, ready = PICTURES["dark"]["ranks"]
        watched.open(place.format(eight_ranks=row["id"]))
        page.wait_for_selector(ready)
        watched.settle()
        figure = ROOT / "docs" / "figures" / "dashboard-ranks.png"
        assert difference(page, figure) < MOST
        # What a page that went wrong would look like: no heat map, and other colours.
        page.evaluate("document.querySelector('main canvas').style.visibility = 'hidden'")
        assert difference(page, figure) > MOST
        page.evaluate("document.querySelector('main canvas').style.visibility = ''")
        page.emulate_media(color_scheme="light")
        assert difference(page, figure) > MOST
        watched.check()
        watched.end()
        browser.close()
    assert dash.end() == 0
