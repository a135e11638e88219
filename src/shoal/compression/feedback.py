"""Error feedback: what a codec loses is kept and added to what comes next (Karimireddy et al. 2019, algorithm 2).

What was sent plus what is kept equals what was given: exactly for codecs that select, and for int8 and int4 rounded to nearest,
whose difference is a float32 (Sterbenz' lemma); within one rounding for the others. A step that is not taken, such as one with a
gradient that is not finite, must keep the residual from before it: NaN in a residual would never leave.
"""

from dataclasses import dataclass

from torch import Tensor

from shoal.compression.codec import Codec, Encoded


@dataclass(frozen=True)
class Feedback:
    """What error feedback makes of a gradient."""

    encoded: Encoded
    sent: Tensor
    """What the receivers decode."""
    residual: Tensor
    """What is kept for the next step."""


def compensate(gradient: Tensor, residual: Tensor | None, rate_ratio: float = 1.0) -> Tensor:
    """``p = g + e * rate_ratio``, with the former learning rate over this one: the residual was to be applied with the former."""
    if residual is None:
        return gradient
    return gradient + (residual if rate_ratio == 1.0 else residual * rate_ratio)


def encode_with_feedback(
    codec: Codec, gradient: Tensor, residual: Tensor | None, *, key: int = 0, offset: int = 0, rate_ratio: float = 1.0
) -> Feedback:
    """Encode ``p = g + e``, and keep ``p - decode(encode(p))``."""
    given = compensate(gradient, residual, rate_ratio)
    encoded = codec.encode(given, key=key, offset=offset)
    sent = codec.decode(encoded, given.numel())
    return Feedback(encoded, sent, given - sent)
