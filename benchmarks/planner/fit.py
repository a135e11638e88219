"""Fits the constants of every device and software on a table of published runs, and writes them into the package.

    python benchmarks/planner/fit.py TABLE.csv [--folds 5] [--software NAME] [--dry-run]
    python benchmarks/planner/fit.py TABLE.csv --leave group     # nothing is written: whole groups of rows are left out
    python benchmarks/planner/fit.py TABLE.csv --leave device

A constant moves by coordinate descent in its logarithm; the loss is the mean absolute error, a source counting by the root of
its rows, and a pull towards where the fit began: the constants of the software's relatives for a device, the defaults for a
software. At most six constants of a stack are free.

Errors are of rows that were left out, in three ways. Rows: every fifth. Groups: all rows of a model on a number of devices
of a kind, because rows alike teach each other. Devices: all rows of a device, which is then predicted like one that nobody saw.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from shoal.planner import stacks
from shoal.planner.predict import TIMED, job_of, mixed_seconds, needed_recompute, step_seconds, timed_value
from shoal.planner.stacks import SOFTWARE, Constants, Stack, chip_of, constants_of
from shoal.planner.table import Run, read_table

TARGET = Path(stacks.__file__).with_name("constants.json")
LIMITS = {
    "matmul": (0.2, 1.0), "memory": (0.2, 1.0), "launch": (1e-6, 1e-4), "link": (0.05, 1.0), "network": (0.05, 1.0),
    "sync": (1e-7, 2e-3), "attention": (0.1, 2.0), "narrow": (0.3, 1.4),
}  # fmt: skip
DENSE = ("matmul", "memory", "launch", "link", "network", "sync")
SHARDED = ("matmul", "memory", "attention", "narrow", "network", "launch")
EXPERT = ("matmul", "memory", "launch", "link", "network", "narrow")
FREE = {
    "megatron-deepspeed": DENSE,
    "bigscience": DENSE,
    "megatron": DENSE,
    "fsdp": SHARDED,
    "megatron-core": EXPERT,
}
START = {"megatron-core": Constants(narrow=1.0)}
"""Where a fit begins, if not at the defaults: Transformer Engine's casts are fused, and counted as what they read and write."""
MOST_ROWS = 150
"""Rows of one source that are fitted on; the rest of a larger source is only predicted."""
PULL = 0.3
"""How much a row's error a constant may cost that is e times what the fit began with."""
GROUP_FOLDS = 8


@dataclass(frozen=True)
class Fitted:
    """Constants of a stack, and how well they do on its device's rows."""

    constants: Constants
    rows: int
    error: float
    validated: float | None


def usable(runs: Sequence[object]) -> list[Run]:
    """Timed rows whose model is known; a guessed number of heads would teach the wrong efficiency."""
    return [
        run
        for run in runs
        if isinstance(run, Run)
        and run.measured
        and run.metric in TIMED
        and not any("heads" in word for word in run.assumed)
    ]


def fitted_as(run: Run) -> str:
    """The software that a row teaches: releases that differ in what they do have one set of constants."""
    return SOFTWARE[run.software].fitted_as or run.software


RECOMPUTED: dict[int, float] = {}
"""By row, the share of blocks that is recomputed where the row does not say; memory decides that, so constants do not matter."""


def error_of(run: Run, constants: Constants) -> float:
    """The absolute error of one row, as a share of what was measured."""
    software = SOFTWARE[run.software]
    job = job_of(run, Stack(software=software, constants=constants_of(software, constants), is_fitted=True))
    if run.recompute == "unknown":
        if run.row not in RECOMPUTED:
            RECOMPUTED[run.row] = needed_recompute(job, run.plan)
        seconds = mixed_seconds(job, run.plan, RECOMPUTED[run.row])
    else:
        seconds = step_seconds(job, run.plan)
    return abs(timed_value(run, job, seconds) / run.measured - 1)


def mean_error(runs: Sequence[Run], constants: Constants) -> float:
    """Mean absolute error, a source counting by the root of its rows: many alike say less than as many unlike."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_source[run.source].append(error_of(run, constants))
    weights = {source: math.sqrt(len(errors)) for source, errors in by_source.items()}
    means = {source: sum(errors) / len(errors) for source, errors in by_source.items()}
    return sum(means[source] * weight for source, weight in weights.items()) / sum(weights.values())


def fit(runs: Sequence[Run], start: Constants, free: Sequence[str]) -> Constants:
    """Constants near ``start`` with the least error."""

    def loss(constants: Constants) -> float:
        pull = sum(math.log(getattr(constants, name) / getattr(start, name)) ** 2 for name in free) / len(free)
        return mean_error(runs, constants) + PULL * pull / len(runs)

    best, lowest = start, loss(start)
    stride = dict.fromkeys(free, 0.3)
    while max(stride.values()) > 0.02:
        for name in free:
            low, high = LIMITS[name]
            for sign in (1, -1):
                value = min(max(getattr(best, name) * math.exp(sign * stride[name]), low), high)
                candidate = replace(best, **{name: value})
                found = loss(candidate)
                if found < lowest - 1e-6:
                    best, lowest = candidate, found
                    stride[name] *= 1.2
                    break
            else:
                stride[name] *= 0.6
    return best


def thin(runs: Sequence[Run]) -> list[Run]:
    """At most ``MOST_ROWS`` of each source, spread over it."""
    kept: list[Run] = []
    for source in dict.fromkeys(run.source for run in runs):
        own = [run for run in runs if run.source == source]
        stride = max(1, -(-len(own) // MOST_ROWS))
        kept += own[::stride]
    return kept


def fit_stack(runs: Sequence[Run], start: Constants, free: Sequence[str], folds: int, device: str = "") -> Fitted:
    """Fit on all rows, and measure on rows that were left out; of one device, where its chip has several."""
    chosen = thin(runs)
    judged = [run for run in runs if device in ("", run.device)]
    # One row moves whatever comes first; it has had its say where all devices are fitted together.
    constants = fit(chosen, start, free) if len(chosen) > 1 else start
    errors: list[float] = []
    if len(chosen) >= folds > 1:
        for fold in range(folds):
            held = [run for at, run in enumerate(chosen) if at % folds == fold]
            rest = [run for at, run in enumerate(chosen) if at % folds != fold]
            learned = fit(rest, start, free)
            errors += [error_of(run, learned) for run in held if device in ("", run.device)]
    num_rows = sum(device in ("", run.device) for run in chosen)
    return Fitted(constants, num_rows, mean_error(judged, constants), mean(errors) if errors else None)


def fit_software(runs: Sequence[Run], software: str) -> Callable[[Run], Constants]:
    """What predicts a row of a software when only ``runs`` are known, as ``find_stack`` does: the constants of its device's chip,
    or those of all devices together."""
    free, chosen = FREE[software], thin(runs)
    joint = fit(chosen, START.get(software, Constants()), free)
    chips: dict[str, list[Run]] = defaultdict(list)
    for run in chosen:
        chips[chip_of(run.device)].append(run)
    own = {chip: fit(alike, joint, free) for chip, alike in chips.items() if len(alike) > 1}
    return lambda run: own.get(chip_of(run.device), joint)


def leave_out(runs: Sequence[Run], software: str, by: str) -> dict[str, list[float]]:
    """Errors of rows by device, each predicted without its group, or without all rows of its device."""
    own = [run for run in runs if fitted_as(run) == software]
    keys = {run.row: run.device if by == "device" else "/".join((run.device, *run.group[1:4])) for run in own}
    names = list(dict.fromkeys(keys.values()))
    num_folds = len(names) if by == "device" else min(GROUP_FOLDS, len(names))
    errors: dict[str, list[float]] = defaultdict(list)
    for fold in range(num_folds if len(names) > 1 else 0):
        out = set(names[fold::num_folds])
        learned = fit_software([run for run in own if keys[run.row] not in out], software)
        for run in thin(own):
            if keys[run.row] in out:
                errors[run.device].append(error_of(run, learned(run)))
    return errors


def report_left_out(runs: Sequence[Run], softwares: Sequence[str], by: str) -> None:
    """Prints the errors of groups or devices that were left out."""
    for software in softwares:
        found = leave_out(runs, software, by)
        for device, errors in found.items():
            print(f"{software + '/' + device:32} {len(errors):4} rows, {by} left out: {mean(errors):.1%}", flush=True)
        every = [error for errors in found.values() for error in errors]
        if every:
            print(f"{software + '/*':32} {len(every):4} rows, {by} left out: {mean(every):.1%}", flush=True)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--leave", choices=("group", "device"), help="only print errors of what was left out whole")
    parser.add_argument("--software", choices=list(FREE), help="fit only this one, and keep the others as they are")
    arguments = parser.parse_args()
    runs = usable(read_table(arguments.table))
    softwares = [name for name in dict.fromkeys(map(fitted_as, runs)) if arguments.software in (None, name)]
    if arguments.leave:
        report_left_out(runs, softwares, arguments.leave)
        return
    entries: dict[str, dict[str, object]] = json.loads(TARGET.read_text())["stacks"] if arguments.software else {}

    def record(name: str, found: Fitted, own: Sequence[Run]) -> None:
        sources = sorted({run.source.split(" [")[0] for run in own})
        entries[name] = {
            "constants": {key: float(f"{value:.4g}") for key, value in found.constants.as_dict().items()},
            "fitted_on": f"{found.rows} rows of {'; '.join(sources)}",
            "rows": found.rows,
            "error": round(found.error, 4),
            "validated_error": None if found.validated is None else round(found.validated, 4),
        }
        validated = "" if found.validated is None else f", cross-validated {found.validated:.1%}"
        print(f"{name:32} {found.rows:4} rows, error {found.error:.1%}{validated}", flush=True)

    for software in softwares:
        own = [run for run in runs if fitted_as(run) == software]
        free = FREE[software]
        joint = fit_stack(own, START.get(software, Constants()), free, folds=0)
        record(f"{software}/*", joint, own)
        for device in dict.fromkeys(run.device for run in own):
            alike = [run for run in own if chip_of(run.device) == chip_of(device)]
            found = fit_stack(alike, joint.constants, free, arguments.folds, device)
            record(f"{software}/{device}", found, [run for run in alike if run.device == device])
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
        TARGET.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
