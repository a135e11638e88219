"""Run directories that were made up for the benchmark, as runs write them, and their numbers as TensorBoard has them."""

import json
import math
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

_NAMES = {
    "loss": "loss", "lr": "learning_rate", "grad_norm": "gradient_norm", "seconds": "step_seconds",
    "data_seconds": "data_seconds", "loss_scale": "loss_scale",
}  # fmt: skip
PHASES = ("data", "forward", "backward", "optimizer")
_WRITTEN = 4


def step_line(rank: int, step: int, at: float, draw: random.Random) -> str:
    """One step of a rank."""
    busy = 0.06 * (1 + 0.05 * draw.random())
    event = {
        "t": round(at, 6),
        "rank": rank,
        "kind": "step",
        "step": step,
        "loss": 6.0 / math.sqrt(step) + 0.1 * draw.random(),
        "lr": 0.003,
        "grad_norm": 1.0 + draw.random(),
        "samples": 16,
        "tokens": 512,
        "seconds": 0.1,
        "data_seconds": 0.004,
        "skipped": False,
        "loss_scale": 1.0,
        "wait_seconds": {"dp": round(0.096 - busy, 6)},
        "phases": {"data": 0.004, "forward": round(busy / 3, 6), "backward": round(busy / 1.5, 6), "optimizer": 0.001},
    }
    return json.dumps(event) + "\n"


def _make(folder: Path, ranks: int, steps: int, begin: float, seed: int) -> None:
    (folder / "events").mkdir(parents=True)
    (folder / "recipe.toml").write_text("[train]\nseed = 1\n")
    (folder / "plan.json").write_text(json.dumps({"plan": f"dp={ranks}", "dp": ranks, "total_steps": 10**6}))
    draw = random.Random(seed)
    for rank in range(ranks):
        started = {
            "t": begin,
            "rank": rank,
            "kind": "run_started",
            "plan": f"dp={ranks}",
            "world_size": ranks,
            "step": 0,
        }
        lines = [json.dumps({**started, "generation": 0, "pid": 1}) + "\n"]
        lines += [step_line(rank, step, begin + 0.1 * step, draw) for step in range(1, steps + 1)]
        (folder / "events" / f"rank-{rank:03d}.jsonl").write_text("".join(lines))


def make_runs(folder: Path, count: int, steps: int) -> None:
    """Runs that are over. Four are made up, and copied: making them all up takes longer than reading them."""
    for number in range(count):
        run = folder / f"run-{number:03d}"
        if number >= _WRITTEN:
            shutil.copytree(folder / f"run-{number % _WRITTEN:03d}", run)
            continue
        _make(run, 1, steps, 1_790_000_000.0, number)
        (run / "summary.json").write_text(json.dumps({"status": "completed", "steps": steps}))


def make_live_run(folder: Path, ranks: int, steps: int) -> Path:
    """A run that has done so many steps."""
    _make(folder, ranks, steps, time.time() - 0.1 * steps - 1.0, 1)
    return folder


def add_steps(run: Path, ranks: int, step: int) -> None:
    """A step of every rank, and the supervisor's word."""
    draw = random.Random(step)
    for rank in range(ranks):
        with (run / "events" / f"rank-{rank:03d}.jsonl").open("a") as file:
            file.write(step_line(rank, step, time.time(), draw))
    states = [
        {"rank": rank, "host": "h", "pid": 1, "step": step, "phase": "forward", "phase_seconds": 0.1, "heartbeat_age": 0.1,
         "rss_bytes": 10**9, "state": "running", "metrics": {}}
        for rank in range(ranks)
    ]  # fmt: skip
    live = {
        "t": time.time(),
        "generation": 0,
        "status": "running",
        "plan": "dp",
        "pid": 1,
        "host": "h",
        "ranks": states,
        "hang": None,
    }
    beside = run / ".live"
    beside.write_text(json.dumps(live))
    os.replace(beside, run / "live.json")


def write_tensorboard(runs: Path, logs: Path, curves: tuple[str, ...]) -> None:
    """Curves of every run as TensorBoard has them. Four are written, and copied: writing them all takes longer than reading."""
    from tensorboardX import SummaryWriter

    folders = sorted(runs.iterdir())
    for run in folders[:_WRITTEN]:
        with SummaryWriter(str(logs / run.name), flush_secs=600) as writer:
            for line in (run / "events" / "rank-000.jsonl").read_text().splitlines():
                event = json.loads(line)
                if event["kind"] == "step":
                    values = _values(event)
                    for name in curves:
                        writer.add_scalar(name, values[name], event["step"], walltime=event["t"])
    for number, run in enumerate(folders[_WRITTEN:]):
        shutil.copytree(logs / folders[number % _WRITTEN].name, logs / run.name)


def _values(event: dict[str, Any]) -> dict[str, float]:
    """All that a step says, by the names of curves."""
    own = {name: event[key] for key, name in _NAMES.items()}
    speeds = {f"{name}_per_s": event[name] / event["seconds"] for name in ("tokens", "samples")}
    return {**own, **speeds, **event["phases"], "wait_dp": event["wait_seconds"]["dp"]}
