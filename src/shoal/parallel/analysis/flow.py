"""Follows the outputs of linear layers through the record of one forward pass, to see which layers can be split over ranks.

A ``Label`` on a tensor says: this dim holds the output features of a linear layer (or the heads that they were viewed as), so
that a rank could have a contiguous share of it. Every operation either keeps a label (elementwise, views, attention head by
head) or needs features that other ranks would have, which blocks the group. What is not known blocks: a layer that is left whole
is slow, a layer that is wrongly split is wrong.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.costs.tracer import Call, TensorInfo, tensors_in
from shoal.parallel.analysis.groups import Groups, SizeUse
from shoal.parallel.analysis.traced_int import Dimension, Source, TracedInt, sources_of


@dataclass(frozen=True)
class Label:
    """Where the features of a group are in a tensor."""

    group: int
    dims: tuple[int, ...]
    """The dim that a rank has a share of, then the dims inside it, outermost first."""
    units: int
    """How many pieces the share is counted in: heads once they are visible, else features."""
    origins: frozenset[str]
    """The producers whose features these are."""
    parts: int = 1
    """Equal parts that the producer's output was cut into to get here: 3 for a fused query-key-value layer."""
    written: tuple[SizeUse, ...] = ()
    """Sizes written on the way, for when their outermost dim turns out to count parts."""

    @property
    def dim(self) -> int:
        """The dim that a rank has a share of."""
        return self.dims[0]


class BlockedError(Exception):
    """Raised by a rule: the operation needs features of more than one rank. Its text says why."""


Rule = Callable[["Follower", tuple[Any, ...], dict[str, Any], Any], None]
RULES: dict[str, Rule] = {}
"""What each operation does to labels, by its name; ``rules.py`` and ``views.py`` fill it."""

ATTENTION = "scaled_dot_product_attention"
"""torch's attention function: the one that techniques can replace."""
_READS_VALUES = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "numpy", "numel", "nelement"})
_WRITES_VALUES = frozenset({"__setitem__", "register_hook"})
"""Hand no tensor back, but change one, or its gradient."""
_WRITES_SIZES = frozenset({"view", "reshape", "unflatten", "expand", "broadcast_to", "split", "split_with_sizes"})
"""Take whole numbers as sizes, which their rules put down; elsewhere a whole number is a value."""


DROPOUTS = ("dropout", "dropout_", "alpha_dropout")
"""Functions that drop single elements, of split features too."""


class Follower:
    """Keeps the labels of all tensors as it is told of one call after another, and tells the groups what it sees."""

    def __init__(self, *, owners: dict[TensorInfo, str], values: Sequence[TracedInt]) -> None:
        self.groups = Groups()
        self.owners = owners
        """Parameter of a layer that may be split -> path of that layer."""
        self.used_outside: set[str] = set()
        """Layers whose parameters are used by something else than the layer itself."""
        self.kept_whole: set[Source] = set()
        """Sources of sizes of tensors without a label."""
        self.values = list(values)
        """Numbers that were used as values."""
        self.path = ""
        """The innermost module that runs."""
        self.plain_inputs: set[str] = set()
        """Linear layers that were called on a whole tensor."""
        self.lengths: list[tuple[str, int]] = []
        """Path of each module that attends with torch's function, and the positions that ask in it."""
        self.order: list[str] = []
        """Linear layers in the order of their first calls."""
        self.dropped: dict[str, list[int | None]] = {}
        """By the module that calls: the group of what each of its dropouts dropped, None for a whole tensor."""
        self._labels: dict[TensorInfo, Label] = {}

    def follow(self, call: Call) -> None:
        """See what a call did to labels."""
        name, args, kwargs, result = call.name, call.args, call.kwargs, call.output
        self.path = call.path
        tensors = tensors_in((args, kwargs))
        if name in ("shape", "size") and tensors:
            label = self.label(tensors[0])
            if label is not None:
                self.groups.features[Dimension(tensors[0].number, label.dim)] = label.group
            return
        if name in _READS_VALUES | _WRITES_VALUES or isinstance(result, TensorInfo | tuple | list):
            self._look(name, tensors, args, kwargs, result)
        if name in DROPOUTS and isinstance(result, TensorInfo):
            label = self.label(result)
            self.dropped.setdefault(self.path, []).append(None if label is None else label.group)

    def label(self, tensor: TensorInfo) -> Label | None:
        """The label of a tensor."""
        found = self._labels.get(tensor)
        return None if found is None else replace(found, group=self.groups.root(found.group))

    def put(self, tensor: TensorInfo, label: Label) -> None:
        """Label a tensor."""
        self._labels[tensor] = label

    def join(self, labels: list[Label]) -> Label:
        """The label of features that were combined one by one."""
        first = labels[0]
        if any(label.parts != first.parts for label in labels):
            raise BlockedError("parts of one layer's output meet the whole of it, or of another's")
        return replace(
            max(labels, key=lambda label: len(label.dims)),
            group=self.groups.join([label.group for label in labels]),
            units=math.gcd(*(label.units for label in labels)),
            origins=frozenset().union(*(label.origins for label in labels)),
            parts=first.parts,
        )

    def consume(self, label: Label) -> None:
        """Note that features were used: in how many units, and in how many parts of their producers' outputs."""
        group = self.groups[label.group]
        group.units.add(label.units)
        for origin in label.origins:
            group.parts.setdefault(origin, set()).add(label.parts)

    def write_sizes(self, tensor: TensorInfo, label: Label, sizes: tuple[int, ...]) -> None:
        """Label a tensor, and note the sizes that the forward pass wrote down for it."""
        use = SizeUse(sizes, tensor.shape, label.dims)
        self.groups[label.group].sizes.append(use)
        self.put(tensor, replace(label, written=(*label.written, use)))

    def call_linear(self, path: str, x: TensorInfo, output: TensorInfo) -> None:
        """A linear layer ran: it sums up the features that it reads, and gives features of its own."""
        if path not in self.order:
            self.order.append(path)
        label = self.label(x)
        if label is None:
            self.plain_inputs.add(path)
        elif label.dim != x.ndim - 1:
            self.groups[label.group].block(f"{path} reads its features in another dim than the last")
        else:
            self.consume(label)
            # A layer that sums up the features of several groups makes one of them: it is split for all or for none.
            number = self.groups.join([label.group, *self.groups.with_row(path)])
            group = self.groups[number]
            group.rows = list(dict.fromkeys([*group.rows, path]))
        features = output.shape[-1]
        self.put(output, Label(self.groups.of_producer(path), (output.ndim - 1,), features, frozenset([path])))

    def block(self, tensors: list[TensorInfo], reason: str) -> None:
        """The features of these tensors are needed whole."""
        for tensor in tensors:
            label = self.label(tensor)
            if label is not None:
                self.groups[label.group].block(reason)

    def _look(
        self, name: str, tensors: list[TensorInfo], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        for tensor in tensors:
            if tensor in self.owners:
                self.used_outside.add(self.owners[tensor])
        if name == ATTENTION:
            self.lengths.append((self.path, tensors[0].shape[-2]))
        if not any(tensor in self._labels for tensor in tensors):
            self.kept_whole |= sources_of(_integers((args, kwargs)))
            # An operation in place may hand back a tensor whose label was that of its old contents: none here.
            return
        if name not in _WRITES_SIZES:
            self.values += [number for number in _integers((args, kwargs)) if isinstance(number, TracedInt)]
        rule = RULES.get(name)
        where = f" in {self.path}" if self.path else ""
        if rule is None:
            self.block(tensors, f"{name}{where} may mix its features")
            return
        try:
            rule(self, args, kwargs, result)
        except BlockedError as reason:
            self.block(tensors, f"{name}{where}: {reason}")


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _integers(item)
