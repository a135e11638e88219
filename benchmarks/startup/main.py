"""From the command to the end of the first step on two processes, beside a bare torchrun script that does the same.

python benchmarks/startup/main.py [--rounds 7]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parents[1] / "recipes" / "tiny.toml"


def time_shoal(folder: Path) -> float:
    started = time.time()
    command = [sys.executable, "-m", "shoal", "train", str(RECIPE), "--plan", "dp=2", "--run-dir", str(folder / "run")]
    subprocess.run([*command, "--set", "train.steps=1"], check=True, capture_output=True, timeout=120)
    events = [json.loads(line) for line in (folder / "run" / "events" / "rank-000.jsonl").read_text().splitlines()]
    return next(event["t"] for event in events if event["kind"] == "step") - started


def time_torchrun(folder: Path) -> float:
    started = time.time()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(HERE / "bare.py"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)
    line = next(line for line in done.stdout.splitlines() if line.startswith("first step ended at"))
    return float(line.rsplit(" ", 1)[1]) - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    contenders = [("shoal", time_shoal), ("torchrun", time_torchrun)]
    found: dict[str, list[float]] = {name: [] for name, _ in contenders}
    for turn in range(options.rounds + 1):
        for name, run in contenders if turn % 2 else reversed(contenders):
            with tempfile.TemporaryDirectory() as folder:
                seconds = run(Path(folder))
            if turn:  # the first round fills the file cache
                found[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    results = {
        "date": str(date.today()),
        "seconds": found,
        "median": medians,
        "ratio": medians["shoal"] / medians["torchrun"],
    }
    print(json.dumps(results, indent=2))
    (HERE / "results" / f"{date.today()}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
