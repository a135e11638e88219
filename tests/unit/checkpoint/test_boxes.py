"""Boxes, and the proof that pieces make up a tensor, compared with counting every element."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.boxes import Box, check_tiling, contains, describe_cut, intersect, subtract, whole_box
from support.processes.instruction_count import instructions


def points(box):
    return set(itertools.product(*(range(low, high) for low, high in zip(box.start, box.stop, strict=True))))


def boxes_in(shape):
    def extent(dim):
        return st.tuples(st.integers(0, dim), st.integers(0, dim)).map(lambda pair: (min(pair), max(pair)))

    spans = st.tuples(*(extent(dim) for dim in shape))
    return spans.map(lambda found: Box(tuple(a for a, _ in found), tuple(b - a for a, b in found)))


@st.composite
def tilings(draw):
    """A shape, and boxes that make it up: boxes are cut in two again and again, in any dim."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes = [whole_box(shape)]
    for _ in range(draw(st.integers(0, 7)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        low = Box(box.start, (*box.shape[:dim], at, *box.shape[dim + 1 :]))
        boxes += [part for part in (low, *subtract(box, low)) if part.num_elements]
    return shape, boxes


def is_tiling(shape, boxes):
    counts = Counter(point for box in boxes for point in points(box))
    return counts == Counter(points(whole_box(shape))) and all(box.num_elements for box in boxes)


@given(tilings())
def test_what_is_cut_again_and_again_is_still_the_whole(tiling):
    shape, boxes = tiling
    assert is_tiling(shape, boxes)
    check_tiling("a", shape, boxes)


@settings(max_examples=300, deadline=None)
@given(tilings(), st.data())
def test_boxes_are_refused_exactly_when_counting_every_element_says_so(tiling, data):
    shape, boxes = tiling
    index = data.draw(st.integers(0, len(boxes) - 1))
    boxes[index] = data.draw(boxes_in(shape))
    if is_tiling(shape, boxes):
        check_tiling("a", shape, boxes)
    else:
        with pytest.raises(ValueError, match="pieces of 'a'"):
            check_tiling("a", shape, boxes)


def test_overlap_and_gap_of_the_same_size_are_seen():
    """The number of elements is right, and so is every row; only the corners tell."""
    boxes = [Box((0, 0), (1, 4)), Box((0, 0), (1, 4)), Box((2, 0), (1, 4))]
    with pytest.raises(ValueError, match="overlap and leave gaps"):
        check_tiling("a", (3, 4), boxes)


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [Box((), ()), Box((), ())]),
        ((0, 3), []),
        ((0, 3), [Box((0, 0), (0, 2)), Box((0, 2), (0, 1))]),
        ((4,), [Box((0,), (5,))]),
        ((4,), [Box((0, 0), (4, 1))]),
        ((4,), [Box((2**61,), (4,))]),
    ],
    ids=str,
)
def test_odd_ones_are_refused(shape, boxes):
    with pytest.raises(ValueError, match="of 'a'"):
        check_tiling("a", shape, boxes)


def test_many_pieces_in_many_dims_are_refused_before_they_are_looked_at():
    boxes = [Box(start, (1,) * 10) for start in itertools.product((0, 1), repeat=10)]
    check_tiling("a", (2,) * 10, boxes)
    boxes = [Box(start, (1,) * 11) for start in itertools.product((0, 1), repeat=11)]

    def refuse():
        with pytest.raises(ValueError, match="2048 cut along 11 dims"):
            check_tiling("a", (2,) * 11, boxes)

    assert instructions(refuse) < 1000 * len(boxes), "each has 2048 corners"


@given(boxes_in((4, 5)), boxes_in((4, 5)))
def test_intersection_difference_and_containment_agree_with_sets(first, second):
    shared = intersect(first, second)
    assert (set() if shared is None else points(shared)) == points(first) & points(second)
    rest = subtract(first, second)
    assert sum(box.num_elements for box in rest) == len(points(first) - points(second))
    assert set().union(*map(points, rest)) == points(first) - points(second)
    if first.num_elements and second.num_elements:
        assert contains(first, second) == (points(second) <= points(first))
    assert math.prod(first.shape) == first.num_elements


def test_a_cut_is_told_in_a_few_words():
    quarters = [Box((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
    assert describe_cut((), [whole_box(())]) == "whole"
    assert describe_cut((4, 3), quarters[::2]) == "dim 0 in 2"
    assert describe_cut((4, 6), quarters) == "dim 0 in 2, dim 1 in 2"
    assert describe_cut((4, 6), [*quarters[:2], Box((2, 0), (2, 6))]) == "3 pieces"
