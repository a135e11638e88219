"""What a proof found out about one plan: whether its numbers are one process's, and whether its cost was foretold."""

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoal.verify.judge import Difference, Judgement
from shoal.verify.prediction import Prediction
from shoal.verify.question import Question
from shoal.verify.tolerance import Tolerance

Status = Literal["proven", "differs", "refused", "crashed"]


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """One plan in one arithmetic."""

    plan: str
    dtype: str
    steps: int
    status: Status
    """Of the numbers. ``refused``: it cannot run, or one process cannot; ``crashed``: it did not run to its end."""
    reason: str
    """Where the tolerance of a proven plan comes from; of another, what is wrong."""
    bitwise: bool = False
    worst: Mapping[str, float] = field(default_factory=dict)
    first_difference: Difference | None = None
    tolerance: float = 0.0
    prediction: Prediction = field(default_factory=Prediction)
    decided_by: str | None = None
    """The arithmetic that proved it where this one could not tell rounding from a bug."""
    is_amplified: bool = False
    """What differs could be rounding that the optimizer made whole steps of."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """Tensors of which rounding was excused, or that were bounded absolutely: the norm of the difference, nothing excused."""
    flat: float | None = None
    """Distance of the reference's tree from one pass over the whole global batch."""
    traffic: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""
    """Of a crash."""
    wall_s: float = 0.0

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


def broke_rule(question: Question, violation: str) -> PlanResult:
    """The result of a plan whose record is not what its rule says; its numbers were not compared."""
    return PlanResult(
        plan=str(question.plan),
        dtype=question.case.precision,
        steps=question.case.steps,
        status="differs",
        reason=f"what it did is not what its rule says: {violation}",
        first_difference=Difference(kind="rule", pattern=violation),
        wall_s=time.monotonic() - question.started,
    )


def compared(question: Question, judged: Judgement, tolerance: Tolerance, **found: Any) -> PlanResult:
    """The result of a plan whose numbers were compared; ``found`` has what there is beside."""
    difference = judged.difference
    values: dict[str, Any] = {"reason": tolerance.reason, **found}
    if difference is not None:
        values["reason"] = str(difference)
    return PlanResult(
        plan=str(question.plan),
        dtype=question.case.precision,
        steps=question.case.steps,
        status="proven" if difference is None else "differs",
        bitwise=judged.verdict.is_bitwise,
        worst=judged.verdict.worst,
        first_difference=difference,
        tolerance=tolerance.widest,
        is_amplified=difference is not None and difference.kind != "flat" and judged.verdict.is_amplified,
        noise=dict(sorted(judged.verdict.noise.items())),
        wall_s=time.monotonic() - question.started,
        **values,
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
