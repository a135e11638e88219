"""The table of combinations in the guide is what the rules of a plan say."""

from architecture.combinations import GUIDE, TABLE_END, TABLE_START, TECHNIQUES, combination_table, with_table
from shoal.core.plan import EXECUTED


def test_the_guide_has_the_table_that_the_rules_give():
    between = GUIDE.read_text().partition(TABLE_START)[2].partition(TABLE_END)[0]
    assert between.strip() == combination_table(), "run `python tests/architecture/combinations.py`"


def test_the_table_asks_about_every_technique_that_a_plan_can_have():
    asked = {key for keys in TECHNIQUES.values() for key in keys}
    # Three say how much of a pipeline, not which; servers are no way of laying a model out, with rules of their own.
    others = {"chunks", "replicas", "microbatches", "ps", "workers", "update", "backup"}
    assert asked == EXECUTED - others


def test_the_table_is_written_between_its_marks():
    text = with_table(f"before\n{TABLE_START}\nold\n{TABLE_END}\nafter\n")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert combination_table() in text
