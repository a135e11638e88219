"""Parts that are merged as they come give what a list of them would, whoever made them and whenever they are ready."""

import time

import pytest

from shoal.core.config import Config, validate
from shoal.data.transform.blocks import GROUP, MergeTree, fold_groups
from shoal.data.transform.config import StepConfig
from shoal.data.transform.moments import merge_tree
from shoal.data.transform.pipeline import steps_for


def join(one, other):
    return f"({one} {other})"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 11, 16, 21])
def test_parts_are_merged_as_a_list_of_them_would_be(count):
    tree = MergeTree(join)
    for part in range(count):
        tree.add(str(part))
    assert tree.total() == merge_tree([str(part) for part in range(count)], join)


class Late:
    """Rows whose groups are ready in another order than they stand in."""

    is_in_memory = False

    def __len__(self):
        return 7 * GROUP + 5

    def read(self, start, stop, names):
        time.sleep(0.02 if start % (2 * GROUP) == 0 else 0)
        return stop - start


def test_groups_come_in_their_order_whenever_they_are_ready():
    found = [fold_groups(Late(), (), lambda size, first: f"{first}+{size}", join, shards) for shards in (1, 3)]
    assert found[0] == found[1] and f"{7 * GROUP}+5" in found[0]


class Steps(Config):
    """Some steps."""

    prepare: tuple[StepConfig, ...]
    """In order."""


def test_columns_are_made_by_the_steps_that_they_come_of_and_by_no_others():
    steps = validate(
        Steps,
        {
            "prepare": [
                {"step": "image", "columns": ["photo"], "size": [4, 4]},
                {"step": "date", "columns": ["when"], "parts": ["hour"]},
                {"step": "filter", "columns": ["a"], "how": "missing"},
                {"step": "scale", "columns": ["when_hour", "a"]},
                {"step": "pca", "columns": ["a", "b"], "to": "p"},
            ]
        },
        origin="a.toml",
    ).prepare
    assert steps_for(steps, ["when_hour"]) == ((1, 3), {"when", "a"})
    assert steps_for(steps, ["p", "label"]) == ((1, 3, 4), {"when", "a", "b", "label"})
    assert steps_for(steps, ["b"]) == ((), {"b"}) and steps_for(steps, ["photo"]) == ((0,), {"photo"})
