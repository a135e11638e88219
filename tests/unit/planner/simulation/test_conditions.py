"""Who is slow: parsed, dealt out to sites, and folded."""

import numpy as np
import pytest

from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.planner.simulation.conditions import (
    Conditions,
    Factors,
    Slow,
    factors_of,
    fold,
    parse_slow,
    place_of,
    ranks_of,
    split_islands,
    split_sites,
)

PLAN = Plan(pp=2, dp=4, cp=2, tp=2)


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("3:1.5", Slow(index=3, factor=1.5)),
        ("pp=1:2", Slow(index=1, factor=2.0, axis=Axis.PIPELINE)),
        ("tp=0:0.5", Slow(index=0, factor=0.5, axis=Axis.TENSOR)),
    ],
)
def test_slow_ranks_are_parsed(text, slow):
    assert parse_slow(text) == slow


@pytest.mark.parametrize("text", ["3", "x:2", "ep=1:2", "pp=1", "-1:2", "3:fast", "pp=a:2", ""])
def test_what_is_no_slow_rank_is_refused(text):
    with pytest.raises(RequestError, match=r"write 3:1\.5 or pp=1:1\.5"):
        parse_slow(text)


def test_every_rank_has_one_place_and_one_replica():
    seen = []
    for place in range(2):
        for replica in range(4):
            ranks = ranks_of(PLAN, place=place, replicas=[replica])
            assert {place_of(PLAN, rank) for rank in ranks} == {(place, replica)}
            seen += ranks
    assert seen == list(range(PLAN.world_size))


def test_the_slowest_of_a_lockstep_group_counts():
    slow = (Slow(index=17, factor=2.0), Slow(index=18, factor=3.0), Slow(axis=Axis.PIPELINE, index=1, factor=1.5))
    found = factors_of(PLAN, Conditions(slow=slow))
    # Ranks 16 to 19 are the first replica at the second place.
    assert found.compute.tolist() == [[1.0] * 4, [4.5, 1.5, 1.5, 1.5]] and (found.links == 1).all()


def test_only_replicas_that_are_alike_in_all_places_and_links_are_folded():
    compute = np.array([[1.0, 1.0, 2.0, 1.0], [1.0, 3.0, 1.0, 1.0]])
    links = np.ones((2, 4))
    assert fold(Factors(compute, links)).groups == ((0, 3), (1,), (2,))
    links[1, 3] = 1.1
    folded = fold(Factors(compute, links))
    assert folded.groups == ((0,), (1,), (2,), (3,))
    assert folded.compute.tolist() == compute.tolist() and folded.links.tolist() == links.tolist()


def test_what_is_slow_keeps_its_place_when_replicas_are_dealt_out_to_sites():
    slow = (
        Slow(index=17, factor=2.0),  # pp 1, dp 0
        Slow(index=14, factor=3.0),  # pp 0, dp 3
        Slow(axis=Axis.DATA, index=2, factor=1.25),
        Slow(axis=Axis.TENSOR, index=1, factor=1.1),
    )
    whole = factors_of(PLAN, Conditions(slow=slow)).compute
    sites = split_sites(Conditions(slow=slow, seed=5), PLAN, 2)
    site_plan = Plan(pp=2, dp=2, cp=2, tp=2)
    parts = [factors_of(site_plan, site).compute for site in sites]
    assert np.concatenate(parts, axis=1).tolist() == whole.tolist()
    assert sites[0].seed != sites[1].seed


def test_sites_that_do_not_divide_are_refused():
    with pytest.raises(RequestError, match="3 sites cannot share 4 replicas"):
        split_sites(Conditions(), PLAN, 3)


def test_what_is_slow_keeps_its_place_in_its_island():
    """Islands are the outermost axis, so rank 9 of two islands of eight is the second of the second."""
    plan = Plan(islands=2, pp=2, dp=2, tp=2, sync="local:4")
    slow = tuple(parse_slow(text) for text in ("9:2.0", "islands=0:3.0", "pp=1:1.5"))
    first, second = split_islands(Conditions(slow=slow, seed=5), plan)
    inside = Plan(pp=2, dp=2, tp=2)
    assert factors_of(inside, first).compute.tolist() == [[3.0, 3.0], [4.5, 4.5]]
    assert factors_of(inside, second).compute.tolist() == [[2.0, 1.0], [1.5, 1.5]]
    assert first.seed != second.seed
    with pytest.raises(RequestError, match="has 2 ranks along islands"):
        split_islands(Conditions(slow=(parse_slow("islands=2:2"),)), plan)
