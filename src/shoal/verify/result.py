"""The result of a proof of one plan: whether its numbers are those of one process, and whether its cost was predicted.

These are two questions. A prediction that is off says something about the prediction, or about a collective that nobody needs;
it says nothing about the numbers.
"""

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoal.verify.compare.judge import Difference, Judgement
from shoal.verify.compare.tolerance import Tolerance
from shoal.verify.request import ProofRequest

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


Status = Literal["proven", "differs", "refused", "crashed"]


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """One plan in one arithmetic."""

    plan: str
    """Its line."""
    dtype: str
    """The arithmetic."""
    steps: int
    """That were compared."""
    status: Status
    """Of the numbers. ``refused``: it cannot run, or one process cannot; ``crashed``: it did not run to its end."""
    reason: str
    """Where the tolerance of a proven plan comes from; of another, what is wrong."""
    bitwise: bool = False
    """Not a bit differs."""
    worst: Mapping[str, float] = field(default_factory=dict)
    """The largest relative error of each kind: ``loss``, ``grad``, ``norm``, ``weight``, ``optimizer``, ``buffer``."""
    first_difference: Difference | None = None
    """Where it begins to differ, and how; None where it does not."""
    tolerance: float = 0.0
    """The largest error that is allowed."""
    prediction: Prediction = field(default_factory=Prediction)
    """Whether bytes, calls and memory were those that were predicted."""
    decided_by: str | None = None
    """The arithmetic that proved it where this one could not tell rounding from a bug."""
    is_amplified: bool = False
    """What differs could be rounding that the optimizer made whole steps of."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """Tensors of which rounding was excused, or that were bounded absolutely: the norm of the difference, nothing excused."""
    flat: float | None = None
    """Distance of the reference's tree from one pass over the whole global batch."""
    traffic: Mapping[str, Any] = field(default_factory=dict)
    """Of the last step on the first rank: calls and bytes that were ``expected``, and ``counted``."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Bytes on the first rank: ``measured``, ``predicted``, and why some are ``missing``."""
    traceback: str = ""
    """Of a crash."""
    wall_s: float = 0.0
    """Seconds that it took."""

    @property
    def ok(self) -> bool:
        """True when its numbers are those of one process; whether its cost was predicted is another question."""
        return self.status == "proven"


def refused(plan: str, *, dtype: str, steps: int, reason: str, wall_s: float = 0.0) -> PlanResult:
    """The result of a plan that cannot run, or that one process cannot be compared with."""
    return PlanResult(plan=plan, dtype=dtype, steps=steps, status="refused", reason=reason, wall_s=wall_s)


def crashed(plan: str, *, dtype: str, steps: int, error: Exception, is_ours: bool, wall_s: float) -> PlanResult:
    """The result of a plan that did not run to its end; an error that is not ours has its type in the text."""
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return PlanResult(
        plan=plan,
        dtype=dtype,
        steps=steps,
        status="crashed",
        reason=text,
        first_difference=Difference(kind="run", pattern=text),
        traceback="".join(traceback.format_exception(error)),
        wall_s=wall_s,
    )


def broke_rule(request: ProofRequest, violation: str) -> PlanResult:
    """The result of a plan whose record is not what its rule says; its numbers were not compared."""
    return PlanResult(
        plan=str(request.plan),
        dtype=request.case.precision,
        steps=request.case.steps,
        status="differs",
        reason=f"what it did is not what its rule says: {violation}",
        first_difference=Difference(kind="rule", pattern=violation),
        wall_s=time.monotonic() - request.started,
    )


def compared(request: ProofRequest, judged: Judgement, tolerance: Tolerance, **found: Any) -> PlanResult:
    """The result of a plan whose numbers were compared; ``found`` has what there is beside."""
    difference = judged.difference
    values: dict[str, Any] = {"reason": tolerance.reason, **found}
    if difference is not None:
        values["reason"] = str(difference)
    return PlanResult(
        plan=str(request.plan),
        dtype=request.case.precision,
        steps=request.case.steps,
        status="proven" if difference is None else "differs",
        bitwise=judged.comparison.is_bitwise,
        worst=judged.comparison.worst,
        first_difference=difference,
        tolerance=tolerance.widest,
        is_amplified=difference is not None and difference.kind != "flat" and judged.comparison.is_amplified,
        noise=dict(sorted(judged.comparison.noise.items())),
        wall_s=time.monotonic() - request.started,
        **values,
    )


def worst_of(results: Sequence[PlanResult]) -> PlanResult:
    """One result for a plan that was compared in parts, island by island: the first that differs, or what holds for all."""
    differing = [number for number, one in enumerate(results) if not one.ok]
    kinds = {kind for one in results for kind in one.worst}
    worst = {kind: max(one.worst.get(kind, 0.0) for one in results) for kind in sorted(kinds)}
    first = results[differing[0]] if differing else results[-1]
    where = f"island {differing[0]}: " if differing and len(results) > 1 else ""
    return replace(
        first,
        worst=worst,
        bitwise=all(one.bitwise for one in results),
        reason=where + first.reason,
        noise={name: size for one in results for name, size in one.noise.items()},
    )


def settle(results: Sequence[PlanResult]) -> tuple[PlanResult, ...]:
    """Let float64 decide where a coarser type cannot: an Adam-like rule makes whole steps of roundings, and there it does not.

    Only of what rounding can be: the losses and gradients of the first step are within that type's own bound, and no weight is
    further off than the rule can go.
    """
    by_float64 = {result.plan: result for result in results if result.dtype == "float64"}
    return tuple(_settled(result, by_float64.get(result.plan)) for result in results)


def _settled(result: PlanResult, other: PlanResult | None) -> PlanResult:
    if result.status != "differs" or not result.is_amplified:
        return result
    if other is None:
        return replace(
            result, reason=f"{result.reason}; the optimizer can make this of rounding: --dtype float64 decides"
        )
    if other.status != "proven":
        return result
    return replace(
        result,
        status="proven",
        decided_by="float64",
        first_difference=None,
        reason=f"{result.dtype} is off, by rounding that the optimizer made whole steps of ({result.first_difference}); float64, "
        f"which decides, is within {other.tolerance:g}",
    )
