"""Whole numbers that remember where they came from, to learn which attributes of a module count its heads.

A forward pass writes sizes into its views: ``x.view(batch, length, self.heads, self.head)``. When heads are shared out, ``heads``
must shrink and ``head`` must not; when the code says ``x.view(..., -1, self.head)`` nothing must; and when it says
``y.view(batch, length, x.shape[-1])`` with the width of a whole tensor, the layer cannot be split at all. Names do not tell these
apart, so during the trace every number that a module or a followed tensor hands out is a ``TracedInt``, which can say what it
would be if some of its sources were halved. A number that becomes a value, such as the scale of an attention, must not change.
"""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from torch import nn


class Attribute(NamedTuple):
    """A whole number that a module keeps: its path and its name."""

    path: str
    name: str


class Dimension(NamedTuple):
    """A dim of a tensor that the forward pass asked for the size of: the number of the tensor, and the dim."""

    tensor: int
    dim: int


class Features(NamedTuple):
    """The dim of a tensor that holds the features of a group: the number of the group."""

    group: int


Source = Attribute | Dimension
FeatureDims = dict[Dimension, int]
"""The group whose features a dim turned out to hold."""
Halved = Callable[[Source], bool]
"""True for the sources that a rank has half of."""
Formula = Callable[[Halved], Fraction]


class TracedInt(int):
    """A whole number with the formula that gave it. Arithmetic keeps the formula; everything else sees a plain int."""

    formula: Formula
    sources: frozenset[Source]
    values: "list[TracedInt]"
    """Shared by all numbers of a trace: those that went into arithmetic with other than whole numbers."""

    @classmethod
    def of(
        cls, value: int, formula: Formula, sources: Iterable[Source], values: "list[TracedInt] | None" = None
    ) -> "TracedInt":
        """A number and where it came from."""
        made = cls(value)
        made.formula = formula
        made.sources = frozenset(sources)
        made.values = [] if values is None else values
        return made

    def is_same(self, halved: Halved) -> bool:
        """True when a rank that has half of some sources has the same number."""
        return self.formula(halved) == self.formula(lambda _: False)

    # A copy or a pickle of a model that kept one of these holds a plain int.
    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> int:
        return int(self)

    def __mul__(self, other: Any) -> Any:
        return _combine(self, other, lambda a, b: a * b, int.__mul__)

    def __rmul__(self, other: Any) -> Any:
        return _combine(self, other, lambda a, b: b * a, int.__rmul__)

    def __add__(self, other: Any) -> Any:
        return _combine(self, other, lambda a, b: a + b, int.__add__)

    def __radd__(self, other: Any) -> Any:
        return _combine(self, other, lambda a, b: b + a, int.__radd__)

    def __sub__(self, other: Any) -> Any:
        return _combine(self, other, lambda a, b: a - b, int.__sub__)

    def __rsub__(self, other: Any) -> Any:
        return _combine(self, other, lambda a, b: b - a, int.__rsub__)

    def __floordiv__(self, other: Any) -> Any:
        return _combine(self, other, lambda a, b: Fraction(a // b), int.__floordiv__)

    def __rfloordiv__(self, other: Any) -> Any:
        return _combine(self, other, lambda a, b: Fraction(b // a), int.__rfloordiv__)

    # From here on what comes out is a value and no size.
    def __truediv__(self, other: Any) -> Any:
        _note_ratio(self, other)
        return int.__truediv__(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        self.values.append(self)
        return int.__rtruediv__(self, other)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        self.values.append(self)
        return int.__pow__(self, other, modulus)

    def __rpow__(self, other: Any, modulus: Any = None) -> Any:
        self.values.append(self)
        return int.__rpow__(self, other, modulus)

    def __float__(self) -> float:
        self.values.append(self)
        return int.__float__(self)


def trace_source(value: int, source: Source, values: list[TracedInt] | None = None) -> TracedInt:
    """A number that comes straight from a source."""
    return TracedInt.of(value, lambda halved: Fraction(value, 2 if halved(source) else 1), [source], values)


def size_if(size: int, halved: Halved) -> Fraction:
    """What a size would be on a rank that has half of some sources."""
    return size.formula(halved) if isinstance(size, TracedInt) else Fraction(size)


def resolve(sources: Iterable[Source], features: FeatureDims) -> set[Attribute | Features]:
    """The attributes among the sources, and the groups whose features their dims hold; other dims are of no interest."""
    return {
        source if isinstance(source, Attribute) else Features(features[source])
        for source in sources
        if isinstance(source, Attribute) or source in features
    }


def sources_of(sizes: Iterable[int]) -> set[Source]:
    """Everything that some sizes came from."""
    return {source for size in sizes if isinstance(size, TracedInt) for source in size.sources}


class TracedAttributes:
    """While entered, the whole numbers that the user's modules keep are traced ones. torch's own modules are left alone."""

    def __init__(self, model: nn.Module, values: list[TracedInt]) -> None:
        self.model, self.values = model, values
        self.modules = [(path, module) for path, module in model.named_modules() if not is_torch_module(module)]

    def __enter__(self) -> None:
        for path, module in self.modules:
            for name, value in list(vars(module).items()):
                if type(value) is int and not name.startswith("_"):
                    vars(module)[name] = trace_source(value, Attribute(path, name), self.values)

    def __exit__(self, *_: object) -> None:
        # All of them: the forward pass may have written one down, such as a length for which it keeps a table.
        for module in self.model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, TracedInt):
                    vars(module)[name] = int(value)


def is_torch_module(module: nn.Module) -> bool:
    """True for a class that torch ships, whose insides are known."""
    return type(module).__module__.startswith("torch.nn.")


def _combine(
    left: TracedInt, right: Any, apply: Callable[[Fraction, Fraction], Fraction], plain: Callable[..., Any]
) -> Any:
    value = plain(left, right)
    if value is NotImplemented or not isinstance(right, int):
        if isinstance(right, float):
            left.values.append(left)
        return value
    sources = left.sources | (right.sources if isinstance(right, TracedInt) else frozenset())
    return TracedInt.of(
        int(value), lambda halved: apply(size_if(left, halved), size_if(right, halved)), sources, left.values
    )


def _note_ratio(left: TracedInt, right: Any) -> None:
    """Note a quotient as a value: features over heads is the same on every rank, though neither of them is."""
    if not isinstance(right, TracedInt):
        left.values.append(left)
        return
    sources = left.sources | right.sources
    ratio = TracedInt.of(0, lambda halved: size_if(left, halved) / size_if(right, halved), sources, left.values)
    left.values.append(ratio)
