"""Parameters whose true gradient is zero, found in float64: in 16-bit arithmetic what a run computes for them is rounding alone.

The bias before a batch norm is one: the norm takes it off again. In float32 such a gradient is below the law's limit of noise by
itself. In bfloat16 it is not, and a limit that is as much coarser for every parameter would hide the small gradients of norms
and biases. So the coarser limit holds for these parameters alone, and who is one is decided by arithmetic that can tell: at the
first weights and at the last, since a gradient may also be zero at the start alone (behind a layer that begins with zeros).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shoal.verify.noise import NOISE_EPS
from shoal.verify.parts import Ids, Parts, build_parts, global_batches, norm_of

_LIMIT = NOISE_EPS * float(torch.finfo(torch.float32).eps)


def find_zeros(parts: Parts, gradients_at: Callable[[Parts, int, Ids], dict[str, Tensor]]) -> list[str]:
    """Names of the parameters whose gradient is noise in float64 too; none where float64 cannot be run, or is run anyway.

    Args:
        parts: the model after its last step.
        gradients_at: the gradient of a model at a step, on its samples.
    """
    if parts.precision.compute_dtype is None:
        return []
    batches = list(global_batches(parts))
    try:
        precise = build_parts(replace(parts.case, precision="float64"))
        found = _small(gradients_at(precise, 0, batches[0]))
        precise.model.load_state_dict(parts.model.state_dict())
        return sorted(found & _small(gradients_at(precise, len(batches) - 1, batches[-1])))
    except (
        Exception
    ):  # The user's model may raise anything in a type that it was not written for; then nothing is excused.
        return []


def _small(gradients: dict[str, Tensor]) -> set[str]:
    limit = _LIMIT * norm_of(list(gradients.values()))
    return {name for name, gradient in gradients.items() if float(gradient.double().norm()) <= limit}
