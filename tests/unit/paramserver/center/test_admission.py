"""Who is let in: every way in which two models differ is named."""

import pytest

from shoal.elastic.view import View
from shoal.paramserver.center.center import find_difference, find_other_run
from shoal.paramserver.messages import Join

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


@pytest.mark.parametrize(
    ("ours", "run", "seen", "epoch", "words"),
    [
        ("", "", None, 1, None),
        ("", "a", None, 1, None),
        ("a", "", None, 1, None),
        ("a", "a", 9, 2, None),
        ("", "a", 4, 5, None),
        ("", "a", 4, 4, "has reached epoch 4, and this center begins with epoch 4"),
        ("b", "a", None, 9, "it belongs to the run a and this center to the run b"),
        ("b", "a", 3, 9, "it belongs to the run a and this center to the run b"),
    ],
)
def test_members_of_another_run_are_known_by_its_name_and_its_epochs(ours, run, seen, epoch, words):
    view = None if seen is None else View(epoch=seen, servers=(), workers=(), chains=())
    join = Join(name="server-0", role="server", address="", model={}, run=run, view=view)
    found = find_other_run(ours, join, epoch=epoch)
    assert found is None if words is None else found is not None and words in found
