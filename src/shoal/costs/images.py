"""Which operations work on the rows of an image side by side, and what neighbours that share them out read of each other.

That is the attribute dim of a split (Jia et al. 2019, arXiv:1807.05358, Table 1: height and width of a convolution). Columns
could be shared out as well as rows; one of the two is enough to know what could be gained.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.costs.links import Image

aten = torch.ops.aten
_NOTHING = Image(0, 0, False)
_POOLS = frozenset({aten.max_pool2d_with_indices, aten.avg_pool2d, aten.max_pool2d})
_MIXING = frozenset({aten.native_group_norm, aten.native_layer_norm, aten._softmax, aten._log_softmax})
"""Operations that may look at all rows though the rows stay as many."""
_FOUR = 4


def read_image(
    func: Any, named: Mapping[str, Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, comes_from_image: bool
) -> Image | None:
    """What an operation does to images; None for what is done to weights and counters alone.

    Args:
        func: the operation.
        named: its arguments.
        inputs: the tensors that it reads, weights left out.
        outputs: the tensors that it makes.
        comes_from_image: one of the inputs was made by a convolution.
    """
    if not inputs or all(tensor.ndim <= 1 for tensor in (*inputs, *outputs)):
        return None
    packet = func.overloadpacket
    images = [tensor for tensor in (*inputs, *outputs) if tensor.ndim == _FOUR]
    if not outputs or outputs[0].ndim != _FOUR or packet in _MIXING:
        return _NOTHING
    rows = math.gcd(*(tensor.shape[2] for tensor in images))
    if packet is aten.convolution:
        if named["transposed"]:
            return _NOTHING
        return Image(rows, _halo(inputs[0], named["weight"].shape[2], named["stride"], named["dilation"]), True)
    if packet in _POOLS:
        kernel = named["kernel_size"]
        return Image(rows, _halo(inputs[0], kernel[0], named.get("stride") or kernel, named.get("dilation", 1)), True)
    # What keeps the rows as they are looks at each of them alone.
    keeps = all(tensor.shape[2] == rows for tensor in images)
    return Image(rows, 0, comes_from_image) if keeps else _NOTHING


def _halo(image: Tensor, kernel: int, stride: Any, dilation: Any) -> int:
    """Bytes of the rows that the windows of two neighbours have in common."""
    step, spread = (value[0] if isinstance(value, Sequence) else value for value in (stride, dilation))
    shared = max(0, spread * (kernel - 1) + 1 - step)
    return int(shared * image.shape[0] * image.shape[1] * image.shape[3] * image.element_size())


def rows_of(done: Sequence[Image]) -> int:
    """A number that the degree must divide along which the rows of all these are shared out; 0 where they cannot be."""
    if not any(image.is_sure for image in done) or any(image.rows == 0 for image in done):
        return 0
    return math.gcd(*(image.rows for image in done))
