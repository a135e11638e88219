"""What rounds of predicted and measured steps say, on a machine that drifts: ratios inside a round, medians over rounds."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")

CONTROL = "control"
"""What the second turn of the fixed plan is called in a round."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A plan in a round: predicted and measured one right after the other."""

    predicted: float
    measured: float


RoundPairs = Mapping[str, Pair]
"""By plan; the fixed plan's second turn under ``CONTROL``."""
Times = Mapping[str, float]
"""The same with measured seconds alone, as in the finals."""


def judge(rounds: Sequence[RoundPairs], *, fixed: str, picks: Sequence[str]) -> dict[str, Any]:
    """Errors, order and regret, each beside what the machine does to one plan that is timed twice.

    Args:
        rounds: all of the same plans.
        fixed: the plan that is there twice.
        picks: what ``auto`` picked, each time that it was asked.
    """
    rows = judge_plans(rounds)
    errors = [abs(row["error"]) for row in rows]
    single = [abs(pair.predicted / pair.measured - 1) for one in rounds for pair in _plans(one).values()]
    relative = {row["plan"]: row["measured_ratio"] for row in rows}
    return {
        "num_plans": len(rows),
        "num_rounds": len(rounds),
        "mean_absolute_error": statistics.mean(errors),
        "median_absolute_error": statistics.median(errors),
        "within_a_tenth": sum(error <= 0.1 for error in errors) / len(errors),
        "signed_bias": statistics.mean(row["error"] for row in rows),
        "mean_absolute_error_of_single_predictions": statistics.mean(single),
        "kendall_tau": kendall([row["predicted_ratio"] for row in rows], [row["measured_ratio"] for row in rows]),
        "fastest": rows[0]["plan"],
        "picks": [
            {
                "plan": pick,
                "regret": relative[pick] / rows[0]["measured_ratio"] - 1,
                **across(_only(rounds, "measured"), pick),
            }
            for pick in picks
        ],
        "best_predicted": (best := min(rows, key=lambda row: float(row["predicted_ratio"]))["plan"]),
        "regret_of_best_predicted": relative[best] / rows[0]["measured_ratio"] - 1,
        "noise": judge_noise(rounds, fixed),
        "plans": rows,
    }


def judge_plans(rounds: Sequence[RoundPairs]) -> list[dict[str, Any]]:
    """Every plan, the fastest first. A ratio is to the median plan of the same round."""
    predicted, measured = ratios(rounds, "predicted"), ratios(rounds, "measured")
    rows = [
        {
            "plan": plan,
            "predicted_ms": 1e3 * statistics.median(one[plan].predicted for one in rounds),
            "measured_ms": 1e3 * statistics.median(one[plan].measured for one in rounds),
            "error": statistics.median(one[plan].predicted / one[plan].measured for one in rounds) - 1,
            "predicted_ratio": statistics.median(predicted[plan]),
            "measured_ratio": statistics.median(measured[plan]),
            "spread": _spread(measured[plan]),
        }
        for plan in _plans(rounds[0])
    ]
    return sorted(rows, key=lambda row: float(row["measured_ratio"]))


def judge_noise(rounds: Sequence[RoundPairs], fixed: str) -> dict[str, float]:
    """The same plan in two turns of each round: in one round, and after the medians over rounds."""
    found: dict[str, float] = {}
    for kind in ("predicted", "measured"):
        pairs = [(getattr(one[fixed], kind), getattr(one[CONTROL], kind)) for one in rounds]
        found[f"{kind}_in_a_round"] = statistics.mean(abs(first / second - 1) for first, second in pairs)
        found[f"{kind}_over_rounds"] = abs(statistics.median(first / second for first, second in pairs) - 1)
    levels = [statistics.median(pair.measured for pair in _plans(one).values()) for one in rounds]
    found["drift_of_the_machine"] = max(levels) / min(levels) - 1
    return found


def finalists(rows: Sequence[Mapping[str, Any]], picks: Sequence[str], most: int) -> list[str]:
    """The fastest of all plans, and whatever ``auto`` picked.

    Args:
        rows: of ``judge_plans``, the fastest first.
        picks: what ``auto`` picked.
        most: how many of the fastest.
    """
    return list(dict.fromkeys([*(str(row["plan"]) for row in rows[:most]), *picks]))


def judge_finals(rounds: Sequence[Times], *, fixed: str, picks: Sequence[str]) -> dict[str, Any]:
    """Regret of every pick against the fastest finalist, with what chance may do to it.

    The interval holds nine tenths of what is found when rounds are drawn again, with the fastest found anew in every draw.
    """
    rows = [
        {"plan": plan, "ratio": _middle(values), "spread": _spread(values)} for plan, values in relative(rounds).items()
    ]
    rows.sort(key=lambda row: float(row["ratio"]))
    ratio = {row["plan"]: float(row["ratio"]) for row in rows}
    twice = [one[fixed] / one[CONTROL] for one in rounds]
    return {
        "num_rounds": len(rounds),
        "plans": rows,
        "same_plan_in_a_round": statistics.mean(abs(one - 1) for one in twice),
        "same_plan_over_rounds": abs(statistics.median(twice) - 1),
        "picks": [
            {
                "plan": pick,
                "regret": ratio[pick] / float(rows[0]["ratio"]) - 1,
                "interval": _redrawn(rounds, pick),
                **across(rounds, pick),
            }
            for pick in dict.fromkeys(picks)
        ],
    }


def _middle(values: Sequence[float]) -> float:
    """The mean of the middle half: steadier than the median over a few dozen rounds, and as deaf to a turn that was disturbed."""
    quarter = len(values) // 4
    return statistics.mean(sorted(values)[quarter : len(values) - quarter])


def _redrawn(rounds: Sequence[Times], pick: str, draws: int = 500) -> tuple[float, float]:
    drawing = random.Random(0)
    values = relative(rounds)
    found = []
    for _ in range(draws):
        chosen = drawing.choices(range(len(rounds)), k=len(rounds))
        middles = {plan: _middle([ratio[number] for number in chosen]) for plan, ratio in values.items()}
        found.append(middles[pick] / min(middles.values()) - 1)
    cuts = statistics.quantiles(found, n=20, method="inclusive")
    return cuts[0], cuts[-1]


def across(rounds: Sequence[Times], pick: str) -> dict[str, float | None]:
    """Regret without the luck of the fastest: found in every second round, compared in the others, and the reverse.

    The fastest of many plans is in part the one that chance helped most, and chance does not help it again.
    """
    if len(rounds) < 2:
        return {"regret_across_rounds": None}
    halves = [relative(rounds[start::2]) for start in (0, 1)]
    middles = [{plan: statistics.median(values) for plan, values in half.items()} for half in halves]
    regrets = []
    for here, there in (middles, middles[::-1]):
        fastest = min(here, key=lambda plan: here[plan])
        regrets.append(there[pick] / there[fastest] - 1)
    return {"regret_across_rounds": statistics.mean(regrets)}


def ratios(rounds: Sequence[RoundPairs], kind: str) -> dict[str, list[float]]:
    """By plan and round: its time, predicted or measured, over that of the median plan of the round."""
    return relative(_only(rounds, kind))


def _only(rounds: Sequence[RoundPairs], kind: str) -> list[Times]:
    return [{plan: getattr(pair, kind) for plan, pair in one.items()} for one in rounds]


def relative(rounds: Sequence[Times]) -> dict[str, list[float]]:
    """By plan and round: its seconds over those of the median plan of the round."""
    found: dict[str, list[float]] = {plan: [] for plan in _plans(rounds[0])}
    for one in rounds:
        times = _plans(one)
        middle = statistics.median(times.values())
        for plan, seconds in times.items():
            found[plan].append(seconds / middle)
    return found


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs in the same order less pairs in the other, over all pairs."""
    signs = [
        math.copysign(1, (first[a] - first[b]) * (second[a] - second[b]))
        for a in range(len(first))
        for b in range(a)
        if first[a] != first[b] and second[a] != second[b]
    ]
    return sum(signs) / len(signs) if signs else float("nan")


def _plans(one: Mapping[str, Value]) -> dict[str, Value]:
    return {plan: pair for plan, pair in one.items() if plan != CONTROL}


def _spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, over the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle
