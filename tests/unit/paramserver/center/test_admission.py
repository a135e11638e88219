"""Who is let in: every way in which two models differ is named."""

import pytest

from shoal.paramserver.center.center import find_difference

MODEL = {"a.weight": ((4, 2), "float32"), "b": ((3,), "float32")}


def test_the_same_model_is_let_in_also_when_its_shapes_came_as_lists():
    assert find_difference(MODEL, dict(MODEL)) is None
    assert find_difference(MODEL, {"a.weight": ([4, 2], "float32"), "b": ([3], "float32")}) is None


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (
            {"a.weight": ((4, 2), "float32")},
            "'b' is trained by the servers and not by this member (2 and 1 parameters)",
        ),
        (
            {**MODEL, "c": ((1,), "float32")},
            "'c' is trained by this member and not by the servers (2 and 3 parameters)",
        ),
        ({**MODEL, "b": ((5,), "float32")}, "'b' is [3] float32 at the servers and [5] float32 at this member"),
        ({**MODEL, "b": ((3,), "float64")}, "'b' is [3] float32 at the servers and [3] float64 at this member"),
    ],
)
def test_a_difference_is_named_with_both_sides(member, words):
    assert find_difference(MODEL, member) == words
