"""Opening many runs: cold, from the cache, beside TensorBoard, and what answers cost once they are open."""

import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from clients import Address, Dash, cpu_seconds, peak_bytes, wait_for
from writing import PHASES

CURVES = ("loss", "learning_rate", "gradient_norm", "tokens_per_s")
ALL_CURVES = (*CURVES, "samples_per_s", "step_seconds", "data_seconds", "loss_scale", "wait_dp", *PHASES)
"""What is read of every step, whichever curves are looked at."""
_OPEN_SECONDS = 1800


@contextlib.contextmanager
def serving(runs: Path, cache: Path) -> Iterator[tuple[Address, int]]:
    """A dashboard of a folder that nobody has entered, and its process id."""
    command = [sys.executable, "-m", "shoal", "dash", str(runs), "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://([0-9.]+):([0-9]+)(/enter\S+)", line):
                yield Address(found[1], int(found[2]), found[3]), process.pid
                break
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextlib.contextmanager
def dashboard(runs: Path, cache: Path) -> Iterator[tuple[Dash, int]]:
    """A dashboard of a folder that a client has entered, and its process id."""
    with serving(runs, cache) as (address, pid):
        yield Dash(address), pid


def all_rows(dash: Dash) -> list[dict[str, Any]]:
    """The whole table."""
    rows: list[dict[str, Any]] = []
    offset: int | None = 0
    while offset is not None:
        answer = dash.get(f"/api/runs?offset={offset}")
        rows += answer["runs"]
        offset = answer["next"]
    return rows


def open_runs(runs: Path, cache: Path, count: int, steps: int, *, curves: bool = False) -> dict[str, float]:
    """Seconds of processor and memory until every run is in the table, and its curves where asked for."""
    begin = time.monotonic()
    with dashboard(runs, cache) as (dash, pid):
        idle = cpu_seconds(pid)

        def all_there() -> list[dict[str, Any]] | None:
            rows = all_rows(dash)
            return rows if len(rows) == count and all(row["step"] == steps for row in rows) else None

        # Asked seldom: each answer costs the server a little of what is measured.
        rows = wait_for(all_there, _OPEN_SECONDS, every=1.0)
        if curves:
            for row in rows:
                for name in CURVES:
                    assert dash.get(f"/api/run/{row['id']}/curve?name={name}")["x"]
        found = {"cpu_s": cpu_seconds(pid), "of_that_start_s": idle, "wall_s": time.monotonic() - begin}
        # What was read is written to the cache while other files are read; nothing is left to do.
        return {**found, "peak_mb": peak_bytes(pid) / 1e6}


def open_in_tensorboard(python: Path, logs: Path, count: int, steps: int) -> dict[str, float]:
    """The same of TensorBoard: until it answers with every run's curves up to the last step."""
    command = [str(python), "-m", "tensorboard.main", "--logdir", str(logs), "--port", "0", "--reload_interval", "5"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    begin = time.monotonic()
    try:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if found := re.search(r"(http://[^ /]+)/", line):
                address = found[1]
                break

        def get(path: str) -> Any:
            with urlopen(f"{address}/data/plugin/scalars/{path}", timeout=60) as answer:
                return json.load(answer)

        wait_for(lambda: len(get("tags")) == count, _OPEN_SECONDS)
        for run in sorted(get("tags")):
            wait_for(lambda run=run: get(f"scalars?run={run}&tag=loss")[-1][1] == steps, _OPEN_SECONDS)
            for name in CURVES[1:]:
                assert get(f"scalars?run={run}&tag={name}")
        cpu, wall = cpu_seconds(process.pid), time.monotonic() - begin
        return {"cpu_s": cpu, "wall_s": wall, "peak_mb": peak_bytes(process.pid) / 1e6}
    finally:
        process.terminate()
        process.wait(timeout=60)


def beside_tensorboard(python: Path, runs: Path, logs: Path, cache: Path, steps: int) -> dict[str, Any]:
    """Both open the same runs, one after the other: TensorBoard, ours without a cache, ours with one."""
    count = len(list(runs.iterdir()))
    theirs = open_in_tensorboard(python, logs, count, steps)
    cold, warm = (open_runs(runs, cache, count, steps, curves=True) for _ in range(2))
    ratios = {
        f"{name}_ratio_{what}": ours[key] / theirs[key]
        for name, ours in (("cold", cold), ("warm", warm))
        for what, key in (("cpu", "cpu_s"), ("wall", "wall_s"))
    }
    return {"tensorboard": theirs, "cold": cold, "warm": warm, **ratios}


def answers(runs: Path, cache: Path, asked: int) -> dict[str, Any]:
    """Milliseconds and bytes of answers to what a page asks, at random zooms."""
    draw = random.Random(1)
    with dashboard(runs, cache) as (dash, pid):
        wait_for(lambda: all(row["step"] for row in all_rows(dash)) and all_rows(dash), 300)
        rows = all_rows(dash)
        before, milliseconds, sizes = cpu_seconds(pid), [], []
        for _ in range(asked):
            row = draw.choice(rows)
            first = draw.uniform(0, row["step"])
            window = f"from={first:.0f}&to={first + draw.choice([50, 5000, 1e6]):.0f}"
            path = draw.choice(
                [
                    "/api/runs",
                    f"/api/run/{row['id']}",
                    f"/api/run/{row['id']}/curve?name={draw.choice(CURVES)}&{window}",
                    f"/api/run/{row['id']}/curve?name={draw.choice(CURVES)}",
                    f"/api/run/{row['id']}/ranks?{window}",
                    f"/api/run/{row['id']}/agreement",
                    f"/api/run/{row['id']}/story",
                    f"/api/run/{row['id']}/timeline",
                ]
            )
            begin = time.perf_counter()
            sizes.append(len(dash.ask(path)))
            milliseconds.append(1000 * (time.perf_counter() - begin))
        cpu = 1000 * (cpu_seconds(pid) - before) / asked
    return {
        "answers": asked,
        "p50_ms": statistics.median(milliseconds),
        "p95_ms": statistics.quantiles(milliseconds, n=20)[-1],
        "cpu_ms": cpu,
        "p95_bytes": statistics.quantiles(sizes, n=20)[-1],
        "most_bytes": max(sizes),
    }
