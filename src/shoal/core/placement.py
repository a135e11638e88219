"""Which part of a whole tensor a rank holds: plain numbers, from which norms, checkpoints, proofs and predictions are made.

A technique keeps every parameter's name and changes only its local tensor; it says in a ``Placement`` where each stretch of that
tensor lies in the whole one. A fused query-key-value matrix that is split three times over has three patches; the rows that pad
a vocabulary have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A box of the local tensor and the box of the whole tensor that it is."""

    local_start: Shape
    whole_start: Shape
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a local tensor lies in its whole."""

    whole_shape: Shape
    local_shape: Shape
    patches: tuple[Patch, ...]

    @property
    def is_whole(self) -> bool:
        """True when the local tensor is the whole tensor."""
        return self.whole_shape == self.local_shape and len(self.patches) == 1

    def rows(self, start: int, stop: int) -> "Placement":
        """The placement of local rows (dim 0) ``start`` to ``stop`` of this one. A tensor without dims is one row."""
        if not self.local_shape:
            assert (start, stop) == (0, 1)
            return self
        cut = [_cut_rows(patch, start, stop) for patch in self.patches]
        local_shape = (stop - start, *self.local_shape[1:])
        patches = tuple(patch for patch in cut if patch is not None)
        return Placement(whole_shape=self.whole_shape, local_shape=local_shape, patches=patches)


def place_whole(shape: Sequence[int]) -> Placement:
    """The placement of a tensor that this rank holds whole."""
    origin = (0,) * len(shape)
    patch = Patch(local_start=origin, whole_start=origin, shape=tuple(shape))
    return Placement(whole_shape=tuple(shape), local_shape=tuple(shape), patches=(patch,))


def _cut_rows(patch: Patch, start: int, stop: int) -> Patch | None:
    first, last = max(patch.local_start[0], start), min(patch.local_start[0] + patch.shape[0], stop)
    if first >= last:
        return None
    skipped = first - patch.local_start[0]
    return Patch(
        local_start=(first - start, *patch.local_start[1:]),
        whole_start=(patch.whole_start[0] + skipped, *patch.whole_start[1:]),
        shape=(last - first, *patch.shape[1:]),
    )
