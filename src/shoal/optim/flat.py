"""Optimizer state in one contiguous buffer per kind of state, so that it is allocated once and cannot fragment memory.

torch's optimizers make two tensors per parameter, at the first step, among the activations. Here every ``exp_avg`` is a view of
one buffer and every ``exp_avg_sq`` of another; the optimizers do not notice.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

CUT_MULTIPLE = 16
"""Elements from the start of a tensor at whose multiples a shard may be cut without changing a bit of any update.

The fused CPU kernels of momentum SGD, Adam and AdamW compute the last elements, which do not fill a vector register, by scalar
code that rounds differently (torch 2.13); the widest register holds 16 float32. Plain SGD, Adagrad, LARS and LAMB may be cut
anywhere.
"""
SINGLES = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of state that is one number per parameter: a count of steps, and what NAdam and ASGD derive from it. All other state has
the parameter's shape."""


def align(numel: int) -> int:
    """Elements with the padding that brings the next tensor to a multiple of ``CUT_MULTIPLE``."""
    return -(-numel // CUT_MULTIPLE) * CUT_MULTIPLE


def flat_sizes(numels: list[int]) -> tuple[int, int]:
    """Elements of the buffer of a state with the parameters' shapes, and of the buffer of their counts."""
    return sum(align(numel) for numel in numels), len(numels)


def is_flat(optimizer: Optimizer) -> bool:
    """True when each kind of state already lies in one buffer."""
    members = _members(optimizer)
    size, count = flat_sizes([parameter.numel() for parameter in members])
    storages: dict[str, set[tuple[int, int]]] = {}
    for parameter in members:
        for key, value in optimizer.state[parameter].items():
            storage, wanted = value.untyped_storage(), count if key in SINGLES else size
            storages.setdefault(key, set()).add((storage.data_ptr(), storage.nbytes() - wanted * value.element_size()))
    return all(len(found) == 1 and next(iter(found))[1] == 0 for found in storages.values())


class FlatState:
    """The buffers of one optimizer, while its state is moved into them, parameter by parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        members = _members(optimizer)
        self._size, self._count = flat_sizes([parameter.numel() for parameter in members])
        self._buffers: dict[str, Tensor] = {}
        self._offset = self._index = 0

    def move(self, parameter: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of the next parameter, as views of the buffers; its own memory can then be freed."""
        moved = {key: self._place(key, parameter, value) for key, value in state.items()}
        self._offset += align(parameter.numel())
        self._index += 1
        return moved

    @torch.no_grad()
    def _place(self, key: str, parameter: Tensor, value: Tensor) -> Tensor:
        if key not in self._buffers:
            # Not zeros: its pages are first touched as states move in, when the old ones go.
            self._buffers[key] = value.new_empty(self._count if key in SINGLES else self._size)
        buffer = self._buffers[key]
        # The parameter's own strides: a kernel that walks both in memory order must meet the same elements.
        shape, stride = ((), ()) if key in SINGLES else (parameter.shape, parameter.stride())
        view = buffer.as_strided(shape, stride, self._index if key in SINGLES else self._offset)
        return view.copy_(value)


def _members(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
