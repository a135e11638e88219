"""One vocabulary for all, whose ids never move."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.data.labels import LabelSpace, unite_labels
from shoal.data.spec import IGNORED

LABELS = st.lists(st.one_of(st.text(max_size=4), st.integers(-5, 5)), max_size=30)


@settings(max_examples=25)
@given(LABELS, st.integers(1, 8), st.randoms())
def test_the_order_depends_on_nobody(labels, workers, random):
    whole = unite_labels([labels])
    shuffled = random.sample(labels, len(labels))
    parts = [shuffled[worker::workers] for worker in range(workers)]
    assert unite_labels(parts) == whole and unite_labels(reversed(parts)).digest == whole.digest


@settings(max_examples=25)
@given(LABELS, LABELS)
def test_later_labels_move_no_id(early, late):
    before = unite_labels([early])
    after = before.append(late)
    assert after.names[: len(before.names)] == before.names and set(after.names) == {*early, *late}


def test_texts_are_sorted_by_bytes():
    assert unite_labels([["é", "z", "Z", 10, 9]]).names == (9, 10, "Z", "z", "é")


def test_an_unknown_label_counts_for_nothing():
    ids, unknown = LabelSpace(names=("a", "b")).encode(["b", "x"], np.array([0, 1, 0]))
    assert ids.tolist() == [1, IGNORED, 1] and unknown == 1


def test_vocabularies_that_are_too_large_are_refused_when_they_are_united_and_appended_to():
    with pytest.raises(RequestError, match="more than 3 labels"):
        unite_labels([range(3), range(2, 5)], most=3)
    space = LabelSpace(names=("a", "b"))
    assert len(space.append(["a", "c"], most=3).names) == 3
    with pytest.raises(RequestError, match=r"column 'state' has more than 3 labels.*raise data.labels.most"):
        space.append(["d", "c"], most=3, what="state")


def test_a_description_tells_the_order_of_labels_apart():
    one, other = (LabelSpace(names=("a", *middle, "z")).describe() for middle in (("b", "c"), ("c", "b")))
    assert one != other and one.startswith("4 labels from 'a' to 'z', digest ")
