"""L-BFGS over parameter servers: the coordinator's side, which holds numbers and no vector.

Sandblaster (Dean et al., Large Scale Distributed Deep Networks, 2012, section 4.2). Weights, gradient and history stay where they
are, cut over the servers; the coordinator sends programs (``programs.py``) and decides by the numbers that come back. The
direction is the two-loop recursion of Nocedal & Wright, Numerical Optimization (2nd ed.), algorithm 7.4, with the scaling of
equation 7.20; the step is that of ``line_search.py`` or a fixed one. ``torch.optim.LBFGS`` needs all vectors in one process;
given the same objective this walks the same path.

One iteration costs ``2 m + 4`` round trips for a history of m pairs, and two for each evaluation.

A coordinator may die at any moment. Between two iterations the vectors are ``weights``, ``gradient`` and the pairs that the
``Memory`` names. Within one, ``start-<iteration>`` holds the weights that it began with and no pair of the memory is touched, so
whoever has the memory of the last whole iteration can ``resume`` and walks the same path.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shoal.core.errors import RequestError, RunError
from shoal.paramserver.lbfgs.line_search import Point, search
from shoal.paramserver.programs import (
    GRADIENT,
    WEIGHTS,
    Operation,
    Program,
    Vectors,
    axpy,
    copy,
    dot,
    drop,
    has,
    largest,
    scale,
    total,
)

DIRECTION = "direction"
PREVIOUS = "previous"
"""The gradient at which an iteration began."""

# A pair with less curvature than this would make the approximation indefinite (Nocedal & Wright, section 7.2).
_LEAST_CURVATURE = 1e-10


@dataclass(frozen=True, kw_only=True)
class LbfgsSettings:
    """How to minimise."""

    lr: float = 1.0
    """The step that is tried first, or taken without a search."""
    history: int = 10
    """Pairs of steps and changes of the gradient that are kept."""
    line_search: Literal["strong_wolfe", "fixed"] = "strong_wolfe"
    tolerance_gradient: float = 1e-7
    """Stop when no element of the gradient is larger."""
    tolerance_change: float = 1e-9
    """Stop when neither the loss nor any weight changes by more."""
    max_trials: int = 25
    """Evaluations of one line search."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.history < 1 or self.max_trials < 1:
            raise RequestError(
                f"lbfgs with lr {self.lr:g}, history {self.history} and {self.max_trials} trials: lr must be above 0, "
                "and the others at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A step and the change of the gradient over it, as kept on the servers."""

    slot: int
    weight: float
    """1 / (y . s), called rho by Nocedal & Wright."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """All that a coordinator knows after an iteration; with it any other process can be the coordinator."""

    iteration: int = 0
    """Iterations done."""
    first: int = 0
    """Iterations that were done, by another rule, before this memory began."""
    evaluations: int = 0
    loss: float
    step: float = 0.0
    """How far along its direction the last iteration went."""
    pairs: tuple[Pair, ...] = ()
    """Oldest first."""
    scaling: float = 1.0
    """Of the first guess of the inverse Hessian, called gamma by Nocedal & Wright."""
    stopped: str | None = None
    """Why there is nothing more to do."""

    def as_values(self) -> dict[str, Any]:
        """JSON for a checkpoint or a message."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Any, *, origin: str) -> "Memory":
        """Back from JSON.

        Raises:
            RunError: a field is missing, left over or impossible.
        """
        try:
            plain = dict(values)
            memory = cls(pairs=tuple(Pair(**pair) for pair in plain.pop("pairs")), **plain)
            is_possible = memory.iteration >= 0 and math.isfinite(memory.loss) and memory.scaling > 0
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{origin} does not hold a coordinator's memory: {error!r}") from error
        if not is_possible:
            raise RunError(f"{origin} holds an impossible memory of a coordinator: {memory}")
        return memory


async def begin(vectors: Vectors, settings: LbfgsSettings) -> Memory:
    """Evaluate the objective where ``weights`` are.

    Raises:
        RunError: it is not finite there.
    """
    loss = await vectors.evaluate()
    (size,) = await vectors.run(_program(largest(GRADIENT)))
    if not (math.isfinite(loss) and math.isfinite(size)):
        raise RunError(f"the loss is {loss} and its largest gradient {size} at the first weights; use smaller weights")
    return Memory(evaluations=1, loss=loss, stopped=_gradient_is_small(size, settings))


async def change_batch(vectors: Vectors, memory: Memory) -> Memory:
    """Go on with another batch: its loss and gradient take the place of the old one's; what is known of the curvature stays."""
    loss = await vectors.evaluate()
    return replace(memory, loss=loss, evaluations=memory.evaluations + 1, stopped=None)


async def skip(vectors: Vectors, memory: Memory) -> Memory:
    """Count an iteration in which nothing moves."""
    await vectors.run(_program(drop(start_name(memory.iteration - 1)), drop(start_name(memory.iteration))))
    return replace(memory, iteration=memory.iteration + 1)


async def resume(vectors: Vectors, memory: Memory, settings: LbfgsSettings) -> Memory:
    """Take over from a coordinator that died after the iteration which this memory is of, or in the next one."""
    start = start_name(memory.iteration)
    leftovers = [drop(_trial_name(trial)) for trial in range(1, settings.max_trials + 1)]
    # A program that only some of the servers ran counts as not run: the weights move after all of them have kept the start.
    (has_start,) = await vectors.run(_program(*leftovers, has(start)))
    if has_start:
        await vectors.run(_program(copy(start, WEIGHTS)))
    loss = await vectors.evaluate()
    return replace(memory, loss=loss, evaluations=memory.evaluations + 1)


async def iterate(vectors: Vectors, memory: Memory, settings: LbfgsSettings) -> Memory:
    """One iteration: a direction, a step along it, and the pair that this gives. Nothing when the memory says that it is over.

    Raises:
        RunError: a fixed step led to a loss that is not finite.
    """
    if memory.stopped is not None:
        return memory
    slope, width, first_step = await _point_downhill(vectors, memory, settings)
    start = Point(trial=0, step=0.0, loss=memory.loss, slope=slope)
    if not slope <= -settings.tolerance_change:
        return replace(memory, stopped=f"the direction descends by {-slope:g} only")
    if settings.line_search == "fixed":
        chosen, num_trials = await _move(vectors, memory, start, first_step), 1
    else:
        chosen, num_trials = await _search(vectors, memory, start, first_step, width, settings)
    sizes = await _remember(vectors, memory, settings, chosen)
    after = replace(
        memory,
        iteration=memory.iteration + 1,
        evaluations=memory.evaluations + num_trials,
        loss=chosen.loss,
        step=chosen.step,
        stopped=_gradient_is_small(sizes.gradient, settings)
        or _change_is_small(chosen.step * width, chosen.loss - memory.loss, settings),
    )
    return _with_pair(after, sizes, settings)


async def _point_downhill(vectors: Vectors, memory: Memory, settings: LbfgsSettings) -> tuple[float, float, float]:
    """Leave the direction in its vector; the slope along it, its largest element, and the step to try first.

    Algorithm 7.4 of Nocedal & Wright. What changes a vector goes out with the product that is needed next, so each pair costs
    two round trips and not four.
    """
    pairs = memory.pairs
    pending: list[Operation] = [copy(GRADIENT, DIRECTION), scale(DIRECTION, -1.0)]
    alphas: list[float] = []
    for pair in reversed(pairs):
        (product,) = await vectors.run(_program(*pending, dot(_step_name(pair), DIRECTION)))
        alphas.append(pair.weight * product)
        pending = [axpy(-alphas[-1], _change_name(pair), DIRECTION)]
    if pairs:
        pending.append(scale(DIRECTION, memory.scaling))
    for pair, alpha in zip(pairs, reversed(alphas), strict=True):
        (product,) = await vectors.run(_program(*pending, dot(_change_name(pair), DIRECTION)))
        pending = [axpy(alpha - pair.weight * product, _step_name(pair), DIRECTION)]
    # The old start goes only now that its iteration is known to be over, and the new one is there before any weight moves.
    keep = [
        drop(start_name(memory.iteration - 1)),
        copy(GRADIENT, PREVIOUS),
        copy(WEIGHTS, start_name(memory.iteration)),
    ]
    slope, width, sum_of_gradient = await vectors.run(
        _program(*pending, *keep, dot(GRADIENT, DIRECTION), largest(DIRECTION), total(GRADIENT))
    )
    # Before there is any history the length of a gradient says nothing of how far to go.
    first_step = settings.lr if memory.iteration > memory.first else min(1.0, 1.0 / sum_of_gradient) * settings.lr
    return slope, width, first_step


async def _try(vectors: Vectors, memory: Memory, trial: int, step: float, *, keep: bool) -> Point:
    await vectors.run(_program(copy(start_name(memory.iteration), WEIGHTS), axpy(step, DIRECTION, WEIGHTS)))
    loss = await vectors.evaluate()
    kept = [copy(GRADIENT, _trial_name(trial))] if keep else []
    (slope,) = await vectors.run(_program(*kept, dot(GRADIENT, DIRECTION)))
    return Point(trial=trial, step=step, loss=loss, slope=slope)


async def _move(vectors: Vectors, memory: Memory, start: Point, step: float) -> Point:
    point = await _try(vectors, memory, 1, step, keep=False)
    if not point.is_finite:
        await vectors.run(_program(copy(start_name(memory.iteration), WEIGHTS)))
        raise RunError(
            f"iteration {memory.iteration}: a fixed step of {step:g} leads from a loss of {start.loss:g} to {point.loss}; "
            "use a smaller lr, or the strong_wolfe line search"
        )
    return point


async def _search(
    vectors: Vectors, memory: Memory, start: Point, first_step: float, width: float, settings: LbfgsSettings
) -> tuple[Point, int]:
    """The point that the line search chose, with weights and gradient left there; and the evaluations it took."""
    searching = search(
        start, first_step, width=width, least_width=settings.tolerance_change, max_trials=settings.max_trials
    )
    held: set[int] = set()
    num_trials = 0
    ask = next(searching)
    while True:
        left = held - ask.keep
        if left:
            await vectors.run(_program(*(drop(_trial_name(trial)) for trial in sorted(left))))
        point = await _try(vectors, memory, ask.trial, ask.step, keep=True)
        held = (held - left) | {ask.trial}
        num_trials += 1
        try:
            ask = searching.send(point)
        except StopIteration as end:
            chosen: Point = end.value
            break
    gradient = _trial_name(chosen.trial) if chosen.trial else PREVIOUS
    await vectors.run(
        _program(
            copy(start_name(memory.iteration), WEIGHTS),
            axpy(chosen.step, DIRECTION, WEIGHTS),
            copy(gradient, GRADIENT),
            *(drop(_trial_name(trial)) for trial in sorted(held)),
        )
    )
    return chosen, num_trials


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    gradient: float
    """The largest element."""
    curvature: float
    """y . s"""
    change: float
    """y . y"""


async def _remember(vectors: Vectors, memory: Memory, settings: LbfgsSettings, chosen: Point) -> _Sizes:
    """Write the step and the change of the gradient into the slot that no pair of the memory uses."""
    spare = Pair(slot=_spare_slot(memory, settings), weight=0.0)
    step, change = _step_name(spare), _change_name(spare)
    gradient, curvature, length = await vectors.run(
        _program(
            copy(GRADIENT, change),
            axpy(-1.0, PREVIOUS, change),
            copy(DIRECTION, step),
            scale(step, chosen.step),
            largest(GRADIENT),
            dot(change, step),
            dot(change, change),
        )
    )
    return _Sizes(gradient=gradient, curvature=curvature, change=length)


def _with_pair(memory: Memory, sizes: _Sizes, settings: LbfgsSettings) -> Memory:
    if not sizes.curvature > _LEAST_CURVATURE:
        return memory
    pair = Pair(slot=_spare_slot(memory, settings), weight=1.0 / sizes.curvature)
    kept = memory.pairs[-(settings.history - 1) :] if settings.history > 1 else ()
    # Equation 7.20.
    return replace(memory, pairs=(*kept, pair), scaling=sizes.curvature / sizes.change)


def _spare_slot(memory: Memory, settings: LbfgsSettings) -> int:
    used = {pair.slot for pair in memory.pairs}
    return next(slot for slot in range(settings.history + 1) if slot not in used)


def _gradient_is_small(size: float, settings: LbfgsSettings) -> str | None:
    if size <= settings.tolerance_gradient:
        return f"no element of the gradient is larger than {size:g}"
    return None


def _change_is_small(move: float, change: float, settings: LbfgsSettings) -> str | None:
    if move <= settings.tolerance_change:
        return f"no weight moved by more than {move:g}"
    if abs(change) < settings.tolerance_change:
        return f"the loss changed by {change:g} only"
    return None


def _program(*operations: Operation) -> Program:
    return Program(operations=operations)


def _step_name(pair: Pair) -> str:
    return f"step-{pair.slot}"


def _change_name(pair: Pair) -> str:
    return f"change-{pair.slot}"


def start_name(iteration: int) -> str:
    """The vector that keeps the weights after so many iterations while the next one tries others."""
    return f"start-{iteration}"


def pair_names(history: int) -> tuple[str, ...]:
    """The vectors that pairs lie in: one more of each than are kept, for the one that is being made."""
    slots = [Pair(slot=slot, weight=0.0) for slot in range(history + 1)]
    return tuple(name for slot in slots for name in (_step_name(slot), _change_name(slot)))


def _trial_name(trial: int) -> str:
    return f"trial-{trial}"
