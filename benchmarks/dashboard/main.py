"""What the dashboard costs: opening many runs beside TensorBoard, answers, following a live run, and the run that is watched.

python benchmarks/dashboard/main.py [--tensorboard PYTHON] [--to FILE]
"""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from clients import Dash, cpu_seconds, listen, peak_bytes, wait_for
from writing import PHASES, add_steps, make_live_run, make_runs, write_tensorboard

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parents[1] / "recipes" / "tiny.toml"
CURVES = ("loss", "learning_rate", "gradient_norm", "tokens_per_s")
ALL_CURVES = (*CURVES, "samples_per_s", "step_seconds", "data_seconds", "loss_scale", "wait_dp", *PHASES)
"""What is read of every step, whichever curves are looked at."""


@contextlib.contextmanager
def dashboard(runs: Path, cache: Path) -> Iterator[tuple[Dash, int]]:
    """A dashboard of a folder, that a client has entered, and its process id."""
    command = [sys.executable, "-m", "shoal", "dash", str(runs), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://([0-9.]+):([0-9]+)(/enter\S+)", line):
                yield Dash(found[1], int(found[2]), found[3]), process.pid
                break
    finally:
        process.terminate()
        process.communicate(timeout=30)


def open_runs(runs: Path, cache: Path, count: int, steps: int, *, curves: bool) -> dict[str, float]:
    """Seconds of processor and memory until every run is in the table, and its curves where asked for."""
    begin = time.monotonic()
    with dashboard(runs, cache) as (dash, pid):
        idle = cpu_seconds(pid)

        def all_there() -> list[dict[str, Any]] | None:
            rows = []
            offset: int | None = 0
            while offset is not None:
                answer = dash.get(f"/api/runs?offset={offset}")
                rows += answer["runs"]
                offset = answer["next"]
            return rows if len(rows) == count and all(row["step"] == steps for row in rows) else None

        # Asked seldom: each answer costs the server a little of what is measured.
        rows = wait_for(all_there, 300, every=1.0)
        if curves:
            for row in rows:
                for name in CURVES:
                    assert dash.get(f"/api/run/{row['id']}/curve?name={name}")["x"]
        found = {"cpu_s": cpu_seconds(pid), "of_that_start_s": idle, "wall_s": time.monotonic() - begin}
        # What was read is written to the cache while other files are read; nothing is left to do.
        return {**found, "peak_mb": peak_bytes(pid) / 1e6}


def open_in_tensorboard(python: Path, logs: Path, count: int, steps: int) -> dict[str, float]:
    """The same of TensorBoard: until it answers with every run's curves up to the last step."""
    from urllib.request import urlopen

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

        wait_for(lambda: len(get("tags")) == count, 600)
        for run in sorted(get("tags")):
            wait_for(lambda run=run: get(f"scalars?run={run}&tag=loss")[-1][1] == steps, 600)
            for name in CURVES[1:]:
                assert get(f"scalars?run={run}&tag={name}")
        return {
            "cpu_s": cpu_seconds(process.pid),
            "wall_s": time.monotonic() - begin,
            "peak_mb": peak_bytes(process.pid) / 1e6,
        }
    finally:
        process.terminate()
        process.wait(timeout=30)


def beside_tensorboard(folder: Path, asked: argparse.Namespace, logs: Path, number: int) -> dict[str, Any]:
    """Both open the same runs, one after the other: TensorBoard, ours without a cache, ours with one."""
    theirs = open_in_tensorboard(asked.tensorboard, logs, 100, asked.peer_steps)
    cache = folder / f"cache-{logs.name}-{number}"
    cold = open_runs(folder / "peer", cache, 100, asked.peer_steps, curves=True)
    warm = open_runs(folder / "peer", cache, 100, asked.peer_steps, curves=True)
    return {
        "tensorboard": theirs,
        "cold": cold,
        "warm": warm,
        **{
            f"{name}_ratio_{what}": ours[key] / theirs[key]
            for name, ours in (("cold", cold), ("warm", warm))
            for what, key in (("cpu", "cpu_s"), ("wall", "wall_s"))
        },
    }


def answers(runs: Path, cache: Path, asked: int) -> dict[str, Any]:
    """Milliseconds and bytes of answers to what a page asks, at random zooms."""
    draw = random.Random(1)
    with dashboard(runs, cache) as (dash, pid):
        rows = wait_for(lambda: dash.get("/api/runs")["runs"], 300)
        wait_for(lambda: all(row["step"] for row in dash.get("/api/runs")["runs"]), 300)
        dash.get("/api/runs")
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


def follow(folder: Path, cache: Path, ranks: int, seconds: float) -> dict[str, Any]:
    """From an event in a file to a client, and what following costs, beside a run of many ranks with five steps a second."""
    runs = folder / "following"
    run = make_live_run(runs / "live", ranks)
    with dashboard(runs, cache) as (dash, pid):
        wait_for(lambda: [row for row in dash.get("/api/runs")["runs"] if row["step"]], 60)
        heard = listen(dash)
        wait_for(lambda: heard.ready, 30)
        begin, cpu, sent, step = time.monotonic(), cpu_seconds(pid), {}, 10
        while time.monotonic() - begin < seconds:
            step += 1
            add_steps(run, ranks, step)
            sent[step] = time.monotonic()
            time.sleep(max(0.0, begin + (step - 10) * 0.2 - time.monotonic()))
        share = (cpu_seconds(pid) - cpu) / (time.monotonic() - begin)
        time.sleep(2)
        delays = sorted(heard.at[one] - at for one, at in sent.items() if one in heard.at)
        heard.close()
        cpu, begin = cpu_seconds(pid), time.monotonic()
        time.sleep(10)
        idle = (cpu_seconds(pid) - cpu) / (time.monotonic() - begin)
    return {
        "ranks": ranks,
        "steps": len(sent),
        "heard": len(delays),
        "delay_p50_s": statistics.median(delays),
        "delay_p95_s": statistics.quantiles(delays, n=20)[-1],
        "delay_most_s": delays[-1],
        "core_share": share,
        "core_share_idle": idle,
    }


def watched(folder: Path, cache: Path, windows: int, seconds: float) -> dict[str, Any]:
    """Steps of one real run while a dashboard with a client looks on and while that dashboard stands still, in turns."""
    import signal

    runs = folder / "watched"
    sets = ["--set", "train.steps=1000000", "--set", "telemetry.tensorboard=false", "--set", "checkpoint.every=0"]
    command = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        str(RECIPE),
        "--plan",
        "dp=1",
        "--run-dir",
        str(runs / "run"),
        *sets,
    ]
    train = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    events = runs / "run" / "events" / "rank-000.jsonl"
    marks: list[tuple[float, bool]] = []
    try:
        wait_for(lambda: events.exists() and events.stat().st_size > 20_000, 120)
        with dashboard(runs, cache) as (dash, pid):
            wait_for(lambda: [row for row in dash.get("/api/runs")["runs"] if row["step"]], 60)
            heard = listen(dash)
            for window in range(2 * windows):
                is_looking = window % 2 == 0
                os.kill(pid, signal.SIGCONT if is_looking else signal.SIGSTOP)
                marks.append((time.time(), is_looking))
                time.sleep(seconds)
            marks.append((time.time(), False))
            os.kill(pid, signal.SIGCONT)
            heard.close()
    finally:
        train.terminate()
        train.wait(timeout=60)
    steps = [event for event in map(json.loads, events.read_text().splitlines()) if event["kind"] == "step"]
    medians: dict[bool, list[float]] = {True: [], False: []}
    for (start, is_looking), (end, _) in pairwise(marks):
        inside = [event["seconds"] for event in steps if start + 0.5 < event["t"] < end]
        medians[is_looking].append(statistics.median(inside))
    pairs = [one / other - 1 for one, other in zip(medians[True], medians[False], strict=True)]
    return {
        "windows": windows,
        "step_ms_looked_at": 1000 * statistics.median(medians[True]),
        "step_ms_alone": 1000 * statistics.median(medians[False]),
        "longer": statistics.median(pairs),
        "longer_quartiles": statistics.quantiles(pairs, n=4),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensorboard", type=Path, default=None, help="a python that has tensorboard")
    parser.add_argument("--to", type=Path, default=HERE / "results" / f"{date.today()}.json")
    parser.add_argument("--steps", type=int, default=10_000, help="of each of the 100 runs")
    parser.add_argument(
        "--peer-steps", type=int, default=2_000, help="of each of the 100 runs that TensorBoard opens too"
    )
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shoal-dashboard-"))
    result: dict[str, Any] = {"date": str(date.today()), "python": platform.python_version(), "cores": os.cpu_count()}
    try:
        runs, cache = folder / "runs", folder / "cache"
        make_runs(runs, 100, asked.steps)
        result["cold"] = open_runs(runs, cache, 100, asked.steps, curves=False)
        result["warm"] = open_runs(runs, cache, 100, asked.steps, curves=False)
        print(json.dumps({key: result[key] for key in ("cold", "warm")}, indent=2), flush=True)
        result["answers"] = answers(runs, cache, 600)
        print(json.dumps(result["answers"], indent=2), flush=True)
        result["follow"] = follow(folder, cache, 64, 20)
        print(json.dumps(result["follow"], indent=2), flush=True)
        result["watched"] = watched(folder, cache, 10, 4)
        print(json.dumps(result["watched"], indent=2), flush=True)
        if asked.tensorboard is not None:
            peer = folder / "peer"
            make_runs(peer, 100, asked.peer_steps)
            for name, curves in (("four_curves", CURVES), ("all_curves", ALL_CURVES)):
                logs = folder / name
                write_tensorboard(peer, logs, curves)
                result[name] = [beside_tensorboard(folder, asked, logs, number) for number in range(2)]
                print(json.dumps({name: result[name]}, indent=2), flush=True)
                shutil.rmtree(logs)
    finally:
        shutil.rmtree(folder)
    asked.to.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
