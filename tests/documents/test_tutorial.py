"""Every code block of the tutorial runs, and prints what the page says it prints."""

import pytest

from support.documents.running import run_page
from support.processes.command import ROOT

PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs(page, tmp_path):
    run_page(page, tmp_path, long=False)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_whole_page_runs(page, tmp_path):
    run_page(page, tmp_path, long=True, timeout=500.0)
