"""A step of a pipeline: as it was done, as it was planned, and as it would go with its cells' usual times."""

import json

import pytest

from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.timeline import RankSpans, Span, align, planned_grid, timeline_answer
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.player import order_cells
from shoal.schedules.pricing import Costs, price
from support.dashboard.synthetic import make_run

PIPE = {
    "pp": 2,
    "dp": 1,
    "plan": "pp=2 schedule=1f1b microbatches=4",
    "schedule": "1f1b",
    "microbatches": 4,
    "chunks": None,
}


def write_spans(path, rank, step, begin, spans):
    event = {
        "t": begin,
        "rank": rank,
        "kind": "spans",
        "step": step,
        "num_steps": 1,
        "begin": begin,
        "spans": spans,
        "left_out": 0,
    }
    with (path / "events" / f"rank-{rank:03d}.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def played_rows(forward=0.01, backward=0.02, scale=1.0):
    """The spans of every rank of a step that went exactly by its schedule."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    played = price(schedule, Costs(forward=forward * scale, input=backward * scale / 2, weight=backward * scale / 2))
    rows = []
    for row, spans in zip(schedule.rows, played.spans, strict=True):
        rows.append(
            [["cell", str(cell[0]), start, end - start, 0] for cell, (start, end) in zip(row, spans, strict=True)]
        )
    return rows, played


@pytest.fixture
def pipeline(tmp_path):
    path = make_run(tmp_path / "one", ranks=2, steps=3, more=PIPE)
    for step, scale in ((2, 5.0), (10, 1.0), (20, 1.0), (30, 2.0)):
        for rank, row in enumerate(played_rows(scale=scale)[0]):
            write_spans(path, rank, step, 1000.0 * step, row)
    return Run(path).look_once()


def test_what_was_done_is_what_was_written(pipeline):
    answer = timeline_answer(pipeline, 30)
    assert answer["steps"] == [2, 10, 20, 30] and answer["step"] == 30
    rows, played = played_rows(scale=2.0)
    for rank, row in enumerate(rows):
        shown = answer["executed"][rank]["spans"]
        assert [span[1] for span in shown] == [span[1] for span in row]
        assert [span[2] for span in shown] == pytest.approx([span[2] for span in row], abs=1e-6)
    assert answer["bubble"]["measured"] == pytest.approx(played.bubble, abs=1e-6)


def test_the_prediction_has_the_usual_times_of_other_steps(pipeline):
    answer = timeline_answer(pipeline, 30)
    _, usual = played_rows()
    assert "other steps" in answer["predicted_by"]
    # Steps 10 and 20 are as usual; step 2, in which everything starts up, does not count.
    assert max(span[2] + span[3] for row in answer["predicted"] for span in row["spans"]) == pytest.approx(
        usual.makespan, abs=1e-6
    )
    assert answer["bubble"]["predicted"] == pytest.approx(usual.bubble, abs=1e-6)
    assert answer["bubble"]["planned"] == pytest.approx(price(make_schedule("1f1b", ranks=2, microbatches=4)).bubble)


def test_the_planned_grid_is_the_schedule(pipeline):
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    grid = timeline_answer(pipeline, 30)["planned"]
    assert grid == planned_grid(schedule)
    assert [[cell for cell in row if cell] for row in grid] == [[str(cell[0]) for cell in row] for row in schedule.rows]
    at = {cell: place for row in grid for place, cell in enumerate(row) if cell}
    for one in order_cells(schedule).cells:
        for need in one.needs:
            assert at[str(order_cells(schedule).cells[need.cell].cell[0])] < at[str(one.cell[0])]


def test_without_cells_the_forecast_is_played(tmp_path):
    path = make_run(tmp_path / "one", ranks=2, steps=3, more=PIPE)
    forecast = {"t": 1.0, "rank": 0, "kind": "forecast", "source": "layout", "step_seconds": 0.5, "bubble": None}
    with (path / "events" / "rank-000.jsonl").open("a") as file:
        file.write(json.dumps(forecast) + "\n")
    answer = timeline_answer(Run(path).look_once())
    assert answer["executed"] == [] and "forecast" in answer["predicted_by"]
    assert max(span[2] + span[3] for row in answer["predicted"] for span in row["spans"]) == pytest.approx(0.5)


def rank_spans(rank, offset, ends):
    spans = tuple(Span("comm", "everyone all_reduce", end - 0.01, 0.01, 8) for end in ends)
    return RankSpans(rank, 1000.0 + offset, spans, 0, 1)


def test_clocks_of_hosts_are_aligned_by_the_ends_of_collectives():
    found = [rank_spans(0, 0.0, [0.1, 0.2]), rank_spans(1, 0.0, [0.1, 0.2002]), rank_spans(2, 7.0, [0.1, 0.2])]
    aligned, residual = align(found, {0: "a", 1: "a", 2: "b"})
    ends = {rank: spans[-1].end for rank, spans in aligned.items()}
    assert max(ends.values()) - min(ends.values()) < 0.001
    assert residual is not None and residual < 0.001


def test_ranks_of_one_host_keep_their_clock_and_the_residual_is_said():
    aligned, residual = align([rank_spans(0, 0.0, [0.1]), rank_spans(1, 0.0, [0.3])], {0: "a", 1: "a"})
    assert aligned[1][0].end - aligned[0][0].end == pytest.approx(0.2)
    assert residual == pytest.approx(0.1)


def test_a_schedule_in_a_file_is_not_read(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0B0\n")
    path = make_run(tmp_path / "one", ranks=2, steps=3, more={**PIPE, "schedule": str(tmp_path / "mine.csv")})
    assert timeline_answer(Run(path).look_once())["planned"] is None


@pytest.mark.parametrize(
    "more", [{"microbatches": 10**9}, {"pp": -1}, {"chunks": 10**6}, {"replicas": "x"}, {"pp": "2"}]
)
def test_a_plan_that_cannot_be_is_no_schedule(tmp_path, more):
    path = make_run(tmp_path / "one", ranks=2, steps=3, more={**PIPE, **more})
    assert timeline_answer(Run(path).look_once())["planned"] is None


def test_a_step_of_many_spans_is_cut_to_cells_and_the_longest(tmp_path):
    path = make_run(tmp_path / "one", ranks=2, steps=3)
    spans = [["comm", "dp all_reduce", n * 0.001, 0.0001 * (n % 7), 8] for n in range(4000)]
    write_spans(path, 0, 2, 1000.0, [*spans, ["cell", "0F0", 0.5, 0.00001, 0]])
    write_spans(path, 1, 2, 1000.0, [["nonsense"], ["cell", "0F0", "x", 1, 1], *spans[:10]])
    answer = timeline_answer(Run(path).look_once())
    assert answer["left_out"] == 1011 and ["cell", "0F0", 0.5, 0.00001, 0] in answer["executed"][0]["spans"]
    assert len(json.dumps(answer)) < 200_000
