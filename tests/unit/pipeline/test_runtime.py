"""When receives are posted: each once, in the order of use, and before the message is sent where some memory buys that."""

import pytest

from shoal.pipeline.runtime import NUM_AHEAD, receives_by_cell
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.pricing import Costs, price
from shoal.schedules.schedule import made_by, needs_of

CASES = [
    (name, ranks)
    for ranks in (2, 4)
    for name in ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zbv", "chimera")
]


def from_afar(schedule, rank, action):
    needs = needs_of(action, schedule.grid.num_stages)
    return [result for result in needs if schedule.grid.rank_of(result[1], result[2]) != rank]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_every_parcel_is_awaited_once_in_the_order_of_use_and_few_at_a_time(name, ranks):
    schedule = make_schedule(name, ranks=ranks, microbatches=8)
    for rank in range(ranks):
        row = list(schedule.actions(rank))
        posted = receives_by_cell(schedule, rank)
        uses = [result for action in row for result in from_afar(schedule, rank, action)]
        assert [result for results in posted for result in results] == uses and len(posted) == len(row)
        waiting = []
        for action, results in zip(row, posted, strict=True):
            waiting += results
            needed = from_afar(schedule, rank, action)
            assert waiting[: len(needed)] == needed, "what a cell needs is posted by then, and taken first"
            assert len(waiting) - len(needed) <= NUM_AHEAD
            del waiting[: len(needed)]
        assert not waiting


@pytest.mark.parametrize(("name", "ranks"), [("zbv", 2), ("interleaved", 2), ("zb-h1", 2), ("1f1b", 4)])
def test_receives_are_there_before_what_is_sent(name, ranks):
    """But for the first of each rank, which may idle before it. The halves of a backward pass take what they take in a gpt."""
    schedule = make_schedule(name, ranks=ranks, microbatches=8)
    timeline = price(schedule, Costs(forward=1.0, input=1.0, weight=0.5))
    sent = {}
    for rank in range(ranks):
        for (_, end), action in zip(timeline.spans[rank], schedule.actions(rank), strict=True):
            sent |= dict.fromkeys(made_by(action), end)
    for rank in range(ranks):
        posted = receives_by_cell(schedule, rank)
        late = [
            result
            for (begin, _), results in zip(timeline.spans[rank], posted, strict=True)
            for result in results
            if sent[result] <= begin
        ]
        assert len(late) <= 1, late
