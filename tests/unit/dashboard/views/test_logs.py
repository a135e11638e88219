"""A log is searched to its end, whatever its length and its letters."""

import pytest

from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.logs import log_answer
from support.dashboard.synthetic import make_run

MEGABYTE = 1 << 20


@pytest.fixture
def log(tmp_path):
    folder = make_run(tmp_path / "one", steps=1) / "logs"
    folder.mkdir()
    return folder / "rank-000.log"


def found_lines(log, search):
    """All lines with a text, found one after the other as the page does."""
    run, at, lines = Run(log.parents[1]), 0, []
    while True:
        answer = log_answer(run, "rank-000", at, search)
        if answer["found"]:
            lines.append(answer["text"].split("\n", 1)[0])
            at = answer["next"]
        elif answer["to"] >= answer["size"]:
            return lines
        else:
            assert answer["to"] > at, "it stands still"
            at = answer["to"]


@pytest.mark.parametrize("search", ["gefunden", "GEFUNDEN: Ä", "ä and Ö", "événement", "ÉVÉNEMENT"])
def test_letters_are_found_whatever_their_case(log, search):
    lines = ["nothing", "Gefunden: Ä and ö, İstanbul", "İİİ Événement: gefunden: ä and ö", "nothing more"]
    log.write_text("\n".join(lines))
    assert found_lines(log, search) == (lines[2:3] if search.lower() == "événement" else lines[1:3])


@pytest.mark.parametrize("needle", ["needle", "Nädel"])
def test_a_line_far_behind_is_found(log, needle):
    with log.open("wb") as file:
        file.write(b"\x1b[31mfirst " + needle.upper().encode() + b"\x1b[0m\n")
        file.truncate(80 * MEGABYTE)  # A hole: one line of nothing, 80 MB long.
        file.seek(0, 2)
        file.write(f"{needle} across two blocks\n".encode() + b"a line\n" * 10 + needle.encode())
    first, second, third = found_lines(log, needle)
    assert first == f"first {needle.upper()}" and second.endswith(f"{needle} across two blocks") and third == needle


def test_one_answer_searches_a_bounded_part_and_says_how_far(log):
    with log.open("wb") as file:
        file.truncate(40 * MEGABYTE)
    answer = log_answer(Run(log.parents[1]), "rank-000", 0, "needle")
    assert answer["found"] is False and 0 < answer["to"] < answer["size"]
