"""Every code block of the README, the guides and the pages about errors runs, and prints what the page says it prints."""

import pytest

from support.documents.running import run_page
from support.processes.command import ROOT

PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "api.md"),  # That has signatures, not code.
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    *sorted((ROOT / "docs" / "errors").glob("*.md")),
]
NAMES = [page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_page_runs(page, tmp_path):
    run_page(page, tmp_path, long=False)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_whole_page_runs(page, tmp_path):
    run_page(page, tmp_path, long=True, timeout=1000.0)
