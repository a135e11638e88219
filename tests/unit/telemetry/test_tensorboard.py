"""Curves are written to TensorBoard files; what is no curve or no number is left out."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.core.events import Evaluated, Event, StepDone, Warned
from shoal.telemetry.config import TelemetryConfig
from shoal.telemetry.eventlog import EventLog
from shoal.telemetry.tensorboard import TensorBoardSink, scalars, wants_curves


def step_done(step: int, loss: float = 2.5, seconds: float = 0.5) -> StepDone:
    return StepDone(
        step=step, loss=loss, lr=0.1, grad_norm=1.0, samples=4, tokens=64, seconds=seconds, data_seconds=0.0
    )


def test_points() -> None:
    points = scalars(step_done(3))
    assert points["train/loss"] == 2.5
    assert points["speed/tokens_per_s"] == 128.0
    assert "speed/tokens_per_s" not in scalars(step_done(3, seconds=0.0))
    evaluated = Evaluated(step=3, split="validation", loss=2.0, accuracy=None, samples=1, seconds=0.1)
    assert scalars(evaluated) == {"validation/loss": 2.0}
    assert scalars(Warned(message="x")) == {}


def test_file_is_written_through_the_event_log(tmp_path: Path) -> None:
    warnings: list[str] = []
    folder = tmp_path / "tensorboard"
    log = EventLog(tmp_path, 0, sinks=[lambda: TensorBoardSink(folder)], warn=warnings.append)
    events: list[Event] = [step_done(1), step_done(2, loss=float("nan")), Warned(message="x")]
    for event in events:
        log.write(event)
    log.close()
    assert warnings == []
    (file,) = folder.iterdir()
    content = file.read_bytes()
    # Both steps came between two looks at the queue, so the curves have the newer one; its loss is NaN and is left out.
    assert content.count(b"train/loss_scale") == 1
    assert content.count(b"train/grad_norm") == 1
    assert content.count(b"train/loss") == 1, "only as the beginning of train/loss_scale"


def test_folder_that_cannot_be_written_costs_the_curves_only(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    warnings: list[str] = []
    log = EventLog(tmp_path, 0, sinks=[lambda: TensorBoardSink(tmp_path / "tensorboard")], warn=warnings.append)
    log.write(step_done(1))
    log.close()
    assert len(warnings) == 1
    assert (tmp_path / "events/rank-000.jsonl").read_text().count("\n") == 1


def test_a_step_without_a_norm_is_no_point_of_that_curve() -> None:
    points = scalars(replace(step_done(1), grad_norm=None))
    assert "train/loss" in points
    assert "train/grad_norm" not in points


def test_without_the_library_a_run_has_no_curves_unless_it_asks(monkeypatch):
    assert wants_curves(TelemetryConfig()) and wants_curves(TelemetryConfig(tensorboard=True))
    assert not wants_curves(TelemetryConfig(tensorboard=False))
    # Python's own sign for a library that cannot be imported.
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert not wants_curves(TelemetryConfig())
    with pytest.raises(RequestError, match=r"pip install 'shoal\[tensorboard\]'"):
        wants_curves(TelemetryConfig(tensorboard=True))
