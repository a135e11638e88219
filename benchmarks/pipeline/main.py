"""A pipeline step on two processes: beside ``torch.distributed.pipelining``, beside its own prediction, and without a flush.

python benchmarks/pipeline/main.py [--rounds 9] [--only zbv,chimera]
"""

import argparse
import json
import os
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import asynchronous
import memory
import steps
import torch
from workload import WORKLOAD

from shoal.testing.ranks import run_on_ranks


def measure(rounds: int) -> dict[str, Any]:
    """All three parts, one after the other."""
    load, started = os.getloadavg()[0], time.perf_counter()
    parts = {
        "step": steps.summarise(run_on_ranks(steps.race, 2, rounds, deadline_seconds=900.0)),
        "asynchronous": asynchronous.summarise(run_on_ranks(asynchronous.race, 2, rounds, deadline_seconds=900.0)),
        "memory": memory.summarise(run_on_ranks(memory.measure, 2, deadline_seconds=900.0)),
    }
    return {
        "date": str(date.today()),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "seconds": round(time.perf_counter() - started),
        "rounds": rounds,
        "workload": WORKLOAD,
        **parts,
    }


def as_markdown(results: dict[str, Any]) -> str:
    """The README's tables."""
    lines = [
        "| | ms | torch, ms | to torch | bubble | predicted | difference, points | of it jitter | the rest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results["step"].items():
        beside = f"{row['torch_ms']:.0f} | {row['to_torch']:.2f}" if "to_torch" in row else " | "
        points = " | ".join(f"{100 * row[key]:+.1f}" for key in ("difference", "jitter", "rest"))
        lines.append(
            f"| {name} | {row['ms']:.0f} | {beside} | {row['bubble']:.3f} | {row['predicted_bubble']:.3f} | {points} |"
        )
    lines += ["", "| | samples/s | to 1f1b | predicted | with updates |", "|---|---|---|---|---|"]
    for name, row in results["asynchronous"].items():
        keys = ("to_1f1b", "predicted", "with_updates")
        ratios = " | ".join(f"{row[key]:.2f}" if key in row else "" for key in keys)
        lines.append(f"| {name} | {row['samples_per_second']:.1f} | {ratios} |")
    lines += [
        "",
        "| | peak MB by rank | predicted | to predicted | without what p2p holds | within actions, MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results["memory"].items():
        keys = ("mb", "predicted_mb", "to_predicted", "to_predicted_without_sent", "within_actions_mb")
        forms = (".1f", ".1f", ".3f", ".3f", ".1f")
        cells = (", ".join(format(value, form) for value in row[key]) for key, form in zip(keys, forms, strict=True))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the tables of the README and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", help="steps of these schedules alone, by commas; prints their table and writes no file"
    )
    given = parser.parse_args()
    if given.only:
        names = given.only.split(",")
        answers = run_on_ranks(steps.race, 2, given.rounds, names, deadline_seconds=900.0)
        print(as_markdown({"step": steps.summarise(answers, names), "asynchronous": {}, "memory": {}}))
        return
    results = measure(given.rounds)
    print(as_markdown(results))
    target = Path(__file__).parent / "results" / f"{date.today()}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {target} after {results['seconds']} s", file=sys.stderr)


if __name__ == "__main__":
    main()
