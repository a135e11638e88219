"""What compression costs in arithmetic, and which elements a rank encodes and decodes for one sum.

A codec reads and writes memory more than it computes, so its speed is a share of the memory's bandwidth: what a copy of the same
tensor moves in the same round (``benchmarks/compression/main.py``). The shares were measured on one core of a processor and are
taken for every device; on an accelerator nothing was measured.
"""

from dataclasses import dataclass
from typing import Literal

from shoal.compression.config import CompressionConfig, back_rule, has_residual
from shoal.core.compressrule import CompressKind, CompressRule
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule

WorkKind = CompressKind | Literal["sparse"]
"""What is encoded by: a codec of ``compress``, or the choice of the largest of each chunk by ``sync=sparse``."""

_FLOAT32 = 4.0
SELECTING: tuple[CompressKind, ...] = ("topk", "threshold", "dgc")
"""Codecs whose payloads are gathered: every rank decodes those of all."""


@dataclass(frozen=True)
class CodecSpeed:
    """Bytes of float32 that are worked off in a second, as a share of the memory's bandwidth."""

    encode: float
    decode: float


SPEEDS: dict[WorkKind, CodecSpeed] = {
    "fp16": CodecSpeed(0.77, 0.68),
    "bf16": CodecSpeed(0.63, 0.71),
    "fp8": CodecSpeed(0.084, 0.032),
    "int8": CodecSpeed(0.12, 0.34),
    "int4": CodecSpeed(0.10, 0.19),
    "qsgd": CodecSpeed(0.015, 0.18),
    "natural": CodecSpeed(0.024, 0.029),
    "sign": CodecSpeed(0.058, 0.21),
    "onebit": CodecSpeed(0.058, 0.21),
    "topk": CodecSpeed(0.055, 0.93),
    "dgc": CodecSpeed(0.055, 0.93),
    "randk": CodecSpeed(0.30, 0.44),
    "threshold": CodecSpeed(0.063, 0.78),
    "powersgd": CodecSpeed(0.015, 0.13),
    "sparse": CodecSpeed(0.0051, 0.18),
}
"""Of ``benchmarks/compression/results``. PowerSGD's encoding is its two products and the orthogonalisation, with rank 4."""


@dataclass(frozen=True)
class BackWork:
    """Elements of the way back, and the codec that they go by."""

    kind: WorkKind
    encoded: float
    decoded: float


@dataclass(frozen=True)
class CodecWork:
    """Elements that one rank encodes and decodes for one sum."""

    encoded: float = 0.0
    decoded: float = 0.0
    back: BackWork | None = None
    """Of the way back, where the sum is encoded on it."""

    def seconds(self, kind: WorkKind, bandwidth: float) -> float:
        """How long that takes where memory moves so many bytes in a second."""
        speed = SPEEDS[kind]
        read = self.encoded / speed.encode + self.decoded / speed.decode
        if self.back is not None:
            speed = SPEEDS[self.back.kind]
            read += self.back.encoded / speed.encode + self.back.decoded / speed.decode
        return _FLOAT32 * read / bandwidth


def encodes_by(plan: Plan) -> WorkKind | None:
    """What replicas encode by when they agree; None where they send their numbers as they are."""
    if plan.compress is not None:
        return CompressRule.parse(plan.compress).kind
    return "sparse" if SyncRule.parse(plan.sync).kind == "sparse" else None


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
    back = None if is_sharded else back_rule(rule, config)
    return CodecWork(
        elements,
        elements + feedback,
        None if back is None else BackWork(back.kind, own, elements + feedback / num_ranks),
    )
