"""From recordings to a judgement of the numbers: every step compared, and copies compared with each other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.comm.full_tensor import take_local
from shoal.verify.compare.assemble import AssembledStep
from shoal.verify.compare.diagnose import RankGrid, describe_number, describe_spread, describe_tensor
from shoal.verify.compare.tensors import Comparer, Comparison, Judged
from shoal.verify.compare.tolerance import Tolerance
from shoal.verify.reference.recording import Recording, Step


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that is wrong with a plan, and in which pattern."""

    kind: str
    """loss, grad, norm, optimizer, weight, buffer; flat, rule; or run, when there is nothing to compare."""
    step: int | None = None
    """Counted from 1."""
    tensor: str | None = None
    error: float | None = None
    allowed: float | None = None
    pattern: str = ""
    spread: str = ""
    """How many tensors of this kind are wrong at this step."""

    def __str__(self) -> str:
        if self.step is None:
            return f"{self.kind}: {self.pattern}"
        what = self.kind if self.tensor in (None, self.kind) else f"{self.kind} of {self.tensor}"
        error = "not finite" if self.error is None or not math.isfinite(self.error) else f"{self.error:.3g}"
        spread = f" ({self.spread})" if self.spread else ""
        return f"step {self.step}, {what}: off by {error}, allowed {self.allowed or 0:g}: {self.pattern}{spread}"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What comparing a plan's recordings gave."""

    comparison: Comparison
    difference: Difference | None


def judge_run(
    reference: Recording,
    gather: Callable[[int], AssembledStep],
    *,
    tolerance: Tolerance,
    layout: RankGrid,
    flat_bound: float,
    explain_flat: Callable[[], str | None] = lambda: None,
) -> Judgement:
    """Compare a plan with the reference, step by step.

    Args:
        reference: what one process recorded.
        gather: what the plan recorded of a step, put together (``assemble_step``).
        tolerance: what is allowed.
        layout: where the ranks stand.
        flat_bound: how far the reference's tree may be from the flat sum over the global batch.
        explain_flat: why it is further, where that is known.
    """
    comparer = Comparer(tolerance)
    difference: Difference | None = None
    before: Step | None = None
    for index in range(len(reference)):
        theirs, ours = reference.step(index), gather(index)
        wrong = comparer.add(index, theirs, ours.step)
        wrong += _judge_copies(index, theirs, ours, {f"{one.kind}/{one.name}" for one in wrong}, comparer.comparison)
        if wrong and difference is None:
            difference = _describe(wrong, theirs, ours, before, layout)
        before = theirs
    flat = reference.facts["flat"]
    if difference is None and flat is not None and not flat <= flat_bound:
        cause = explain_flat()
        difference = Difference(
            kind="flat",
            error=flat,
            allowed=flat_bound,
            pattern=f"one pass over the whole global batch gives another gradient than its microbatches: off by {flat:.3g}, "
            f"allowed {flat_bound:g}" + (f"; {cause}" if cause else ""),
        )
    return Judgement(comparison=comparer.comparison, difference=difference)


def _judge_copies(
    index: int, reference: Step, found: AssembledStep, known: set[str], comparison: Comparison
) -> list[Judged]:
    """Copies that are not the lowest rank's: wrong whatever the tolerance, because replicas that differ drift apart."""
    wrong = []
    for key, ranks in sorted(found.disagreeing.items()):
        kind, _, name = key.partition("/")
        if key in known or f"{kind}/{kind}" in known:
            continue
        error = math.inf
        if key in reference.tensors:
            copies = [piece for piece in found.pieces[key] if piece.rank in ranks]
            error = max(_distance(reference.tensors[key], copy.local, copy.placement) for copy in copies)
        judged = Judged(step=index + 1, kind=kind, name=name or kind, error=error, allowed=0.0, is_bitwise=False)
        comparison.add(judged)
        comparison.is_amplified = False
        wrong.append(judged)
    return wrong


def _distance(reference: Tensor, local: Tensor, placement: Any) -> float:
    part = take_local(reference, placement)
    apart, size = float((local.double() - part.double()).norm()), float(part.double().norm())
    return apart / size if size > 0 else math.inf


def _describe(
    wrong: Sequence[Judged], reference: Step, found: AssembledStep, before: Step | None, layout: RankGrid
) -> Difference:
    first = wrong[0]
    if first.kind in ("loss", "norm"):
        theirs, ours = getattr(reference, first.kind), getattr(found.step, first.kind)
        pattern = describe_number(theirs, ours, layout) if theirs != ours else "ranks hold different values"
        alone = _whose_norm(ours, found) if first.kind == "norm" else None
        pattern = (
            f"{pattern}; it is the norm of what {layout.name_ranks([alone])} holds alone"
            if alone is not None
            else pattern
        )
        return _difference(first, pattern, "")
    key = f"{first.kind}/{first.name}"
    same_kind = [one.name for one in wrong if one.kind == first.kind]
    all_names = [name for name in reference.tensors if name.startswith(f"{first.kind}/")]
    shapes = {name.partition("/")[2]: tensor.ndim for name, tensor in reference.tensors.items()}
    spread = describe_spread(all_names, same_kind, shapes)
    if key not in reference.tensors or key not in found.step.tensors:
        side = "the plan" if key in reference.tensors else "the reference"
        return _difference(first, f"{side} has no such tensor", spread)
    theirs_tensor, ours_tensor = reference.tensors[key], found.step.tensors[key]
    if ours_tensor.shape != theirs_tensor.shape:
        return _difference(first, f"shape {tuple(ours_tensor.shape)} for {tuple(theirs_tensor.shape)}", spread)
    pattern = describe_tensor(theirs_tensor, ours_tensor, found.pieces[key], layout)
    if before is not None and key in before.tensors and _is_near(before.tensors[key], ours_tensor):
        pattern = "it is the value of the step before"
    return _difference(first, pattern, spread)


def _difference(first: Judged, pattern: str, spread: str) -> Difference:
    return Difference(
        kind=first.kind,
        step=first.step,
        tensor=first.name,
        error=first.error,
        allowed=first.allowed,
        pattern=pattern,
        spread=spread,
    )


def _is_near(one: Tensor, other: Tensor) -> bool:
    size = float(one.double().norm())
    return size > 0 and float((one.double() - other.double()).norm()) <= 1e-6 * size


def _whose_norm(norm: float, found: AssembledStep) -> int | None:
    """The rank whose own gradient pieces have this norm, where they are not the whole gradient."""
    squares: dict[int, float] = {}
    for key, pieces in found.pieces.items():
        if key.startswith("grad/"):
            for piece in pieces:
                squares[piece.rank] = squares.get(piece.rank, 0.0) + float(piece.local.double().square().sum())
    return next((rank for rank, square in squares.items() if abs(math.sqrt(square) - norm) <= 1e-5 * norm), None)
