"""Seconds to the first step, and memory of all ranks until then, where the model is built once and where each rank builds it.

python benchmarks/startup/memory.py [--rounds 3] [--plan TEXT]...

Memory is the sum of PSS over the ranks, looked at every 20 ms: a page that several processes share counts once. The template that
builds the shared model counts with them while it lives.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
RECIPE = """
[model]
build = "parts:{build}"
[data]
build = "parts:data"
[train]
steps = 1
global_batch = 2
[optim]
name = "sgd"
[eval]
samples = 1
[telemetry]
tensorboard = false
[checkpoint]
every = 0
[[callbacks]]
build = "parts:Mark"
"""
PLANS = ("dp=2", "dp=2 zero=3", "tp=2", "pp=2")
BUILDS = ("shared", "by_each_rank")


def pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def processor_seconds() -> float:
    """Of all processes that were started here and have ended: the whole run, which other work on the machine disturbs least."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def is_counted(process: psutil.Process) -> bool:
    """Ranks and the template; the fork server itself holds no model and is the same in both."""
    try:
        words, parent = process.cmdline(), process.parent()
        is_template = parent is not None and "shoal.launch.forkserver" in parent.cmdline()
    except psutil.Error:
        return False
    return is_template or ("shoal.launch.child" in words and "shoal.trainer.worker" in words)


def measure(plan: str, build: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.toml").write_text(RECIPE.format(build=build))
        command = [sys.executable, "-m", "shoal", "train", "recipe.toml", "--plan", plan, "--run-dir", "run"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        seen: list[tuple[float, int]] = []
        started, before = time.time(), processor_seconds()
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=quiet, stderr=quiet) as process:
            while process.poll() is None:
                below = psutil.Process(process.pid).children(recursive=True)
                seen.append((time.time(), sum(pss(one.pid) for one in below if is_counted(one))))
                time.sleep(0.02)
            assert process.returncode == 0, f"{plan} {build} ended with {process.returncode}"
        events = (folder / "run" / "events" / "rank-000.jsonl").read_text().splitlines()
        first = next(event["t"] for event in map(json.loads, events) if event["kind"] == "step")
        logs = [path.read_text() for path in (folder / "run" / "logs").glob("rank-*.log")]
        laid_out = max(float(time_) for log in logs for time_ in re.findall(r"laid out at ([\d.]+)", log))
        return {
            "seconds_to_first_step": first - started,
            "processor_seconds": processor_seconds() - before,
            "peak_mb_until_laid_out": max(size for at, size in seen if at <= laid_out) / 1e6,
            "peak_mb_until_first_step": max(size for at, size in seen if at <= first) / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plan", action="append")
    options = parser.parse_args()
    rows = []
    for plan in options.plan or PLANS:
        found: dict[str, list[dict[str, float]]] = {build: [] for build in BUILDS}
        for turn in range(options.rounds):
            for build in BUILDS if turn % 2 else reversed(BUILDS):
                found[build].append(measure(plan, build))
        for build in BUILDS:
            medians = {key: round(statistics.median(one[key] for one in found[build]), 2) for key in found[build][0]}
            rows.append({"plan": plan, "model": build, **medians})
            print(json.dumps(rows[-1]), flush=True)
    results = {"date": str(date.today()), "parameters": 201_519_108, "rows": rows}
    (HERE / "results" / f"{date.today()}-memory.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
