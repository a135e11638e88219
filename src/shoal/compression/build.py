"""The codec that a plan's ``compress`` and the ``[compression]`` section name."""

import torch

from shoal.compression.blocks import DEFAULT_BLOCK as INT_BLOCK
from shoal.compression.blocks import BlockInt
from shoal.compression.codec import Codec
from shoal.compression.config import CompressionConfig, back_rule, has_residual
from shoal.compression.floats import DEFAULT_BLOCK as FLOAT_BLOCK
from shoal.compression.floats import BlockFloat8, HalfFloat
from shoal.compression.quantize import DEFAULT_BLOCK as QSGD_BLOCK
from shoal.compression.quantize import QSGD, Natural
from shoal.compression.sign import DEFAULT_BLOCK as SIGN_BLOCK
from shoal.compression.sign import Sign
from shoal.compression.sparse import RandomK, Threshold, TopK
from shoal.core.compressrule import CompressRule


def build_codec(rule: CompressRule, config: CompressionConfig) -> Codec | None:
    """The codec of flat tensors; None for ``powersgd``, which takes matrices. ``dgc`` sends as top-k, ``onebit`` as signs."""
    block = rule.block or config.block
    match rule.kind:
        case "fp16":
            return HalfFloat(torch.float16)
        case "bf16":
            return HalfFloat(torch.bfloat16)
        case "fp8":
            return BlockFloat8(block or FLOAT_BLOCK)
        case "int8":
            return BlockInt(8, block or INT_BLOCK, config.round)
        case "int4":
            return BlockInt(4, block or INT_BLOCK, config.round)
        case "topk" | "dgc":
            return TopK(rule.number)
        case "randk":
            # Error feedback needs the elements as they are; without it the mean must be right.
            return RandomK(rule.number, unbiased=not has_residual(rule, config))
        case "threshold":
            return Threshold(rule.number)
        case "sign" | "onebit":
            return Sign(block or SIGN_BLOCK)
        case "qsgd":
            return QSGD({2: 2, 4: 4, 8: 8}[int(rule.number)], block or QSGD_BLOCK)  # type: ignore[arg-type]
        case "natural":
            return Natural()
    return None


def build_back(rule: CompressRule, config: CompressionConfig) -> Codec | None:
    """The codec that sums come back by; None where they come back as they are."""
    back = back_rule(rule, config)
    return None if back is None else build_codec(back, config)
