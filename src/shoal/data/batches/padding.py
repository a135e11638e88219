"""Samples of many lengths as one batch: padded to the longest, and what is padded counts for nothing.

    loader = run.loader(dataset, global_batch=32, collate_fn=PadCollate(padding_value=0))

Targets are padded with -100, which the losses leave out and the weight of a batch does not count; of a dict, ``labels`` with
-100, ``attention_mask`` with 0 and the rest with ``padding_value``. A model must not look from a sample's own positions at
padding: causal models do not, others are given a mask.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from shoal.core.errors import RunError
from shoal.data.spec import IGNORED

_UNSEEN = ("attention_mask",)
_COUNTED = ("labels",)


@dataclass(frozen=True, kw_only=True)
class PadCollate:
    """A ``collate_fn`` that pads dim 0 of every tensor of a sample to that of the longest sample."""

    padding_value: float = 0
    """In inputs."""
    target_value: float = IGNORED
    """In targets and in ``labels``."""
    multiple_of: int = 1
    """Lengths are rounded up to a multiple of this, so that fewer shapes occur."""
    length: int | None = None
    """Pad to this length in any case; the longest of the batch when left out."""

    def __call__(self, samples: Sequence[Any]) -> Any:
        """A batch of samples ``(inputs, targets)``, or of dicts.

        Raises:
            RunError: a floating-point target would be padded, which cannot be left out of a loss; or a sample is too long.
        """
        first = samples[0]
        if isinstance(first, tuple | list) and not hasattr(first, "_fields"):
            inputs, targets = zip(*samples, strict=True)
            return self._merge(inputs, self._pad_input, ""), self._merge(targets, self._pad_target, "target")
        return self._merge(samples, self._pad_input, "")

    def _merge(self, values: Sequence[Any], pad: Callable[[Sequence[Tensor], str], Tensor], key: str) -> Any:
        """Values of one structure, leaf by leaf."""
        first = values[0]
        if isinstance(first, Mapping):
            return {name: self._merge([value[name] for value in values], pad, str(name)) for name in first}
        if is_dataclass(first) and not isinstance(first, type):
            names = [field.name for field in fields(first)]
            return replace(
                first, **{name: self._merge([getattr(value, name) for value in values], pad, name) for name in names}
            )
        if isinstance(first, tuple | list) and any(not isinstance(part, int | float) for part in first):
            return tuple(self._merge(list(parts), pad, key) for parts in zip(*values, strict=True))
        try:
            tensors = [torch.as_tensor(value) for value in values]
        except (TypeError, ValueError, RuntimeError):
            return default_collate(list(values))
        return torch.stack(tensors) if tensors[0].ndim == 0 else pad(tensors, key)

    def _pad_input(self, tensors: Sequence[Tensor], key: str) -> Tensor:
        if key in _COUNTED:
            return self._pad_target(tensors, key)
        return self._pad(tensors, 0 if key in _UNSEEN else self.padding_value)

    def _pad_target(self, tensors: Sequence[Tensor], key: str) -> Tensor:
        is_even = len({len(tensor) for tensor in tensors}) == 1
        if tensors[0].is_floating_point():
            if is_even:
                return torch.stack(list(tensors))
            raise RunError(
                f"the {key} of samples have from {min(map(len, tensors))} to {max(map(len, tensors))} floating-point numbers, "
                "and padding would count in the loss; mask them in a collate_fn of your own, which returns Items"
            )
        return self._pad(tensors, self.target_value)

    def _pad(self, tensors: Sequence[Tensor], value: float) -> Tensor:
        longest = max(len(tensor) for tensor in tensors)
        size = self.length or -(-longest // self.multiple_of) * self.multiple_of
        if longest > size:
            raise RunError(
                f"a sample has {longest} positions and PadCollate pads to length {size}; raise length, or cut it"
            )
        padded = tensors[0].new_full((len(tensors), size, *tensors[0].shape[1:]), value)
        for row, tensor in zip(padded, tensors, strict=True):
            row[: len(tensor)] = tensor
        return padded
