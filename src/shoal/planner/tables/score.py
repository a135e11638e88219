"""How good predictions are: errors, order and choice per source, and what was said about running out of memory."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from shoal.planner.tables.predict import TIMED, Predicted, is_better_low


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of one source. A figure is None where no row could give it."""

    count: int
    """Rows with a prediction and a measured value."""
    unpredicted: int
    out_of_range: int
    mape: float | None = None
    """Mean absolute error, as a share of the measured value."""
    p90: float | None = None
    """The absolute error that nine rows of ten stay below."""
    bias: float | None = None
    """Mean signed error; above zero where predictions are too high."""
    kendall_tau: float | None = None
    """Agreement of the order of steps' times within groups of one model on the same devices: 1 the same, -1 reversed. What was
    run several times counts once, by its mean."""
    regret: float | None = None
    """Measured time of the run that would have been picked in a group, over the best measured one, minus 1; mean over groups."""
    oom_precision: float | None = None
    oom_recall: float | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def score(rows: Sequence[Predicted]) -> Score:
    """The figures of some rows."""
    judged = [row for row in rows if row.predicted is not None and row.measured is not None]
    errors = [
        row.predicted / row.measured - 1.0
        for row in judged
        if row.metric != "oom" and row.measured and row.predicted is not None
    ]
    sizes = sorted(abs(error) for error in errors)
    taus, regrets = [], []
    for group in _groups(judged):
        taus += _kendall(group)
        regrets += _regret(group)
    precision, recall = _out_of_memory(judged)
    return Score(
        count=len(judged),
        unpredicted=sum(row.predicted is None for row in rows),
        out_of_range=sum(not row.in_range for row in judged),
        mape=_mean(sizes),
        p90=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))] if sizes else None,
        bias=_mean(errors),
        kendall_tau=_mean(taus),
        regret=_mean(regrets),
        oom_precision=precision,
        oom_recall=recall,
    )


def score_by_source(rows: Sequence[Predicted]) -> dict[str, Score]:
    """The figures of every source, in the order of the table."""
    sources = dict.fromkeys(row.source for row in rows)
    return {source: score([row for row in rows if row.source == source]) for source in sources}


def short_names(sources: Iterable[str], length: int = 48) -> dict[str, str]:
    """Names for a table: what stands before the bracket, cut in the middle where it is long, and never two alike.

    Releases of one document differ at the end of their names, so an end that is cut off would make them one.
    """
    short: dict[str, str] = {}
    for source in sources:
        name = source.split(" [")[0]
        half = (length - 3) // 2
        cut = name if len(name) <= length else f"{name[: length - 3 - half]}...{name[-half:]}"
        short[source] = cut if cut not in short.values() else name
    return short


def _mean(values: Iterable[float]) -> float | None:
    kept = list(values)
    return sum(kept) / len(kept) if kept else None


def _groups(rows: Sequence[Predicted]) -> list[list[Predicted]]:
    timed = [row for row in rows if row.metric in TIMED and row.group]
    groups: dict[tuple[object, ...], dict[str, list[Predicted]]] = {}
    for row in timed:
        groups.setdefault((row.group, row.metric), {}).setdefault(row.choice or str(row.row), []).append(row)
    found = [[_averaged(repeats) for repeats in choices.values()] for choices in groups.values()]
    return [group for group in found if len(group) > 1]


def _averaged(repeats: Sequence[Predicted]) -> Predicted:
    """One row for a choice that was measured several times: a choice cannot be made of the better of its measurements."""
    return replace(repeats[0], measured=_mean(row.measured for row in repeats if row.measured is not None))


def _slowness(row: Predicted) -> tuple[float, float]:
    """Measured and predicted, turned so that more is slower."""
    assert row.measured is not None and row.predicted is not None
    return (row.measured, row.predicted) if is_better_low(row.metric) else (-row.measured, -row.predicted)


def _kendall(group: Sequence[Predicted]) -> list[float]:
    concordant = pairs = 0
    for one, other in itertools.combinations(map(_slowness, group), 2):
        if one[0] != other[0]:
            pairs += 1
            product = (one[0] - other[0]) * (one[1] - other[1])
            concordant += (product > 0) - (product < 0)
    return [concordant / pairs] if pairs else []


def _regret(group: Sequence[Predicted]) -> list[float]:
    picked = min(group, key=lambda row: _slowness(row)[1])
    best = min(group, key=lambda row: _slowness(row)[0])
    assert picked.measured is not None and best.measured is not None
    ratio = picked.measured / best.measured if is_better_low(picked.metric) else best.measured / picked.measured
    return [ratio - 1.0]


def _out_of_memory(rows: Sequence[Predicted]) -> tuple[float | None, float | None]:
    """Precision and recall over all rows: what has a time or its memory measured did not run out of memory."""
    truths = sum(_ran_out(row) for row in rows)
    claims = sum(row.runs_out is True for row in rows)
    hits = sum(row.runs_out is True and _ran_out(row) for row in rows)
    return (hits / claims if claims else None), (hits / truths if truths else None)


def _ran_out(row: Predicted) -> bool:
    return row.metric == "oom" and row.measured == 1.0
