"""Errors of rows that the constants had not seen, in three ways, and the constants of each fold, kept for the tests.

rows      every fifth row
group     all rows of a model on a number of devices of a kind, because rows alike teach each other
device    all rows of a device, which is then predicted like one that nobody saw

A fit takes minutes and a prediction seconds, so ``fit.py`` writes what each fold taught into ``folds.json``; a test predicts each
row with the constants of the fold that left it out.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fitting import FREE, START, Learned, choose, learn, own_rows, ratio_of, start_of

from shoal.planner.hardware.software import Constants
from shoal.planner.tables.table import Run

FILE = Path(__file__).with_name("folds.json")
WAYS = ("rows", "group", "device")
ROW_FOLDS, GROUP_FOLDS = 5, 8

Folds = Mapping[str, Sequence[Learned]]
"""By way of leaving out and software (``group/fsdp``): what each fold taught."""


def number_folds(own: Sequence[Run], way: str) -> dict[int, int]:
    """The fold that each row of a software is left out in, by the row's number."""
    if way == "rows":
        return {run.row: at % ROW_FOLDS for at, run in enumerate(own)}
    keys = {run.row: run.device if way == "device" else "/".join((run.device, *run.group[1:4])) for run in own}
    names = list(dict.fromkeys(keys.values()))
    most = len(names) if way == "device" else min(GROUP_FOLDS, len(names))
    return {row: names.index(key) % most for row, key in keys.items()}


def learn_folds(runs: Sequence[Run], software: str, way: str) -> list[Learned]:
    """What the rows of a software teach that are not in each fold; nothing where there is one fold only."""
    own = own_rows(runs, software)
    numbers = number_folds(own, way)
    folds = sorted(set(numbers.values()))
    if len(folds) < 2:
        return []
    start = start_of(runs, software)
    return [learn([run for run in own if numbers[run.row] != fold], software, start) for fold in folds]


def left_out(runs: Sequence[Run], folds: Folds, *, way: str, software: str) -> list[tuple[Run, float]]:
    """Rows of a software, and for each what the fold predicts that it was left out of, over what was measured."""
    own = own_rows(runs, software)
    learned, numbers = folds[f"{way}/{software}"], number_folds(own, way)
    return [(run, ratio_of(run, choose(learned[numbers[run.row]], run))) for run in own] if learned else []


def write_folds(folds: Folds) -> None:
    """Keep what every fold taught: the free constants, the others are where fits begin."""
    lines = []
    for name, each in folds.items():
        software = name.partition("/")[2]
        kept = [{chip: _free(found, software) for chip, found in learned.items()} for learned in each]
        lines.append(f" {json.dumps(name)}: {json.dumps(kept)}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_folds() -> Folds:
    """What ``write_folds`` kept."""
    folds: dict[str, list[Learned]] = {}
    for name, each in json.loads(FILE.read_text(encoding="utf-8")).items():
        software = name.partition("/")[2]
        folds[name] = [{chip: _whole(values, software) for chip, values in learned.items()} for learned in each]
    return folds


def _free(constants: Constants, software: str) -> dict[str, float]:
    values = constants.as_dict()
    return {name: float(f"{values[name]:.4g}") for name in FREE[software]}


def _whole(values: Mapping[str, float], software: str) -> Constants:
    return Constants(**{**START.get(software, Constants()).as_dict(), **values})
