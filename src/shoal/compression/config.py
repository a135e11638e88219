"""The ``[compression]`` section of a recipe: how what the plan's ``compress`` names is done."""

from typing import Literal, get_args

from pydantic import Field

from shoal.core.compressrule import CompressKind, CompressRule
from shoal.core.config import Config

# DGC has a memory of its own; the unbiased and the fine ones need none.
_NEEDS_RESIDUAL = frozenset({"int4", "topk", "randk", "threshold", "sign", "onebit", "powersgd"})
_CODES_ALL: tuple[CompressKind, ...] = ("fp16", "bf16", "fp8", "int8", "int4", "sign", "onebit", "qsgd", "natural")
_READ_BY: dict[str, tuple[CompressKind, ...]] = {
    "residual": tuple(kind for kind in get_args(CompressKind) if kind != "dgc"),
    "round": ("int8", "int4"),
    "both_ways": _CODES_ALL,
    "back": _CODES_ALL,
    "block": ("fp8", "int8", "int4", "sign", "onebit", "qsgd"),
    "momentum": ("dgc",),
    "warmup": ("dgc",),
    "min_rate": ("powersgd",),
}
"""The codecs that look at a setting; all of them look at those that are not here."""


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


def idle_settings(config: CompressionConfig, rule: CompressRule, *, comes_back: bool) -> list[str]:
    """Settings that differ from their defaults and that nobody looks at.

    Args:
        config: the recipe's section.
        rule: the plan's ``compress``.
        comes_back: sums come back to all ranks; under ZeRO they stay with their owners, and pushes and gossip have none.
    """
    # By value: a run's own recipe.toml has every key filled in.
    changed = [name for name, field in type(config).model_fields.items() if getattr(config, name) != field.default]
    found = [name for name in changed if name in _READ_BY and rule.kind not in _READ_BY[name]]
    found += [name for name in changed if name in ("both_ways", "back") and not comes_back and name not in found]
    reads_block = config.weights != "none" or (comes_back and config.both_ways and config.back == "int8")
    return [name for name in found if name != "block" or not reads_block]


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
