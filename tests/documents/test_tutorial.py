"""Every code block of the tutorial runs, and prints what the page says it prints; the dearest pages only in soak."""

import pytest

from support.documents.running import run_page
from support.processes.command import ROOT

PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
# Ten to sixteen seconds of a processor each, of commands that other tests run too.
DEAR = ("02-your-own-model", "04-plans", "07-checkpoints", "08-fine-tuning")


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in DEAR], ids=lambda page: page.stem)
def test_the_page_runs(page, tmp_path):
    run_page(page, tmp_path, long=False)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_whole_page_runs(page, tmp_path):
    run_page(page, tmp_path, long=True, timeout=500.0)
