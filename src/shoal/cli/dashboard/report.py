"""``shoal report``: what became of a run, in the terminal or as one page to mail."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, log, write_result, write_whole

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, of a run under way or over.")]
_Html = Annotated[
    Path | None,
    typer.Option("--html", "--out", metavar="FILE", help="Write one page with curves, timeline and story, to mail."),
]


def report(run: _Run, html: _Html = None, json_file: JsonFile = None) -> None:
    """Say what RUN was, how it went, what it cost against the forecast, and what went wrong."""
    # Verbs import what they need when they run: see cli/main.py.
    check_result_file(json_file)
    check_result_file(html, "--html")
    from shoal.dashboard.report.gather import gather
    from shoal.dashboard.report.page import build_page
    from shoal.dashboard.report.words import card_lines

    parts = gather(run)
    if html is not None:
        page = build_page(parts)
        write_whole(html, page, "--html")
        log(f"wrote {html}: {len(page.encode())} bytes, no scripts, nothing that it loads")
    for name, text in card_lines(parts.card):
        print(f"{name:<18} {text}")
    write_result(json_file, parts.card)
