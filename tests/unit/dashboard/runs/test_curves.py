"""Curves that grow with their run: the same as if all had been there at first, at the cost of what is new."""

import time

import numpy as np
import pytest

from shoal.dashboard.runs.columns import Table
from shoal.dashboard.runs.curves import AXES, Axis
from shoal.dashboard.runs.run import Run
from shoal.dashboard.views.overview import run_row
from support.dashboard.synthetic import make_run, started_line, step_line

NAMES = ("loss", "busy_seconds", "gradient_norm", "tokens_per_s", "wait:dp")


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_followed_is_as_one_that_is_read_at_once(tmp_path, seed):
    """With restarts that take steps back, clocks that jump, and a wait that is measured from some step on."""
    draw = np.random.default_rng(seed)
    path = make_run(tmp_path / "one", steps=1, status=None)
    events = path / "events" / "rank-000.jsonl"
    followed, step, t = Run(path).look_once(), 1, 1_790_000_001.0
    for _ in range(30):
        lines = []
        if draw.random() < 0.3:
            step = int(draw.integers(0, step + 1))
            lines.append(started_line(0, t=t, step=step, generation=1))
        for _ in range(int(draw.integers(0, 40))):
            step, t = step + 1, t + float(draw.normal(0.1, 0.2))
            wait = {"dp": 0.01} if step > 100 else None
            lines.append(step_line(step, 0, t=max(t, 0.0), loss=float(draw.normal()), wait=wait))
        with events.open("a") as file:
            file.writelines(lines)
        followed.look_once()
        # Some curves are asked for at every look, others now and then.
        for name in NAMES[: int(draw.integers(1, len(NAMES) + 1))]:
            followed.curve(name)
    at_once = Run(path).look_once()
    for name in NAMES:
        one, other = followed.curve(name), at_once.curve(name)
        assert (one is None) == (other is None)
        if one is None:
            continue
        assert np.array_equal(one.pyramid.values, other.pyramid.values, equal_nan=True)
        for axis in AXES:
            assert one.axes[axis] == pytest.approx(other.axes[axis])
        for points in (3, 40):
            (_, mine, _), (_, theirs, _) = (each.window("step", 3, None, points) for each in (one, other))
            assert np.array_equal(mine.high, theirs.high, equal_nan=True)


def grown(rows):
    """A table of so many steps."""
    table = Table()
    step = np.arange(1, rows + 1)
    table.append({"step": step, "t": step * 0.1, "seconds": np.full(rows, 0.1), "loss": np.ones(rows),
                  "samples": np.ones(rows, np.int64), "tokens": np.ones(rows, np.int64), "grad_norm": np.full(rows, np.nan),
                  "data_seconds": np.zeros(rows), "wait:dp": np.zeros(rows, np.float32)}, rows)  # fmt: skip
    return table


def test_shares_of_one_step_all_count_until_the_step_is_done_again():
    table, axis = Table(), Axis(repeats=True)

    def add(*steps):
        count = len(steps)
        table.append({name: np.array(steps, float) for name in ("step", "t")} | {"seconds": np.full(count, 0.5),
                     "samples": np.full(count, 2.0), "tokens": np.full(count, 2.0)}, count)  # fmt: skip
        return axis.follow(table)

    assert add(1, 1, 2) == 0 and add(2, 3) == 3 and axis.rows is None
    assert axis.step.tolist() == [1, 1, 2, 2, 3] and axis.of("samples").tolist() == [2, 4, 6, 8, 10]
    assert add(2, 3) == 4
    assert axis.step.tolist() == [1, 1, 2, 2, 2, 3] and axis.of("samples")[-1] == 12


def test_a_look_costs_what_is_new(tmp_path):
    took = {}
    for rows in (2_000, 1_000_000):
        path = make_run(tmp_path / str(rows), steps=1, status=None)
        run = Run(path).look_once()
        lead = run.lead()
        lead.steps = grown(rows)
        seconds = []
        for look in range(40):
            with lead.path.open("a") as file:
                file.write(step_line(rows + look + 1, 0, t=1_790_000_000.0 + look, wait={"dp": 0.0}))
            begin = time.thread_time()
            run.look_once()
            run_row(run, 1_790_000_000.0 + look)
            for name in ("loss", "step_seconds", "tokens_per_s", "gradient_norm", "busy_seconds"):
                run.curve(name)
            seconds.append(time.thread_time() - begin)
        took[rows] = sorted(seconds)[len(seconds) // 2]
    assert took[1_000_000] < 3 * took[2_000], took
