"""Sites that average seldom: pace and bytes against the period, and rounds played with steps that vary."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RequestError
from shoal.planner.hardware.presets import LINKS
from shoal.planner.simulation.local_sgd import (
    LocalUpdates,
    Rounds,
    find_link,
    pace_of,
    periods_around,
    play_rounds,
    simulate_rounds,
    sweep,
)


def updates(period: int = 10, **changes) -> LocalUpdates:
    given = {"num_sites": 4, "num_bytes": 1e9, "bandwidth": 1e8, "latency": 0.05, **changes}
    return LocalUpdates(period=period, **given)


def test_an_average_is_a_ring_over_the_sites():
    # 2 x 3 messages of 50 ms, and 2 x 3/4 of a gigabyte at 100 MB/s.
    assert updates().sync_seconds == pytest.approx(6 * 0.05 + 15.0)
    assert updates(compression=4.0).sync_seconds == pytest.approx(6 * 0.05 + 15.0 / 4)
    assert updates(num_sites=1).sync_seconds == 0.0


def test_pace_and_share():
    found = pace_of(1.0, updates(period=100))
    assert found.steps_per_second == pytest.approx(100 / 115.3)
    assert found.communication == pytest.approx(15.3 / 115.3)
    assert found.bytes_per_step == pytest.approx(1.5e9 / 100)


@given(st.floats(0.01, 100.0), st.lists(st.integers(1, 10_000), min_size=2, max_size=6, unique=True))
def test_a_longer_period_is_never_slower_and_never_above_what_a_site_does_alone(step_seconds, periods):
    found = sweep(step_seconds, updates(), sorted(periods))
    for shorter, longer in itertools.pairwise(found):
        assert longer.steps_per_second > shorter.steps_per_second
        assert longer.communication < shorter.communication and longer.bytes_per_step < shorter.bytes_per_step
    assert found[-1].steps_per_second <= 1 / step_seconds


def test_rounds_of_steady_sites_go_at_the_steady_pace():
    found = simulate_rounds(np.full((4, 35), 2.0), updates(period=10))
    steady = pace_of(2.0, updates(period=10))
    assert found.steps_per_second == pytest.approx(steady.steps_per_second)
    assert found.communication == pytest.approx(steady.communication)
    assert found.bytes_per_step == steady.bytes_per_step


def test_a_round_waits_for_the_slowest_site():
    steps = np.ones((4, 20))
    steps[2, :10] = 2.0
    wall = 20 + 10 + 2 * 15.3
    assert simulate_rounds(steps, updates(period=10)).steps_per_second == pytest.approx(20 / wall)


def test_slow_steps_even_out_over_a_long_round():
    """Waiting for each other at every step costs the mean of the slowest; over a round it is the slowest of the means."""
    steps = 1.0 + np.random.default_rng(0).standard_exponential((4, 4000))
    free = {"num_bytes": 0.0, "latency": 0.0}
    each = simulate_rounds(steps, updates(period=1, **free)).steps_per_second
    seldom = simulate_rounds(steps, updates(period=400, **free)).steps_per_second
    assert each == pytest.approx(1 / steps.max(axis=0).mean())
    assert each < 1 / 3.0 < 1 / 2.2 < seldom < 1 / 2.0


def test_links_with_jitter_are_slower_and_seeded():
    steps = np.ones((4, 100))
    plain = simulate_rounds(steps, updates()).steps_per_second
    one, again, other = (
        simulate_rounds(steps, updates(), link_jitter=0.2, seed=seed).steps_per_second for seed in (1, 1, 2)
    )
    assert one == again != other and one < plain


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("1Gbit/s,30ms", 1.25e8, 0.03),
        ("100Mb/s:50ms", 1.25e7, 0.05),
        ("2.5GB/s, 20us", 2.5e9, 2e-5),
        ("800kbit/s,1.5s", 1e5, 1.5),
    ],
)
def test_a_link_of_ones_own(text, bandwidth, latency):
    found = find_link(text)
    assert (found.bandwidth, found.latency) == pytest.approx((bandwidth, latency))


def test_links_by_name_and_what_is_none():
    assert find_link("wan-100m") is LINKS["wan-100m"]
    with pytest.raises(RequestError, match="there is no link 'wan-100'; did you mean 'wan-100m'"):
        find_link("wan-100")
    with pytest.raises(RequestError, match="give a bandwidth above 0"):
        find_link("0Mbit/s,1ms")


def test_periods():
    assert periods_around(500) == [1, 10, 100, 500, 1000]
    assert periods_around(1) == [1, 10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"period": 0}, "local steps are 0"),
        ({"num_sites": 0}, "sites are 0"),
        ({"bandwidth": 0.0}, "bandwidth of 0 cannot be; give above 0"),
        ({"latency": -1.0}, "latency of -1"),
        ({"compression": 0.5}, "compression of 0.5 cannot be; give 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        updates(**changes)


def test_too_few_steps_for_a_round():
    with pytest.raises(RequestError, match="5 steps of 4 sites hold no round of 10 steps of 4 sites"):
        simulate_rounds(np.ones((4, 5)), updates(period=10))


def rounds(**changes):
    """Cycles of four steps with an exchange of 3 seconds that is needed after the last."""
    given = {"meets": (False, False, False, True), "exchange": (0.0, 0.0, 0.0, 3.0), "work": (0.0, 0.0, 0.0, 0.5)}
    return Rounds(num_sites=2, **{**given, "sent": (0.0, 0.0, 0.0, 8.0), **changes})


def test_a_round_is_part_of_the_step_that_it_follows():
    found = play_rounds(np.ones((2, 8)), rounds(), period=4)
    assert found.seconds.tolist() == [1, 1, 1, 4.5, 1, 1, 1, 4.5]
    assert found.waited.tolist() == [0, 0, 0, 3.5, 0, 0, 0, 3.5]
    assert found.has_round.tolist() == [False, False, False, True] * 2
    assert found.pace.steps_per_second == pytest.approx(8 / 15) and found.pace.longest_seconds == 4.5
    assert found.pace.communication == pytest.approx(7 / 15) and found.pace.bytes_per_step == 2.0


@pytest.mark.parametrize(("delay", "longest"), [(1, 3.5), (2, 2.5), (3, 1.5)])
def test_an_exchange_goes_on_beside_the_steps_until_it_is_needed(delay, longest):
    found = play_rounds(np.ones((2, 8)), rounds(delay=delay), period=4)
    assert found.seconds.max() == pytest.approx(longest)


def test_an_exchange_waits_for_the_last_site_when_it_begins():
    steps = np.ones((2, 4))
    steps[1, 1] = 2.0
    # Begun after the second step of the slower site, at 3; the other is at its fourth step by then.
    found = play_rounds(steps, rounds(delay=2), period=4)
    assert found.seconds.sum() == pytest.approx(max(3 + 3, 5) + 0.5)


def test_what_sites_tell_each_other_holds_all_of_them_up():
    steps = np.ones((2, 4))
    steps[0, 0] = 2.0
    told = rounds(meets=(True, False, False, True), told=(0.25, 0.0, 0.0, 0.0), delay=3)
    found = play_rounds(steps, told, period=4)
    assert found.seconds[0] == pytest.approx(2.25)
