"""A plan's steps beside the reference's: the error of every tensor, and what is further off than allowed.

Error is the norm of the difference over the norm of the reference, per tensor. A gradient that is below 10 eps of the whole
gradient's norm is noise: it is listed and bounded by that amount absolutely. The bounds are in
``tolerance.py``; what rounding of a gradient excuses in weights and optimizer state is ``Known``'s.

How well each element of a parameter's gradients is known, and what follows for its weight and its optimizer state.

Where sums are split, two right runs have gradients that differ by rounding. A gradient of which rounding is all there is (the
bias of attention's keys, whose true gradient is zero) is another number in every run, and so is whatever the optimizer makes of
it; the same holds, by its share, of an element that is little more than rounding. So a weight and its state are known as well as
their gradients, and no better. Here the difference of both runs' gradients is followed through the rule, element by element:

* what is linear in gradients (first moments, momentum, Adamax's norm) may be off by the sum of their differences;
* what is made of squares, by the sum of ``2 |g| |dg| + dg^2``;
* a weight under a rule without quotients, by twice the rate times what the momentum may be off by: momentum keeps at most the
  sum of all gradients, and Nesterov's adds one more;
* a quotient (``tolerance.py``), by its *doubt* times the longest way that both runs can be from each other. The doubt is 1 where
  the gradient is noise. Elsewhere a rounding ``dg`` changes ``m / sqrt(v)`` by at most ``2 sqrt(t) dg / g`` of its largest value
  after t updates: both m and sqrt(v) move by at most dg, and of t squares in a mean each counts for about 1/t. And nowhere is the
  doubt more than ``sqrt(t) dg / eps``, because the rule divides by no less than its eps: in float64 a gradient of 1e-15 makes no
  whole step, but 1e-7 of one. A decay that is added to the gradient makes a dg of how far weights were apart before.

The mean that batch norm keeps of its features may be off by as much as the weights that rounding moved.

A difference of gradients counts up to the law's limit of noise, 10 eps of the whole gradient's norm, and not at all where the
reference's element is noise and the plan's is not: that is no rounding, and what the rule makes of it is judged like the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.verify.compare.tolerance import Tolerance
from shoal.verify.reference.case import NOISE_EPS
from shoal.verify.reference.recording import KINDS, Step

_SQUARES = {"exp_avg_sq": 1.0, "max_exp_avg_sq": 1.0, "sum": 1.0, "square_avg": 1.0, "acc_delta": 4.0}
"""Optimizer states that are made of squares of gradients, and by how much these are multiplied at most: ``sum`` is Adagrad's,
``square_avg`` RMSprop's and Adadelta's, ``acc_delta`` the latter's steps, at most twice a small gradient."""
_WEIGHTS = ("ax",)
"""Optimizer states that are weights: the mean that ASGD keeps."""


@dataclass
class Known:
    """What is known of one parameter's gradients so far; every tensor has its shape."""

    doubt: Tensor
    """The largest share of a quotient that is rounding, of all steps: the weight has moved by it."""
    linear: Tensor
    """How far both runs' gradients are apart, added up."""
    square: Tensor
    """The same of their squares."""
    way: Tensor
    """How far weights may be apart by it under a rule without quotients."""
    largest: Tensor
    """The largest difference of what both runs' rules were given in one step."""

    def add(self, step: int, reference: Tensor, found: Tensor, limit: float, tolerance: Tolerance) -> None:
        """Enter the gradients of a step, counted from 0.

        Args:
            step: its number.
            reference: the gradient of one process, in float64.
            found: the plan's.
            limit: up to which an element is noise.
            tolerance: of the plan and its rule.
        """
        size, apart = reference.abs(), (found - reference).abs()
        is_small = size <= limit
        is_beyond = is_small & ~(apart <= limit)
        # Where a step has several updates the gradients of all but the last are not seen.
        unseen = tolerance.updates > 1
        rounding = torch.full_like(apart, limit) if unseen else apart.clamp(max=limit)
        root = math.sqrt((step + 1.0) * tolerance.updates)
        doubt = torch.where(size > 0, 2.0 * root * rounding / size, (rounding > 0).to(size.dtype))
        # Zeros in both runs are no noise: a row that no token touched stays where it is.
        doubt[is_small & (torch.maximum(size, found.abs()) > 0)] = 1.0
        doubt[(size == 0) & (found == 0)] = 0.0
        doubt[is_beyond] = 0.0
        rounding = torch.where(is_beyond, torch.zeros_like(rounding), rounding)
        self.largest = torch.maximum(self.largest, rounding + self._decayed(step, tolerance))
        if tolerance.divisor > 0:
            doubt = torch.minimum(doubt, root * self.largest / tolerance.divisor)
        self.doubt = torch.maximum(self.doubt, doubt.clamp_(max=1.0))
        rounding = rounding * tolerance.updates
        self.linear = self.linear + rounding
        self.square = self.square + rounding * (2.0 * size + rounding)
        self.way = self.way + 2.0 * tolerance.step_sizes[step] * self.linear

    def _decayed(self, step: int, tolerance: Tolerance) -> Tensor:
        """How far apart the decays are that both runs add to their gradients: as their weights, times its rate."""
        decay = tolerance.decay if self.doubt.ndim > 1 or tolerance.decays_1d else 0.0
        # Of several updates in a step the later ones decay what the earlier ones moved.
        before = tolerance.reach(step if tolerance.updates > 1 else step - 1)
        return decay * before * self.doubt

    def excuse(self, kind: str, key: str, step: int, tolerance: Tolerance) -> Tensor:
        """How far each element of the weight, or of the optimizer state ``key``, may be apart after a step by rounding alone."""
        if kind == "optimizer" and key in tolerance.state_sizes:
            return self._of_quotient(tolerance.state_reach(key, step))
        if kind == "weight" or key in _WEIGHTS:
            return self._of_quotient(tolerance.reach(step)) if tolerance.normalises else self.way
        return self.square * _SQUARES[key] if key in _SQUARES else self.linear

    def _of_quotient(self, reach: float) -> Tensor:
        if math.isfinite(reach):
            return self.doubt * reach
        # What has no longest step is a gradient that one of both runs may have forgotten.
        return torch.where(self.doubt >= 1.0, torch.full_like(self.doubt, math.inf), self.linear)


def nothing_known(like: Tensor) -> Known:
    """Before the first step."""
    zeros = torch.zeros_like(like, dtype=torch.float64)
    return Known(doubt=zeros, linear=zeros, square=zeros, way=zeros, largest=zeros)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One number or tensor of one step."""

    step: int
    """Counted from 1, as people do."""
    kind: str
    name: str
    error: float
    """Relative, without what rounding of gradients excuses."""
    allowed: float
    is_bitwise: bool
    is_noise: bool = False
    """It is within what is allowed because rounding of gradients was excused."""
    apart: float = 0.0
    """Norm of the difference, with all that is excused."""

    @property
    def is_wrong(self) -> bool:
        """True when it is further off than allowed; NaN is."""
        return not self.error <= self.allowed


@dataclass
class Comparison:
    """The comparison of a whole run."""

    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    is_bitwise: bool = True
    """Every gradient, weight, optimizer state and buffer has the reference's bits."""
    wrong: list[Judged] = field(default_factory=list)
    """In the order in which they went wrong."""
    is_amplified: bool = True
    """Whatever is wrong could be rounding that an Adam-like rule made whole steps of; then float64 decides."""
    noise: dict[str, float] = field(default_factory=dict)
    """Of which rounding was excused: the norm of the difference as it is, at its largest."""
    num_compared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, judged: Judged) -> None:
        """Enter one comparison."""
        self.num_compared[judged.kind] += 1
        error = math.inf if math.isnan(judged.error) else judged.error
        if judged.is_noise:
            key = f"{judged.kind}/{judged.name}"
            self.noise[key] = max(self.noise.get(key, 0.0), judged.apart)
        self.worst[judged.kind] = max(self.worst[judged.kind], error)
        if judged.kind not in ("loss", "norm"):
            self.is_bitwise = self.is_bitwise and judged.is_bitwise
        if judged.is_wrong:
            self.wrong.append(judged)


class Comparer:
    """Compares step after step, because what is noise is decided by all gradients so far."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.comparison = Comparison()
        self._known: dict[str, Known] = {}
        """By parameter."""
        self._moved = 0.0
        """How far apart the weights are, at most, that rounding moved and that the next step's buffers are computed with."""
        self._is_loose = False
        """Weights that the model reads in float32 are apart, so that the rest of a step is known in float32 as well."""
        self._rescaled = 0.0
        """How far apart, relatively, all gradients of this step were clipped."""

    def add(self, index: int, reference: Step, found: Step) -> list[Judged]:
        """Compare step number ``index`` (from 0); returns what is wrong in it, in the order of ``KINDS``."""
        whole = _norm_of(reference.tensors, "grad/")
        self._remember_noise(index, reference, found, whole)
        self._rescaled = self._clipped_apart(reference, found)
        allowed = max(self.tolerance.loss_bound, self._bound(""))
        judged = [self._number(index, "loss", reference.loss, found.loss, allowed)]
        # A step that both skip overflowed in both, and which kind of overflow came out is an accident.
        if not (reference.skipped and found.skipped):
            allowed = self._norm_bound(reference, whole)
            judged.append(self._number(index, "norm", reference.norm, found.norm, allowed))
        if reference.skipped != found.skipped:
            judged.append(_missing(index, "grad", "(whether the step is skipped)"))
        for key in sorted(reference.tensors.keys() | found.tensors.keys()):
            kind, _, name = key.partition("/")
            if key not in reference.tensors or key not in found.tensors:
                judged.append(_missing(index, kind, name))
                continue
            judged.append(self._tensor(index, kind, name, reference.tensors[key], found.tensors[key], whole))
        judged.sort(key=lambda one: KINDS.index(one.kind))
        for one in judged:
            self.comparison.add(one)
            if one.is_wrong and not self._is_amplified(one, reference, found):
                self.comparison.is_amplified = False
            if one.is_noise and one.kind == "weight":
                key = f"weight/{one.name}"
                apart = reference.tensors[key].double() - found.tensors[key].double()
                self._moved = max(self._moved, float(apart.abs().max()))
        self._is_loose = self._is_loose or any(
            one.kind == "weight" and one.name in self.tolerance.narrow and not one.is_bitwise for one in judged
        )
        return [one for one in judged if one.is_wrong]

    def _is_narrow(self, owner: str) -> bool:
        return self._is_loose or owner in self.tolerance.narrow

    def _bound(self, owner: str) -> float:
        return self.tolerance.narrow_bound if self._is_narrow(owner) else self.tolerance.bound

    def _limit(self, owner: str, whole: float) -> float:
        """Up to which a gradient of this parameter is noise."""
        eps = self.tolerance.narrow_eps if self._is_narrow(owner) else self.tolerance.eps_of(owner)
        return NOISE_EPS * eps * whole

    def _norm_bound(self, reference: Step, whole: float) -> float:
        """The whole gradient's norm is known as well as its parts, each by its share."""
        keys = [f"grad/{name}" for name in self.tolerance.narrow if f"grad/{name}" in reference.tensors]
        part = _norm_of({key: reference.tensors[key] for key in keys}, "") / whole if whole > 0 else 0.0
        return max(self.tolerance.loss_bound, self._bound("")) + self.tolerance.narrow_bound * part

    def _clipped_apart(self, reference: Step, found: Step) -> float:
        """Where the norm is known in float32 only and is clipped by, so is all that follows; squares twice."""
        limit = self.tolerance.clip
        if not self.tolerance.narrow or limit is None or not max(reference.norm, found.norm) > limit:
            return 0.0
        apart = abs(found.norm - reference.norm) / reference.norm if reference.norm > 0 else 0.0
        return 2.0 * min(apart, self.tolerance.narrow_bound)

    def _remember_noise(self, index: int, reference: Step, found: Step, whole: float) -> None:
        if self.tolerance.is_bitwise:
            return
        for key, tensor in reference.tensors.items():
            other = found.tensors.get(key)
            if key.startswith("grad/") and other is not None and other.shape == tensor.shape:
                name = key.removeprefix("grad/")
                known = self._known.setdefault(name, nothing_known(tensor))
                known.add(index, tensor.double(), other.double(), self._limit(name, whole), self.tolerance)

    def _is_amplified(self, judged: Judged, reference: Step, found: Step) -> bool:
        """True when what is wrong could come of rounding: not before the rule's first step, and no further than it can go."""
        if not self.tolerance.amplifies or not math.isfinite(judged.error):
            return False
        if judged.kind != "weight":
            return judged.step > 1
        key = f"weight/{judged.name}"
        theirs, ours = reference.tensors[key].double(), found.tensors[key].double()
        reach = self.tolerance.reach(judged.step - 1) + self.tolerance.bound * theirs.abs()
        return bool(((ours - theirs).abs() <= reach).all())

    def _number(self, index: int, kind: str, reference: float, found: float, allowed: float) -> Judged:
        error = 0.0 if reference == found else abs(found - reference) / max(abs(reference), 1e-300)
        return Judged(
            step=index + 1,
            kind=kind,
            name=kind,
            error=error,
            allowed=allowed,
            is_bitwise=reference == found,
        )

    def _tensor(self, index: int, kind: str, name: str, reference: Tensor, found: Tensor, whole: float) -> Judged:
        if found.shape != reference.shape or found.dtype != reference.dtype:
            return _missing(index, kind, f"{name} ({tuple(found.shape)} for {tuple(reference.shape)})")
        if torch.equal(reference, found):
            return Judged(
                step=index + 1, kind=kind, name=name, error=0.0, allowed=self.tolerance.bound, is_bitwise=True
            )
        error, allowed, is_noise = self._measure(index, kind, name, reference, found, whole)
        return Judged(
            step=index + 1,
            kind=kind,
            name=name,
            error=error,
            allowed=allowed,
            is_bitwise=False,
            is_noise=is_noise,
            apart=float((found.double() - reference.double()).norm()) if is_noise else 0.0,
        )

    def _measure(
        self, index: int, kind: str, name: str, reference: Tensor, found: Tensor, whole: float
    ) -> tuple[float, float, bool]:
        """Error, what is allowed, and whether rounding was excused."""
        apart, size = (found.double() - reference.double()), float(reference.double().norm())
        owner, _, key = name.rpartition("/") if kind == "optimizer" else (name, "", "")
        error, allowed = _relative(apart, size), self._bound(owner)
        if self.tolerance.is_bitwise or not reference.is_floating_point():
            return error, 0.0, False
        if kind == "grad":
            floor = self._limit(name, whole)
            is_noise = size <= floor and float(apart.norm()) <= floor
            return (0.0 if is_noise else error), allowed, is_noise
        allowed += self._slack(index, kind, key, apart.numel(), size)
        if kind != "buffer":
            allowed += self._rescaled
        excuse = None if error <= allowed else self._excuse(index, kind, owner, key, apart)
        if excuse is None:
            return error, allowed, False
        error = _relative((apart.abs() - excuse).clamp_(min=0.0), size)
        return error, allowed, error <= allowed

    def _excuse(self, index: int, kind: str, owner: str, key: str, apart: Tensor) -> Tensor | None:
        """How far each element may be apart by rounding alone; None where there is nothing to excuse it by."""
        if kind == "buffer":
            # The mean that batch norm keeps moves with the bias before it, whose true gradient is zero; nothing else does.
            is_mean = owner.rpartition(".")[2] == "running_mean"
            return torch.full_like(apart, self._moved) if is_mean and self._moved > 0 else None
        known = self._known.get(owner)
        if known is None or known.doubt.shape != apart.shape:
            return None
        return known.excuse(kind, key, index, self.tolerance)

    def _slack(self, index: int, kind: str, key: str, count: int, size: float) -> float:
        """What 16-bit arithmetic may move beside: signs that are in doubt."""
        is_quotient = kind == "weight" or (kind == "optimizer" and key in self.tolerance.state_sizes)
        if not (is_quotient and self.tolerance.doubtful and self.tolerance.normalises and size > 0):
            return 0.0
        reach = self.tolerance.reach(index) if kind == "weight" else self.tolerance.state_reach(key, index)
        # What has no longest step is a gradient that one of both runs may have forgotten: at most itself.
        step = reach if math.isfinite(reach) else size / math.sqrt(count)
        return step * math.sqrt(count * self.tolerance.doubtful) / size


def _relative(apart: Tensor, size: float) -> float:
    error = float(apart.norm())
    if error == 0.0:
        return 0.0
    return error / size if size > 0 else math.inf


def _norm_of(tensors: Mapping[str, Tensor], prefix: str) -> float:
    return math.sqrt(
        sum(float(tensor.double().square().sum()) for key, tensor in tensors.items() if key.startswith(prefix))
    )


def _missing(index: int, kind: str, name: str) -> Judged:
    return Judged(step=index + 1, kind=kind, name=name, error=math.inf, allowed=0.0, is_bitwise=False)
