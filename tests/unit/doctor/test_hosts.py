"""Which pair of hosts is wrong, and which host where all its pairs are."""

import itertools

import pytest

from shoal.doctor.checks import State
from shoal.doctor.hosts import judge_pairs, pair_rounds
from shoal.launch.hosts.messages import Interface, Probed

HOSTS = {name: Interface("eth", f"10.0.0.{number}") for number, name in enumerate("abc", 1)}
GOOD = Probed(round_trip=0.0001, bytes_per_second=1e9)


def judged(**others: Probed) -> dict[str, tuple[State, str]]:
    """Checks by pair, where ``ab`` is the way from a to b."""
    pairs = {(one, two): others.get(one + two, GOOD) for one, two in itertools.permutations(HOSTS, 2)}
    return {check.name: (check.state, check.advice) for check in judge_pairs(pairs, HOSTS)}


def test_pairs_that_are_alike_are_fine() -> None:
    assert {state for state, _ in judged().values()} == {State.OK}


def test_one_slow_way_is_named_alone() -> None:
    found = judged(ab=Probed(round_trip=0.0001, bytes_per_second=1e8))
    assert [name for name, (state, _) in found.items() if state is State.WRONG] == ["a to b"]
    assert found["a to b"][1] == (
        "a sends to b 10.0 times slower than the best pair; look at the cable, the port and the load of both"
    )


def test_a_host_all_of_whose_pairs_are_slow_is_named() -> None:
    slow = Probed(round_trip=0.0001, bytes_per_second=1e7)
    found = judged(ac=slow, ca=slow, bc=slow, cb=slow)
    for name in ("a to c", "c to a", "b to c", "c to b"):
        assert "the load of c: all its pairs are wrong, and the others are not" in found[name][1]
    assert found["a to b"][0] is State.OK


def test_long_round_trips_and_closed_ports_are_told() -> None:
    found = judged(ab=Probed(round_trip=0.5, bytes_per_second=1e9), ba=Probed(problem="timed out"))
    assert "takes 5000.0 times longer than the median pair's" in found["a to b"][1]
    assert found["b to a"][1] == "b does not reach a at 10.0.0.1 (timed out): look for a firewall, or give --network"


@pytest.mark.parametrize("number", [2, 3, 4, 7, 16])
def test_every_way_is_tried_once_and_no_host_twice_at_a_time(number: int) -> None:
    hosts = [f"h{one}" for one in range(number)]
    rounds = pair_rounds(hosts)
    tried = [pair for pairs in rounds for pair in pairs]
    assert sorted(tried) == sorted((one, other) for one in hosts for other in hosts if one != other)
    for pairs in rounds:
        named = [host for pair in pairs for host in pair]
        assert len(named) == len(set(named))
    assert len(rounds) == 2 * (number - 1 + number % 2)
