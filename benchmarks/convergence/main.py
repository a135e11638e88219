"""Whether asynchronous pipelines learn as well as synchronous ones: the demo recipe, the same samples, five pipelines.

python benchmarks/convergence/main.py [--runs DIR] [--results FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plot import draw_svg

from shoal.core.config import read_toml
from shoal.core.rundir import RunDir

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPE = "recipes/gpt.toml"
FIGURE = ROOT / "docs" / "figures" / "convergence.svg"
MICROBATCHES = 4
TAKES: dict[str, dict[str, Any]] = {"lr 4e-3": {}, "lr 1e-3": {"optim.lr": 0.001}}
"""What differs from the recipe, which has the first rate, in all five runs alike."""
SUITED = "suited to delay"
SUITED_CHANGES: dict[str, Any] = {"optim.lr": 0.002, "optim.betas": [0.5, 0.95]}
"""Half the rate and a shorter memory of gradients: what a delay of one update asks for (README)."""
EVALUATIONS = 12
ALLOWED = 0.02
"""Share by which an asynchronous schedule's last validation loss may differ from that of its control."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One run."""

    schedule: str
    microbatches: int
    batch: int
    """Samples of a step, which is not always an update."""
    steps: int
    updates: int
    control: str | None
    """The run that differs from this one by the delay of its updates and what comes with it; None for such a run."""

    @property
    def plan(self) -> str:
        """As the command line takes it."""
        return f"pp=2 schedule={self.schedule} microbatches={self.microbatches}"


def contenders(recipe: dict[str, Any]) -> dict[str, Contender]:
    """All five: every one sees the recipe's samples, in the recipe's order.

    An asynchronous run is compared with the synchronous one that makes as many updates of as many samples: otherwise the size of
    an update, and not its delay, would decide.
    """
    batch, steps = recipe["train"]["global_batch"], recipe["train"]["steps"]
    each = batch // MICROBATCHES

    def asynchronous(schedule: str, updates: int, control: str) -> Contender:
        return Contender(
            schedule=schedule, microbatches=MICROBATCHES, batch=batch, steps=steps, updates=updates, control=control
        )

    def control(size: int, microbatches: int) -> Contender:
        length = batch * steps // size
        return Contender(
            schedule="1f1b", microbatches=microbatches, batch=size, steps=length, updates=length, control=None
        )

    whole, part = f"1f1b-{batch}", f"1f1b-{each}"
    return {
        whole: control(batch, MICROBATCHES),
        "pipedream-2bw": asynchronous("pipedream-2bw", steps, whole),
        part: control(each, 1),
        "pipedream": asynchronous("pipedream", steps * MICROBATCHES, part),
        "pipedream-vsync": asynchronous("pipedream-vsync", steps * MICROBATCHES, part),
    }


def suited(recipe: dict[str, Any]) -> dict[str, Contender]:
    """The asynchronous three as somebody would use them, all by updates of 8 samples, beside the demo as it is."""
    found = contenders(recipe)
    demo = next(iter(found.values()))
    each = demo.batch // MICROBATCHES
    length = demo.batch * demo.steps // each
    small = replace(found["pipedream-2bw"], batch=each, steps=length, updates=length)
    runs = {"pipedream-2bw": small, "pipedream": found["pipedream"], "pipedream-vsync": found["pipedream-vsync"]}
    return {"demo": demo} | {name: replace(run, control="demo") for name, run in runs.items()}


def train(contender: Contender, changes: dict[str, Any], run_dir: Path) -> None:
    """Run it unless it has been run: the numbers of a run do not depend on when it was."""
    if contender.batch * contender.steps in dict(curve(contender, run_dir)):
        return
    settings = {
        "train.global_batch": contender.batch,
        "train.steps": contender.steps,
        "eval.every": contender.steps // EVALUATIONS,
        "checkpoint.every": 0,
        **changes,
    }
    command = [sys.executable, "-m", "shoal", "train", RECIPE, "--plan", contender.plan, "--run-dir", str(run_dir)]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    print(" ".join(command[1:]), file=sys.stderr)
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)


def events(run_dir: Path) -> list[dict[str, Any]]:
    """What rank 0 has told of a run; nothing of one that was not begun."""
    path = RunDir(run_dir).events(0)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve(contender: Contender, run_dir: Path) -> list[tuple[int, float]]:
    """Samples seen and validation loss of every evaluation so far."""
    # By step: a step that is both a multiple of eval.every and the last one counts once.
    found = {
        event["step"]: event["loss"]
        for event in events(run_dir)
        if event["kind"] == "evaluated" and event["split"] == "validation"
    }
    return [(step * contender.batch, loss) for step, loss in sorted(found.items())]


def measure(runs: Path) -> dict[str, Any]:
    """Every run of every take in turn, each in a folder of its own below ``runs``."""
    recipe = read_toml(ROOT / RECIPE)
    takes = {
        take: {
            "changes": changes,
            "runs": measure_take(contenders(recipe), changes, runs / take.replace(" ", "-")),
        }
        for take, changes in TAKES.items()
    }
    takes[SUITED] = {
        "changes": SUITED_CHANGES,
        "runs": measure_take(suited(recipe), SUITED_CHANGES, runs / SUITED.replace(" ", "-")),
    }
    return {
        "date": str(date.today()),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "recipe": RECIPE,
        "seed": recipe["train"]["seed"],
        "validation_samples": recipe["eval"]["samples"],
        "takes": takes,
    }


def measure_take(entered: dict[str, Contender], changes: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Some runs with the same changes of the recipe; the demo has none."""
    found: dict[str, Any] = {}
    for name, contender in entered.items():
        train(contender, {} if name == "demo" else changes, runs / name)
        times = [event["t"] for event in events(runs / name)]
        found[name] = {
            **asdict(contender),
            "plan": contender.plan,
            "seconds": round(max(times) - min(times)),
            "curve": curve(contender, runs / name),
        }
    for row in found.values():
        row["final"] = row["curve"][-1][1]
        if row["control"]:
            row["to_control"] = round(row["final"] / found[row["control"]]["curve"][-1][1], 4)
    return found


def as_markdown(results: dict[str, Any]) -> str:
    """The README's table."""
    lines = [
        f"| | | updates | samples each | validation loss | control | its loss | ratio | within {ALLOWED:.0%} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for take, found in results["takes"].items():
        runs = found["runs"]
        for name, row in runs.items():
            each = row["batch"] * row["steps"] // row["updates"]
            beside = " | | | "
            if row["control"]:
                other, ratio = runs[row["control"]]["final"], row["to_control"]
                # Beside the demo a lower loss is no miss: there the runs differ in more than the delay.
                is_met = ratio <= 1.0 + ALLOWED if row["control"] == "demo" else is_near(ratio)
                beside = f"{row['control']} | {other:.4f} | {ratio:.3f} | {'yes' if is_met else 'no'}"
            lines.append(f"| {take} | {name} | {row['updates']} | {each} | {row['final']:.4f} | {beside} |")
    return "\n".join(lines)


def is_near(ratio: float) -> bool:
    """True when a loss is as near to its control's as asked for, above or below."""
    return abs(ratio - 1.0) <= ALLOWED


def figures(results: dict[str, Any]) -> dict[Path, str]:
    """The text of every figure: a take each, that of the recipe without a number."""
    return {
        FIGURE.with_stem(FIGURE.stem + (f"-{place + 1}" if place else "")): draw_svg(found["runs"], ALLOWED, take)
        for place, (take, found) in enumerate(results["takes"].items())
    }


def main() -> None:
    """Train, print the README's table, write the results and draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=Path, help="keep the run directories here; those that are done are not run again"
    )
    parser.add_argument("--results", type=Path, help="train nothing: table and figures of this file")
    options = parser.parse_args()
    if options.results:
        results = json.loads(options.results.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(options.runs or Path(folder))
        target = HERE / "results" / f"{results['date']}.json"
        target.write_text(json.dumps(results, indent=2) + "\n")
        print(f"written to {target}", file=sys.stderr)
    print(as_markdown(results))
    for path, text in figures(results).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
