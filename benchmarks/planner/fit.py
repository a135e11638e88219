"""Fits the constants of every device and software on a table of published runs, and writes them into the package.

    python benchmarks/planner/fit.py TABLE.csv                  # constants.json, and folds.json beside this file
    python benchmarks/planner/fit.py TABLE.csv --dry-run        # prints what it would write

How a fit goes: ``fitting.py``. Which rows are left out for which error: ``folds.py``.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from fitting import EVERY, FREE, Learned, choose, fitted_as, learn, mean, mean_error, own_rows, start_of, thin, usable
from folds import WAYS, Folds, learn_folds, left_out, write_folds

from shoal.planner.hardware import software as stacks
from shoal.planner.tables.predict import cover
from shoal.planner.tables.table import Run, read_table

TARGET = Path(stacks.__file__).with_name("constants.json")


def report(runs: Sequence[Run], folds: Folds, softwares: Sequence[str]) -> dict[str, float]:
    """Prints the errors of rows that were left out, by way and device; those of rows by stack, to be stored."""
    stored: dict[str, float] = {}
    for way in WAYS:
        for software in softwares:
            by_stack: dict[str, list[float]] = defaultdict(list)
            for run, ratio in left_out(runs, folds, way=way, software=software):
                by_stack[f"{software}/{run.device}"].append(abs(ratio - 1))
                by_stack[f"{software}/{EVERY}"].append(abs(ratio - 1))
            for stack, errors in by_stack.items():
                print(f"{stack:32} {len(errors):4} rows, {way} left out: {mean(errors):.1%}", flush=True)
            if way == "rows":
                stored |= {stack: mean(errors) for stack, errors in by_stack.items()}
    return stored


def entry(learned: Learned, rows: Sequence[Run], validated: float | None) -> dict[str, object]:
    """What is stored of one stack; all its rows have the same constants."""
    constants = choose(learned, rows[0]) if len({run.device for run in rows}) == 1 else learned[EVERY]
    sources = sorted({run.source.split(" [")[0] for run in rows})
    num_rows = len(thin(rows))
    return {
        "constants": {key: float(f"{value:.4g}") for key, value in constants.as_dict().items()},
        "fitted_on": f"{num_rows} rows of {'; '.join(sources)}",
        "rows": num_rows,
        "covered": cover(rows),
        "error": round(mean_error(rows, constants), 4),
        "validated_error": None if validated is None else round(validated, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    runs = usable(read_table(arguments.table))
    softwares = list(dict.fromkeys(map(fitted_as, runs)))
    folds = {f"{way}/{software}": learn_folds(runs, software, way) for way in WAYS for software in softwares}
    validated = report(runs, folds, softwares)
    entries: dict[str, dict[str, object]] = {}
    for software in softwares:
        own = own_rows(runs, software)
        learned = learn(own, software, start_of(runs, software))
        devices = dict.fromkeys(run.device for run in own)
        of_device = {device: [run for run in own if run.device == device] for device in devices}
        for device, rows in {EVERY: own, **of_device}.items():
            name = f"{software}/{device}"
            entries[name] = entry({EVERY: learned[EVERY]} if device == EVERY else learned, rows, validated.get(name))
            print(f"{name:32} {len(rows):4} rows, error {entries[name]['error']:.1%}", flush=True)
    # A software that nobody has published runs of starts from the sharded one, whose kernels are torch's own.
    entries["*/*"] = entries["fsdp/*"]
    content = {
        "made_by": "benchmarks/planner/fit.py",
        "made_on": date.today().isoformat(),
        "table": arguments.table.name,
        "free": {software: list(names) for software, names in FREE.items()},
        "stacks": entries,
    }
    if not arguments.dry_run:
        # Lists of a few numbers are easier to read, and to compare, on one line.
        text = re.sub(
            r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(content, indent=1)
        )
        TARGET.write_text(text + "\n", encoding="utf-8")
        write_folds(folds)


if __name__ == "__main__":
    main()
