"""What compression costs in arithmetic, and which elements a rank encodes and decodes for one sum.

A codec reads and writes memory more than it computes, so its speed is a share of the memory's bandwidth: what a copy of the same
tensor moves in the same round (``benchmarks/compression/codecs.py``). The shares were measured on one core of a processor and are
taken for every device; on an accelerator nothing was measured.
"""

from dataclasses import dataclass

from shoal.compression.config import CompressionConfig, has_residual
from shoal.core.compressrule import CompressKind, CompressRule

_FLOAT32 = 4.0
SELECTING: tuple[CompressKind, ...] = ("topk", "threshold", "dgc")
"""Codecs whose payloads are gathered: every rank decodes those of all."""


@dataclass(frozen=True)
class CodecSpeed:
    """Bytes of float32 that are worked off in a second, as a share of the memory's bandwidth."""

    encode: float
    decode: float


SPEEDS: dict[CompressKind, CodecSpeed] = {
    "fp16": CodecSpeed(0.73, 0.55),
    "bf16": CodecSpeed(0.62, 0.58),
    "fp8": CodecSpeed(0.070, 0.028),
    "int8": CodecSpeed(0.10, 0.30),
    "int4": CodecSpeed(0.085, 0.17),
    "qsgd": CodecSpeed(0.014, 0.17),
    "natural": CodecSpeed(0.016, 0.054),
    "sign": CodecSpeed(0.039, 0.060),
    "onebit": CodecSpeed(0.039, 0.060),
    "topk": CodecSpeed(0.038, 0.60),
    "dgc": CodecSpeed(0.038, 0.60),
    "randk": CodecSpeed(0.26, 0.29),
    "threshold": CodecSpeed(0.053, 0.50),
    "powersgd": CodecSpeed(0.013, 0.096),
}
"""Of ``benchmarks/compression/results``. PowerSGD's encoding is its two products and the orthogonalisation, with rank 4."""


@dataclass(frozen=True)
class CodecWork:
    """Elements that one rank encodes and decodes for one sum."""

    encoded: float = 0.0
    decoded: float = 0.0

    def seconds(self, rule: CompressRule, bandwidth: float) -> float:
        """How long that takes where memory moves so many bytes in a second."""
        speed = SPEEDS[rule.kind]
        return _FLOAT32 * (self.encoded / speed.encode + self.decoded / speed.decode) / bandwidth


def codec_work(
    rule: CompressRule, config: CompressionConfig, elements: float, *, num_ranks: int, is_sharded: bool
) -> CodecWork:
    """The work of one sum over ``num_ranks``.

    Args:
        rule: of the plan.
        config: the recipe's section.
        elements: that are compressed, of one rank.
        num_ranks: that add up.
        is_sharded: the sum stays with its owners (ZeRO), so that nothing is compressed on a way back.
    """
    # What is lost is known only once what was sent is decoded again.
    feedback = elements if has_residual(rule, config) else 0.0
    if rule.kind in SELECTING:
        return CodecWork(elements, num_ranks * elements + (0.0 if rule.kind == "dgc" else feedback))
    if rule.kind == "powersgd":
        return CodecWork(elements, elements)
    if rule.kind == "randk":
        return CodecWork(elements, elements + feedback)
    own = elements / num_ranks
    if is_sharded or not config.both_ways:
        return CodecWork(elements, elements + feedback)
    return CodecWork(elements + own, 2 * elements + feedback + feedback / num_ranks)
