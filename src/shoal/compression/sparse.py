"""Codecs that send some elements as they are and none of the others: top-k, random-k and all above a threshold.

What is sent is exact, so with error feedback what is sent and what is kept add up to what was given, to the bit. Magnitudes are
compared as whole numbers (a float32 without its sign orders like one), where NaN is above infinity and above all else: what is
not finite is sent first. Equal magnitudes go by the lowest index.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from shoal.compression.codec import Encoded, Field, Payload, check_flat, deliver, room_for
from shoal.compression.keyed import draw_bits

_NO_SIGN = 0x7FFFFFFF
# A sample of so many elements guesses where the k-th magnitude lies; a wrong guess costs another pass and changes no bit.
_SAMPLE = 1 << 14
# Boundaries of random-k's ranges are multiples of a fraction; with a larger denominator they would leave 64 bits.
_LARGEST_DENOMINATOR = 10**6


def count_kept(ratio: float, numel: int) -> int:
    """Elements that a ratio keeps: at least one of any."""
    return min(numel, max(1, int(ratio * numel)))


def select_largest(flat: Tensor, k: int) -> Tensor:
    """Ascending indices of the ``k`` largest magnitudes, of equal ones the first.

    torch's ``topk`` leaves open which of equal ones it takes, and sorts all of the tensor: this one guesses a bound from a
    sample, sorts what is above it, and is exact whatever the guess was, because it tries again below when too few are above.
    """
    sizes = flat.view(torch.int32) & _NO_SIGN
    places = None
    if flat.numel() > 4 * _SAMPLE:
        sample = sizes[:: flat.numel() // _SAMPLE]
        share = 1.25 * k / flat.numel() + 16 / _SAMPLE
        if share < 0.5:
            bound = sample.topk(int(share * sample.numel())).values[-1]
            places = (sizes >= bound).nonzero().squeeze(1)
    if places is not None and places.numel() >= k:
        sizes = sizes[places]
    else:
        places = None
    least = sizes.topk(k, sorted=False).values.min()
    kept = sizes > least
    ties = (sizes == least).nonzero().squeeze(1)
    kept[ties[: k - int(kept.count_nonzero())]] = True
    inside = kept.nonzero().squeeze(1)
    return inside if places is None else places[inside]


def _gathered(flat: Tensor, places: Tensor, key: int, offset: int, out: Payload | None) -> Encoded:
    if flat.numel() > _NO_SIGN:
        raise ValueError(f"places are sent as int32, and there are {flat.numel()} elements; send them in parts")
    return Encoded(deliver((flat[places], places.to(torch.int32)), out), offset, key)


def _scattered(values: Tensor, places: Tensor, numel: int, out: Tensor | None) -> Tensor:
    return room_for(numel, values, out).zero_().index_copy_(0, places.to(torch.int64), values)


@dataclass(frozen=True)
class TopK:
    """The largest magnitudes of the tensor, with their places, counted from the tensor's first element.

    A choice among all elements depends on what the tensor is: a shard's largest are not the whole's. (Stich et al. 2018, section
    2.)
    """

    ratio: float

    has_fixed_size = True

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """Values and places of the elements that are kept."""
        kept = count_kept(self.ratio, numel)
        return (torch.float32, kept), (torch.int32, kept)

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """The largest elements in the order of their places."""
        flat = check_flat(flat)
        if not flat.numel():
            return _gathered(flat, flat.new_empty(0, dtype=torch.int64), key, offset, out)
        return _gathered(flat, select_largest(flat, count_kept(self.ratio, flat.numel())), key, offset, out)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """The elements in their places, zeros elsewhere."""
        values, places = encoded.payload
        return _scattered(values, places, numel, out)


@dataclass(frozen=True)
class Threshold:
    """Every element with at least this magnitude, with its place. How many there are depends on the values.

    ``fields`` gives the most there can be; the bytes that are sent are eight for each element that is.
    """

    threshold: float

    has_fixed_size = False

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """Values and places, if all elements were kept."""
        return (torch.float32, numel), (torch.int32, numel)

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """The elements at or above the threshold, and all that are not finite."""
        flat = check_flat(flat)
        # Not "at least": of a NaN every comparison is false, and it must be sent.
        return _gathered(flat, (flat.abs() < self.threshold).logical_not_().nonzero().squeeze(1), key, offset, out)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """The elements in their places, zeros elsewhere."""
        values, places = encoded.payload
        return _scattered(values, places, numel, out)


@dataclass(frozen=True)
class RandomK:
    """One element of each range of ``1 / ratio`` elements, chosen by key: no places are sent, and payloads may be summed.

    The ranges lie in the global numbering (range ``j`` begins at ``floor(j / ratio)``), so shards cut between ranges send what
    the whole would. Every element of a range of n has the chance 1/n, as in random-k (Stich et al. 2018, definition 2.1); one
    per range makes the choice a matter of k draws. ``unbiased`` sends n times the element, whose mean is the element; it is not
    for error feedback, which needs a contraction.
    """

    ratio: float
    unbiased: bool = False

    has_fixed_size = True

    def fields(self, numel: int, offset: int = 0) -> tuple[Field, ...]:
        """One value per range that is touched."""
        first, stop = self._ranges(numel, offset)
        return ((torch.float32, stop - first),)

    def encode(self, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None) -> Encoded:
        """The chosen values in the order of their places."""
        flat = check_flat(flat)
        places, widths = self._choose(flat.numel(), key, offset, flat.device)
        values = flat[places]
        return Encoded(deliver((values.mul_(widths) if self.unbiased else values,), out), offset, key)

    def decode(self, encoded: Encoded, numel: int, out: Tensor | None = None) -> Tensor:
        """The values in the places that the key chooses, zeros elsewhere."""
        (values,) = encoded.payload
        places, _ = self._choose(numel, encoded.key, encoded.offset, values.device)
        return _scattered(values, places, numel, out)

    @property
    def _fraction(self) -> Fraction:
        return max(Fraction(self.ratio).limit_denominator(_LARGEST_DENOMINATOR), Fraction(1, _LARGEST_DENOMINATOR))

    def _ranges(self, numel: int, offset: int) -> tuple[int, int]:
        """The first range that is touched, and the one after the last."""
        if not numel:
            return 0, 0
        share = self._fraction
        # Range j holds the elements e with j / share - 1 < e < (j + 1) / share, so e is in the last j with floor(j / share) <= e.
        first, last = (
            (-(-(element + 1) * share.numerator // share.denominator)) - 1 for element in (offset, offset + numel - 1)
        )
        return first, last + 1

    def _choose(self, numel: int, key: int, offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places in the shard, and how many elements each was chosen from."""
        share = self._fraction
        first, stop = self._ranges(numel, offset)
        edges = torch.arange(first, stop + 1, device=device) * share.denominator // share.numerator - offset
        edges.clamp_(0, numel)
        widths = edges.diff()
        drawn = draw_bits(key, first, stop - first, device).to(torch.int64) & 0xFFFFFFFF
        return edges[:-1] + (drawn * widths >> 32), widths
