"""Versions of weights under PipeDream's rules, against the papers' counts and against a slow simulation written from them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.schedules.families.family import Family, Size
from shoal.schedules.families.one_f_one_b import PIPEDREAM, PIPEDREAM_2BW, PIPEDREAM_VSYNC
from shoal.schedules.pricing import price
from shoal.schedules.rules import check
from shoal.schedules.schedule import Grid, Kind, Schedule, Updates
from shoal.schedules.versions import held_versions, peak_versions, versions_used

RANKS, MICROBATCHES = range(1, 7), range(1, 17)
SIZES = [(ranks, microbatches) for ranks in RANKS for microbatches in MICROBATCHES]


def schedule_of(family: Family, ranks: int, microbatches: int, steps: int = 1) -> Schedule:
    size = Size(ranks, microbatches * steps, 1)
    schedule = Schedule(
        name=family.name,
        grid=Grid(family.fold, ranks, ranks, size.microbatches),
        rows=family.rows(size),
        updates=family.updates,
        accumulate=microbatches if family.accumulates else 1,
        version_bound=tuple(family.versions(size, rank) for rank in range(ranks)),
    )
    check(schedule)
    return schedule


def test_weight_stashing_holds_a_version_per_microbatch_that_is_on_its_way():
    """PipeDream, section 3.3: at most as many as ranks from here to the end, and the last rank one."""
    for ranks, microbatches in SIZES:
        peaks = peak_versions(schedule_of(PIPEDREAM, ranks, microbatches))
        for rank, peak in enumerate(peaks):
            depth = ranks - rank
            assert peak <= min(microbatches, depth)
            # The first ``depth`` microbatches all met version 0, so that the stash is full only when as many came after them.
            if microbatches >= 2 * depth - 2:
                assert peak == min(microbatches, depth), (ranks, microbatches, rank)


def test_a_short_stream_fills_the_stash_only_in_part():
    for ranks, microbatches in SIZES:
        for rank, peak in enumerate(peak_versions(schedule_of(PIPEDREAM, ranks, microbatches))):
            depth = ranks - rank
            alone = depth == 1 or microbatches == 1
            assert peak == (1 if alone else min(depth, max(2, microbatches - depth + 2)))


def test_vertical_sync_holds_at_most_a_version_per_rank():
    for ranks, microbatches in SIZES:
        peaks = peak_versions(schedule_of(PIPEDREAM_VSYNC, ranks, microbatches))
        assert max(peaks) <= ranks
        if microbatches >= 2 * ranks - 2:
            assert peaks == (ranks,) * ranks


@pytest.mark.parametrize("steps", [3, 5])
def test_double_buffering_holds_two_versions_however_long_it_goes_on(steps):
    for ranks, microbatches in SIZES:
        if microbatches >= ranks:
            assert peak_versions(schedule_of(PIPEDREAM_2BW, ranks, microbatches, steps)) == (2,) * ranks


def test_fewer_microbatches_than_ranks_would_want_a_version_before_it_is_made():
    """What the family refuses, and why."""
    (problem,) = PIPEDREAM_2BW.problems(Size(4, 2, 1))
    assert "2 are fewer than 4" in problem and "set microbatches to 4" in problem
    with pytest.raises(AssertionError, match="0F4 wants a version that is not made yet"):
        simulate(schedule_of(PIPEDREAM_2BW, 4, 2, steps=4))


def test_a_flush_leaves_one_version_everywhere():
    schedule = schedule_of(PIPEDREAM, 3, 4)
    flushed = Schedule(name="1f1b", grid=schedule.grid, rows=schedule.rows, updates=Updates.FLUSH)
    assert peak_versions(flushed) == (1, 1, 1)
    assert set(versions_used(flushed).values()) == {0}


class Stage:
    """A stage as the papers describe it: weights that updates replace, and old ones that are kept while somebody needs them."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.newest = 0
        self.gradients: list[int] = []
        """The versions with which the gradients of the next update were computed."""
        self.applied: list[list[int]] = []

    def add(self, version: int) -> None:
        self.gradients.append(version)
        if len(self.gradients) == self.accumulate:
            self.applied.append(self.gradients)
            self.gradients, self.newest = [], self.newest + 1


def simulate(schedule: Schedule) -> tuple[dict[tuple[int, int], int], list[Stage]]:
    """Work through the cells in the order of time, asking at every forward which weights the rule takes."""
    timeline = price(schedule)
    events = sorted(
        (start, rank, cell[0])
        for rank, row in enumerate(schedule.rows)
        for cell, (start, _) in zip(row, timeline.spans[rank], strict=True)
    )
    stages = [Stage(schedule.accumulate) for _ in schedule.rows]
    used: dict[tuple[int, int], int] = {}
    for _, rank, action in events:
        stage, key = stages[rank], (action.stage, action.microbatch)
        if action.kind is Kind.BACKWARD:
            # Every rule: the backward of a microbatch uses the weights of its forward on this stage.
            stage.add(used[key])
            continue
        if schedule.updates is Updates.STASHED or (schedule.updates is Updates.VERTICAL and action.stage == 0):
            used[key] = stage.newest
        elif schedule.updates is Updates.VERTICAL:
            # The version travels with the microbatch from the first stage.
            used[key] = used[0, action.microbatch]
        else:
            # 2BW: the gradient of a step is taken at the weights before those to which it will be applied.
            used[key] = max(0, action.microbatch // schedule.accumulate - 1)
        assert used[key] <= stage.newest, f"{action} wants a version that is not made yet"
    return used, stages


CASES = st.tuples(
    st.sampled_from([PIPEDREAM, PIPEDREAM_VSYNC, PIPEDREAM_2BW]),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 3),
).filter(lambda case: case[0] is not PIPEDREAM_2BW or case[2] >= case[1])


@settings(max_examples=80, deadline=None)
@given(case=CASES)
def test_the_versions_are_those_of_a_simulation(case):
    schedule = schedule_of(*case)
    used, stages = simulate(schedule)
    assert versions_used(schedule) == used
    if schedule.updates is Updates.BUFFERED:
        # W(t+1) = W(t) - gradient(W(t-1)): equation of section 3.1, on every stage.
        for stage in stages:
            assert [set(versions) for versions in stage.applied] == [{max(0, t - 1)} for t in range(case[3])]


@settings(max_examples=80, deadline=None)
@given(case=CASES)
def test_what_is_held_is_what_is_newest_or_still_needed_and_nothing_else(case):
    schedule = schedule_of(*case)
    used, _ = simulate(schedule)
    for rank, row in enumerate(schedule.rows):
        moments = held_versions(schedule, rank)
        backwards = 0
        for place, ((action,), moment) in enumerate(zip(row, moments, strict=True)):
            backwards += action.kind is Kind.BACKWARD
            newest = backwards // schedule.accumulate
            to_come = {used[later.stage, later.microbatch] for (later,) in row[place + 1 :]}
            assert moment.action == action
            assert moment.alive == {newest} | {version for version in to_come if version <= newest}


def test_stages_differ_under_stashing_and_agree_under_vertical_sync():
    """What vertical sync is for: one version of the whole model per microbatch."""
    stashed, vertical = (versions_used(schedule_of(family, 3, 8)) for family in (PIPEDREAM, PIPEDREAM_VSYNC))
    assert [stashed[stage, 5] for stage in range(3)] == [3, 4, 5]
    assert [vertical[stage, 5] for stage in range(3)] == [3, 3, 3]


@pytest.mark.soak
def test_a_long_stream_is_counted_in_time():
    """Each action used to look through all versions of the stream, and each rank through all ranks: minutes for this size."""
    assert peak_versions(schedule_of(PIPEDREAM, 2, 20_000)) == (2, 1)
