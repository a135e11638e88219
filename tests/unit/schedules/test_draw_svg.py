"""The picture of a schedule: well-formed, complete, to scale, and with nothing in it that reaches outside."""

import re
import xml.etree.ElementTree as xml
from dataclasses import replace

import pytest

from shoal.schedules.catalogue import FAMILIES, make_schedule
from shoal.schedules.draw import draw_svg, short
from shoal.schedules.pricing import Costs, price
from shoal.schedules.schedule import Schedule

SPACE = "{http://www.w3.org/2000/svg}"


def boxes_of(root: xml.Element) -> list[dict]:
    """Tip, name and outline of every cell, rank by rank."""
    found = []
    for group in root.iter(f"{SPACE}g"):
        outline = group.findall(f"{SPACE}rect")[-1]
        name = group.find(f"{SPACE}text")
        place = {key: float(outline.get(key)) for key in ("x", "y", "width", "height")}
        found.append({"tip": group.findtext(f"{SPACE}title"), "name": name.text if name is not None else None, **place})
    return found


def picture(schedule: Schedule, costs: Costs | None = None) -> tuple[xml.Element, list[dict]]:
    root = xml.fromstring(draw_svg(schedule, price(schedule, costs)))
    return root, boxes_of(root)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_cell_has_a_box_with_its_name_within_the_picture_and_clear_of_the_others(name):
    schedule = make_schedule(name, ranks=4, microbatches=8)
    root, boxes = picture(schedule)
    assert [box["name"] for box in boxes] == [short(cell) for row in schedule.rows for cell in row]
    width, height = float(root.get("width")), float(root.get("height"))
    for before, box in zip([None, *boxes], boxes, strict=False):
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= height
        if before is not None and before["y"] == box["y"]:
            assert before["x"] + before["width"] <= box["x"] + 0.02
    assert len({box["y"] for box in boxes}) == 4


def test_time_is_to_scale_and_idle_time_is_blank():
    _, boxes = picture(make_schedule("1f1b", ranks=2, microbatches=2), Costs(forward=1, input=2, weight=3))
    unit = boxes[0]["width"]
    assert [round(box["width"] / unit) for box in boxes] == [1, 1, 5, 5, 1, 5, 1, 5]
    # Rank 0: two forwards, then it waits from 2 to 7 for the last rank's forward and backward.
    assert round((boxes[2]["x"] - boxes[0]["x"]) / unit) == 7


def test_tips_say_stage_microbatch_start_and_end():
    schedule = make_schedule("dualpipev", ranks=2, microbatches=8)
    _, boxes = picture(schedule)
    assert boxes[0]["tip"] == "0F0 (forward of stage 0, microbatch 0): 0 to 1"
    both = next(box["tip"] for box in boxes if "&" in box["name"])
    assert re.fullmatch(
        r"\dF\d \(forward of stage \d, microbatch \d\) and \dB\d \(backward of stage \d, microbatch \d\): \d+ to \d+",
        both,
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("1f1b", ["F forward", "B backward"]),
        ("zb-h1", ["F forward", "I backward, input gradient", "W backward, weight gradient"]),
    ],
)
def test_the_legend_names_the_kinds_that_occur_each_in_its_own_colour(name, words):
    root, _ = picture(make_schedule(name, ranks=2, microbatches=4))
    texts = [text.text for text in root.findall(f"{SPACE}text")]
    assert texts[-len(words) :] == words
    colours = [rect.get("fill") for rect in root.findall(f"{SPACE}rect")[-len(words) :]]
    assert len(set(colours)) == len(words)


def test_nothing_reaches_outside_and_a_hostile_name_is_text():
    schedule = replace(make_schedule("1f1b", ranks=2, microbatches=2), name='</title><script>&"\x01')
    text = draw_svg(schedule, price(schedule))
    root = xml.fromstring(text)
    assert root.findtext(f"{SPACE}title").startswith('</title><script>&"?: 2 ranks, 2 stages, 2 microbatches')
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} == {"svg", "title", "rect", "text", "g"}
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize(
    "costs",
    [
        Costs(weight=1e-9),
        Costs(transfer=1e9),
        Costs(forward=0, input=0, weight=0),
        Costs(weight=0),
        Costs(forward=1e300),
    ],
)
def test_wild_costs_give_a_picture_of_bounded_size(costs):
    root, boxes = picture(make_schedule("zb-h1", ranks=2, microbatches=4), costs)
    assert len(boxes) == 24
    assert 0 < float(root.get("width")) < 10_000
