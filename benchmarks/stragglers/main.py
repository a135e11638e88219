"""Time to a loss with one worker of four slowed down, under each update rule.

python benchmarks/stragglers/main.py [--steps 150] [--factor 4]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from plot import draw_svg

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parents[1] / "docs" / "figures" / "stragglers.svg"
RULES = {
    "bsp": "update=bsp",
    "ssp:3": "update=ssp:3",
    "ssp:8": "update=ssp:8",
    "half:3,0.25": "update=half:3,0.25",
}
SMOOTHED = 10
RECIPE = """
plan = "ps=1 workers=4"
[model]
build = "slowmodel:build"
args = {{ factor = {factor} }}
[data]
source = "stdlib"
sequence = 32
limit_bytes = 1000000
[train]
steps = {steps}
global_batch = 16
seed = 1
threads = 1
[optim]
name = "adamw"
lr = 3e-3
[checkpoint]
every = 0
[eval]
samples = 256
"""


def run(rule: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train under one rule; its curve over seconds, counted from the first step."""
    name = rule.replace(":", "-").replace(",", "-")
    recipe, run_dir = folder / f"{name}.toml", folder / name
    recipe.write_text(RECIPE.format(factor=options.factor, steps=options.steps))
    command = [sys.executable, "-m", "shoal", "train", str(recipe), "--plan", f"ps=1 workers=4 {RULES[rule]}"]
    subprocess.run(
        [*command, "--run-dir", str(run_dir)],
        check=True,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
    )
    steps = [json.loads(line) for line in (run_dir / "events" / "rank-000.jsonl").read_text().splitlines()]
    steps = [event for event in steps if event["kind"] == "step"]
    curve = [(event["t"] - steps[0]["t"], event["loss"]) for event in steps]
    summary = json.loads((run_dir / "summary.json").read_text())
    return {"curve": smooth(curve), "validation_loss": summary["validation_loss"], "seconds": curve[-1][0]}


def smooth(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over the last few steps."""
    found = []
    for place, (seconds, _) in enumerate(curve):
        recent = [loss for _, loss in curve[max(0, place + 1 - SMOOTHED) : place + 1]]
        found.append((seconds, sum(recent) / len(recent)))
    return found


def time_to(curve: list[tuple[float, float]], loss: float) -> float | None:
    """Seconds until a loss is reached."""
    return next((seconds for seconds, value in curve if value <= loss), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--factor", type=float, default=4.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {rule: run(rule, options, Path(folder)) for rule in RULES}
    # A loss that every rule comes to, reached late enough for the beginning not to matter.
    target = 1.02 * max(entry["curve"][-1][1] for entry in found.values())
    for entry in found.values():
        entry["seconds_to_target"] = time_to(entry["curve"], target)
    base = found["bsp"]["seconds_to_target"]
    print(f"seconds to a training loss of {target:.3f}, one worker of four {options.factor:g} times slower")
    for rule, entry in found.items():
        print(
            f"  {rule:12} {entry['seconds_to_target']:7.1f} s   {base / entry['seconds_to_target']:5.2f} x bsp   "
            f"validation loss {entry['validation_loss']:.4f} after {entry['seconds']:.1f} s"
        )
    results = {
        "date": str(date.today()),
        "steps": options.steps,
        "factor": options.factor,
        "target": target,
        "rules": found,
    }
    (HERE / "results" / f"{date.today()}.json").write_text(json.dumps(results, indent=1) + "\n")
    FIGURE.write_text(draw_svg({rule: entry["curve"] for rule, entry in found.items()}, target))


if __name__ == "__main__":
    main()
