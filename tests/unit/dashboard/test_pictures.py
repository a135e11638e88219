"""Pictures of a report: well formed, to scale, inside their frames, with every extreme, and with nothing that a file planted."""

import re
import xml.etree.ElementTree as xml

import pytest

from shoal.dashboard.report.pictures import (
    LEVELS,
    MOST_BOXES,
    WIDTH,
    Box,
    DrawnCurve,
    Row,
    Tick,
    draw_curves,
    draw_heat,
    draw_timeline,
    steps_between,
)

HOSTILE = '<script>alert(1)</script>"\x00\x1b[2J\udcff&'


def line(name: str = "loss", count: int = 100, spike: int | None = None, hole: int | None = None) -> DrawnCurve:
    values: list[float | None] = [1.0 + at / count for at in range(count)]
    high = list(values)
    if spike is not None:
        high[spike] = 1000.0
    if hole is not None:
        values[hole] = high[hole] = None
    bad = [int(at == hole) for at in range(count)]
    return DrawnCurve(name=name, x=list(range(count)), low=values, high=high, mean=values, bad=bad)


def parse(text: str) -> xml.Element:
    return xml.fromstring(text)


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]


def test_a_spike_of_one_bucket_reaches_the_top_and_is_not_in_the_line_of_means():
    root = parse(draw_curves("Loss", [line(spike=37)], x_name="step"))
    (band,) = [path for path in root.iter("path") if path.get("class") == "band"]
    (mean,) = [path for path in root.iter("path") if path.get("class") == "line"]
    height = float(root.get("viewBox").split()[3])
    # The frame has one part in twenty above the largest value.
    top = 22 + (height - 22 - 26) * (0.05 / 1.1)
    assert min(numbers(band.get("d"))[1::2]) == pytest.approx(top, abs=0.2)
    assert min(numbers(mean.get("d"))[1::2]) > height / 2


def test_points_are_where_their_values_are():
    root = parse(
        draw_curves(
            "x", [DrawnCurve(name="a", x=[0, 5, 10], low=[0, 5, 10], high=[0, 5, 10], mean=[0, 5, 10])], x_name="s"
        )
    )
    (drawn,) = [path for path in root.iter("path") if path.get("class") == "line"]
    found = numbers(drawn.get("d"))
    assert found[0] == 64 and found[4] == WIDTH - 12 and found[2] == pytest.approx((found[0] + found[4]) / 2, abs=0.1)
    assert found[3] == pytest.approx((found[1] + found[5]) / 2, abs=0.1) and found[1] > found[5]
    assert not [path for path in root.iter("path") if path.get("class") == "band"], "no area where nothing varies"


def test_a_line_does_not_cross_what_is_missing_and_marks_it():
    root = parse(draw_curves("x", [line(hole=50)], x_name="step"))
    assert len([path for path in root.iter("path") if path.get("class") == "line"]) == 2
    (bad,) = [path for path in root.iter("path") if path.get("class") == "bad"]
    assert bad.findtext("title") == "1 not finite"


def test_what_is_planted_is_text():
    for text in (
        draw_curves(HOSTILE, [line(HOSTILE), line("b")], x_name=HOSTILE, ticks=[Tick(x=3, text=HOSTILE)]),
        draw_heat(HOSTILE, [HOSTILE], [(1, 2)], [[1.0]]),
        draw_timeline(HOSTILE, [Row(label=HOSTILE, boxes=[Box(start=0, end=1, kind='x" onload="y', name=HOSTILE)])]),
    ):
        root = parse(text)
        assert all("script" not in element.tag and "onload" not in element.attrib for element in root.iter())
        assert "<script" not in text and "\x1b" not in text and text.encode()


def test_curves_without_a_point_are_no_picture():
    empty = DrawnCurve(name="a", x=[], low=[], high=[], mean=[])
    assert draw_curves("x", [empty], x_name="step") == "" and draw_curves("x", [], x_name="step") == ""
    assert draw_curves("x", [DrawnCurve(name="a", x=[1], low=[None], high=[None], mean=[None])], x_name="s") == ""
    assert "circle" in draw_curves("x", [DrawnCurve(name="a", x=[1], low=[2], high=[2], mean=[2])], x_name="s")


def test_a_heat_map_has_every_cell_in_the_shade_of_its_value():
    values = [[float(10 * row + column) for column in range(10)] for row in range(10)]
    values[3][4] = None
    root = parse(draw_heat("busy", [f"rank {row}" for row in range(10)], [(at, at) for at in range(10)], values))
    shades = {path.get("class"): path.get("d").count("M") for path in root.iter("path")}
    assert sum(shades.values()) == 99 and set(shades) == {f"h{level}" for level in range(LEVELS)}
    (darkest,) = [path.get("d") for path in root.iter("path") if path.get("class") == f"h{LEVELS - 1}"]
    assert {numbers(shape)[1] for shape in darkest.split("M")[1:]} == {22 + 9 * 18.0}
    assert draw_heat("busy", ["a"], [(1, 1)], [[None]]) == "" and draw_heat("busy", ["a"], [(1, 1)], [[5.0]])


def test_a_timeline_is_to_scale_and_keeps_the_longest():
    boxes = [Box(start=at, end=at + 0.5, kind="forward", name=f"{at}F0") for at in range(4)]
    root = parse(draw_timeline("step", [Row(label="rank 0", boxes=boxes)]))
    drawn = list(root.iter("rect"))
    left, wide = [float(rect.get("x")) for rect in drawn], {float(rect.get("width")) for rect in drawn}
    assert len(wide) == 1 and left[1] - left[0] == pytest.approx(2 * wide.pop(), abs=0.2)
    assert max(left) + 0.5 < WIDTH
    many = [Box(start=at, end=at + 0.1 + (at % 7) / 10, kind="phase", name="x") for at in range(2 * MOST_BOXES)]
    shown = list(parse(draw_timeline("step", [Row(label="r", boxes=many)])).iter("rect"))
    assert len(shown) == MOST_BOXES
    tips = [rect.findtext("title") for rect in shown]
    assert not [tip for tip in tips if tip.startswith("x: 100 ms")], "the shortest are left out"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 3), (1e-9, 2e-9), (1e12, 1.5e12), (5, 5.0001)])
def test_axes_have_a_few_round_numbers(low, high):
    found = steps_between(low, high, 5)
    assert 2 <= len(found) <= 7 and all(low <= value <= high * (1 + 1e-12) + 1e-12 for value in found)
    assert steps_between(1.0, 1.0, 5) == [1.0] and steps_between(float("nan"), 1.0, 5) == []
