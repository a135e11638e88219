"""Predicted beside measured steps of all legal plans on this machine, and how far the plan that auto picks is from the fastest.

python benchmarks/planner_local/main.py [--recipe recipes/gpt.toml] [--nproc 2 4] [--steps 8] [--rounds 2] [--machine FILE]
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from shoal.core.plan import Plan
from shoal.planner.machine import cpu_name, num_cores, read_machine, torch_version, write_machine
from shoal.trainer.config import Recipe, load_recipe
from shoal.trainer.forecasts.auto import legal_plans
from shoal.trainer.forecasts.calibrating import measure_machine
from shoal.trainer.forecasts.deciding import decide, pick
from shoal.trainer.forecasts.rehearsal import build_subject
from shoal.trainer.forecasts.trial import Trial

ROOT = Path(__file__).resolve().parents[2]


def measure_count(recipe: Recipe, count: int, machine: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Every legal plan over so many processes, predicted and measured, and the pick."""
    plans = [str(plan) for plan in legal_plans(build_subject(recipe), count)]
    say(f"{count} processes: predicting {len(plans)} plans")
    predicted = {page["plan"]: page for page in decide(recipe, count, machine=machine, plans=plans).ranked}
    picked = pick(recipe, count, machine=machine)
    say(f"picked {picked.plan} of {len(picked.ranked)} rehearsed in {picked.seconds:.0f} s; measuring all")
    with Trial(recipe, count) as trial:
        tried = trial.run(plans, steps=steps, rounds=rounds)
    rows = [
        {
            "plan": one.plan,
            "predicted_ms": 1e3 * predicted[one.plan]["seconds"],
            "measured_ms": 1e3 * one.median,
            "error": predicted[one.plan]["seconds"] / one.median - 1,
        }
        for one in tried
        if not one.problem
    ]
    return {
        "num_plans": len(plans),
        "failed": {one.plan: one.problem for one in tried if one.problem},
        "picked": picked.plan,
        "num_rehearsed": len(picked.ranked),
        "search_seconds": picked.seconds,
        **judge(rows, picked.plan),
        "plans": sorted(rows, key=lambda row: row["measured_ms"]),
    }


def judge(rows: Sequence[dict[str, Any]], picked: str) -> dict[str, Any]:
    """Errors, order and regret."""
    errors = [abs(row["error"]) for row in rows]
    fastest = min(rows, key=lambda row: row["measured_ms"])
    of_pick = next(row for row in rows if row["plan"] == picked)
    return {
        "mean_absolute_error": statistics.mean(errors),
        "median_absolute_error": statistics.median(errors),
        "signed_bias": statistics.mean(row["error"] for row in rows),
        "kendall_tau": kendall([row["predicted_ms"] for row in rows], [row["measured_ms"] for row in rows]),
        "fastest": fastest["plan"],
        "regret": of_pick["measured_ms"] / fastest["measured_ms"] - 1,
        "error_of_pick": of_pick["error"],
    }


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs in the same order less pairs in the other, over all pairs."""
    signs = [
        math.copysign(1, (first[a] - first[b]) * (second[a] - second[b]))
        for a in range(len(first))
        for b in range(a)
        if first[a] != first[b] and second[a] != second[b]
    ]
    return sum(signs) / len(signs) if signs else float("nan")


def as_markdown(results: dict[str, Any]) -> str:
    """The README's tables."""
    lines = [
        "| processes | plans | mean error | bias | Kendall tau | picked | fastest | regret |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for count, found in results["counts"].items():
        lines.append(
            f"| {count} | {found['num_plans']} | {found['mean_absolute_error']:.1%} | {found['signed_bias']:+.1%} | "
            f"{found['kendall_tau']:.2f} | `{found['picked']}` ({found['error_of_pick']:+.1%}) | `{found['fastest']}` | "
            f"{found['regret']:.1%} |"
        )
    return "\n".join(lines)


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "gpt.toml")
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started, load = time.perf_counter(), os.getloadavg()
    machine = arguments.machine or Path(tempfile.gettempdir()) / "shoal-planner-local-machine.json"
    if arguments.machine is None:
        say("measuring the machine")
        write_machine(machine, measure_machine(tell=say))
    recipe = load_recipe(arguments.recipe, ())
    counts = {
        count: measure_count(recipe, count, machine, arguments.steps, arguments.rounds) for count in arguments.nproc
    }
    results = {
        "date": str(date.today()),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "torch": torch_version(),
        "load_before": [round(value, 1) for value in load],
        "load_after": [round(value, 1) for value in os.getloadavg()],
        "seconds": round(time.perf_counter() - started),
        "recipe": arguments.recipe.name,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "sharing": [point.model_dump() for point in read_machine(machine).sharing],
        "counts": counts,
    }
    out = arguments.out or Path(__file__).parent / "results" / f"{date.today()}.json"
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(as_markdown(results))
    for count, found in counts.items():
        for row in found["plans"]:
            say(
                f"{count}: {row['measured_ms']:8.1f} ms measured {row['predicted_ms']:8.1f} predicted "
                f"{row['error']:+7.1%}  {row['plan']}"
            )
    assert all(Plan.parse(found["picked"]) for found in counts.values())


if __name__ == "__main__":
    main()
