"""How far a plan may be from the reference: the numbers of ``docs/guarantees.md``, and where they come from.

* Data parallelism and ZeRO add the same numbers in the same tree, so **nothing** may differ where the sum runs in the order of
  ranks (always for two ranks; for any number over shared memory). Elsewhere only the order differs: 1e-6 in float32.
* Pipelines, synchronous or not, compute what one process computes, on other ranks: nothing differs.
* Tensor, sequence and context parallelism split single sums, so roundings differ: 1e-5 in float32 and 1e-12 in float64, per
  tensor.
* bfloat16 rounds to 8 bits, unit roundoff u = 2^-8. Between two plans the roundings of a block are other ones, about R = 8 of
  them (two norms, query-key-value, attention, output, two feed-forward products, residual) forward and as many backward. Each
  perturbs a tensor by a relative error of at most u, independently, so over L blocks they add up as a random walk: ``2 u sqrt(2
  R L)``, the factor two for the two runs, whose errors are both there. With L = 4 that is 6 %, with L = 32 it is 18 %.

Weights follow gradients through the optimizer. A rule that divides each gradient by its own size (Adam, LAMB, Adagrad) turns
the rounding of an element that is nearly zero into a whole step, so weights have two further rules, both applied only where
bits may differ:

* noise elements: where the reference's gradient was at most 10 eps of the whole gradient's norm at some step, an element's
  weight is judged absolutely, by the longest step that the rule can take; the other elements of the tensor are judged
  relatively.
* bfloat16: with a relative error t of the gradient the share of elements whose sign is in doubt is about t, and each moves by
  up to two steps, so a tensor of n elements may be off by ``2 lr sqrt(n t)`` per step beside its relative error.
"""

import math
from dataclasses import dataclass

import torch

from shoal.core.plan import Plan
from shoal.optim.config import TORCH, OptimConfig, PrecisionName
from shoal.optim.rates import rate
from shoal.verify.oracle import Delay

NOISE_EPS = 10
_ROUNDINGS_PER_BLOCK = 8
_BFLOAT16_UNIT = 2.0**-8
_FLOAT16_UNIT = 2.0**-11
_SPLIT = {"float64": 1e-12, "float32": 1e-5}
_REORDERED = {"float64": 1e-14, "float32": 1e-6}
# A norm that nothing is clipped by comes from one kernel per tensor, in its own type.
_SHOWN = {"float64": 1e-12, "float32": 1e-6}
# Optimizers that divide an element's gradient by its own size, in lower case.
_NORMALISING = ("adam", "adamw", "adagrad", "lamb", "nadam", "radam", "adamax", "rmsprop")


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What is allowed, and why."""

    bound: float
    """Relative error per tensor; 0 asks for the same bits."""
    loss_bound: float
    """Relative error of the loss and of the norm: numbers that are shown, added up in another order than the gradients."""
    reason: str
    eps: float
    """Of the type that weights and gradients are kept in."""
    normalises: bool
    """The optimizer divides an element's gradient by its size."""
    step_sizes: tuple[float, ...] = ()
    """The longest way that an element can go at each step."""
    doubtful: float = 0.0
    """Share of elements whose step's sign is in doubt (16-bit arithmetic)."""

    @property
    def is_bitwise(self) -> bool:
        """True when every bit must be the reference's."""
        return self.bound == 0.0

    def reach(self, step: int) -> float:
        """How far apart an element of noise may be after ``step`` + 1 steps: each run may have gone the other way."""
        return 2.0 * sum(self.step_sizes[: step + 1])


def derive_tolerance(
    plan: Plan,
    *,
    precision: PrecisionName,
    depth: int,
    adds_in_order: bool,
    joins_replicas: bool,
    optim: OptimConfig,
    total_steps: int,
    steps: int,
) -> Tolerance:
    """What is allowed for one plan.

    Args:
        plan: what is proved.
        precision: the arithmetic.
        depth: blocks one after another.
        adds_in_order: sums over replicas run in the order of ranks.
        joins_replicas: the reference runs all replicas as one batch (synchronised batch norm), so it has no tree to keep.
        optim: how gradients become weights.
        total_steps: length of the whole run.
        steps: steps that are compared.
    """
    splits = plan.tp > 1 or plan.cp > 1 or joins_replicas
    replicas = (plan.dp or 1) * plan.cp
    weight_type = torch.float64 if precision == "float64" else torch.float32
    eps = float(torch.finfo(weight_type).eps)
    doubtful = 0.0
    if not splits and (adds_in_order or replicas <= 2):
        bound, reason = 0.0, "the same sums in the same order: every bit"
    elif not splits:
        bound = _REORDERED.get(precision, _REORDERED["float32"])
        reason = f"the same sums, replicas in another order: {bound:g}"
    elif precision in _SPLIT:
        bound = _SPLIT[precision]
        reason = f"sums are split, {precision}: {bound:g}"
    else:
        unit = _BFLOAT16_UNIT if precision == "bfloat16" else _FLOAT16_UNIT
        bound = 2.0 * unit * math.sqrt(2 * _ROUNDINGS_PER_BLOCK * max(1, depth))
        doubtful = bound
        reason = f"sums are split, {precision}, {depth} blocks: 2 u sqrt(2 R L) = {bound:.2g}"
    return Tolerance(
        bound=bound,
        loss_bound=max(bound, _SHOWN["float64" if precision == "float64" else "float32"]),
        reason=reason,
        eps=eps,
        normalises=_rule(optim) in _NORMALISING,
        step_sizes=tuple(
            _longest_step(optim, step, total_steps, updates=_updates_per_step(plan)) for step in range(steps)
        ),
        doubtful=doubtful,
    )


def _updates_per_step(plan: Plan) -> int:
    """Every microbatch is an update where weights change with each of them."""
    return plan.microbatches or 1 if plan.schedule in (Delay.STASHED, Delay.VERTICAL) else 1


def _longest_step(optim: OptimConfig, step: int, total_steps: int, *, updates: int) -> float:
    """Kingma & Ba 2015 (arXiv 1412.6980), section 2.1: at most lr (1 - b1) / sqrt(1 - b2), or lr where that is larger.

    RAdam and Adamax go no further. NAdam adds the gradient itself to the mean, and RMSprop has no mean: there b1 counts as 0,
    and the decay of RMSprop is its alpha.
    """
    kind = _rule(optim)
    first, second = optim.args.get("betas", optim.betas)
    if kind == "rmsprop":
        second = optim.args.get("alpha", 0.99)
    if kind in ("rmsprop", "nadam"):
        first = 0.0
    longest: float = max(1.0, (1 - first) / math.sqrt(1 - second))
    ticks = range(step * updates, (step + 1) * updates)
    return sum(rate(optim, tick, total_steps * updates) for tick in ticks) * longest


def _rule(optim: OptimConfig) -> str:
    return optim.name.removeprefix(TORCH).lower()
