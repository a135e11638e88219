"""What a plan should cost beside what it cost: collectives, bytes sent, bytes held. A verdict of its own.

Whether a plan computes what one process computes, and whether its cost was foretold, are two questions. A prediction that is off
says something about the prediction, or about a collective that nobody needs; it says nothing about the numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ACTIVATIONS_WITHIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Off:
    """One thing that was not as predicted, where it was furthest off."""

    what: str
    """Such as ``calls of dp sum`` or ``bytes of activations``."""
    predicted: int
    counted: int
    where: str
    """Rank and step."""

    @property
    def percent(self) -> float | None:
        """Of the prediction, with its sign; None where nothing was predicted."""
        return 100.0 * (self.counted - self.predicted) / self.predicted if self.predicted else None

    def as_values(self) -> dict[str, Any]:
        """JSON."""
        percent = None if self.percent is None else round(self.percent, 2)
        return {
            "what": self.what,
            "predicted": self.predicted,
            "counted": self.counted,
            "percent": percent,
            "where": self.where,
        }

    def __str__(self) -> str:
        kind = "redundant" if self.counted > self.predicted else "missing"
        hint = f": a collective is {kind}" if self.what.startswith("calls") else ""
        percent = "" if self.percent is None else f" ({_percent(self.percent, '+')})"
        return f"{self.what}, {self.where}: {self.counted} counted, {self.predicted} predicted{percent}{hint}"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Whether a plan cost what it should."""

    is_made: bool = False
    """There was one, and it was compared."""
    off: tuple[Off, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """What was measured and could not be predicted, such as ``activations``, and why."""

    @property
    def ok(self) -> bool | None:
        """None where nothing was predicted, or something was not and the rest holds."""
        if self.off:
            return False
        return True if self.is_made and not self.missing else None

    def describe(self) -> str:
        """A few words."""
        if not self.off and self.missing:
            return "not predicted"
        if not self.off:
            return "holds" if self.is_made else "-"
        percents = [one.percent for one in self.off]
        if any(percent is None for percent in percents):
            return "off: not foreseen"
        return f"off by {_percent(max(abs(percent) for percent in percents if percent is not None))}"

    def as_values(self) -> dict[str, Any]:
        """JSON."""
        return {"ok": self.ok, "off": [one.as_values() for one in self.off], "missing": dict(self.missing)}


def _percent(value: float, sign: str = "") -> str:
    return f"{value:{sign}.2g}%" if abs(value) < 100 else f"{value:{sign}.0f}%"


def judge_prediction(answers: Sequence[Mapping[str, Any]]) -> Prediction:
    """Hold what every rank counted against what the plan predicts: to the call and to the byte, activations within 5 %."""
    found: dict[str, Off] = {}
    for one in [*_traffic_off(answers), *_sizes_off(answers)]:
        known = found.get(one.what)
        if known is None or _distance(one) > _distance(known):
            found[one.what] = one
    return Prediction(is_made=True, off=tuple(found.values()), missing=_sizes_missing(answers))


def _sizes_missing(answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for answer in answers:
        sizes = answer["sizes"]
        for what in sorted(sizes.get("measured", {}).keys() - sizes.get("predicted", {}).keys()):
            found.setdefault(what, sizes.get("missing", {}).get(what, "nothing predicts them here"))
    return found


def _distance(off: Off) -> float:
    return abs(off.counted - off.predicted) / max(off.predicted, 1)


def _traffic_off(answers: Sequence[Mapping[str, Any]]) -> list[Off]:
    found = []
    for rank, answer in enumerate(answers):
        for step, (counted, expected) in enumerate(zip(answer["traffic"], answer["expected_traffic"], strict=True)):
            for key in sorted(counted.keys() | expected.keys()):
                pairs = zip(("calls", "bytes"), counted.get(key, [0, 0]), expected.get(key, [0, 0]), strict=True)
                found += [
                    Off(
                        what=f"{unit} of {key}",
                        predicted=wanted,
                        counted=seen,
                        where=f"step {step + 1}, rank {rank}",
                    )
                    for unit, seen, wanted in pairs
                    if seen != wanted
                ]
    return found


def _sizes_off(answers: Sequence[Mapping[str, Any]]) -> list[Off]:
    found = []
    for rank, answer in enumerate(answers):
        predicted, measured = answer["sizes"].get("predicted", {}), answer["sizes"].get("measured", {})
        for what in sorted(predicted.keys() & measured.keys()):
            seen, wanted = measured[what], predicted[what]
            if abs(seen - wanted) > (_ACTIVATIONS_WITHIN * wanted if what == "activations" else 0):
                found.append(Off(what=f"bytes of {what}", predicted=wanted, counted=seen, where=f"rank {rank}"))
    return found
