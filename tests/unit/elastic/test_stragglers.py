"""Slow ranks are named, with the reason, and quick ones are not."""

import random
from statistics import median

import pytest

from shoal.elastic.stragglers import (
    LEAST,
    REASONS,
    WINDOW,
    Phases,
    Straggler,
    _median_of_others,
    find_stragglers,
    order_ranks,
)

COMPUTE, DATA, NETWORK = 0.20, 0.02, 0.05


def history(
    seed: int,
    *,
    slow: str | None = None,
    reason: str = "compute",
    share: float = 0.2,
    num_ranks: int = 8,
    num_steps: int = 20,
) -> list[dict[str, Phases]]:
    """Noisy steps: each has a length that all ranks share, each rank differs by a tenth, and one in fifty stands still for a
    while.

    The slow rank is busy longer by a share of the whole step, in one of the phases.
    """
    draw = random.Random(seed)
    more = share * (COMPUTE + DATA + NETWORK)
    steps = []
    for _ in range(num_steps):
        common = draw.lognormvariate(0, 0.3)
        step = {}
        for number in range(num_ranks):
            rank = f"rank-{number}"
            times = {"compute": COMPUTE, "data": DATA, "network": NETWORK}
            if rank == slow:
                times[reason] += more
            noisy = {key: seconds * common * draw.lognormvariate(0, 0.1) for key, seconds in times.items()}
            if draw.random() < 0.02:
                noisy["compute"] += draw.uniform(0.2, 1.0)
            step[rank] = Phases(**noisy)
        steps.append(step)
    return steps


@pytest.mark.parametrize("num_ranks", [2, 4, 8, pytest.param(32, marks=pytest.mark.soak)])
@pytest.mark.parametrize("reason", REASONS)
def test_a_rank_that_is_busy_a_fifth_longer_is_first_within_twenty_steps_in_40_of_40(
    num_ranks: int, reason: str
) -> None:
    for seed in range(40):
        slow = f"rank-{seed % num_ranks}"
        found = order_ranks(history(seed, slow=slow, reason=reason, num_ranks=num_ranks))
        assert (found[0].rank, found[0].reason) == (slow, reason), (seed, found[:3])


def test_the_slow_one_is_named_and_nobody_else() -> None:
    for seed in range(40):
        names = [one.rank for one in find_stragglers(history(seed, slow="rank-3", share=0.3), factor=1.15)]
        assert names == ["rank-3"], (seed, names)
        assert find_stragglers(history(seed), factor=1.15) == [], seed


def test_two_slow_ones_are_in_order() -> None:
    steps = [
        {f"rank-{rank}": Phases(compute={1: 2.0, 2: 3.0}.get(rank, 1.0)) for rank in range(5)} for _ in range(WINDOW)
    ]
    assert [(one.rank, one.factor) for one in find_stragglers(steps, factor=1.5)] == [("rank-2", 3.0), ("rank-1", 2.0)]


def test_steps_that_are_long_for_all_name_nobody() -> None:
    steps = [{rank: Phases(compute=1.0 + 9.0 * (at % 5 == 0)) for rank in "abcd"} for at in range(WINDOW)]
    assert find_stragglers(steps, factor=1.01) == []


def test_one_long_pause_names_nobody() -> None:
    steps = [{rank: Phases(compute=60.0 if (rank, at) == ("b", 7) else 1.0) for rank in "abcd"} for at in range(WINDOW)]
    assert find_stragglers(steps, factor=1.01) == []


def test_too_few_steps_or_ranks_say_nothing() -> None:
    slow = {"a": Phases(compute=1.0), "b": Phases(compute=5.0)}
    assert find_stragglers([slow] * (LEAST - 1), factor=1.1) == [] and find_stragglers([], factor=1.1) == []
    assert find_stragglers([{"a": slow["a"]}] * WINDOW, factor=1.1) == []
    assert [one.rank for one in find_stragglers([slow] * LEAST, factor=1.1)] == ["b"]


def test_who_recovered_is_forgotten_after_the_window() -> None:
    slow, fast = {"a": Phases(compute=1.0), "b": Phases(compute=5.0)}, {rank: Phases(compute=1.0) for rank in "ab"}
    assert find_stragglers([slow] * 50 + [fast] * WINDOW, factor=1.1) == []


def test_one_that_came_in_between_is_not_compared() -> None:
    two, three = {rank: Phases(compute=1.0) for rank in "ab"}, {"a": Phases(compute=1.0), "b": Phases(compute=1.0)}
    steps = [two] * 10 + [three | {"c": Phases(compute=9.0)}] * 10
    assert {one.rank for one in order_ranks(steps)} == {"a", "b"}


def test_the_median_of_others_is_that() -> None:
    draw = random.Random(1)
    for count in range(2, 9):
        values = {str(rank): draw.choice((1.0, 2.0, draw.random())) for rank in range(count)}
        assert _median_of_others(values) == {
            rank: median(value for other, value in values.items() if other != rank) for rank in values
        }


def test_what_is_said() -> None:
    one = Straggler(rank="rank-3", factor=1.31, reason="data", seconds=0.0421)
    assert str(one) == "rank-3 is busy 1.31 times as long as the others (data: +0.0421 s a step)"


def test_a_rank_that_no_phase_keeps_longer_is_not_named_for_large_ratios() -> None:
    """Of two ranks that take turns to be slow, both have large ratios in the mean."""
    quick, slow = Phases(compute=0.01), Phases(compute=0.02)
    steps = [{"rank 0": quick, "rank 1": slow}, {"rank 0": slow, "rank 1": quick}] * 10
    assert [one.factor > 1.15 for one in order_ranks(steps)] == [True, True]
    assert find_stragglers(steps, factor=1.15) == []
