"""What the dashboard costs: opening many runs beside TensorBoard, answers, following a live run, the run that is watched.

python benchmarks/dashboard/main.py [--only cold,warm,answers,follow,pixels,effect,tensorboard] [--to FILE]
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from live import effect, follow, pixels
from opening import ALL_CURVES, CURVES, answers, beside_tensorboard, open_runs
from writing import make_runs, write_tensorboard

HERE = Path(__file__).resolve().parent
PARTS = ("cold", "warm", "answers", "follow", "pixels", "effect", "tensorboard")
ROWS: tuple[tuple[str, str, str, Callable[[Any], float], float], ...] = (
    ("cold", "opening without a cache", "CPU s", lambda one: one["cpu_s"], 4.0),
    ("cold", "its memory at most", "MB", lambda one: one["peak_mb"], 300.0),
    ("warm", "opening with a cache, beyond the start", "CPU s", lambda one: one["cpu_s"] - one["of_that_start_s"], 0.3),
    ("answers", "an answer, 95th percentile", "ms", lambda one: one["p95_ms"], 100.0),
    ("answers", "its bytes, 95th percentile", "KB", lambda one: one["p95_bytes"] / 1000, 200.0),
    ("follow", "from an event to a client, 95th percentile", "s", lambda one: one["delay_p95_s"], 1.5),
    ("follow", "a core, beside 64 ranks with five steps a second", "%", lambda one: 100 * one["core_share"], 2.0),
    ("pixels", "first paint, slowest load", "s", lambda one: one["first_paint_most_s"], 1.0),
    ("pixels", "from an event to its pixel, 95th percentile", "s", lambda one: one["delay_p95_s"], 1.5),
    ("effect", "steps of a watched run longer, median", "%", lambda one: 100 * one["longer"], 1.0),
    ("four_curves", "time to the same curves, to TensorBoard's", "ratio", lambda one: one["cold_ratio_wall"], 0.2),
    ("all_curves", "the same where TensorBoard has all that events have", "ratio", lambda one: one["cold_ratio_wall"], 0.2),
)  # fmt: skip
"""Part of the results, what, unit, its value, the bar."""


def measure(asked: argparse.Namespace, folder: Path, result: dict[str, Any], keep: Callable[[], None]) -> None:
    """Part by part, each kept as soon as it is there."""
    runs, cache = folder / "runs", folder / "cache"
    parts: dict[str, Callable[[], Any]] = {
        "cold": lambda: open_runs(runs, cache, asked.runs, asked.steps),
        "warm": lambda: open_runs(runs, cache, asked.runs, asked.steps),
        "answers": lambda: answers(runs, cache, asked.answers),
        "follow": lambda: follow(folder, cache, ranks=64, steps=asked.live_steps, seconds=asked.seconds),
        "pixels": lambda: pixels(
            runs, folder, cache, ranks=4, steps=asked.live_steps, seconds=asked.seconds, times=asked.loads
        ),
        "effect": lambda: effect(folder, cache, windows=asked.windows, seconds=4.0),
    }
    if {"cold", "warm", "answers", "pixels"} & set(asked.only):
        make_runs(runs, asked.runs, asked.steps)
        if "cold" not in asked.only:
            # What comes now begins with a cache that is there.
            open_runs(runs, cache, asked.runs, asked.steps)
    for name in asked.only:
        if name in parts:
            found = parts[name]()
            print(json.dumps({name: found}, indent=2), flush=True)
            if found is not None:
                result[name] = found
                keep()
    if "tensorboard" in asked.only:
        shutil.rmtree(runs, ignore_errors=True)
        _peer(asked, folder, result, keep)


def _peer(asked: argparse.Namespace, folder: Path, result: dict[str, Any], keep: Callable[[], None]) -> None:
    if asked.tensorboard is None:
        print("tensorboard is not installed (`pip install 'shoal[bench]'`, or --tensorboard PYTHON): left out")
        return
    peer = folder / "peer"
    make_runs(peer, asked.runs, asked.peer_steps)
    for name, curves in (("four_curves", CURVES), ("all_curves", ALL_CURVES)):
        if name not in asked.curves:
            continue
        logs = folder / name
        write_tensorboard(peer, logs, curves)
        found = beside_tensorboard(asked.tensorboard, peer, logs, folder / f"cache-{name}", asked.peer_steps)
        result[name] = {"runs": asked.runs, "steps": asked.peer_steps, **found}
        print(json.dumps({name: result[name]}, indent=2), flush=True)
        keep()
        shutil.rmtree(logs)


def table(result: dict[str, Any]) -> str:
    """The results as the README has them."""
    lines = ["| | measured | bar | |", "|---|---|---|---|"]
    for part, what, unit, value, bar in ROWS:
        if part in result:
            found = value(result[part])
            lines.append(
                f"| {what} | {found:.3g} {unit} | {bar:g} {unit} | {'met' if found <= bar else '**not met**'} |"
            )
    return "\n".join(lines)


def read_request() -> argparse.Namespace:
    """What is asked for.

    Raises:
        SystemExit: a part that is none.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_peer = importlib.util.find_spec("tensorboard") is not None
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--to", type=Path, default=HERE / "results" / f"{date.today()}.json")
    parser.add_argument(
        "--tensorboard", type=Path, default=Path(sys.executable) if has_peer else None, help="a python that has it"
    )
    parser.add_argument("--curves", default="four_curves,all_curves", help="what TensorBoard has of each step")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000, help="of each run")
    parser.add_argument("--peer-steps", type=int, default=100_000, help="of each run that TensorBoard opens too")
    parser.add_argument("--live-steps", type=int, default=5_000, help="that a run has behind it when it is followed")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which one is followed")
    parser.add_argument("--answers", type=int, default=600)
    parser.add_argument("--loads", type=int, default=5, help="of the page")
    parser.add_argument("--windows", type=int, default=10, help="of 4 s each, with a dashboard and without")
    parser.add_argument("--folder", type=Path, default=None, help="where runs are made up; 9 GB for tensorboard")
    asked = parser.parse_args()
    asked.only = [part for part in PARTS if part in asked.only.split(",")]
    if not asked.only:
        parser.error(f"--only takes some of {', '.join(PARTS)}")
    return asked


def main() -> None:
    """Measure, print and write; parts that are not asked for stay as the file has them."""
    asked = read_request()
    asked.to.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = json.loads(asked.to.read_text()) if asked.to.exists() else {}
    result |= {"date": str(date.today()), "python": platform.python_version(), "cores": os.cpu_count()}

    def keep() -> None:
        asked.to.write_text(json.dumps(result, indent=2) + "\n")

    folder = Path(tempfile.mkdtemp(prefix="shoal-dashboard-", dir=asked.folder))
    try:
        measure(asked, folder, result, keep)
    finally:
        shutil.rmtree(folder)
    print(table(result))


if __name__ == "__main__":
    main()
