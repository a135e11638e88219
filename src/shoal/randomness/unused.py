"""Random numbers that a forward pass draws and that decide nothing.

LayerDrop at zero is the common case: ``if torch.rand([]) < self.layerdrop`` draws for every layer and never skips one. Such a
draw is no reason to refuse a model, so a draw is not judged when it is made but by what becomes of it: a comparison that has one
outcome for every number that could have been drawn is a constant, any other use is a use, and what is still there when the
forward pass is over may be used later.
"""

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_LESS, _LESS_EQUAL = ("lt", "__lt__", "less"), ("le", "__le__", "less_equal")
_GREATER, _GREATER_EQUAL = ("gt", "__gt__", "greater"), ("ge", "__ge__", "greater_equal")
_COPIES = ("to", "cpu", "float", "double", "detach", "clone", "contiguous")
_FACTS = frozenset({"dim", "size", "numel", "is_floating_point", "stride", "is_contiguous"})


@dataclass(frozen=True)
class Bounds:
    """Between which numbers a draw lies: ``low <= number < high``."""

    low: float
    high: float

    def decides(self, name: str, other: float) -> bool:
        """True when a comparison with a number has one outcome, whatever was drawn."""
        if name in _LESS or name in _GREATER_EQUAL:
            return other <= self.low or other >= self.high
        if name in _LESS_EQUAL or name in _GREATER:
            return other < self.low or other >= self.high
        return False


@dataclass
class UnusedDraws:
    """The draws of one forward pass of which no use has been seen."""

    found: int = 0
    """How many were made."""
    _pending: dict[int, tuple["weakref.ref[Tensor]", str, Bounds | None]] = field(default_factory=dict)

    def add(self, result: Any, what: str, name: str, kwargs: Mapping[str, Any]) -> bool:
        """Remember a draw until it is used; False where that cannot be seen.

        Args:
            result: what the function returned.
            what: the function and the module that called it, for people.
            name: of the function.
            kwargs: it was called with.
        """
        if not isinstance(result, Tensor) or name.endswith("_") or "out" in kwargs:
            return False  # Written into memory that other tensors may show, whose uses are not looked at.
        self.found += 1
        self._pending[id(result)] = (weakref.ref(result), what, _bounds(name))
        return True

    def use(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[str]:
        """Note one call of torch: the draws that it makes use of, in words."""
        if not self._pending:
            return []
        drawn = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and self._is_pending(leaf)]
        if not drawn or name in _FACTS or (name == "__get__" and not isinstance(result, Tensor)):
            return []
        (_, what, bounds), *others = (self._pending[id(draw)] for draw in drawn)
        if not others and _is_constant(name, args, kwargs, bounds):
            return []
        if not others and name in _COPIES and isinstance(result, Tensor):
            self._pending[id(result)] = (weakref.ref(result), what, bounds)
            return []
        return [what, *(other[1] for other in others)]

    def left(self) -> list[str]:
        """What was drawn and is still there: the pass may have put it out, or kept it."""
        if any(reference() is not None for reference, _, _ in self._pending.values()):
            # Frames of a pass that was left by an exception may hold it in a circle.
            gc.collect()
        kept = [what for reference, what, _ in self._pending.values() if reference() is not None]
        self._pending.clear()
        return kept

    def _is_pending(self, tensor: Tensor) -> bool:
        entry = self._pending.get(id(tensor))
        return entry is not None and entry[0]() is tensor


def _bounds(name: str) -> Bounds | None:
    """What the numbers of a draw lie between, where that is known."""
    return Bounds(0.0, 1.0) if name in ("rand", "rand_like") else None


def _is_constant(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], bounds: Bounds | None) -> bool:
    """True for a draw, first, compared with a number, second, that lies outside of what could be drawn."""
    if bounds is None or len(args) != 2 or kwargs or not isinstance(args[0], Tensor):
        return False
    other = args[1]
    if isinstance(other, Tensor):
        if other.requires_grad or other.numel() != 1 or other.device.type == "meta":
            return False
        other = other.item()
    return isinstance(other, int | float) and bounds.decides(name, float(other))
