"""Traces hold the chosen steps and no others, and a trace that cannot be written is only a warning."""

import json
from pathlib import Path

import torch

from shoal.telemetry.trace import Tracer


def train(tracer: Tracer, first: int, last: int) -> None:
    torch.set_num_threads(1)
    for step in range(first, last + 1):
        tracer.before_step(step)
        with torch.profiler.record_function(f"work of step {step}"):
            torch.ones(2) + 1
        tracer.after_step(step)
    tracer.close()


def steps_in(path: Path) -> list[int]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({int(event["name"].split()[-1]) for event in events if event["name"].startswith("work of step")})


def test_window(tmp_path: Path) -> None:
    tracer = Tracer("3:5", tmp_path, 1)
    train(tracer, 1, 8)
    assert tracer.path == tmp_path / "traces/rank-001.json"
    assert steps_in(tracer.path) == [3, 4]


def test_resume_inside_and_end_inside_the_window(tmp_path: Path) -> None:
    tracer = Tracer("3:50", tmp_path, 0)
    train(tracer, 10, 12)
    assert steps_in(tracer.path) == [10, 11, 12]


def test_no_window(tmp_path: Path) -> None:
    train(Tracer(None, tmp_path, 0), 1, 3)
    train(Tracer("9:10", tmp_path, 0), 1, 3)
    assert not (tmp_path / "traces").exists()


def test_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("in the way")
    warnings: list[str] = []
    train(Tracer("1:2", tmp_path, 0, warn=warnings.append), 1, 3)
    assert len(warnings) == 1
    assert "cannot write the trace" in warnings[0]
