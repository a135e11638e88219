"""Drawings for the terminal: to scale, never wider than asked for, and the same picture in colour."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.schedules.catalogue import make_schedule
from shoal.schedules.draw import draw_order, draw_time
from shoal.schedules.pricing import Costs, price
from shoal.schedules.schedule import Schedule

COLOUR = re.compile(r"\033\[[\d;]*m")


def draw(schedule: Schedule, costs: Costs | None = None, **options) -> str:
    return draw_time(schedule, price(schedule, costs), **{"colour": False, **options})


def test_a_cell_is_as_wide_as_its_time_and_idle_time_is_blank():
    assert draw(make_schedule("1f1b", ranks=2, microbatches=2)) == "\n".join(
        [
            "rank  0  0F0 0F1         0B0         0B1",
            "rank  1      1F0 1B0     1F1 1B1",
        ]
    )


def test_cells_that_take_no_time_are_not_drawn_and_shift_nothing():
    drawing = draw(make_schedule("zb-h1", ranks=2, microbatches=2), Costs(weight=0))
    assert "W" not in drawing
    lines = drawing.splitlines()
    assert lines[0].index("0I0") == lines[1].index("1I0") + 4


def test_the_overlap_of_two_is_one_cell():
    drawing = draw(make_schedule("dualpipev", ranks=2, microbatches=8), Costs(overlapped=2.5))
    assert re.search(r"\b\dF\d&\dB\d\b", drawing)


def test_colour_adds_nothing_but_colour_and_gives_each_kind_its_own():
    schedule = make_schedule("zb-h1", ranks=3, microbatches=4)
    coloured = draw(schedule, colour=True)
    plain = "\n".join(line.rstrip() for line in COLOUR.sub("", coloured).splitlines())
    assert plain == draw(schedule)
    found = set(re.findall(r"\033\[(\d+);30m\d([FIW])", coloured))
    assert sorted(kind for _, kind in found) == ["F", "I", "W"] and len({code for code, _ in found}) == 3
    # Every colour is switched off again before the line ends.
    assert all(line.count("\033[0m") * 2 == len(COLOUR.findall(line)) for line in coloured.splitlines())


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["1f1b", "interleaved", "zbv", "dualpipev"]),
    microbatches=st.sampled_from([4, 8, 12]),
    width=st.integers(30, 200),
    colour=st.booleans(),
)
def test_a_narrow_terminal_gets_bands_that_together_are_the_whole(name, microbatches, width, colour):
    schedule = make_schedule(name, ranks=4, microbatches=microbatches)
    whole = draw(schedule).splitlines()
    bands = COLOUR.sub("", draw(schedule, width=width, colour=colour)).split("\n\n")
    assert all(len(line) <= width for band in bands for line in band.splitlines())
    rows = [[line for line in band.splitlines() if line.startswith("rank")] for band in bands]
    for rank in range(4):
        joined = "".join(band[rank][9:].ljust(width - 9) for band in rows)
        assert whole[rank][9:] == joined.rstrip()
    if len(bands) > 1:
        headers = [band.splitlines()[0] for band in bands]
        assert headers[0].startswith("time 0 to ")
        assert headers[-1].endswith(f" to {price(schedule).makespan:.4g}")


def test_one_band_has_no_header():
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    assert draw(schedule, width=80) == draw(schedule)


def test_even_a_terminal_of_one_column_gets_whole_names():
    assert "0F0" in draw(make_schedule("1f1b", ranks=2, microbatches=2), width=1)


@pytest.mark.parametrize(
    "costs", [Costs(weight=1e-9), Costs(transfer=1e9), Costs(forward=0, input=0, weight=0), Costs(forward=1e300)]
)
def test_wild_costs_give_a_drawing_of_bounded_size(costs):
    drawing = draw(make_schedule("zb-h1", ranks=2, microbatches=4), costs)
    assert len(drawing.splitlines()) == 2 and len(drawing) < 4000


def test_a_cell_that_takes_next_to_nothing_does_not_blow_up_the_others():
    drawing = draw(make_schedule("zb-h1", ranks=2, microbatches=4), Costs(weight=1e-9))
    assert drawing.index("0F1") - drawing.index("0F0") == 8 * len("0F0 ")


def test_three_digits_of_ranks_keep_their_columns():
    lines = draw(make_schedule("gpipe", ranks=101, microbatches=1)).splitlines()
    assert lines[0].index("0F0") == len("rank   0  ") == len("rank 100  ")


def test_the_arrow_of_a_message_stands_under_its_cell():
    schedule = make_schedule("1f1b", ranks=4, microbatches=16)
    lines = draw_order(schedule, arrow=(1, 20)).splitlines()
    assert lines[1].startswith("rank  1  ... ") and lines[1].endswith(" ...")
    assert lines[2].strip() == "^ here"
    assert lines[1][lines[2].index("^") :].startswith(str(schedule.rows[1][20][0]))
