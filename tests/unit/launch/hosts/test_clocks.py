"""Whose clock is wrong."""

from shoal.launch.hosts.clocks import wrong_clocks


def test_clocks_that_agree_are_not_named() -> None:
    assert wrong_clocks({"a": 0.3, "b": -0.2}) == []
    assert wrong_clocks({}) == []


def test_the_one_that_differs_from_most_is_named_with_the_fix() -> None:
    (found,) = wrong_clocks({"a": 0.0, "b": 100.2})
    assert found == "the clock of host b is 100.2 s ahead; let chrony or ntpd set it"


def test_this_machine_may_be_the_one() -> None:
    (found,) = wrong_clocks({"a": -7.0, "b": -7.1})
    assert found.startswith("this machine's clock is 7.0 s off")
