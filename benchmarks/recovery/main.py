"""Kill a rank, again and again, and time how long training stands still.

python benchmarks/recovery/main.py [--kills 20]
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parents[1] / "recipes" / "tiny.toml"
DEADLINE_SECONDS = 45.0


def steps_after(path: Path, generation_starts: int) -> int:
    """Steps done since the given number of starts, or 0 while that start has not happened."""
    starts, steps = 0, 0
    for line in path.read_text().splitlines() if path.exists() else ():
        kind = line.split('"kind": "', 1)[-1].split('"kind":"', 1)[-1].split('"', 1)[0]
        starts += kind == "run_started"
        steps += kind == "step" and starts > generation_starts
    return steps


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The ranks among the processes of a run, and not the fork server, whose arguments name what it has imported for them."""
    found = []
    for child in psutil.Process(process.pid).children():
        words = child.cmdline()
        is_forked = "shoal.launch.child" in words
        if is_forked and words[words.index("shoal.launch.child") + 1] == "shoal.trainer.worker":
            found.append(child)
    return found


def wait_for(condition, deadline: float) -> float | None:
    """The time at which a condition came true, or None when it did not."""
    while time.monotonic() < deadline:
        if condition():
            return time.monotonic()
        time.sleep(0.01)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    dice, seconds, failures = random.Random(1), [], 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "shoal", "train", str(RECIPE), "--plan", "dp=2", "--run-dir", str(run)]
        command += [
            "--max-restarts",
            str(options.kills + 1),
            "--set",
            "train.steps=1000000",
            "--set",
            "checkpoint.every=20",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        events = run / "events" / "rank-000.jsonl"
        try:
            for kill in range(options.kills):
                if wait_for(lambda kill=kill: steps_after(events, kill) > 3, time.monotonic() + 60) is None:
                    raise SystemExit(f"generation {kill} never trained")
                time.sleep(dice.uniform(0.0, 1.0))  # any moment: in compute, in a collective, in a save
                victim = dice.choice(ranks_of(process))
                os.kill(victim.pid, signal.SIGKILL)
                killed = time.monotonic()
                back = wait_for(lambda kill=kill: steps_after(events, kill + 1) > 0, killed + DEADLINE_SECONDS)
                if back is None:
                    failures += 1
                    break
                seconds.append(back - killed)
                print(f"kill {kill + 1}: training again after {seconds[-1]:.2f} s", file=sys.stderr)
        finally:
            process.terminate()
            process.wait(timeout=60)
    if not seconds:
        raise SystemExit(f"training was not on again {DEADLINE_SECONDS:g} s after the first kill")
    results = {
        "date": str(date.today()),
        "kills": options.kills,
        "recovered": len(seconds),
        "median_s": statistics.median(seconds),
        "max_s": max(seconds),
        "seconds": seconds,
    }
    print(json.dumps(results, indent=2))
    (HERE / "results" / f"{date.today()}.json").write_text(json.dumps(results, indent=2) + "\n")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
