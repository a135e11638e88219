"""What a proof found out about one plan."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.verify.judge import Difference, Judgement
from shoal.verify.question import Question
from shoal.verify.tolerance import Tolerance


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """One plan in one arithmetic."""

    plan: str
    dtype: str
    steps: int
    ok: bool
    bitwise: bool
    worst: Mapping[str, float]
    first_difference: Difference | None
    tolerance: float
    reason: str
    """Where the tolerance comes from."""
    noise: tuple[str, ...] = ()
    """Tensors that were bounded absolutely."""
    flat: float | None = None
    """Distance of the reference's tree from one pass over the whole global batch."""
    traffic: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0


def failed(question: Question, difference: Difference) -> PlanResult:
    """The result of a plan whose numbers were not compared: it did not run to its end, or not by its rule."""
    return PlanResult(
        plan=str(question.plan),
        dtype=question.case.precision,
        steps=question.case.steps,
        ok=False,
        bitwise=False,
        worst={},
        first_difference=difference,
        tolerance=0.0,
        reason="it did not run" if difference.kind == "run" else "what it did is not what its rule says",
        wall_s=time.monotonic() - question.started,
    )


def compared(question: Question, judged: Judgement, tolerance: Tolerance, **found: Any) -> PlanResult:
    """The result of a plan whose numbers were compared; ``found`` has what there is beside."""
    values: dict[str, Any] = {"first_difference": judged.difference, "reason": tolerance.reason, **found}
    return PlanResult(
        plan=str(question.plan),
        dtype=question.case.precision,
        steps=question.case.steps,
        ok=values["first_difference"] is None,
        bitwise=judged.verdict.is_bitwise,
        worst=judged.verdict.worst,
        tolerance=tolerance.bound,
        noise=tuple(sorted(judged.verdict.noise)),
        wall_s=time.monotonic() - question.started,
        **values,
    )
