"""How far to go along a direction: a search for a step that meets the strong Wolfe conditions, in scalars alone.

Nocedal & Wright, Numerical Optimization (2nd ed.), algorithms 3.5 (widen until a bracket is found) and 3.6 (narrow it), with
the cubic of equation 3.59 through both ends. A generator: it yields the step that it wants tried and is sent what was found
there, so it knows nothing of vectors, servers or waiting, and a test can send it any function.

Where they leave a choice it is that of ``torch.optim.LBFGS``, so that both walk the same path: how far a
bracket may widen, how near to its ends a trial may lie, and that a value is compared with the one before it from the third trial
on. One thing is different: a trial that is not finite counts as too far, and is never interpolated through.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass

# Nocedal & Wright, equation 3.7: sufficient decrease and curvature, as they advise for quasi-Newton directions.
_DECREASE = 1e-4
_CURVATURE = 0.9
# How far beyond the last trial the next may lie: at least this share of the last widening, at most this multiple of the step.
_LEAST_WIDENING = 0.01
_MOST_WIDENING = 10.0
# A trial nearer to an end of its bracket than this share of its width makes little progress.
_MARGIN = 0.1


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step along the direction and what is known there."""

    trial: int
    """Counts the evaluations of a search; 0 is where it starts."""
    step: float
    loss: float
    slope: float
    """Of the loss along the direction."""

    @property
    def is_finite(self) -> bool:
        """True when it can be interpolated through."""
        return math.isfinite(self.loss) and math.isfinite(self.slope)


GRADIENTS_HELD = 3
"""Of trials, at once at most: both ends of the bracket, and the one that is tried between them."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A step that is to be tried, and the trials whose gradients may still be chosen."""

    trial: int
    step: float
    keep: frozenset[int]


Search = Generator[Ask, Point, Point]


def search(start: Point, first_step: float, *, width: float, least_width: float, max_trials: int) -> Search:
    """Search along a direction; returns the point that was chosen, which is ``start`` itself when nothing better was found.

    Args:
        start: the point at step 0, with a slope below zero.
        first_step: tried first.
        width: the largest element of the direction: what a step of 1 moves the weights by at most.
        least_width: a bracket that moves no weight by more than this is not narrowed further.
        max_trials: evaluations that may be asked for.
    """
    assert start.slope < 0 < first_step, (start, first_step)
    before, point = start, (yield Ask(trial=1, step=first_step, keep=frozenset({0})))
    while True:
        if _is_too_high(point, start) or (point.trial > 2 and point.loss >= before.loss):
            break
        if _is_flat(point, start):
            return point
        if point.slope >= 0:
            break
        if point.trial >= max_trials:
            return point  # Still going down, so it is the lowest that is known.
        bounds = (point.step + _LEAST_WIDENING * (point.step - before.step), point.step * _MOST_WIDENING)
        step = interpolate(before, point, bounds)
        before, point = point, (yield Ask(trial=point.trial + 1, step=step, keep=frozenset({0, point.trial})))
    return (yield from _narrow(start, before, point, width=width, least_width=least_width, max_trials=max_trials))


def _narrow(start: Point, one: Point, other: Point, *, width: float, least_width: float, max_trials: int) -> Search:
    ends = [one, other]
    low = _lower(ends)
    trial = max(one.trial, other.trial)
    was_near = False
    while trial < max_trials and abs(one.step - other.step) * width >= least_width:
        left, right = min(one.step, other.step), max(one.step, other.step)
        step, was_near = _keep_clear(interpolate(one, other, (left, right)), left, right, was_near)
        trial += 1
        point = yield Ask(trial=trial, step=step, keep=frozenset({one.trial, other.trial}))
        if _is_too_high(point, start) or point.loss >= ends[low].loss:
            ends[1 - low] = point
            low = _lower(ends)
        elif _is_flat(point, start):
            return point
        else:
            if point.slope * (ends[1 - low].step - ends[low].step) >= 0:
                ends[1 - low] = ends[low]
            ends[low] = point
        one, other = ends
    return ends[low]


def _lower(ends: list[Point]) -> int:
    """Which end is lower; the first of two that are level."""
    return 0 if _order(ends[0]) <= _order(ends[1]) else 1


def _order(point: Point) -> float:
    return point.loss if point.is_finite else math.inf


def _is_too_high(point: Point, start: Point) -> bool:
    """The first Wolfe condition is broken (Nocedal & Wright, equation 3.7a)."""
    return not point.is_finite or point.loss > start.loss + _DECREASE * point.step * start.slope


def _is_flat(point: Point, start: Point) -> bool:
    """The second strong Wolfe condition holds (Nocedal & Wright, equation 3.7b)."""
    return abs(point.slope) <= -_CURVATURE * start.slope


def _keep_clear(step: float, left: float, right: float, was_near: bool) -> tuple[float, bool]:
    """The step to try, moved off the end it is too near to; and whether it is left near an end, which is allowed once."""
    margin = _MARGIN * (right - left)
    if min(right - step, step - left) >= margin:
        return step, False
    if not was_near and left < step < right:
        return step, True
    return (right - margin if abs(step - right) < abs(step - left) else left + margin), False


def interpolate(a: Point, b: Point, bounds: tuple[float, float]) -> float:
    """The lowest place of the cubic through two points and their slopes, held within bounds; their middle when it has none.

    Nocedal & Wright, equation 3.59.
    """
    middle = (bounds[0] + bounds[1]) / 2
    if not (a.is_finite and b.is_finite) or a.step == b.step:
        return middle
    left, right = (a, b) if a.step <= b.step else (b, a)
    d1 = left.slope + right.slope - 3 * (left.loss - right.loss) / (left.step - right.step)
    square = d1 * d1 - left.slope * right.slope
    if not (math.isfinite(square) and square >= 0):
        return middle
    d2 = math.sqrt(square)
    denominator = right.slope - left.slope + 2 * d2
    if denominator == 0:
        return middle
    lowest = right.step - (right.step - left.step) * ((right.slope + d2 - d1) / denominator)
    return min(max(lowest, bounds[0]), bounds[1]) if math.isfinite(lowest) else middle
