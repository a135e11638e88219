"""Weights that ZeRO gathers in few bits, in one process: passes read what arrives, the optimizer moves the weights themselves.

Blocks lie inside rows: of at most so many elements as the codec's block, and a divisor of a row. (Wang et al. 2023, "ZeRO++",
section 3.1: blocks of their own scale make eight bits enough.)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.core.compressrule import CompressRule
from shoal.verify.oracle.codecs import block_codec
from shoal.verify.reference.model import ReferenceModel

_DEFAULT_BLOCK = 128
_SMALLEST_BLOCK = 16


@contextmanager
def reading_coded(parts: ReferenceModel, settings: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the model has the weights that arrive at a rank; outside, its own.

    Args:
        parts: the model.
        settings: the recipe's ``[compression]``; empty where nothing is compressed.
    """
    kind = settings.get("weights", "none")
    own: dict[str, Tensor] = {}
    for name, parameter in parts.named if kind != "none" else ():
        block = _block_of(parameter.shape, settings)
        if block is not None:
            own[name] = parameter.detach().clone()
            parameter.data.copy_(_coded(own[name], kind, block))
    yield
    for name, parameter in parts.named:
        if name in own:
            parameter.data.copy_(own[name])


def _block_of(shape: Sequence[int], settings: Mapping[str, Any]) -> int | None:
    """Elements with one scale; None where the weight is gathered as it is."""
    if len(shape) < 2 or math.prod(shape) < settings["min_elements"]:
        return None
    row = math.prod(shape[1:])
    block = max(size for size in range(1, (settings["block"] or _DEFAULT_BLOCK) + 1) if row % size == 0)
    return block if block >= _SMALLEST_BLOCK else None


def _coded(weight: Tensor, kind: str, block: int) -> Tensor:
    codec = block_codec(CompressRule.parse(f"{kind}:{block}"), block=None, at_random=False)
    return torch.from_numpy(codec(weight.contiguous().reshape(-1).numpy(), 0, 0)).view(weight.shape)
