"""How constants are fitted: which rows teach, what is made small, and what predicts a row.

A constant moves by coordinate descent in its logarithm; the loss is the mean absolute error, a source counting by the root of
its rows, and a pull towards where the fit began: the constants of the software's relatives for a device, the defaults for a
software. At most six constants of a stack are free.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.planner.hardware.software import Constants, Stack, chip_of, constants_of
from shoal.planner.tables.predict import TIMED, job_of, mixed_seconds, needed_recompute, step_seconds, timed_value
from shoal.planner.tables.table import Run

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
RELATIVES = {"megatron": "megatron-deepspeed", "bigscience": "megatron-deepspeed"}
"""Software that another one is a fork of, with the same kernels."""
KERNELS = ("matmul", "memory", "launch", "sync")
"""What kernels and the host decide, of the constants that a relative lends."""
FEW = 10
"""Rows below which six constants are as good as free: a fit then begins at what its relative's rows teach."""
MOST_ROWS = 150
"""Rows of one source that are fitted on; the rest of a larger source is only predicted."""
PULL = 0.3
"""How much a row's error a constant may cost that is e times what the fit began with."""
EVERY = "*"
"""The name of the constants of all devices together."""
RECOMPUTED: dict[int, float] = {}
"""By row, the share of blocks that is recomputed where the row does not say; memory decides that, so constants do not matter."""

Learned = Mapping[str, Constants]
"""Constants of a software: of all its devices together, and of each chip."""


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
    return run.software.fitted_name


def own_rows(runs: Sequence[Run], software: str) -> list[Run]:
    """The rows that teach a software."""
    return [run for run in runs if fitted_as(run) == software]


def error_of(run: Run, constants: Constants) -> float:
    """The absolute error of one row, as a share of what was measured."""
    return abs(ratio_of(run, constants) - 1)


def ratio_of(run: Run, constants: Constants) -> float:
    """What is predicted for a row over what was measured."""
    stack = Stack(software=run.software, constants=constants_of(run.software, constants), is_fitted=True)
    job = job_of(run, stack)
    if run.recompute == "unknown":
        if run.row not in RECOMPUTED:
            RECOMPUTED[run.row] = needed_recompute(job, run.plan)
        seconds = mixed_seconds(job, run.plan, RECOMPUTED[run.row])
    else:
        seconds = step_seconds(job, run.plan)
    assert run.measured
    return timed_value(run, job, seconds) / run.measured


def mean_error(runs: Sequence[Run], constants: Constants) -> float:
    """Mean absolute error, a source counting by the root of its rows: many alike say less than as many unlike."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_source[run.source].append(error_of(run, constants))
    weights = {source: math.sqrt(len(errors)) for source, errors in by_source.items()}
    return sum(mean(by_source[source]) * weight for source, weight in weights.items()) / sum(weights.values())


def mean(values: Sequence[float]) -> float:
    """Of some numbers, at least one."""
    return sum(values) / len(values)


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


def start_of(runs: Sequence[Run], software: str) -> Constants:
    """Where the fit of a software begins; its own rows have no say in it, so leaving some of them out does not change it."""
    relative = RELATIVES.get(software)
    if relative is None or len(own_rows(runs, software)) >= FEW:
        return START.get(software, Constants())
    found = fit(thin(own_rows(runs, relative)), START.get(relative, Constants()), FREE[relative])
    # Not what it reached of links and networks: those are another machine's.
    return replace(START.get(software, Constants()), **{name: getattr(found, name) for name in KERNELS})


def learn(runs: Sequence[Run], software: str, start: Constants) -> Learned:
    """The constants of a software from rows of it: of all devices together, then of each chip, pulled towards those."""
    free, chosen = FREE[software], thin(runs)
    joint = fit(chosen, start, free)
    chips: dict[str, list[Run]] = defaultdict(list)
    for run in chosen:
        chips[chip_of(run.device)].append(run)
    # One row moves whatever comes first; it has had its say where all devices are fitted together.
    own = {chip: fit(alike, joint, free) for chip, alike in chips.items() if len(alike) > 1}
    return {EVERY: joint, **own}


def choose(learned: Learned, run: Run) -> Constants:
    """What predicts a row, as ``find_stack`` chooses it: the constants of its device's chip, or those of all devices."""
    return learned.get(chip_of(run.device), learned[EVERY])
