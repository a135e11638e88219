"""An update rule is one word of the plan: it parses, prints back, and says what is wrong with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.core.updaterule import UpdateRule


@pytest.mark.parametrize(
    ("text", "quorum", "staleness", "wait", "push_every", "fetch_every"),
    [
        ("bsp", None, 0, 0.0, 1, 1),
        ("ssp:3", None, 3, 0.0, 1, 1),
        ("ssp:0", None, 0, 0.0, 1, 1),
        ("async", 1, None, 0.0, 1, 1),
        ("half:3,0.25", 3, None, 0.25, 1, 1),
        ("half:3,1", 3, None, 1.0, 1, 1),
        ("half", None, None, 0.25, 1, 1),
        ("downpour:2,7", 1, None, 0.0, 2, 7),
        ("lbfgs", None, 0, 0.0, 1, 1),
    ],
)
def test_a_rule_parses_into_its_settings_and_prints_back(text, quorum, staleness, wait, push_every, fetch_every):
    rule = UpdateRule.parse(text)
    settings = (rule.quorum, rule.staleness, rule.wait, rule.push_every, rule.fetch_every)
    assert settings == (quorum, staleness, wait, push_every, fetch_every)
    assert str(rule) == text


def test_numbers_left_out_have_defaults_that_are_printed():
    assert str(UpdateRule.parse("ssp")) == "ssp:3"
    assert str(UpdateRule.parse("downpour")) == "downpour:5,5"
    assert str(UpdateRule.parse("half").resolve(6)) == "half:5,0.25"
    assert UpdateRule.parse("half").resolve(1).quorum == 1


@given(
    k=st.integers(1, 10**6), wait=st.floats(0, 10), n=st.integers(1, 999), m=st.integers(1, 999), s=st.integers(0, 99)
)
def test_print_is_the_inverse_of_parse(k, wait, n, m, s):
    for text in (f"half:{k},{wait!r}", f"downpour:{n},{m}", f"ssp:{s}"):
        rule = UpdateRule.parse(text)
        assert UpdateRule.parse(str(rule)) == rule
        assert UpdateRule.parse(str(rule.resolve(10**6))) == rule


def test_only_rules_that_wait_for_every_share_are_stepwise():
    stepwise = [
        text for text in ("bsp", "ssp:2", "async", "half", "half:2,0", "downpour", "lbfgs") if _is_stepwise(text)
    ]
    assert stepwise == ["bsp", "ssp:2", "lbfgs"]


def _is_stepwise(text: str) -> bool:
    return UpdateRule.parse(text).is_stepwise


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spp:3", ["'spp'", "did you mean 'ssp'?"]),
        ("BSP!", ["the choices are async, bsp"]),
        ("", ["unknown name ''"]),
        ("bsp:1", ["takes 0 numbers, not 1", "write bsp"]),
        ("bsp:", ["takes 0 numbers, not 1"]),
        ("ssp:1,2", ["takes 0 or 1 numbers, not 2", "ssp:3"]),
        ("ssp:-1", ["'-1'", "0 or more"]),
        ("ssp:", ["''", "0 or more"]),
        ("ssp:1_0", ["'1_0'"]),
        ("half:3", ["takes 0 or 2 numbers, not 1", "half:3,0.25"]),
        ("half:0,1", ["'0'", "1 or more"]),
        ("half:2,11", ["'11'", "0 to 10"]),
        ("half:2,nan", ["'nan'", "0 to 10"]),
        ("half:2,x", ["'x'", "0 to 10"]),
        ("downpour:5", ["takes 0 or 2 numbers, not 1"]),
        ("downpour:0,5", ["between pushes", "1 or more"]),
        ("downpour:5,0", ["between fetches", "1 or more"]),
    ],
)
def test_a_wrong_rule_says_what_to_write(text, words):
    with pytest.raises(RequestError) as caught:
        UpdateRule.parse(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_quorum_above_the_workers_names_both_numbers():
    with pytest.raises(RequestError, match=r"waits for 5 arrivals from 4 workers; use half:4,0.5, or start 5 workers"):
        UpdateRule.parse("half:5,0.5").resolve(4)
