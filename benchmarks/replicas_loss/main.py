"""What replicas learn that agree in other ways than by a dense sum: validation loss at equal steps, beside one replica alone.

python benchmarks/replicas_loss/main.py [--runs DIR] [--seeds 1,2,3] [--only NAME]... [--add NAME]... [--results FILE]
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contenders import ALONE, CONTENDERS, DENSE, LONG, PLAIN, SHORT, Contender
from plot import draw_svg

from shoal.core.rundir import RunDir

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPES = {"": "recipe.toml", ", plain GPT": "plain.toml"}
"""By what the tables say of the model: the shipped one, and the one that the promises were made of."""
FIGURE = ROOT / "docs" / "figures" / "replicas-loss.svg"
BEGIN, END = "<!-- made by main.py: begin -->", "<!-- made by main.py: end -->"
EVALUATIONS = 4
BYTES_OF_DENSE = 0.05
"""A twentieth: what a run that is to close the gap may send."""


def train(contender: Contender, recipe: str, steps: int, seed: int, run_dir: Path) -> dict[str, Any] | None:
    """The numbers of one run, which is made unless it is there; None where the product refuses it or it fails."""
    if not is_done(run_dir):
        settings = {
            "train.steps": steps,
            "train.seed": seed,
            "eval.every": steps // EVALUATIONS,
            **contender.settings,
        }
        command = [sys.executable, "-m", "shoal", "train", str(HERE / recipe), "--plan", contender.plan]
        command += ["--run-dir", str(run_dir)]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        print(" ".join(command[1:]), file=sys.stderr)
        # What a run that was stopped half-way has sent is not known.
        shutil.rmtree(run_dir, ignore_errors=True)
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SENT_BYTES": str(run_dir / "sent")}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr)
        if done.returncode:
            print(f"{contender.plan}: exit code {done.returncode}, left out", file=sys.stderr)
            return None
    return read_run(run_dir)


def is_done(run_dir: Path) -> bool:
    """True where a run has come to its end."""
    summary = run_dir / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "completed"


def read_run(run_dir: Path) -> dict[str, Any]:
    """Validation losses by step, and the most that any rank has sent."""
    lines = RunDir(run_dir).events(0).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    # By step: one that is both a multiple of eval.every and the last counts once.
    curve = {
        event["step"]: event["loss"]
        for event in events
        if event["kind"] == "evaluated" and event["split"] == "validation"
    }
    ranks = [json.loads(path.read_text()) for path in sorted((run_dir / "sent").iterdir())]
    sent = [sum(row[2] for row in rank["traffic"].values()) for rank in ranks]
    return {
        "curve": sorted(curve.items()),
        "loss": curve[max(curve)],
        "sent_per_step": round(max(sent) / ranks[0]["steps"]),
        "counted": ranks[0]["traffic"],
    }


def measure(runs: Path, seeds: list[int], names: list[str], known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Every contender, with every seed; beside the rows of ``known`` results, where there are such: runs are deterministic."""
    found: dict[str, Any] = {}
    for steps, (model, recipe) in itertools.product((SHORT, LONG), RECIPES.items()):
        rows: dict[str, Any] = {}
        for name in names:
            contender = CONTENDERS[name]
            if steps not in contender.steps or (model and name not in PLAIN):
                continue
            folder = "".join(letter if letter.isalnum() else "-" for letter in name)
            # More seeds only where something is promised: a table of one seed says enough about the rest.
            own = seeds if name in (DENSE, ALONE) or contender.bar(steps) else seeds[:1]
            taken = {
                seed: train(contender, recipe, steps, seed, runs / Path(recipe).stem / f"{steps}-{folder}-{seed}")
                for seed in own
            }
            if all(taken.values()):
                rows[name] = as_row(contender, taken)
        title = f"{steps} steps{model}"
        rows = {**(known["steps"][title] if known else {}), **rows}
        found[title] = judge({name: rows[name] for name in CONTENDERS if name in rows}, steps)
    return {
        "date": str(date.today()),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "seeds": seeds,
        "steps": found,
    }


def as_row(contender: Contender, taken: dict[int, Any]) -> dict[str, Any]:
    """One contender's runs together."""
    first = next(iter(taken.values()))
    return {
        "plan": contender.plan,
        "settings": dict(contender.settings),
        "losses": {str(seed): run["loss"] for seed, run in taken.items()},
        "loss": first["loss"],
        "sent_per_step": first["sent_per_step"],
        "counted_by_rank_0": first["counted"],
        "curve": first["curve"],
    }


def judge(rows: dict[str, Any], steps: int) -> dict[str, Any]:
    """The rows beside dense and beside one replica alone, and what was promised of them."""
    if DENSE not in rows or ALONE not in rows:
        return rows
    dense, alone = rows[DENSE], rows[ALONE]
    for name, row in rows.items():
        over = [loss - dense["losses"][seed] for seed, loss in row["losses"].items()]
        gaps = [alone["losses"][seed] - dense["losses"][seed] for seed in row["losses"]]
        closed = [1 - one / gap for one, gap in zip(over, gaps, strict=True)]
        row["over_dense"] = round(statistics.mean(over), 4)
        row["over_dense_by_seed"] = [round(one, 4) for one in over]
        row["closes"] = round(statistics.mean(closed), 3)
        row["closes_by_seed"] = [round(one, 3) for one in closed]
        row["share_of_bytes"] = round(row["sent_per_step"] / dense["sent_per_step"], 4)
        contender = CONTENDERS[name]
        bar = contender.bar(steps)
        if bar is None:
            continue
        if steps == SHORT:
            row["bar"], row["is_met"] = f"at most {bar:g} over dense", row["over_dense"] <= bar
        else:
            row["bar"] = f"closes {bar:.0%} at {BYTES_OF_DENSE:.0%} of the bytes"
            # Beside what is exchanged there are a few bytes that ask whether to stop.
            row["is_met"] = row["closes"] >= bar and round(row["share_of_bytes"], 3) <= BYTES_OF_DENSE
    return rows


def as_markdown(results: dict[str, Any]) -> str:
    """The README's tables."""
    lines = []
    for title, rows in results["steps"].items():
        lines += [
            f"| {title} | plan | loss | over dense | seeds | gap closed | kB sent a step | of dense | bar |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name, row in rows.items():
            bar = f"{row['bar']}: {'met' if row['is_met'] else '**missed**'}" if "bar" in row else ""
            lines.append(
                f"| {name} | `{row['plan']}` | {row['loss']:.4f} | {row['over_dense']:+.4f} | "
                f"{len(row['losses'])} | {row['closes']:.0%} | {row['sent_per_step'] / 1e3:.1f} | "
                f"{row['share_of_bytes']:.4f} | {bar} |"
            )
        lines.append("")
    return "\n".join(lines)


def write_readme(table: str) -> None:
    """Put the table into the README, between its marks."""
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def main() -> None:
    """Train, print the README's tables, write the results and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="keep the run directories here; what is done is not run again")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of the model and of the order of samples")
    parser.add_argument("--only", action="append", help="this contender beside dense and alone; nothing is written")
    parser.add_argument(
        "--add", action="append", help="this contender beside the newest results, in which it is written"
    )
    parser.add_argument("--results", type=Path, help="train nothing: tables and figure of this file")
    options = parser.parse_args()
    if options.results:
        results = json.loads(options.results.read_text())
    else:
        asked = options.add or (options.only and [DENSE, ALONE, *options.only]) or CONTENDERS
        names = [name for name in CONTENDERS if name in asked]
        seeds = [int(seed) for seed in options.seeds.split(",")]
        newest = sorted((HERE / "results").glob("*.json"))[-1:] if options.add else []
        known = json.loads(newest[0].read_text()) if newest else None
        with tempfile.TemporaryDirectory() as folder:
            results = measure(options.runs or Path(folder), seeds, names, known)
        if not options.only:
            target = HERE / "results" / f"{results['date']}.json"
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(results, indent=1) + "\n")
            print(f"written to {target}", file=sys.stderr)
    table = as_markdown(results).strip()
    print(table)
    if not options.only:
        write_readme(table)
        FIGURE.write_text(draw_svg(results["steps"]))


if __name__ == "__main__":
    main()
