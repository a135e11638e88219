"""A plan's steps beside the reference's: the error of every tensor, and what is further off than allowed.

Error is the norm of the difference over the norm of the reference, per tensor. A gradient that is below 10 eps of the whole
gradient's norm is noise: it is listed and bounded by that amount absolutely. The other rules, and why weights need their own,
are in ``tolerance.py``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.verify.capture import KINDS, Step
from shoal.verify.tolerance import NOISE_EPS, Tolerance

_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg")
"""Optimizer states that are made of squares of gradients; ``sum`` is Adagrad's, ``square_avg`` RMSprop's and Adadelta's."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One number or tensor of one step."""

    step: int
    """Counted from 1, as people do."""
    kind: str
    name: str
    error: float
    """Relative, over the elements that are not noise."""
    allowed: float
    is_bitwise: bool
    is_noise: bool = False

    @property
    def is_wrong(self) -> bool:
        """True when it is further off than allowed; NaN is."""
        return not self.error <= self.allowed


@dataclass
class Verdict:
    """The comparison of a whole run."""

    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    is_bitwise: bool = True
    """Every gradient, weight, optimizer state and buffer has the reference's bits."""
    wrong: list[Judged] = field(default_factory=list)
    """In the order in which they went wrong."""
    noise: set[str] = field(default_factory=set)
    num_compared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, judged: Judged) -> None:
        """Enter one comparison."""
        self.num_compared[judged.kind] += 1
        error = math.inf if math.isnan(judged.error) else judged.error
        if judged.is_noise:
            self.noise.add(f"{judged.kind}/{judged.name}")
        else:
            self.worst[judged.kind] = max(self.worst[judged.kind], error)
        if judged.kind not in ("loss", "norm"):
            self.is_bitwise = self.is_bitwise and judged.is_bitwise
        if judged.is_wrong:
            self.wrong.append(judged)


class Comparer:
    """Compares step after step, because which elements are noise is decided by all gradients so far."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.verdict = Verdict()
        self._doubt: dict[str, Tensor] = {}
        """Of every element, what rounding is of its gradient, at most: 1 where the gradient is noise."""

    def add(self, index: int, reference: Step, found: Step) -> list[Judged]:
        """Compare step number ``index`` (from 0); returns what is wrong in it, in the order of ``KINDS``."""
        self._remember_noise(reference)
        judged = [self._number(index, "loss", reference.loss, found.loss)]
        # A step that both skip overflowed in both, and which kind of overflow came out is an accident.
        if not (reference.skipped and found.skipped):
            judged.append(self._number(index, "norm", reference.norm, found.norm))
        if reference.skipped != found.skipped:
            judged.append(_missing(index, "grad", "(whether the step is skipped)"))
        whole = _norm_of(reference.tensors, "grad/")
        for key in sorted(reference.tensors.keys() | found.tensors.keys()):
            kind, _, name = key.partition("/")
            if key not in reference.tensors or key not in found.tensors:
                judged.append(_missing(index, kind, name))
                continue
            judged.append(self._tensor(index, kind, name, reference.tensors[key], found.tensors[key], whole))
        judged.sort(key=lambda one: KINDS.index(one.kind))
        for one in judged:
            self.verdict.add(one)
        return [one for one in judged if one.is_wrong]

    def _remember_noise(self, reference: Step) -> None:
        """Note how much of each element's gradient is noise; the most of all steps stays, because its weight has moved by it."""
        if self.tolerance.is_bitwise or not self.tolerance.normalises:
            return
        limit = NOISE_EPS * self.tolerance.eps * _norm_of(reference.tensors, "grad/")
        for key, tensor in reference.tensors.items():
            if key.startswith("grad/"):
                name, size = key.removeprefix("grad/"), tensor.double().abs()
                # Exact zeros are no noise: a row that no token touched stays where it is in both runs.
                doubt = torch.where(size > 0, limit / size, torch.zeros_like(size)).clamp_(max=1.0)
                self._doubt[name] = torch.maximum(self._doubt[name], doubt) if name in self._doubt else doubt

    def _number(self, index: int, kind: str, reference: float, found: float) -> Judged:
        error = 0.0 if reference == found else abs(found - reference) / max(abs(reference), 1e-300)
        return Judged(
            step=index + 1,
            kind=kind,
            name=kind,
            error=error,
            allowed=self.tolerance.loss_bound,
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
            step=index + 1, kind=kind, name=name, error=error, allowed=allowed, is_bitwise=False, is_noise=is_noise
        )

    def _measure(
        self, index: int, kind: str, name: str, reference: Tensor, found: Tensor, whole: float
    ) -> tuple[float, float, bool]:
        """Error, what is allowed, and whether it is noise."""
        bound = self.tolerance.bound
        apart, size = (found.double() - reference.double()), float(reference.double().norm())
        if self.tolerance.is_bitwise or not reference.is_floating_point():
            return _relative(apart, size), 0.0, False
        if kind == "optimizer":
            owner, _, key = name.rpartition("/")
            if key in self.tolerance.state_sizes:
                return self._measure_state(owner, reference, apart, self.tolerance.state_reach(key, index))
        if kind in ("grad", "optimizer"):
            # Moments are sums of gradients and of their squares, so what is noise in one is noise in the other.
            floor = NOISE_EPS * self.tolerance.eps * whole
            floor = floor**2 if name.rpartition("/")[2] in _SQUARES else floor
            if size <= floor:
                is_within = float(apart.norm()) <= floor
                return (0.0 if is_within else _relative(apart, size)), bound, is_within
        if kind == "weight":
            return self._measure_quotients(name, reference, apart, self.tolerance.reach(index))
        return _relative(apart, size), bound, False

    def _measure_quotients(
        self, name: str, reference: Tensor, apart: Tensor, reach: float
    ) -> tuple[float, float, bool]:
        """Of weights, and of state that is made of quotients of a parameter's gradients: noise may be ``reach`` apart."""
        bound, size = self.tolerance.bound, float(reference.double().norm())
        doubt = self._doubt.get(name)
        quiet = None if doubt is None else doubt >= 1.0
        if quiet is not None and bool(quiet.any()):
            if not float(apart[quiet].abs().max()) <= reach:
                return _relative(apart, size), bound, False
            apart = torch.where(quiet, torch.zeros_like(apart), apart)
        slack = 0.0
        if self.tolerance.doubtful and self.tolerance.normalises and size > 0:
            # What has no longest step is a gradient that one of both runs may have forgotten: at most itself.
            step = reach if math.isfinite(reach) else size / math.sqrt(apart.numel())
            slack = step * math.sqrt(apart.numel() * self.tolerance.doubtful) / size
        return _relative(apart, size), bound + slack, quiet is not None and bool(quiet.all())

    def _measure_state(self, name: str, reference: Tensor, apart: Tensor, reach: float) -> tuple[float, float, bool]:
        """The same of state, whose elements are also in doubt where their gradients are *not* noise: a rounding that is a
        hundredth of a gradient moves its quotient by a hundredth of the way."""
        doubt, size = self._doubt.get(name), float(reference.double().norm())
        if doubt is None or not math.isfinite(reach) or size == 0.0:
            return self._measure_quotients(name, reference, apart, reach)
        excused = torch.minimum(apart.abs(), reach * doubt) * (doubt < 1.0)
        error, allowed, is_noise = self._measure_quotients(
            name, reference, apart.sign() * (apart.abs() - excused), reach
        )
        if not error <= allowed:
            return error, allowed, is_noise
        # What is shown is the whole difference, beside what of it each element may have.
        whole, _, _ = self._measure_quotients(name, reference, apart, reach)
        return whole, allowed + _relative(excused, size), is_noise


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
