"""Two checkpoints compared: which tensors differ, in how many elements, and by how much. A pure function of two values.

Seconds are told apart: no two runs take the same time, and two checkpoints from which training would go on alike are the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.reader import Checkpoint

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that is not the same, bit for bit, in both."""

    name: str
    what: str
    """``values``, ``shape`` or ``dtype``."""
    first: str
    """Type and shape in the first checkpoint."""
    second: str
    num_elements: int
    num_different: int
    """Elements whose bits differ; all of them where shapes or types do."""
    max_abs: float | None
    """Largest absolute difference; None where shapes or types differ."""
    relative: float | None
    """Norm of the difference over the norm of the first; infinite when the first is zero."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What distinguishes two checkpoints."""

    first_step: int
    second_step: int
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    changed: tuple[TensorDifference, ...]
    """In the order of names."""
    values: tuple[str, ...]
    """Paths of the values that differ, such as ``progress.step``, without timings."""
    timings: tuple[str, ...]
    """Paths of the timings that differ, such as ``progress.trained_seconds``; they make no difference."""
    num_same: int
    """Tensors that are equal bit for bit."""

    @property
    def is_same(self) -> bool:
        """True when both hold the same tensors and values, bit for bit; timings do not count."""
        return not (self.only_in_first or self.only_in_second or self.changed or self.values)


def compare(first: Checkpoint, second: Checkpoint) -> Difference:
    """What distinguishes two checkpoints. NaNs with the same bits are the same; zeros of two signs are not."""
    shared = sorted(first.tensors.keys() & second.tensors.keys())
    differences = (_compare_tensors(name, first.tensors[name], second.tensors[name]) for name in shared)
    changed = tuple(difference for difference in differences if difference is not None)
    values = _compare_values("", dict(first.values), dict(second.values))
    return Difference(
        first_step=first.step,
        second_step=second.step,
        only_in_first=tuple(sorted(first.tensors.keys() - second.tensors.keys())),
        only_in_second=tuple(sorted(second.tensors.keys() - first.tensors.keys())),
        changed=changed,
        values=tuple(path for path in values if not _is_timing(path)),
        timings=tuple(path for path in values if _is_timing(path)),
        num_same=len(shared) - len(changed),
    )


def _compare_tensors(name: str, first: Tensor, second: Tensor) -> TensorDifference | None:
    what = "dtype" if first.dtype != second.dtype else "shape" if first.shape != second.shape else "values"
    num_different, max_abs, relative = first.numel(), None, None
    if what == "values":
        bits = _BITS[first.element_size()]
        num_different = int((first.view(bits) != second.view(bits)).sum())
        if num_different == 0:
            return None
        wide = torch.complex128 if first.is_complex() else torch.float64
        delta = (first.to(wide) - second.to(wide)).abs()
        norm = float(torch.linalg.vector_norm(first.to(wide)))
        max_abs = float(delta.max())
        relative = float(torch.linalg.vector_norm(delta)) / norm if norm else float("inf") if max_abs else 0.0
    return TensorDifference(
        name=name,
        what=what,
        first=_describe(first),
        second=_describe(second),
        num_elements=first.numel(),
        num_different=num_different,
        max_abs=max_abs,
        relative=relative,
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _is_timing(path: str) -> bool:
    return path.endswith("_seconds")


def _compare_values(path: str, first: Any, second: Any) -> list[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        found = []
        for key in sorted(first.keys() | second.keys()):
            below = f"{path}.{key}" if path else key
            if key in first and key in second:
                found += _compare_values(below, first[key], second[key])
            else:
                found.append(below)
        return found
    # By text, because NaN is not equal to itself and 1 is equal to True.
    return [] if repr(first) == repr(second) else [path]
