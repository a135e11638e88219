"""How well each element of a parameter's gradients is known, and what follows for its weight and its optimizer state.

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

The mean that batch norm keeps of its features may be off by as much as the weights that rounding moved (``compare.py``).

A difference of gradients counts up to the law's limit of noise, 10 eps of the whole gradient's norm, and not at all where the
reference's element is noise and the plan's is not: that is no rounding, and what the rule makes of it is judged like the rest.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.verify.tolerance import Tolerance

NOISE_EPS = 10
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
