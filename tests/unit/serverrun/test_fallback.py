"""When a run with parameter servers goes back to its last good checkpoint, and when its end has nothing to do with gradients."""

import pytest

from shoal.checkpoint.retention import mark_good
from shoal.core.events import GradientRefused, StepDone
from shoal.core.rundir import RunDir
from shoal.serverrun.notices import fall_back_if_refused
from shoal.telemetry.eventlog import encode_event
from support.checkpoint.forged import make

STARTED = 100.0


def step(number, loss=1.0):
    return StepDone(step=number, loss=loss, lr=0.1, grad_norm=None, samples=8, tokens=0, seconds=0.1, data_seconds=0.0)


def refusal():
    return GradientRefused(step=1, worker="w", push="w/1", reason="NaN")


@pytest.mark.parametrize(
    ("events", "falls_back"),
    [
        ([(1, step(1)), (2, refusal())], True),
        ([(1, step(1)), (2, refusal()), (3, step(2, loss=float("nan")))], True),
        # One gradient was refused, the run went on, and something else ended it.
        ([(1, refusal()), (2, step(1))], False),
        ([(1, step(1))], False),
        # It was refused in an earlier attempt.
        ([(-2, step(1)), (-1, refusal())], False),
    ],
)
def test_only_a_refusal_after_the_last_step_sets_checkpoints_aside(tmp_path, events, falls_back):
    run = RunDir(tmp_path)
    for number in (1, 2):
        make(run.checkpoints, number)
    mark_good(run.checkpoints, 1)
    run.events(0).parent.mkdir()
    for rank in (0, 1):
        # Servers write one file each.
        mine = [encode_event(event, rank=rank, wall_time=STARTED + after) for after, event in events[rank::2]]
        run.events(rank).write_bytes(b"".join(mine))
    said = fall_back_if_refused(tmp_path, since=STARTED)
    left = sorted(path.name for path in run.checkpoints.iterdir() if path.name.startswith("step-"))
    assert left == (["step-00000001"] if falls_back else ["step-00000001", "step-00000002"])
    assert (
        said.startswith(f"last good checkpoint: {run.checkpoints / 'step-00000001'} (step-00000002 was set")
        == falls_back
    )
    assert bool(said) == falls_back
