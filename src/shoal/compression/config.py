"""The ``[compression]`` section of a recipe: how what the plan's ``compress`` names is done."""

from typing import Literal

from pydantic import Field

from shoal.core.compressrule import CompressRule
from shoal.core.config import Config

# DGC has a memory of its own; the unbiased and the fine ones need none.
_NEEDS_RESIDUAL = frozenset({"int4", "topk", "randk", "threshold", "sign", "onebit", "powersgd"})


class CompressionConfig(Config):
    """How gradients and weights are compressed; which codec it is stands in the plan, as ``compress``."""

    residual: bool | None = None
    """Keep what a codec lost and add it to the next gradient (error feedback); left out: as the method needs it."""
    round: Literal["nearest", "keyed"] = "nearest"
    """Rounding of int8 and int4: to the nearest, or up or down at random by (seed, step, element), which is unbiased."""
    min_elements: int = Field(default=2048, ge=0)
    """Tensors with fewer elements go uncompressed: their bytes are few, and norms and biases are sensitive."""
    both_ways: bool = True
    """Compress the result on its way back to the replicas as well, not only what each of them sends."""
    back: Literal["same", "int8"] | None = None
    """What the result comes back as where it is compressed: by the codec of the way there, or as int8; left out: int8 for int4,
    whose second rounding costs as much loss as the first, else the same."""
    block: int | None = Field(default=None, ge=8)
    """Elements that share one scale, where the plan does not say; left out: as the method has it (128 for int8 and int4)."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum that ``dgc`` accumulates with before it selects."""
    warmup: int = Field(default=0, ge=0)
    """Steps over which ``dgc`` lowers its ratio to the plan's."""
    weights: Literal["none", "int8", "int4"] = "none"
    """Under ZeRO, what weights are gathered as; passes and evaluations read them so; float32 masters are trained and saved."""
    min_rate: float = Field(default=2.0, gt=0)
    """``powersgd`` leaves a matrix alone unless its factors are so many times smaller than the matrix."""


def back_rule(rule: CompressRule, config: CompressionConfig) -> CompressRule | None:
    """The codec that a sum comes back by, of those that code every element; None where it comes back as it is."""
    if not config.both_ways:
        return None
    back = config.back or ("int8" if rule.kind == "int4" else "same")
    return rule if back == "same" else CompressRule(kind="int8", block=rule.block)


def has_residual(rule: CompressRule, config: CompressionConfig) -> bool:
    """True when error feedback is kept: as the section says, else as the method needs it. DGC keeps what is unsent itself."""
    if rule.kind == "dgc":
        return False
    return rule.kind in _NEEDS_RESIDUAL if config.residual is None else config.residual
