"""A plan is one line: it parses, prints, and says before anything starts why it cannot run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.core.plan import Plan


def test_the_design_documents_line_parses_and_prints_back():
    text = "dp=2 tp=2 pp=2 schedule=1f1b microbatches=8 zero=1"
    assert str(Plan.parse(text)) == text
    assert Plan.parse(text).world_size == 8


@given(
    dp=st.integers(1, 64),
    tp=st.integers(1, 8),
    sp=st.booleans(),
    pp=st.integers(1, 8),
    schedule=st.one_of(st.none(), st.sampled_from(["zbv", "folder/own.csv"])),
    chunks=st.one_of(st.none(), st.integers(1, 4)),
    microbatches=st.one_of(st.none(), st.integers(2, 64)),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_parse_is_the_inverse_of_print(**degrees):
    plan = Plan(**degrees)
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dq=2", ["'dq'", "did you mean 'dp'?"]),
        ("dp", ["key=value"]),
        ("dp=two", ["whole number", "'two'"]),
        ("dp=2 dp=3", ["given twice"]),
        ("dp=2, zero=3", ["separated by spaces, not by commas", "write 'dp=2 zero=3'"]),
        ("dp=2,tp=2 ,zero=3,", ["write 'dp=2 tp=2 zero=3'"]),
        ("sp=yes", ["true or false"]),
        ("schedule=", ["no value"]),
    ],
)
def test_a_line_that_is_not_a_plan_is_refused_with_the_word_that_is_wrong(text, words):
    with pytest.raises(RequestError) as refusal:
        Plan.parse(text)
    for word in words:
        assert word in str(refusal.value)


def test_what_no_version_executes_yet_is_refused_by_name():
    for text in ("ep=2", "ep=4 dp=2"):
        with pytest.raises(RequestError, match="not there yet"):
            Plan.parse(text).check()
    Plan.parse("dp=4 microbatches=2").check(world_size=4)
    Plan.parse("dp=2 pp=2 schedule=interleaved chunks=3 microbatches=4 zero=1").check(world_size=4)
    Plan.parse("dp=2 tp=2 sp=true cp=2 cp_kind=alltoall zero=3 recompute=full").check(world_size=8)


def test_the_world_size_message_shows_the_whole_product():
    with pytest.raises(RequestError, match=r"3 processes are not dp 2 x tp 1 x cp 1 x pp 1 = 2; start 2 processes"):
        Plan.parse("dp=2").check(world_size=3)


def test_every_problem_is_listed_at_once():
    problems = Plan.parse("dp=0 ep=2 zero=7 recompute=some").problems(world_size=2)
    assert any("dp=0 is below 1" in problem for problem in problems)
    assert any("zero=7 is none of 0, 1, 2, 3" in problem for problem in problems)
    assert any("recompute=some" in problem for problem in problems)
    assert any("ep=2 is not there yet" in problem for problem in problems)


@pytest.mark.parametrize("text", ["dp=1 pp=2 schedule=1f1b microbatches=1", "dp=2 microbatches=4", "dp=2 tp=2 zero=3"])
def test_a_plan_is_what_its_line_says_for_those_who_only_get_the_line(text):
    """A pipeline would choose a number of microbatches of its own where the line says none."""
    plan = Plan.parse(text)
    assert Plan.parse(str(plan)) == plan and str(plan) == text
