"""What every policy keeps to, whatever is asked of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.cache.admission import AdmissionConfig, Admitted
from shoal.data.cache.catalogue import NAMES, build_policy
from shoal.data.cache.planned import Planned
from shoal.data.cache.recency import Lru

_ACCESSES = st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(accesses=_ACCESSES, capacity=st.integers(1, 60))
def test_what_is_in_fits_and_what_leaves_is_told(name: str, accesses: list[tuple[int, bool]], capacity: int) -> None:
    policy = build_policy(name, capacity, num_keys=10)
    sizes = {key: 1 + key * 7 % 13 for key in range(31)}
    present: set[int] = set()
    for key, is_lost in accesses:
        if is_lost:
            policy.discard(key)
            present.discard(key)
            continue
        found = policy.access(key, sizes[key])
        assert found.hit == (key in present)
        present |= {key}
        for victim in found.evicted:
            assert victim in present
            present.discard(victim)
        assert policy.used == sum(sizes[each] for each in present) <= capacity
        assert all((each in policy) == (each in present) for each in sizes)


def test_a_plan_is_kept_to_and_can_be_forgotten() -> None:
    policy = Planned(2)
    policy.plan([1, 2, 3, 1, 2, 3])
    assert [policy.access(key).hit for key in (1, 2, 3, 1)] == [False, False, False, True]
    assert 3 not in policy, "it came later than both that were in"
    policy.forget_plan()
    policy.plan([3])
    assert policy.access(4).evicted == (2,), "without a plan the oldest leaves"


def test_planned_uses_that_another_tier_has_had_are_passed_over() -> None:
    policy = Planned(1)
    policy.access(1)
    # The use of 1 that is planned first never happens here; without the rule it would be the next for ever.
    policy.plan([1, *(key for key in range(100, 400) for _ in range(2))])
    hits = sum(policy.access(key).hit for key in range(100, 400) for _ in range(2))
    assert 150 < hits < 200


def test_outside_the_plan_the_oldest_leaves() -> None:
    planned, lru = Planned(3), Lru(3)
    keys = [1, 2, 3, 1, 4, 2, 5, 1, 1, 6, 3, 2]
    assert [planned.access(key) for key in keys] == [lru.access(key) for key in keys]


def test_admission_is_by_size_and_by_use() -> None:
    policy = Admitted(Lru(100), AdmissionConfig(largest=0.5, uses=2), num_keys=10)
    assert policy.access("giant", 51).evicted == ("giant",)
    assert policy.access("giant", 51).evicted == ("giant",)
    assert policy.access("small", 10).evicted == ("small",)
    assert policy.access("small", 10).evicted == ()
    assert policy.access("small", 10).hit
