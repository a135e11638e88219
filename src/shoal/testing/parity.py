"""How far two sets of tensors are apart, measured as ``shoal verify`` does, and the first one that differs by name.

Error is the norm of the difference over the norm of the reference. A tensor whose reference is below 10 eps of the whole
set's norm is noise: a relative error of it says nothing, so it is bounded by that same amount absolutely.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_NOISE_EPS = 10


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome for one set of tensors."""

    worst: float
    """Largest relative error among tensors that are not noise."""
    worst_name: str | None
    is_bitwise: bool
    first_difference: str | None
    """The first tensor, in the order of names, that is not bit for bit the same."""
    noise: tuple[str, ...]
    """Tensors too small to be judged relatively; each was within the absolute bound."""


def compare(reference: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> Comparison:
    """Compare tensors by name.

    Raises:
        AssertionError: names or shapes are not the same, which is a difference that no tolerance covers.
    """
    missing = sorted(reference.keys() ^ found.keys())
    assert not missing, f"only one side has {missing}"
    total = sum(float(tensor.double().square().sum()) for tensor in reference.values()) ** 0.5
    worst, worst_name, first, noise = 0.0, None, None, []
    for name in sorted(reference):
        ours, theirs = found[name], reference[name]
        assert ours.shape == theirs.shape, f"{name} is {tuple(ours.shape)}, the reference is {tuple(theirs.shape)}"
        if torch.equal(ours, theirs):
            continue
        first = first or name
        error, size = float((ours.double() - theirs.double()).norm()), float(theirs.double().norm())
        bound = _NOISE_EPS * torch.finfo(theirs.dtype).eps * total if theirs.is_floating_point() else 0.0
        if size <= bound and error <= bound:
            noise.append(name)
            continue
        relative = error / size if size > 0 else math.inf
        if math.isnan(relative):
            relative = math.inf
        if relative > worst:
            worst, worst_name = relative, name
    return Comparison(
        worst=worst, worst_name=worst_name, is_bitwise=first is None, first_difference=first, noise=tuple(noise)
    )


def assert_close(reference: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], *, bound: float) -> None:
    """Fail unless every tensor is within ``bound``; a bound of 0 asks for the same bits.

    Raises:
        AssertionError: names the worst tensor and its error.
    """
    comparison = compare(reference, found)
    if bound == 0.0:
        assert comparison.is_bitwise, (
            f"{comparison.first_difference} differs; the worst error is {comparison.worst:.3g}"
        )
    assert comparison.worst <= bound, f"{comparison.worst_name} is off by {comparison.worst:.3g}, allowed is {bound:g}"
