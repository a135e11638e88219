"""How far a plan may be from the reference: the numbers of ``docs/guarantees.md``, and where they come from.

* Data parallelism and ZeRO add the same numbers in the same tree, so **nothing** may differ where the sum runs in the order of
  ranks (always for two ranks; for any number over shared memory). Elsewhere only the order differs: 1e-6 in float32.
* Pipelines, synchronous or not, compute what one process computes, on other ranks: nothing differs.
* Tensor, sequence and context parallelism split single sums, so roundings differ: 1e-5 in float32 and 1e-12 in float64, per
  tensor.
* A model that reads weights in float32 by itself, as some norms do, sums their gradients in float32 in a float64 proof too. Where
  a plan splits sums, those are the same sums in another order: 1e-6 and float32's limit of noise, for these weights
  (``reference/rounding.py``); and for the rest of the model after a step that left them apart, by however little: the model
  rounds them to float32, so what the next pass sees is apart by a rounding of float32.
* bfloat16 rounds to 8 bits, unit roundoff u = 2^-8. Between two plans the roundings of a block are other ones, about R = 8 of
  them (two norms, query-key-value, attention, output, two feed-forward products, residual) forward and as many backward. Each
  perturbs a tensor by a relative error of at most u, independently, so over L blocks they add up as a random walk: ``2 u sqrt(2
  R L)``, the factor two for the two runs, whose errors are both there. With L = 4 that is 6 %, with L = 32 it is 18 %.

Weights and optimizer state follow gradients through the optimizer, and are known as well as these, element by element, and no
better: ``tensors.py`` says what rounding excuses, where bits may differ. A rule that divides each gradient by its own size (Adam,
LAMB, Adagrad) turns the rounding of an element that is nearly zero into a whole step; so does state that is made of such
quotients, RMSprop's momentum and Rprop's steps. For these the longest way that the rule can go is here. And:

* bfloat16: with a relative error t of the gradient the share of elements whose sign is in doubt is about t, and each moves by
  up to two steps, so a tensor of n elements may be off by ``2 lr sqrt(n t)`` per step beside its relative error.

RMSprop corrects no bias: its first step is ``lr / sqrt(1 - alpha)``, ten times the rate, for every element. In float32 the
elements that are noise move so far by it that the next gradients are further apart than split sums allow (measured: 2e-5 at a
rate of 1e-3), and how far is a matter of the model's curvature, for which there is no bound. So such plans are proved in float64
alone (``needs_float64``), and centered not at all: there one of six seeds was 4e-11 off, by one element whose gradients were
small twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shoal.core.plan import Plan
from shoal.optim.config import TORCH, OptimConfig, PrecisionName
from shoal.optim.rates import rate
from shoal.verify.oracle.delayed import Delay
from shoal.verify.reference.case import COARSE_FLAT_BOUND, FLAT_BOUNDS

_ROUNDINGS_PER_BLOCK = 8
_BFLOAT16_UNIT = 2.0**-8
_FLOAT16_UNIT = 2.0**-11
_SHORT_EPS = {"bfloat16": 2 * _BFLOAT16_UNIT, "float16": 2 * _FLOAT16_UNIT}
_SPLIT = {"float64": 1e-12, "float32": 1e-5}
_REORDERED = {"float64": 1e-14, "float32": 1e-6}
_NARROW_EPS = float(torch.finfo(torch.float32).eps)
# A norm that nothing is clipped by comes from one kernel per tensor, in its own type.
_SHOWN = {"float64": 1e-12, "float32": 1e-6}
# Optimizers that divide an element's gradient by its own size, in lower case.
_NORMALISING = ("adam", "adamw", "adagrad", "lamb", "nadam", "radam", "adamax", "rmsprop", "rprop")
# What they add to the size that they divide by, where nobody says. Not of LAMB, whose trust ratio makes up for it, nor of Rprop,
# which takes the sign alone.
_DIVISORS = {
    "adam": 1e-8,
    "adamw": 1e-8,
    "nadam": 1e-8,
    "radam": 1e-8,
    "adamax": 1e-8,
    "rmsprop": 1e-8,
    "adagrad": 1e-10,
}


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
    state_sizes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The largest that an element of optimizer state which is made of quotients can be after each step, by the state's name."""
    divisor: float = 0.0
    """The least that the optimizer divides a gradient by, its eps; 0 where it has none."""
    decay: float = 0.0
    """Share of a weight that the optimizer adds to its gradient."""
    decays_1d: bool = False
    """It does so of biases and norms too."""
    clip: float | None = None
    """Longest gradient; a longer one is shortened to it."""
    narrow: frozenset[str] = frozenset()
    """Weights that the model reads in float32 by itself, where that matters."""
    updates: int = 1
    """In a step; the gradient that is compared is the last one's."""
    amplifies: bool = False
    """Rounding can exceed the bound because the rule makes whole steps of it; then float64 decides."""
    doubtful: float = 0.0
    """Share of elements whose step's sign is in doubt (16-bit arithmetic)."""
    short_eps: float = 0.0
    """Of the 16-bit type that the model computes in, where it does."""
    zeros: frozenset[str] = frozenset()
    """Parameters whose true gradient is zero (``reference/rounding.py``): theirs are noise up to ``short_eps``."""

    @property
    def is_bitwise(self) -> bool:
        """True when every bit must be the reference's."""
        return self.bound == 0.0

    @property
    def widest(self) -> float:
        """The bound of those tensors that have the widest."""
        return self.narrow_bound if self.narrow else self.bound

    @property
    def narrow_bound(self) -> float:
        """As ``bound``, of weights that the model reads in float32 by itself."""
        return max(self.bound, _REORDERED["float32"])

    @property
    def narrow_eps(self) -> float:
        """As ``eps``, of weights that the model reads in float32 by itself."""
        return _NARROW_EPS

    def eps_of(self, parameter: str) -> float:
        """How finely a parameter's gradient is known, where it is noise."""
        return max(self.eps, self.short_eps) if parameter in self.zeros else self.eps

    def reach(self, step: int) -> float:
        """How far apart an element of noise may be after ``step`` + 1 steps: each run may have gone the other way."""
        return 2.0 * sum(self.step_sizes[: step + 1])

    def state_reach(self, key: str, step: int) -> float:
        """As ``reach``, of optimizer state."""
        return 2.0 * self.state_sizes[key][step]


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
    narrow: Sequence[str] = (),
    zeros: Sequence[str] = (),
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
        narrow: weights that the model reads in float32 by itself, where the arithmetic is float64.
        zeros: parameters whose gradient is zero in float64, where the arithmetic is of 16 bits.
    """
    splits = plan.tp > 1 or plan.cp > 1 or joins_replicas
    replicas = (plan.dp or 1) * plan.cp
    weight_type = torch.float64 if precision == "float64" else torch.float32
    eps = float(torch.finfo(weight_type).eps)
    doubtful, updates, is_narrow = 0.0, _updates_per_step(plan), False
    if not splits and (adds_in_order or replicas <= 2):
        bound, reason = 0.0, "the same sums in the same order: every bit"
    elif not splits:
        bound = _REORDERED.get(precision, _REORDERED["float32"])
        reason = f"the same sums, replicas in another order: {bound:g}"
    elif precision in _SPLIT:
        bound = _SPLIT[precision]
        reason = f"sums are split, {precision}: {bound:g}"
        if precision == "float64" and narrow:
            is_narrow = True
            reason += (
                f"; {_REORDERED['float32']:g} for {_listed(narrow)}, which the model reads in float32 by itself, and for the "
                "rest once these are apart"
            )
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
        normalises=_normalises(optim),
        step_sizes=tuple(_longest_step(optim, step, total_steps, updates=updates) for step in range(steps)),
        state_sizes=_largest_state(optim, steps, updates=updates),
        divisor=_least_divisor(optim),
        decay=optim.weight_decay if _adds_decay(optim) else 0.0,
        decays_1d=not optim.exempt_1d,
        clip=optim.clip,
        narrow=frozenset(narrow) if is_narrow else frozenset(),
        updates=updates,
        amplifies=splits and precision != "float64" and _normalises(optim),
        doubtful=doubtful,
        short_eps=_SHORT_EPS.get(precision, 0.0),
        zeros=frozenset(zeros),
    )


def flat_bound(precision: PrecisionName, tolerance: Tolerance, narrow: Sequence[str]) -> float:
    """How far the reference's own tree of sums may be from one pass over the whole global batch, whatever the plan splits."""
    own = max(FLAT_BOUNDS.get(precision, COARSE_FLAT_BOUND), tolerance.bound)
    return max(own, _REORDERED["float32"]) if narrow else own


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _updates_per_step(plan: Plan) -> int:
    """Every microbatch is an update where weights change with each of them."""
    return plan.microbatches or 1 if plan.schedule in (Delay.STASHED, Delay.VERTICAL) else 1


def _longest_step(optim: OptimConfig, step: int, total_steps: int, *, updates: int) -> float:
    """Kingma & Ba 2015 (arXiv 1412.6980), section 2.1: at most lr (1 - b1) / sqrt(1 - b2), or lr where that is larger.

    RAdam and Adamax go no further. NAdam adds the gradient itself to the mean: there b1 counts as 0.
    """
    kind = _rule(optim)
    ticks = range(step * updates, (step + 1) * updates)
    rates = [rate(optim, tick, total_steps * updates) for tick in ticks]
    if not _normalises(optim):
        return sum(rates)
    if kind == "rmsprop":
        return sum(lr * _rmsprop_move(optim, tick) for lr, tick in zip(rates, ticks, strict=True))
    if kind == "rprop":
        return sum(_rprop_step(optim, tick) for tick in ticks)
    first, second = optim.args.get("betas", optim.betas)
    if kind == "nadam":
        first = 0.0
    longest: float = max(1.0, (1 - first) / math.sqrt(1 - second))
    return sum(rates) * longest


def _rmsprop_move(optim: OptimConfig, tick: int) -> float:
    """What RMSprop multiplies the rate by, at most: a gradient is at most 1 / sqrt(1 - alpha) of the root of its mean square.

    Centered, the square of the mean is taken off, which by Cauchy and Schwarz is at most 1 - alpha^n of the mean square after n
    updates. The momentum adds the quotients up.
    """
    alpha, momentum = optim.args.get("alpha", 0.99), optim.args.get("momentum", 0.0)
    quotient = 1 / math.sqrt(1 - alpha)
    if optim.args.get("centered", False):
        quotient /= math.sqrt(alpha ** (tick + 1))
    return float(sum(quotient * momentum**past for past in range(tick + 1)))


def _rprop_step(optim: OptimConfig, tick: int) -> float:
    """Rprop's longest step: it begins with the rate, and is multiplied where a sign comes again, up to a limit."""
    _, growth = optim.args.get("etas", (0.5, 1.2))
    smallest, largest = optim.args.get("step_sizes", (1e-6, 50.0))
    return float(min(max(optim.lr * growth ** (tick + 1), smallest), largest))


def _largest_state(optim: OptimConfig, steps: int, *, updates: int) -> dict[str, tuple[float, ...]]:
    ticks = [(step + 1) * updates - 1 for step in range(steps)]
    if not _normalises(optim):
        return {}
    if _rule(optim) == "rmsprop":
        return {"momentum_buffer": tuple(_rmsprop_move(optim, tick) for tick in ticks)}
    if _rule(optim) == "rprop":
        # It forgets a gradient whose sign is not that of the one before, which for noise is an accident of either run.
        return {"step_size": tuple(_rprop_step(optim, tick) for tick in ticks), "prev": (math.inf,) * steps}
    return {}


def needs_float64(optim: OptimConfig) -> bool:
    """True when only float64 tells a rounding from a bug where sums are split."""
    return _rule(optim) == "rmsprop" and _normalises(optim)


def _normalises(optim: OptimConfig) -> bool:
    if _rule(optim) == "rmsprop":
        # With alpha 1 there is no mean square, and centered with alpha 0 nothing is left of it: eps alone divides.
        alpha = optim.args.get("alpha", 0.99)
        return bool(alpha < 1 and (alpha > 0 or not optim.args.get("centered", False)))
    return _rule(optim) in _NORMALISING


def _least_divisor(optim: OptimConfig) -> float:
    kind = _rule(optim)
    if kind not in _DIVISORS or not _normalises(optim):
        return 0.0
    given = optim.args.get("eps", optim.eps)
    return float(_DIVISORS[kind] if given is None else given)


def _adds_decay(optim: OptimConfig) -> bool:
    return _rule(optim) not in ("adamw", "lamb") and not optim.args.get("decoupled_weight_decay", False)


def _rule(optim: OptimConfig) -> str:
    return optim.name.removeprefix(TORCH).lower()
