"""A run's record beside its rule: what keeps the promise passes, and every way of breaking it is named."""

from dataclasses import replace

import pytest

from shoal.verify.servers.rules import Part, Promise, Update, Work, expected_factors, find_violation

SHARES, STEPS = 2, 3
BSP = Promise(name="bsp", shares=SHARES, steps=STEPS, staleness=0, quorum=None)
SSP = replace(BSP, name="ssp:1", staleness=1)
ASYNC = Promise(name="async", shares=SHARES, steps=STEPS, staleness=None, quorum=1)
HALF = Promise(name="half:2,0", shares=3, steps=2, staleness=None, quorum=2, weighs=True)
SAMPLES = dict.fromkeys(range(6), 4)


def part(unit, version, *, factor=1.0, worker=None, samples=4, more=(), claimed=None):
    """One gradient, and ``more`` that the worker computed on its own way, as (work unit, read)."""
    versions = (version,) * 2 if isinstance(version, int) else version
    who = f"w{unit % 2}" if worker is None else worker
    works = [Work(unit=unit, read=versions), *(Work(unit=other, read=read) for other, read in more)]
    told = min(versions) if claimed is None else claimed
    return Part(
        worker=who, index=0, works=tuple(works), versions=versions, claimed=told, factor=factor, samples=samples
    )


def update(*parts):
    return Update(parts=parts, loss=1.0)


def stepwise(*reads):
    """Updates of both shares in order, by the versions that they read."""
    return [update(part(2 * step, own[0]), part(2 * step + 1, own[1])) for step, own in enumerate(reads)]


HALVES = [
    update(part(0, 0, factor=0.5, worker="a"), part(1, 0, factor=0.5, worker="b")),
    # One is late: 4 samples at 1/2 beside 4 at 1.
    update(part(2, 0, factor=2 / 6, worker="c"), part(3, 1, factor=4 / 6, worker="a")),
    # Both are late: each by what it is worth, over all samples.
    update(part(4, 1, factor=2 / 8, worker="b"), part(5, (2, 1), factor=2 / 8, worker="d")),
]


@pytest.mark.parametrize(
    ("promise", "updates"),
    [
        (BSP, stepwise((0, 0), (1, 1), (2, 2))),
        (SSP, stepwise((0, 0), (0, 1), (2, (1, 2)))),
        (ASYNC, [update(part(number, max(0, number - 1))) for number in range(6)]),
        (HALF, HALVES),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_keeps_its_rule_passes(promise, updates):
    assert find_violation(promise, updates, SAMPLES) is None


@pytest.mark.parametrize(
    ("promise", "updates", "words"),
    [
        (BSP, stepwise((0, 0), (1, 0), (2, 2)), "share 2 of step 2 was computed from version 0, and the bound of 0"),
        (SSP, stepwise((0, 0), (1, 1), ((2, 0), 2)), "the bound of 1 allows none below 1"),
        (BSP, stepwise((0, 0), (2, 1), (2, 2)), "version 2, which there was not yet"),
        (BSP, stepwise((0, 0), (1, 1)), "share 1 of step 3 is in no update, and 1 others"),
        (BSP, [update(part(1, 0), part(0, 0)), *stepwise((0, 0), (1, 1), (2, 2))[1:]], "in order are"),
        (BSP, [update(part(0, 0), part(0, 0)), *stepwise((0, 0), (1, 1), (2, 2))[1:]], "was in update 1 already"),
        (ASYNC, [update(part(0, 0)), update(part(0, 1))], "share 1 of step 1 was in update 1 already"),
        (ASYNC, [update(part(0, 0), part(1, 0))], "it has 2 gradients, and closes at 1"),
        (ASYNC, [update(part(0, 0)), update(part(2, 0))], "version 0 by a worker whose own gradient is in version 1"),
        (ASYNC, [update(part(9, 0))], "no work unit 9"),
        (ASYNC, [update(part(0, 0)), update(part(1, (1, 0), claimed=1))], "version 0, and the servers were told 1"),
        (ASYNC, [update(part(0, 0, more=[(1, None)]))], "pushed 2 gradients together, and 1 are allowed"),
        (ASYNC, [update(part(0, 0, factor=0.5))], "multiplied by 0.5, and by the rule it is 1"),
        (ASYNC, [update(part(0, 0, samples=3))], "counts 3 samples and has 4"),
        (
            HALF,
            [HALVES[0], update(part(2, 0, factor=0.5, worker="c"), part(3, 1, factor=0.5, worker="a")), HALVES[2]],
            "share 3 of step 1, 1 updates late, was multiplied by 0.5, and by the rule it is 0.333333",
        ),
        (HALF, [update(part(0, 0, worker="a")), *HALVES[1:]], "1 gradients and not 2"),
        (
            HALF,
            [update(part(0, 0, factor=0.5, worker="a"), part(1, 0, factor=0.5, worker="a")), *HALVES[1:]],
            "a worker has two gradients",
        ),
    ],
)
def test_what_breaks_it_is_named(promise, updates, words):
    found = find_violation(promise, updates, SAMPLES)
    assert found is not None and words in found


DOWNPOUR = replace(ASYNC, name="downpour:2,2", push_every=2, fetch_every=2)


def test_a_worker_on_its_own_way_reads_when_it_is_to():
    """Each has a gradient alone first, then two together; it reads before its first and its third."""

    def own(unit, versions, works, samples=8):
        return Part(
            worker=f"w{unit % 2}",
            index=0,
            works=tuple(Work(unit=one, read=read) for one, read in works),
            versions=versions,
            claimed=min(versions),
            factor=1.0,
            samples=samples,
        )

    alone = [part(0, 0), part(1, (1, 0))]
    kept = [own(2, (0, 0), [(2, None), (4, (2, 2))]), own(3, (1, 0), [(3, None), (5, (3, 2))])]
    assert find_violation(DOWNPOUR, [update(one) for one in [*alone, *kept]], SAMPLES) is None
    wrong = {
        "did not read before its gradient 3": own(2, (0, 0), [(2, None), (4, None)]),
        "read before its gradient 2": own(2, (1, 1), [(2, (1, 1)), (4, (2, 2))]),
        "was in update 3 already": own(2, (0, 0), [(2, None), (2, (2, 2))]),
        "whose own gradient is in version 1": own(2, (0, 0), [(2, None), (4, (2, 0))]),
        "counts 4 samples and has 8": own(2, (0, 0), [(2, None), (4, (2, 2))], samples=4),
    }
    for words, broken in wrong.items():
        assert words in find_violation(DOWNPOUR, [update(one) for one in [*alone, broken, kept[1]]], SAMPLES), words


def test_an_update_may_be_short_when_time_is_up():
    short = [update(part(0, 0, worker="a")), update(part(1, 0, worker="b", factor=0.5))]
    patient = replace(HALF, steps=1, shares=2)
    assert "and not 2" in find_violation(patient, short, SAMPLES)
    assert find_violation(replace(patient, may_be_short=True), short, SAMPLES) is None


def test_old_gradients_are_divided_or_dropped_where_the_recipe_says_so():
    parts = [part(0, 1), part(1, 3)]
    aware = replace(ASYNC, divides_by_age=True)
    assert expected_factors(aware, 3, parts, SAMPLES) == [0.5, 1.0]
    updates = [update(part(number, 0, worker=f"w{number}")) for number in range(6)]
    assert "3 updates old, and older than 2" in find_violation(replace(ASYNC, drop_beyond=2), updates, SAMPLES)


def test_who_overlaps_does_not_see_its_own():
    updates = [update(part(number, max(0, number - 2), worker="w")) for number in range(6)]
    assert find_violation(replace(ASYNC, overlaps=True), updates, SAMPLES) is None
    assert not replace(ASYNC, shares=1, overlaps=True).is_plain and replace(ASYNC, shares=1).is_plain


def test_one_process_needs_no_log_where_every_read_is_new():
    assert BSP.is_plain and not SSP.is_plain and not ASYNC.is_plain
