"""Layers whose outputs meet before they are summed up again, and whether such a group can be split over ranks.

A group begins with linear layers (*producers*: query, key and value; gate and up) and ends in linear layers that read its
features in their reduction dim (*rows*). It can be split when nothing on the way needed features of two ranks at once. The
trace (``flow.py``) tells a group what it saw; ``settle`` decides.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from shoal.parallel.analysis.traced_int import (
    Attribute,
    FeatureDims,
    Features,
    Halved,
    Source,
    TracedInt,
    resolve,
    size_if,
    sources_of,
)

_MOST_ATTRIBUTES = 8  # Subsets of the attributes are tried; a module that counts in more ways than this is left alone.


@dataclass
class SizeUse:
    """Sizes that the forward pass wrote down for a tensor of this group."""

    sizes: tuple[int, ...]
    """As written: traced numbers, plain ones, or -1 for what is left."""
    shape: tuple[int, ...]
    """The whole sizes that came out."""
    dims: tuple[int, ...]
    """The dims that hold the features, outermost first."""
    is_parts: bool = False
    """The outermost turned out to count the parts of a fused layer, so a rank has half of the next one."""

    @property
    def split_dim(self) -> int:
        """The dim that a rank has half of."""
        return self.dims[1 if self.is_parts else 0]

    def holds(self, group: "Group", chosen: frozenset[Attribute]) -> bool:
        """True when a rank with half of the features and of the chosen attributes gets what it should."""
        halved = group.halves(chosen)
        expected = [Fraction(size, 2 if dim == self.split_dim else 1) for dim, size in enumerate(self.shape)]
        written = [size_if(size, halved) for size in self.sizes]
        if -1 in self.sizes:
            place = self.sizes.index(-1)
            rest = Fraction(math.prod(size for dim, size in enumerate(written) if dim != place))
            written[place] = Fraction(math.prod(expected)) / rest if rest else Fraction(0)
        return written == expected


@dataclass
class AttentionUse:
    """One attention that a group goes through."""

    path: str
    num_heads: int
    num_kv_heads: int
    dropout: float = 0.0


@dataclass
class Group:
    """What the trace saw of one group."""

    numbers: set[int]
    """Its own number, and those of the groups that were joined to it."""
    producers: list[str]
    features: FeatureDims
    """Shared by all groups."""
    rows: list[str] = field(default_factory=list)
    parts: dict[str, set[int]] = field(default_factory=dict)
    """Per producer: into how many equal parts its output was cut before use."""
    units: set[int] = field(default_factory=set)
    """Counts of indivisible units (heads, or single features) that the ranks must divide."""
    attentions: list[AttentionUse] = field(default_factory=list)
    dropouts: dict[str, int] = field(default_factory=dict)
    sizes: list[SizeUse] = field(default_factory=list)
    obstacle: str | None = None
    """The first thing that needs features of more than one rank."""
    divided: dict[str, dict[str, int]] = field(default_factory=dict)
    """Filled by ``settle``: per module, the attributes that each rank has a share of."""

    def join(self, other: "Group") -> None:
        """Take up another group: their features were combined."""
        self.numbers |= other.numbers
        self.producers = list(dict.fromkeys(self.producers + other.producers))
        self.rows = list(dict.fromkeys(self.rows + other.rows))
        for path, parts in other.parts.items():
            self.parts.setdefault(path, set()).update(parts)
        self.units |= other.units
        self.attentions += other.attentions
        for path, dim in other.dropouts.items():
            self.add_dropout(path, dim)
        self.sizes += other.sizes
        self.obstacle = self.obstacle or other.obstacle

    def add_dropout(self, path: str, dim: int) -> None:
        """Note a dropout on the group's features; one module cannot be cut along two dims."""
        if self.dropouts.setdefault(path, dim) != dim:
            self.block(f"{path} drops along two different dims")

    def block(self, reason: str) -> None:
        """Note why the group cannot be split; the first reason stays."""
        self.obstacle = self.obstacle or reason

    def halves(self, chosen: frozenset[Attribute]) -> Halved:
        """What a rank has half of when this group is split and these attributes are shared out."""
        return lambda source: (
            source in chosen if isinstance(source, Attribute) else self.features.get(source) in self.numbers
        )

    def settle(self, kept_whole: set[Source], values: Sequence[TracedInt]) -> None:
        """Find the attributes to share out, or the reason why the group cannot be split.

        Args:
            kept_whole: sources of sizes of tensors that no rank has a part of; sharing them out would break those.
            values: numbers that the forward pass computes with, which must be the same on every rank.
        """
        if not self.rows:
            self.block("no linear layer sums its features up")
        for path, parts in self.parts.items():
            if len(parts) > 1:
                self.block(f"the output of {path} is used in {' and in '.join(map(str, sorted(parts)))} parts")
        if any(isinstance(source, Features) and source.group in self.numbers for source in self._resolve(kept_whole)):
            self.block("its number of features also sizes a tensor that stays whole")
        if self.obstacle is None:
            self._choose_attributes(kept_whole, values)

    def _resolve(self, sources: Iterable[Source]) -> set[Attribute | Features]:
        return resolve(sources, self.features)

    def _choose_attributes(self, kept_whole: set[Source], values: Sequence[TracedInt]) -> None:
        written = self._resolve(source for use in self.sizes for source in sources_of(use.sizes))
        resolved = [self._resolve(value.sources) for value in values]
        beside = {source for sources in resolved if sources & written for source in sources}
        candidates = sorted(source for source in written | beside if isinstance(source, Attribute))
        obstacle = "its forward pass writes a whole number of features or heads that no attribute holds"
        for count in range(min(len(candidates), _MOST_ATTRIBUTES) + 1):
            for chosen in itertools.combinations(candidates[:_MOST_ATTRIBUTES], count):
                if not all(use.holds(self, frozenset(chosen)) for use in self.sizes):
                    continue
                if all(value.is_same(self.halves(frozenset(chosen))) for value in values):
                    self._divide(chosen, kept_whole)
                    return
                obstacle = "its forward pass computes with a number of features or heads that would be a rank's share"
        self.block(obstacle)

    def _divide(self, chosen: Sequence[Attribute], kept_whole: set[Source]) -> None:
        paths = {attribute.path for attribute in chosen}
        attended = {seen.path for seen in self.attentions}
        for attribute in chosen:
            if attribute in kept_whole:
                self.block(f"{attribute.path}.{attribute.name} also sizes a tensor that stays whole")
        if not paths <= attended:
            where = ", ".join(
                f"{attribute.path}.{attribute.name}" for attribute in chosen if attribute.path not in attended
            )
            self.block(f"{where} counts its features, outside an attention")
        for attribute in chosen:
            self.divided.setdefault(attribute.path, {})[attribute.name] = 0


class Groups:
    """All groups of a trace, joined as it goes (union-find over their numbers)."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.parents: list[int] = []
        self.by_producer: dict[str, int] = {}
        self.features: FeatureDims = {}

    def of_producer(self, path: str) -> int:
        """The number of the group that a layer begins; a layer that is called twice begins one."""
        if path not in self.by_producer:
            number = len(self.groups)
            self.by_producer[path] = number
            self.groups.append(Group(numbers={number}, producers=[path], features=self.features))
            self.parents.append(number)
        return self.by_producer[path]

    def root(self, number: int) -> int:
        """The number that stands for a joined group."""
        while self.parents[number] != number:
            number = self.parents[number]
        return number

    def __getitem__(self, number: int) -> Group:
        return self.groups[self.root(number)]

    def join(self, numbers: Sequence[int]) -> int:
        """One group out of several; the one that began first stands for it."""
        roots = sorted({self.root(number) for number in numbers})
        for other in roots[1:]:
            self.groups[roots[0]].join(self.groups[other])
            self.parents[other] = roots[0]
        return roots[0]

    def with_row(self, path: str) -> list[int]:
        """The numbers of the groups that a layer sums up."""
        return [number for number, group in enumerate(self.groups) if path in group.rows]

    def roots(self) -> list[Group]:
        """The joined groups, in the order in which they began."""
        return [group for number, group in enumerate(self.groups) if self.parents[number] == number]
